"""Tile-level JAX: arrays placed on tiles, and functions mapped over tiles, inside of `ipu.jit`.

A tile array has a row for each tile along its first axis, and is an array like any other. `docs/tiles.md` explains it.
"""

from ipujax.tiles.tile_functions import (
    cycle_count as cycle_count,
    tile_barrier as tile_barrier,
    tile_gather as tile_gather,
    tile_map as tile_map,
    tile_put_replicated as tile_put_replicated,
    tile_put_sharded as tile_put_sharded,
)
