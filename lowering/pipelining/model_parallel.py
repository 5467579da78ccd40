"""Model parallelism: equations on the IPUs of their stages.

Input: a jaxpr with equations named after stages. Output: as `Lowering`; every equation runs on the IPU of its stage,
stage i on IPU i, one IPU after the other, and copies move values between IPUs, as in a virtual graph of PopART. A
pipeline with stages is lowered as one, see `pipelining`. A reduction over replicas runs on the IPUs that its operands
are mapped to: IPU i of a replica reduces with IPU i of the others, all at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ipujax.lowering.gcl import is_reduction
from ipujax.lowering.ipus import Ipus, IpuView, MakeLowering, assign_stages, named_stage, variables
from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import stage_name
from ipujax.lowering.layer_notes import origin_of
from ipujax.lowering.passes import CallCosts, fuse_equations, fuser, last_uses, outline_placed
from ipujax.lowering.pipelining.pipeline_program import PipelineRun, lower_pipeline
from ipujax.lowering.pipelining.staged import StagedPipeline, is_staged, staged_pipeline
from ipujax.lowering.recomputation import KEEP_ALL, Recomputation
from ipujax.lowering.rules import LastReads, reduce_across_ipus
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import Builder, Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import PLUMBING, Tensor


def lower_staged(
    graph: Graph,
    make_lowering: MakeLowering,
    jaxpr: ClosedJaxpr,
    operands: Sequence[Tensor],
    prog: ProgramSequence,
    donated: Mapping[Var, Tensor],
    recomputation: Recomputation = KEEP_ALL,
) -> tuple[list[Tensor], tuple[PipelineRun, ...], IpuView]:
    """Results of a jaxpr whose equations belong to stages, the runs of its pipelines, and the lowest IPU with a stage.

    Args:
        graph: graph to add to.
        make_lowering: creates the lowering of a graph.
        jaxpr: the jaxpr.
        operands: its inputs, unmapped.
        prog: program to add to.
        donated: operands that results may overwrite, by the variables of the results.
        recomputation: recomputation in gradients of pipelines.

    Raises:
        ArgumentError: for invalid stages, or more stages than IPUs.
    """
    placed = _place(jaxpr, graph, recomputation)
    body = placed.body
    ipus = Ipus(graph, make_lowering, prog)
    env: dict[Var, Tensor] = dict(zip(body.invars, operands, strict=True))
    for var, value in zip(body.constvars, jaxpr.consts, strict=True):
        env[var] = graph.add_constant(value, "constant")
    lowest = min(placed.ipus)
    ipus.lowering(lowest).find_roles(body.eqns, body.outvars)
    # `ipus` may have copied the old value to where the new one is read, so no equation may read the new one.
    read_by_equations = {var for eqn in body.eqns for var in variables(eqn.invars)}
    overwritable = {var: x for var, x in donated.items() if var not in read_by_equations}
    reads = LastReads(last_uses(body), env.items())
    runs = list[PipelineRun]()
    for n, (eqn, ipu) in enumerate(zip(body.eqns, placed.ipus, strict=True)):
        lowering = ipus.lowering(ipu)
        origin = origin_of(eqn, graph.origin)
        operands_of_eqn = [lowering.read(env, atom) for atom in eqn.invars]
        results: Sequence[Tensor]
        if n in placed.pipelines:
            pipeline = placed.pipelines[n]
            with graph.debug_origin(replace(origin, part=PLUMBING)):
                results, run = lower_pipeline(ipus, pipeline, operands_of_eqn)
            runs.append(run)
        elif is_reduction(eqn):
            builder = Builder(graph, prog, origin.path or eqn.primitive.name)
            with graph.debug_origin(origin):
                results = _reduced_over_replicas(eqn, operands_of_eqn, ipus, ipu, builder)
        else:
            into = {
                var: overwritable[var]
                for var in eqn.outvars
                if var in overwritable
                and ipus.may_hold(overwritable[var], ipu)
                and reads.may_overwrite(overwritable[var], operands_of_eqn, n)
            }
            results = ipus.equation(eqn, env, ipu, into)
        lowering.note_roles(eqn.outvars, results)
        reads.add(zip(eqn.outvars, results, strict=True))
        env.update(zip(eqn.outvars, results, strict=True))
    return [ipus.lowering(lowest).read(env, atom) for atom in body.outvars], tuple(runs), ipus.view(lowest)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Equations after repeated runs were outlined and elementwise ones fused, each with its IPU.

    Args:
        body: the equations.
        ipus: the IPU of each.
        pipelines: those that are pipelines with stages, by number.
    """

    body: Jaxpr
    ipus: Sequence[int]
    pipelines: Mapping[int, StagedPipeline]


def _place(jaxpr: ClosedJaxpr, graph: Graph, recomputation: Recomputation) -> _Placed:
    """Assigns an IPU to each equation, then outlines runs and fuses elementwise ones among those of each IPU."""
    eqns = jaxpr.jaxpr.eqns
    byte_cost = graph.byte_cost_cycles
    staged = {
        n: staged_pipeline(eqn, graph.target, byte_cost, recomputation) for n, eqn in enumerate(eqns) if is_staged(eqn)
    }
    stage_of = assign_stages(jaxpr.jaxpr, {n: pipeline.span() for n, pipeline in staged.items()})
    _check_fits(jaxpr, stage_of, graph.target.num_ipus)
    # Below, `outlined` and `fused` have for each equation the number of the one before that it stands for.
    # Runs of equations that are named after stages are outlined already: others had no place until now.
    unnamed_stages = [
        None if n in staged or stage_name(eqn).stage is not None else stage_of[n] for n, eqn in enumerate(eqns)
    ]
    called, outlined = outline_placed(jaxpr.jaxpr, unnamed_stages, CallCosts.of(graph.target, byte_cost))
    body, fused = fuse_equations(called, fuser(), [stage_of[n] for n in outlined])
    sources = [outlined[n] for n in fused]
    pipelines = {n: staged[source] for n, source in enumerate(sources) if source in staged}
    # Stage i is on IPU i.
    return _Placed(body, [stage_of[source] for source in sources], pipelines)


def _reduced_over_replicas(
    eqn: JaxprEqn, operands: Sequence[Tensor], ipus: Ipus, ipu: int, builder: Builder
) -> Sequence[Tensor]:
    """Reduces each operand on the IPU that it is mapped to, or on `ipu` if it is on none, all at the same time."""
    homes = [ipus.view(ipu if home is None else home) for home in map(ipus.tensor_ipu, operands)]
    local = [ipus.copy_to(x, home.ipu) for x, home in zip(operands, homes, strict=True)]
    return reduce_across_ipus(builder, eqn, local, homes)


def _check_fits(jaxpr: ClosedJaxpr, stages: Sequence[int], num_ipus: int) -> None:
    """Refuses more stages than IPUs, with the line of the first stage that has none."""
    last = max(stages)
    if last >= num_ipus:
        first = next(eqn for eqn in jaxpr.jaxpr.eqns if (named_stage(eqn) or 0) >= num_ipus)
        raise ArgumentError(
            f"stage {named_stage(first)} has no IPU",
            where=source_line(first) or None,
            expected=f"{last + 1} IPUs, stage i on IPU i",
            got=f"{num_ipus} for each replica",
            hint=f"ipu.IPUModel(num_ipus={1 << last.bit_length()}) or more for several replicas",
        )
