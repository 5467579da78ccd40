"""Cost model of a pipeline: memory of the fullest tile, with all arguments of the program, and cycles.

Input: a jaxpr of which one equation is a pipeline with stages. Output: the memory of the fullest tile, and cycles: the
pipeline is lowered into a graph of its own and charged by the cost model. The other arguments of the jaxpr, as the
state of an optimiser, lie on the IPUs where placement has them, spread evenly, all the time. What it reads lies in the
memory order of arguments.

Limits: what is computed before and after the pipeline is not counted.
"""

from __future__ import annotations

from typing import Any

from ipujax.lowering.ipus import Ipus, MakeLowering, Span, homes
from ipujax.lowering.jax_compat import ClosedJaxpr, Literal, Var
from ipujax.lowering.jaxpr import variables_read
from ipujax.lowering.layout import MemoryOrder, map_linearly
from ipujax.lowering.offload import MOVES
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.pipelining.pipeline_program import lower_pipeline
from ipujax.lowering.pipelining.staged import is_staged, staged_pipeline
from ipujax.lowering.recomputation import Recomputation
from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.compile import leaf_costs, program_cycles
from ipujax.runtime.graph import Graph, HostStream, Program, Sequence as ProgramSequence, StreamIn, StreamOut
from ipujax.runtime.memory import memory_report
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor


def charged(
    jaxpr: ClosedJaxpr,
    number: int,
    target: Target,
    make: MakeLowering,
    byte_price: float,
    recomputation: Recomputation,
) -> tuple[int, int]:
    """The cost of a pipeline, with the memory of arguments that it does not read.

    Args:
        jaxpr: what is compiled.
        number: which of its equations is the pipeline.
        target: the machine of one replica.
        make: makes what lowers equations into a graph.
        byte_price: cycles that a byte on the fullest tile is worth.
        recomputation: what gradients compute again.

    Returns:
        `MemoryReport.rough_bytes`, and its cycles.
    """
    eqn = jaxpr.jaxpr.eqns[number]
    staged = staged_pipeline(eqn, target, byte_price, recomputation)
    graph = Graph(target, byte_price_cycles=byte_price)
    prog, behind = ProgramSequence(), ProgramSequence()
    ipus = Ipus(graph, make)
    for var, ipu in beside(jaxpr, number, staged.span()):
        held = _variable(graph, var, "beside")
        map_linearly(ipus.view(ipu), held)
        stream = HostStream("beside", held.shape, held.dtype, resident=True)
        prog.add(StreamIn(stream, held))
        behind.add(StreamOut(held, stream))
    in_groups = dict(zip(jaxpr.jaxpr.invars, grouped_inputs(jaxpr.jaxpr), strict=True))
    operands = [_variable(graph, atom, "operand", in_groups.get(atom, False)) for atom in eqn.invars]
    _, run = lower_pipeline(ipus, staged, operands, prog, staged.spec.name)
    prog.add(behind)
    for variable in graph.variables:
        map_linearly(graph, Tensor.of(variable))
    costs, effects = leaf_costs(graph, prog), EffectsOf(graph)
    memory = memory_report(graph, prog, effects, costs)
    return memory.rough_bytes, program_cycles(graph, prog, run.program, costs=costs, effects=effects)


def rough_bytes(graph: Graph, program: Program) -> int:
    """`MemoryReport.rough_bytes` of a lowered program."""
    return memory_report(graph, program, EffectsOf(graph), leaf_costs(graph, program)).rough_bytes


def beside(jaxpr: ClosedJaxpr, number: int, span: Span) -> list[tuple[Var, int]]:
    """The arguments on the chip that a pipeline does not read, and where each is to lie: with what uses it first.

    Args:
        jaxpr: what is compiled.
        number: which of its equations is the pipeline.
        span: where its operands and results are.
    """
    body = jaxpr.jaxpr
    read = {atom for atom in body.eqns[number].invars if not isinstance(atom, Literal)}
    off_chip = {atom for eqn in body.eqns if eqn.primitive in MOVES for atom in variables_read(eqn)}
    others = {
        n: Span((None,) * len(eqn.invars), (0,) * len(eqn.outvars), 0)
        for n, eqn in enumerate(body.eqns)
        if is_staged(eqn)
    }
    found = zip(body.invars, homes(body, {**others, number: span}), strict=True)
    return [(var, home) for var, home in found if home is not None and var not in read | off_chip]


def _variable(graph: Graph, atom: Any, name: str, in_groups: bool = False) -> Tensor:
    return MemoryOrder.for_argument(atom.aval.shape, in_groups).add_variable(graph, atom.aval.dtype, name)
