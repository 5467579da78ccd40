"""Model parallelism: equations on the IPUs of their stages.

Input: a jaxpr with equations named after stages. Output: as `Lowering`; every equation runs on the IPU of its stage,
stage i on IPU i, one IPU after the other, and values go from IPU to IPU by copies: what PopART calls a virtual graph. A
pipeline with stages inside is lowered as one, see `pipelining`. What is reduced over replicas stays where it lies: IPU
i of a replica sums with IPU i of the others, all at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ipujax.lowering.gcl import is_reduction
from ipujax.lowering.ipus import Ipus, MakeLowering, place, variables
from ipujax.lowering.jax_compat import ClosedJaxpr, Var
from ipujax.lowering.jaxpr import stage_name
from ipujax.lowering.passes import fuse_equations, fuser, last_uses, outline_placed
from ipujax.lowering.pipelining.pipeline_program import PipelineRun, lower_pipeline
from ipujax.lowering.pipelining.staged import is_staged, staged_pipeline
from ipujax.lowering.recomputation import KEEP_ALL, Recomputation
from ipujax.lowering.rules import LastReads, reduce_where_they_lie
from ipujax.lowering.source_info import origin_of, source_line
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor


def lower_staged(
    graph: Graph,
    make: MakeLowering,
    jaxpr: ClosedJaxpr,
    operands: Sequence[Tensor],
    prog: ProgramSequence,
    donated: Mapping[Var, Tensor],
    recomputation: Recomputation = KEEP_ALL,
) -> tuple[list[Tensor], tuple[PipelineRun, ...]]:
    """Lowers a jaxpr whose equations belong to stages.

    Args:
        graph: graph to add to.
        make: makes what lowers equations into a graph.
        jaxpr: the jaxpr.
        operands: its inputs, which no tile holds yet.
        prog: program to add to.
        donated: operands that results may be written to at once, by the variables of the results.
        recomputation: what gradients of pipelines compute again.

    Returns:
        Its results, and where its pipelines run.

    Raises:
        ArgumentError: for stages that make no sense, or more of them than IPUs.
    """
    num_ipus = graph.target.num_ipus
    eqns, price = jaxpr.jaxpr.eqns, graph.byte_price_cycles
    cut = {n: staged_pipeline(eqn, graph.target, price, recomputation) for n, eqn in enumerate(eqns) if is_staged(eqn)}
    placed = place(jaxpr.jaxpr, {n: pipeline.span() for n, pipeline in cut.items()})
    _check_fits(jaxpr, placed, num_ipus)
    unnamed = [None if n in cut or stage_name(eqn).stage is not None else placed[n] for n, eqn in enumerate(eqns)]
    called, outlined = outline_placed(jaxpr.jaxpr, unnamed, price)
    body, fused = fuse_equations(called, fuser(), [placed[n] for n in outlined])
    sources = [outlined[n] for n in fused]
    stages = [placed[source] for source in sources]
    pipelines = {n: cut[source] for n, source in enumerate(sources) if source in cut}
    ipus = Ipus(graph, make)
    env: dict[Var, Tensor] = dict(zip(body.invars, operands, strict=True))
    for var, value in zip(body.constvars, jaxpr.consts, strict=True):
        env[var] = graph.add_constant(value, "constant")
    ipus.lowering(0).find_roles(body.eqns, body.outvars)
    uses, read_again = last_uses(body), {var for eqn in body.eqns for var in variables(eqn.invars)}
    reads, runs = LastReads(uses, env.items()), list[PipelineRun]()
    for n, (eqn, ipu) in enumerate(zip(body.eqns, stages, strict=True)):
        lowering, origin = ipus.lowering(ipu), origin_of(eqn, graph.origin)
        with graph.debug_origin(origin):
            read = [lowering.read(env, atom) for atom in eqn.invars]
            results: Sequence[Tensor]
            if n in pipelines:
                results, run = lower_pipeline(ipus, pipelines[n], read, prog, pipelines[n].spec.name)
                runs.append(run)
            elif is_reduction(eqn):
                places = [ipus.home_of(x) for x in read]
                homes = [ipus.view(ipu if place is None else place) for place in places]
                given = [ipus.bring(x, home.ipu, prog) for x, home in zip(read, homes, strict=True)]
                results = reduce_where_they_lie(graph, eqn, given, homes, prog, origin.path or eqn.primitive.name)
            else:
                # Copies of the old value may have been sent, so nothing may read the new one.
                into = {
                    var: donated[var]
                    for var in eqn.outvars
                    if var in donated
                    and var not in read_again
                    and all(ipus.home(held) in (None, ipu) for held in donated[var].variables())
                    and reads.may_overwrite(donated[var], read, n)
                }
                results = ipus.equation(eqn, env, ipu, prog, into)
            lowering.note_roles(eqn.outvars, results)
        reads.add(zip(eqn.outvars, results, strict=True))
        env.update(zip(eqn.outvars, results, strict=True))
    return [ipus.lowering(0).read(env, atom) for atom in body.outvars], tuple(runs)


def _check_fits(jaxpr: ClosedJaxpr, stages: Sequence[int], num_ipus: int) -> None:
    """Refuses more stages than IPUs, with the line of the first stage that has none."""
    num_stages = 1 + max(stages)
    if num_stages > num_ipus:
        first = next(eqn for eqn in jaxpr.jaxpr.eqns if (stage_name(eqn).stage or 0) >= num_ipus)
        raise ArgumentError(
            f"stage {num_ipus} has no IPU",
            where=source_line(first) or None,
            expected=f"{num_stages} IPUs, one a stage",
            got=f"{num_ipus} for each replica",
            hint=f"ipu.IPUModel(num_ipus={1 << (num_stages - 1).bit_length()}) or more for several replicas",
        )
