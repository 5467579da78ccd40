"""Parameters of one plan of a program, which a search for plans that fit the tiles changes; see `ipujax.fit`."""

from __future__ import annotations

from dataclasses import dataclass

from ipujax.lowering.pipelining import Cuts
from ipujax.lowering.recomputation import KEEP_ALL, Recomputation


@dataclass(frozen=True, slots=True)
class Choice:
    """Parameters of a plan.

    Args:
        byte_cost: cost per byte on the fullest tile, in cycles.
        tile_bytes: memory of a tile as planners know it.
        recomputation: values that gradients compute again.
        cuts: for each pipeline with open stages, the cuts to start the search from; empty for a full search.
        stream_loops: whether rows of loops stay in the host's memory.
    """

    byte_cost: float
    tile_bytes: int
    recomputation: Recomputation = KEEP_ALL
    cuts: tuple[Cuts, ...] = ()
    stream_loops: bool = False
