"""Cost of a function that one tile runs by itself: cycles, and memory for its intermediates and its code.

The function is lowered by the passes and rules of entire programs for a target of one tile, so its primitives have the
vertices that they have there, fused ones too, and all six workers. Its cycles are those of the vertices and of copies
on the tile; a vertex calls them one after the other, without syncs and exchanges.
Limits: a loop whose trip count is data runs once, and the function is unpriced; a branch is the costliest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ipujax.lowering.jax_compat import ClosedJaxpr, jaxpr_as_fun
from ipujax.lowering.passes import traced
from ipujax.lowering.rules.base.context import LowerAlone
from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.cache import remembered
from ipujax.runtime.compile import leaf_costs, vertex_cycles
from ipujax.runtime.graph import data_loops
from ipujax.runtime.memory import memory_report
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes


@dataclass(frozen=True, slots=True)
class TileCost:
    """Cost of one run of a function on one tile.

    Args:
        cycles: tile cycles.
        scratch_bytes: bytes of intermediates at their peak.
        code_bytes: bytes of the code of its vertices.
        is_priced: whether `cycles` count all iterations: no trip count is data.
    """

    cycles: int
    scratch_bytes: int
    code_bytes: int
    is_priced: bool


@remembered
def tile_cost(lower_alone: LowerAlone, body: ClosedJaxpr, target: Target) -> TileCost:
    """Cost of a jaxpr on one tile of a target; its operands and results are not counted as scratch."""
    alone = target.replace(num_ipus=1, tiles_per_ipu=1)
    jaxpr, _ = traced(jaxpr_as_fun(body), body.in_avals)
    graph, program = lower_alone(jaxpr, alone)
    effects = EffectsOf(graph)
    costs = leaf_costs(graph, program)
    # Vertices of one codelet share its code.
    codelets = {group.codelet: group.codelet.code_bytes for groups in graph.groups.values() for group in groups}
    memory = memory_report(graph, program, effects, costs)
    connected_bytes = sum(prod(x.shape) * element_bytes(x.dtype) for x in (*body.in_avals, *body.out_avals))
    live_bytes = int(memory.shared_bytes.max())
    return TileCost(
        cycles=vertex_cycles(graph, program, costs),
        scratch_bytes=max(0, live_bytes - connected_bytes),
        code_bytes=sum(codelets.values()),
        is_priced=not data_loops(program),
    )
