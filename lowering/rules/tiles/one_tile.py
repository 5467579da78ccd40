"""Cost of a function that one tile runs by itself: cycles, and memory for its intermediates and its code.

The function is lowered by the passes and rules of entire programs for a target of one tile, so its primitives have the
vertices that they have there, fused ones too, and all six workers. Its cycles are those of the vertices and of copies
on the tile; a vertex calls them one after the other, without syncs and exchanges.
Limits: a loop whose trip count is data runs once, and the function is unpriced; a branch is the costliest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, jaxpr_as_fun
from ipujax.lowering.passes import traced
from ipujax.lowering.rules.base.context import LowerAlone
from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.cache import remembered
from ipujax.runtime.compile import Cost, leaf_costs, static_runs
from ipujax.runtime.cost import compute_set_counts, copying_counts
from ipujax.runtime.graph import Copy, Execute, Graph, Leaf, Program, data_loops
from ipujax.runtime.memory import memory_report
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes


@dataclass(frozen=True, slots=True)
class TileCost:
    """Cost of one run of a function on one tile.

    Args:
        cycles: tile cycles on a target, or on an array of machines.
        costed_by: see `Codelet`: "machine" where code of a user is among its vertices.
        scratch_bytes: bytes of intermediates at their peak.
        code_bytes: bytes of the code of its vertices.
        is_priced: whether `cycles` count all iterations: no trip count is data.
    """

    cycles: Callable[[Target], np.ndarray]
    scratch_bytes: int
    code_bytes: int
    is_priced: bool
    costed_by: Literal["arrays", "machine"]


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
        cycles=partial(_cycles, _parts(graph, program, costs)),
        scratch_bytes=max(0, live_bytes - connected_bytes),
        code_bytes=sum(codelets.values()),
        is_priced=not data_loops(program),
        costed_by="arrays" if all(codelet.costed_by == "arrays" for codelet in codelets) else "machine",
    )


_Parts = Sequence[tuple[int, Callable[[Target], np.ndarray]]]  # runs of each step, and its cycles on the tile


def _parts(graph: Graph, program: Program, costs: Mapping[Leaf, Cost]) -> _Parts:
    """Return the vertices and the copies of a program of one tile."""
    runs = static_runs(graph, program, costs)
    vertices = [
        (runs.get(leaf, 0), compute_set_counts(graph, leaf.compute_set).compute_cycles)
        for leaf in costs
        if isinstance(leaf, Execute)
    ]
    copies = [(runs.get(leaf, 0), copying_counts(graph, leaf).cycles) for leaf in costs if isinstance(leaf, Copy)]
    return [*vertices, *copies]


def _cycles(parts: _Parts, target: Target) -> np.ndarray:
    """Return the cycles of vertices and copies on the only tile, int64[machines]."""
    return sum((times * cycles(target)[0] for times, cycles in parts), np.zeros(1, np.int64))
