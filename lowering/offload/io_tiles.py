"""Tiles of each IPU that only move data: how much they hold, and phases that load more than that.

Input: their number and memory. Output: which loads and stores they move. Larger values go straight to the tiles that
compute, which wait for them; phases of which most bytes do are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.jaxpr import phase_of, value_bytes
from ipujax.lowering.offload.primitives import remote_load_p
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class IoTiles:
    """Tiles of each IPU that only move data.

    Args:
        count: their number.
        tile_bytes: memory of each that this plan uses.
        most_bytes: memory of each that any plan uses.
        depth: prefetch depth, see `Options`.
    """

    count: int
    tile_bytes: int
    most_bytes: int
    depth: int

    @property
    def room_bytes(self) -> int:
        """Bytes of loads that they hold ahead of the tiles that compute, and as many of stores."""
        # assumed: the more batches ahead, the more of their memory, up to half; the rest is for code.
        return self.count * self.tile_bytes * self.depth // (2 * (self.depth + 1))

    def moves(self, eqn: JaxprEqn) -> bool:
        """True if they move the value of a load or a store; larger ones go straight to the tiles that compute."""
        return moved_bytes(eqn) <= self.room_bytes

    def count_for(self, num_bytes: int) -> int:
        """The least number of I/O tiles that move a value."""
        return -(-num_bytes * 2 * (self.depth + 1) // (self.depth * self.tile_bytes))


def moved_bytes(eqn: JaxprEqn) -> int:
    """Bytes of the value of a load or a store."""
    return value_bytes(eqn.outvars[0].aval)


def check_room(eqns: Iterable[JaxprEqn], io_tiles: IoTiles) -> None:
    """Refuses I/O tiles that move less than half of the bytes that phases load, because larger values have no room.

    Raises:
        ArgumentError: with the line of a load that they would have to move too.
    """
    # With all memory that a tile may have: what is refused here has room by no plan.
    io_tiles = replace(io_tiles, tile_bytes=io_tiles.most_bytes)
    loads = [eqn for eqn in eqns if eqn.primitive is remote_load_p and phase_of(eqn) is not None]
    total_bytes = sum(map(moved_bytes, loads))
    if 2 * sum(moved_bytes(load) for load in loads if io_tiles.moves(load)) >= total_bytes:
        return
    loads.sort(key=moved_bytes)
    # With room for this one they move half of the bytes.
    bytes_up_to = accumulate(map(moved_bytes, loads))
    middle = next(load for load, num_bytes in zip(loads, bytes_up_to, strict=True) if 2 * num_bytes >= total_bytes)
    num_bytes = moved_bytes(middle)
    needed = io_tiles.count_for(num_bytes)
    raise ArgumentError(
        f"{io_tiles.count:,} I/O tiles are too few for what the phases load",
        where=source_line(middle) or None,
        expected=f"room for values of {num_bytes:,} bytes: {needed:,} I/O tiles of {io_tiles.tile_bytes:,} bytes",
        got=f"room for {io_tiles.room_bytes:,} bytes at prefetch_depth {io_tiles.depth}",
        hint=f"Options(io_tiles={needed}), a larger prefetch_depth, or io_tiles=0: all tiles load and compute",
    )
