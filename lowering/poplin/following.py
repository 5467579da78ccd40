"""What elementwise operations are expected to cost that follow a product, on arrays that lie as its result does.

Spread over more tiles they take fewer cycles, but hardly fewer once each worker has a vector, while every further tile
pays their start. Where arrays would lie thinner than that, cycles count more (`thinness_weight`): otherwise the
optimizer of a small network would take all of a chip for a gain under 1 %, and the less so the larger the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ipujax.lowering.popops.elementwise_cycles import elementwise_cycles
from ipujax.runtime.mapping import MIN_BYTES_PER_TILE, TileMapping
from ipujax.runtime.target import Target
from ipujax.runtime.variable import element_bytes

Operation = tuple[str, int, int]  # an elementwise operation: name, arrays read, scalars read

# fitted: twice the batch is more work of all workers and no less time for training steps of 64-128-64-10,
# 32-256-256-16 and 784-300-100-10 perceptrons at batches of 2 to 64; at 0.10 the first gives way, at 0.14 the other.
_WEIGHT = 0.12


def elementwise_cycles_on(
    mapping: TileMapping | None, size: int, dtype: Any, operations: Sequence[Operation], target: Target
) -> int:
    """Expected cycles of elementwise operations on arrays that lie in a way, or evenly if that is worth moving them.

    Args:
        mapping: how they lie; None for evenly.
        size: their elements.
        dtype: of them.
        operations: names, arrays read, scalars read.
        target: the machine.
    """
    size_bytes = size * element_bytes(dtype)
    least = max(-(-size // target.tiles_per_ipu), min(size, MIN_BYTES_PER_TILE // element_bytes(dtype)))
    evenly = _operations_cycles(least, dtype, tuple(operations), target)
    evenly *= thinness_weight(size / least, size_bytes, target)
    if mapping is None:
        return int(evenly)
    elements = mapping.elements_per_tile(target.num_tiles)
    there = _operations_cycles(int(elements.max()), dtype, tuple(operations), target)
    there *= thinness_weight(int(np.count_nonzero(elements)), size_bytes, target)
    return int(min(evenly + moving_cycles(size_bytes, target), there))


def thinness_weight(num_tiles: float, num_bytes: int, target: Target) -> float:
    """What a cycle of work on some tiles counts, 1 or more: the more, the less of a vector each of their workers has.

    Args:
        num_tiles: tiles that take part.
        num_bytes: of the array that lies there.
        target: the machine.
    """
    full_tiles = max(1.0, num_bytes / (target.worker_contexts * target.vector_width_bytes))
    return 1 + _WEIGHT * (num_tiles / full_tiles) ** 2


@lru_cache(maxsize=4096)
def _operations_cycles(elements: int, dtype: Any, operations: tuple[Operation, ...], target: Target) -> float:
    count = np.array([elements], np.int64)
    rows = (elementwise_cycles(op, dtype, arrays, scalars, count, target) for op, arrays, scalars in operations)
    return sum(float(cycles[0]) for cycles in rows)


def moving_cycles(num_bytes: int, target: Target) -> int:
    """Expected cycles of bringing results from where they are computed to where they are wanted, by all tiles."""
    share = -(-num_bytes // target.tiles_per_ipu)
    exchange = target.exchange_startup_cycles + share / target.exchange_bytes_per_cycle
    return int(exchange + target.copy_startup_cycles + share / target.memcpy_bytes_per_cycle)
