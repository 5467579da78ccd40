"""Partial results of a split reduction: their dtype, what combining them costs, and combining them.

The combination is popops' `reduce_partials`, in one to three stages; its cost here follows the same stages.
Source of the default partials type, float: poplibs `ConvOptions.hpp` (reference machine.md §2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.poplin.cycles import ceil_div
from ipujax.lowering.popops.elementwise import Op, elementwise
from ipujax.lowering.popops.elementwise_cycles import elementwise_cycles
from ipujax.lowering.popops.reduce import reduce_partials
from ipujax.lowering.popops.reduce_cycles import reduce_cycles
from ipujax.runtime.graph import Graph
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import element_bytes

_STAGES = ((16, 1), (125, 2))  # popops.reduce: one stage below 16 partials, two below 125, then three
_MAX_STAGES = 3
_MIN_RECEIVED_BYTES = 256  # popops.reduce: least a combining tile receives


@dataclass(frozen=True, slots=True, eq=False)
class PartialsCost:
    """Expected cycles of combining partial results, int64[candidates] each."""

    exchange_cycles: np.ndarray
    compute_cycles: np.ndarray
    sync_cycles: np.ndarray


def out_dtypes(out_dtype: Any, partials_dtype: Any = None) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Dtype of a result and of its partials: float for narrower floats unless said otherwise."""
    out = np.dtype(out_dtype)
    narrow = jnp.issubdtype(out, jnp.floating) and out.itemsize < 4
    default = np.dtype(np.float32) if narrow else out
    return out, default if partials_dtype is None else np.dtype(partials_dtype)


def monoid_of(dtype: np.dtype[Any]) -> str:
    """How partial sums of products combine: products of bools are ands, their sums ors."""
    return "or" if dtype == np.bool_ else "add"


def partials_cost(
    slots: np.ndarray,
    tiles: np.ndarray,
    outputs: int,
    dtype: np.dtype[Any],
    out_dtype: np.dtype[Any],
    target: Target,
) -> PartialsCost:
    """Expected cycles to combine partial results, and to cast them.

    Args:
        slots: partial results of an element, int64[candidates]; 1 costs nothing.
        tiles: how many tiles combine, int64[candidates].
        outputs: elements of the result.
        dtype: of the partials.
        out_dtype: of the result.
        target: the machine.
    """
    exchange, compute, sync = (np.zeros(len(slots), np.int64) for _ in range(3))
    width, grain = element_bytes(dtype), max(1, 8 // element_bytes(dtype))
    stages = np.select(
        [slots == 1, *(slots < bound for bound, _ in _STAGES)], [0, *(n for _, n in _STAGES)], _MAX_STAGES
    )
    left, share = slots, np.full(len(slots), outputs)
    for stage in range(_MAX_STAGES, 0, -1):
        there = stages >= stage
        if not there.any():
            continue
        keep = np.where(there, np.maximum(1, np.round(left ** ((stage - 1) / stage))).astype(np.int64), left)
        per_tile = np.maximum(grain, ceil_div(_MIN_RECEIVED_BYTES, width * np.maximum(1, left // keep)))
        blocks = np.maximum(1, np.minimum(tiles // keep, ceil_div(outputs, per_tile)))
        share, depth = np.minimum(outputs, ceil_div(ceil_div(outputs, grain), blocks) * grain), ceil_div(left, keep)
        received = ceil_div(share * depth * width, int(target.exchange_bytes_per_cycle))
        exchange += np.where(there, target.exchange_startup_cycles + received, 0)
        compute += np.where(there, reduce_cycles(monoid_of(dtype), dtype, share, depth, target), 0)
        sync += np.where(there, target.internal_sync_cycles, 0)
        left = keep
    if out_dtype != dtype:
        cast = elementwise_cycles("convert_element_type", dtype, 1, 0, share, target)
        compute += np.where(stages > 0, cast, 0)
        sync += np.where(stages > 0, target.internal_sync_cycles, 0)
    return PartialsCost(exchange, compute, sync)


def combine(
    graph: Graph, partials: Tensor, out_dtype: Any, prog: ProgramSequence, name: str, most_tiles: int
) -> Tensor:
    """Combines dimension 0 of partial results by their monoid.

    Args:
        graph: graph to add to.
        partials: [slots, …], all of a variable with a monoid.
        out_dtype: dtype of the result.
        prog: program the compute sets are added to.
        name: debug name.
        most_tiles: how many tiles may combine.

    Returns:
        A new tensor of shape `partials.shape[1:]` and `out_dtype`.
    """
    total = reduce_partials(graph, partials, prog, name, most_tiles)
    if total.dtype == out_dtype:
        return total
    return elementwise(graph, _cast(np.dtype(out_dtype)), [total], prog, f"{name}/cast")


@lru_cache(maxsize=64)
def _cast(dtype: np.dtype[Any]) -> Op:
    return Op("convert_element_type", lambda x: lax.convert_element_type(x, dtype), dtype, ("cast", dtype.name))
