"""Model parallelism: equations on the IPUs of their stages, one IPU after the other.

Input: a jaxpr with equations named after stages. Output: as `Lowering`; every equation runs on the IPU of its stage,
stage i on IPU i, and values go from IPU to IPU by copies. This is what PopART calls a virtual graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ipujax.lowering.ipus import Ipus
from ipujax.lowering.jax_compat import ClosedJaxpr, Var, name_stack, source_line
from ipujax.lowering.placement import Placement, place
from ipujax.lowering.stage_names import stage_name
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import Graph
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import Origin

if TYPE_CHECKING:
    from ipujax.lowering.lower import Lowering


def lower_staged(
    graph: Graph,
    make: Callable[[Graph], Lowering],
    jaxpr: ClosedJaxpr,
    operands: Sequence[Tensor],
    prog: ProgramSequence,
) -> list[Tensor]:
    """Lowers a jaxpr whose equations belong to stages.

    Args:
        graph: graph to add to.
        make: makes what lowers equations into a graph.
        jaxpr: the jaxpr.
        operands: its inputs, which no tile holds yet.
        prog: program to add to.

    Raises:
        ArgumentError: for stages that make no sense, or more of them than IPUs.
    """
    placement = place(jaxpr.jaxpr)
    check_fits(jaxpr, placement, graph.target.num_ipus)
    ipus, body = Ipus(graph, make), jaxpr.jaxpr
    env: dict[Var, Tensor] = dict(zip(body.invars, operands, strict=True))
    for var, value in zip(body.constvars, jaxpr.consts, strict=True):
        env[var] = graph.add_constant(value, "constant")
    for eqn, ipu in zip(body.eqns, placement.stages, strict=True):
        lowering, origin = ipus.lowering(ipu), Origin(source_line(eqn) or graph.origin.line, name_stack(eqn))
        with graph.debug_origin(origin), ipus.view(ipu).debug_origin(origin):
            given = [ipus.bring(lowering.read(env, atom), ipu, prog) for atom in eqn.invars]
            env.update(zip(eqn.outvars, lowering.equation(eqn, given, prog), strict=True))
    return [ipus.lowering(0).read(env, atom) for atom in body.outvars]


def check_fits(jaxpr: ClosedJaxpr, placement: Placement, num_ipus: int) -> None:
    """Refuses more stages than IPUs.

    Raises:
        ArgumentError: with the line of the first stage that has none.
    """
    if placement.num_stages > num_ipus:
        first = next(eqn for eqn in jaxpr.jaxpr.eqns if (stage_name(eqn).stage or 0) >= num_ipus)
        raise ArgumentError(
            f"stage {num_ipus} has no IPU",
            where=source_line(first) or None,
            expected=f"{placement.num_stages} IPUs, one a stage",
            got=f"{num_ipus} for each replica",
            hint=f"ipu.IPUModel(num_ipus={1 << (placement.num_stages - 1).bit_length()}) or more for several replicas",
        )
