"""Estimated cost of a pipeline: cycles, and memory of the fullest tile with all arguments of the program.

Input: a jaxpr of which one equation is a pipeline with stages. The pipeline is lowered into a graph of its own, whose
cycles and memory the cost model estimates. Arguments that the pipeline does not read, as the state of an optimiser, are
spread evenly over the IPUs that placement gives them. Its operands have the memory order of arguments.

Limits: equations before and after the pipeline are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ipujax.lowering.ipus import Ipus, MakeLowering, Span, homes
from ipujax.lowering.jax_compat import ClosedJaxpr, Literal, Var
from ipujax.lowering.jaxpr import variables_read
from ipujax.lowering.layout import MemoryOrder, map_linearly
from ipujax.lowering.offload import MOVES
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.pipelining.pipeline_program import lower_pipeline
from ipujax.lowering.pipelining.staged import is_staged, staged_pipeline
from ipujax.lowering.recomputation import KEEP_ALL, Recomputation
from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.compile import leaf_costs, program_cycles
from ipujax.runtime.graph import Graph, HostStream, Program, Sequence as ProgramSequence, StreamIn, StreamOut
from ipujax.runtime.memory import memory_report
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Planning:
    """Settings with which candidate pipelines are lowered.

    Args:
        target: the target, with the IPUs of one replica.
        make_lowering: creates the lowering of a graph.
        byte_cost: cost per byte of the fullest tile, in cycles.
        recomputation: recomputation in gradients.
        replicas: number of replicas, or of devices of a mesh, which meet in collectives.
    """

    target: Target
    make_lowering: MakeLowering
    byte_cost: float
    recomputation: Recomputation = KEEP_ALL
    replicas: int = 1

    def graph(self) -> Graph:
        """An empty graph for a candidate."""
        return Graph(self.target, self.replicas, self.byte_cost)

    def on_one_ipu(self) -> Planning:
        """These costs with a single IPU."""
        return replace(self, target=self.target.replace(num_ipus=1))


def pipeline_cost(jaxpr: ClosedJaxpr, number: int, planning: Planning) -> tuple[int, int]:
    """Bytes of the fullest tile (`MemoryReport.rough_bytes`) and cycles of the pipeline at `jaxpr.eqns[number]`.

    It is lowered into a graph of its own. The cycles are those from its first task to its last; the bytes are those of
    a program that also has the arguments which the pipeline does not read.
    """
    eqn = jaxpr.jaxpr.eqns[number]
    staged = staged_pipeline(eqn, planning.target, planning.byte_cost, planning.recomputation)
    graph = planning.graph()
    prog = ProgramSequence()
    end = ProgramSequence()
    ipus = Ipus(graph, planning.make_lowering, prog)
    # Other arguments stay on chip for the whole call, so they add to the memory of every step: written before the
    # pipeline and read after it.
    for var, ipu in other_arguments(jaxpr, number, staged.span()):
        argument = _variable(graph, var, "beside")
        map_linearly(ipus.view(ipu), argument)
        stream = HostStream("beside", argument.shape, argument.dtype, resident=True)
        prog.add(StreamIn(stream, argument))
        end.add(StreamOut(argument, stream))
    in_groups = dict(zip(jaxpr.jaxpr.invars, grouped_inputs(jaxpr.jaxpr), strict=True))
    streamed = staged.spec.streamed or (False,) * len(eqn.invars)
    operands = [
        _off_chip(graph, atom, staged.spec.micro_batches)
        if is_streamed
        else _variable(graph, atom, "operand", not isinstance(atom, Literal) and in_groups.get(atom, False))
        for atom, is_streamed in zip(eqn.invars, streamed, strict=True)
    ]
    # This adds the pipeline to `prog`. No one reads its results here.
    _results, run = lower_pipeline(ipus, staged, operands)
    prog.add(end)
    for variable in graph.variables:
        map_linearly(graph, Tensor.of(variable))  # those that nothing has mapped yet
    costs = leaf_costs(graph, prog)
    effects = EffectsOf(graph)
    memory = memory_report(graph, prog, effects, costs)
    return memory.rough_bytes, program_cycles(graph, prog, run.program, costs=costs, effects=effects)


def rough_bytes(graph: Graph, program: Program) -> int:
    """`MemoryReport.rough_bytes` of a lowered program."""
    return memory_report(graph, program, EffectsOf(graph), leaf_costs(graph, program)).rough_bytes


def other_arguments(jaxpr: ClosedJaxpr, number: int, span: Span) -> list[tuple[Var, int]]:
    """Arguments on chip that the pipeline `jaxpr.eqns[number]` does not read, each with the IPU that it is mapped to.

    `span` has the IPUs of that pipeline's operands and results.
    """
    body = jaxpr.jaxpr
    operands = {atom for atom in body.eqns[number].invars if not isinstance(atom, Literal)}
    off_chip = {atom for eqn in body.eqns if eqn.primitive in MOVES for atom in variables_read(eqn)}
    # Other pipelines give their operands no IPU, as they may have no stages yet; their results count as on IPU 0.
    other_pipelines = {
        n: Span((None,) * len(eqn.invars), (0,) * len(eqn.outvars)) for n, eqn in enumerate(body.eqns) if is_staged(eqn)
    }
    pairs = zip(body.invars, homes(body, {**other_pipelines, number: span}), strict=True)
    return [(var, home) for var, home in pairs if home is not None and var not in operands | off_chip]


def _off_chip(graph: Graph, atom: Any, micro_batches: int) -> Tensor:
    """A batch that the pipeline loads by micro-batches."""
    rows, *shape = atom.aval.shape
    buffer = graph.add_off_chip((micro_batches, rows // micro_batches, *shape), atom.aval.dtype, "batch", on_host=True)
    return Tensor.of(buffer.memory).reshape(atom.aval.shape)


def _variable(graph: Graph, atom: Any, name: str, in_groups: bool = False) -> Tensor:
    return MemoryOrder.for_argument(atom.aval.shape, in_groups).add_variable(graph, atom.aval.dtype, name)
