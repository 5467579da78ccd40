"""What elementwise operations are expected to cost that follow a product, on arrays that lie as its result does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ipujax.lowering.popops.elementwise_cycles import elementwise_cycles
from ipujax.lowering.poputil.thinness import thinness_weight
from ipujax.runtime.mapping import MIN_BYTES_PER_TILE, TileMapping
from ipujax.runtime.target import Target
from ipujax.runtime.variable import element_bytes

Operation = tuple[str, int, int]  # an elementwise operation: name, arrays read, scalars read

# fitted: of 896 doublings of the batches of 128 random perceptrons 24 were less work or took less time at 0.12, where
# results of products count it, 35 at 0.06, 29 at 0.03; the more, the less work for all workers, the more cycles a step.
THINNESS_WEIGHT = 0.12


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
    evenly *= thinness_weight(size / least, size_bytes, target, THINNESS_WEIGHT)
    if mapping is None:
        return int(evenly)
    elements = mapping.elements_per_tile(target.num_tiles)
    there = _operations_cycles(int(elements.max()), dtype, tuple(operations), target)
    there *= thinness_weight(int(np.count_nonzero(elements)), size_bytes, target, THINNESS_WEIGHT)
    return int(min(evenly + moving_cycles(size_bytes, target), there))


def least_cycles(size: int, dtype: Any, operations: Sequence[Operation], target: Target) -> int:
    """What elementwise operations on arrays of a size cost at least, wherever they lie."""
    return int(_operations_cycles(-(-size // target.tiles_per_ipu), dtype, tuple(operations), target))


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
