"""What combining partial results is charged: stages, how each is divided over tiles, and its cycles.

Input: numbers of partial results and lengths of boxes of results, of all candidates of a choice at once. Output:
cycles, and how results are divided, as arrays of one column a candidate. `partials` adds what is charged here.
Source of the stage counts: poplibs `poplin/ConvReducePlan.cpp` (reference machine.md §1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.lowering.layout import ceil_div
from ipujax.lowering.popops.vertices.reduce_cycles import reduce_cycles
from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange import copy_cycles
from ipujax.runtime.memory import INSTRUCTION_BYTES
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes, frozen

# Most partials of one output that are combined in one stage: 1 stage below 16 partials, 2 below 125, then 3.
_STAGES = ((16, 1), (125, 2))
_MAX_STAGES = 3
_MIN_RECEIVED_BYTES = 256  # assumed: a tile that receives less is not worth its exchange code


@remembered
def kept_slots(slots: int) -> tuple[int, ...]:
    """Partials of one output after each stage, 1 after the last; no stage for one partial."""
    if slots <= 1:
        return ()
    stages = next((n for bound, n in _STAGES if slots < bound), _MAX_STAGES)
    kept, left = [], slots
    for stage in range(stages - 1, 0, -1):
        left = max(2, round(left ** (stage / (stage + 1))))
        kept.append(left)
    return (*kept, 1)


def spread_blocks(size: int, slots: Any, keep: Any, dtype: Any, tiles: Any) -> Any:
    """Over how many tiles, for each slot that is kept, a stage of `reduce_partials` spreads its outputs.

    Args:
        size: outputs.
        slots: partials of each, an int or int64 array as the next and the last.
        keep: how many of them are left after it.
        dtype: of the partials.
        tiles: how many tiles there are.
    """
    return np.maximum(1, np.minimum(tiles // keep, -(-size // _least_outputs(slots, keep, dtype))))


def longest_share(size: int, slots: Any, keep: Any, dtype: Any, tiles: Any) -> Any:
    """Outputs of the busiest tile of a stage; arguments as `spread_blocks`."""
    grains = -(-size // grain(dtype))
    return np.minimum(size, -(-grains // spread_blocks(size, slots, keep, dtype, tiles)) * grain(dtype))


def _least_outputs(slots: Any, keep: Any, dtype: Any) -> Any:
    """Fewest outputs that get a tile of their own."""
    return np.maximum(grain(dtype), -(-_MIN_RECEIVED_BYTES // (element_bytes(dtype) * (slots // keep))))


def grain(dtype: Any) -> int:
    """Results of a dtype that are written at once."""
    return max(1, 8 // element_bytes(dtype))


@remembered
def stages(slots: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Partials of one output before and after each stage, int64[stages, slots]; 1 where there is none left."""
    kept = [kept_slots(count) for count in slots]
    after = np.ones((max(map(len, kept), default=0), len(slots)), np.int64)
    for number, own in enumerate(kept):
        after[: len(own), number] = own
    return frozen(np.vstack((slots, after))[:-1], np.int64), frozen(after, np.int64)


# --- partial results combined in place --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """How boxes of results are divided among the tiles that hold partials of them, one entry a candidate.

    Args:
        dim: which dimension is cut, of those behind the slots, int64[candidates].
        count: in how many parts, int64[candidates].
        longest: lengths of the longest part, int64[dimensions, candidates]; of a result without dimensions one of 1.
        cycles: what the stage is charged, int64[candidates].
    """

    dim: np.ndarray
    count: np.ndarray
    longest: np.ndarray
    cycles: np.ndarray


def combined(
    slots: np.ndarray, longest: np.ndarray, dtype: Any, monoid: str, target: Target, byte_price: float
) -> tuple[np.ndarray, np.ndarray]:
    """What `reduce_partials_in_place` is charged for partials that each lie on a tile of their own.

    Args:
        slots: partials of each result, int64[candidates].
        longest: lengths of the largest box of results, int64[dimensions, candidates].
        dtype: of the partials.
        monoid: how they combine.
        target: the machine.
        byte_price: cycles that a byte of exchange code is worth when parts are chosen.

    Returns:
        Cycles, int64[candidates], and the lengths of the largest box in which results then lie, as `longest`.
    """
    counts, which = np.unique(slots, return_inverse=True)
    total = np.zeros(len(slots), np.int64)
    for before, after in zip(*stages(tuple(counts.tolist())), strict=True):
        parts = divided(before[which], after[which], longest, dtype, monoid, target, byte_price)
        runs = before[which] > 1
        total, longest = total + runs * parts.cycles, np.where(runs, parts.longest, longest)
    return total, longest


@remembered
def combined_cycles(
    slots: int, longest: tuple[int, ...], dtype: Any, monoid: str, target: Target, byte_price: float
) -> int:
    """Cycles of `combined` for one candidate."""
    lengths = np.array(longest, np.int64)[:, None]
    return int(combined(np.array([slots]), lengths, dtype, monoid, target, byte_price)[0][0])


def divided(
    slots: np.ndarray,
    keep: np.ndarray,
    longest: np.ndarray,
    dtype: Any,
    monoid: str,
    target: Target,
    byte_price: float,
) -> Parts:
    """The cheapest dimension and number of parts for one stage: at most one for each partial that is combined.

    Args:
        slots: partials of each result before the stage, int64[candidates].
        keep: partials after it, int64[candidates].
        longest: as `combined` takes it, and the others.
    """
    longest = longest if len(longest) else np.ones((1, len(slots)), np.int64)
    depth, width, size = ceil_div(slots, keep), element_bytes(dtype), np.prod(longest, axis=0)
    most = np.minimum(np.minimum(slots // keep, longest), ceil_div(size * width * depth, _MIN_RECEIVED_BYTES))
    # Powers of two up to the most, and the most, for each dimension: int64[dimensions, powers, candidates].
    powers = 1 << np.arange(int(most.max(initial=1)).bit_length() + 1)
    count = np.minimum(powers[:, None], np.maximum(1, most)[:, None])
    extent, before = longest[:, None], np.cumprod(np.vstack((np.ones_like(size), longest)), axis=0)[:-1, None]
    length, shortest, inner = ceil_div(extent, count), extent // count, size // extent
    runs = np.where(count > 1, before, 1)
    elements = length * inner
    compute = reduce_cycles(monoid, dtype, elements, depth, target)
    # A tile puts the part it has itself between those that arrive; no two tiles receive the same.
    copied = copy_cycles(elements * width, runs, target)
    # A tile that combines no part itself sends all it has.
    sent = np.where(count < depth, size, size - shortest * inner) * width
    payload = np.ceil(np.maximum((depth - 1) * elements * width, sent) / target.exchange_bytes_per_cycle)
    pieces = (depth - 1) * runs
    work = np.maximum(payload, pieces * target.exchange_fragment_cycles)
    cycles = target.internal_sync_cycles + target.exchange_startup_cycles + work + copied + compute
    code_bytes = pieces * target.exchange_fragment_cycles * INSTRUCTION_BYTES
    flat = (-1, len(slots))
    best = np.argmin((cycles + byte_price * code_bytes).reshape(flat), axis=0)
    count, cycles, length = (x.reshape(flat)[best, np.arange(len(slots))] for x in (count, cycles, length))
    dim = best // len(powers)
    cut = np.arange(len(longest))[:, None] == dim
    return Parts(dim, count, np.where(cut, length, longest), cycles.astype(np.int64))
