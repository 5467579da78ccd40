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


@dataclass(frozen=True, slots=True)
class PartialsCost:
    """Expected cycles of combining partial results."""

    exchange_cycles: int
    compute_cycles: int
    sync_cycles: int


def out_dtypes(out_dtype: Any, partials_dtype: Any = None) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Dtype of a result and of its partials: float for narrower floats unless said otherwise."""
    out = np.dtype(out_dtype)
    narrow = jnp.issubdtype(out, jnp.floating) and out.itemsize < 4
    default = np.dtype(np.float32) if narrow else out
    return out, default if partials_dtype is None else np.dtype(partials_dtype)


def monoid_of(dtype: np.dtype[Any]) -> str:
    """How partial sums of products combine: products of bools are ands, their sums ors."""
    return "or" if dtype == np.bool_ else "add"


@lru_cache(maxsize=8192)
def partials_cost(
    slots: int, outputs: int, dtype: np.dtype[Any], out_dtype: np.dtype[Any], target: Target
) -> PartialsCost:
    """Expected cycles to combine `slots` partial results of each of `outputs` elements, and to cast them.

    Args:
        slots: partial results of an element; 1 costs nothing.
        outputs: elements of the result.
        dtype: of the partials.
        out_dtype: of the result.
        target: the machine.
    """
    exchange = compute = sync = 0
    if slots == 1:
        return PartialsCost(0, 0, 0)
    width, grain = element_bytes(dtype), max(1, 8 // element_bytes(dtype))
    stages = next((n for bound, n in _STAGES if slots < bound), _MAX_STAGES)
    left = slots
    for stage in range(stages, 0, -1):
        keep = 1 if stage == 1 else max(1, round(left ** ((stage - 1) / stage)))
        per_tile = max(grain, -(-_MIN_RECEIVED_BYTES // (width * max(1, left // keep))))
        blocks = max(1, min(target.tiles_per_ipu // keep, -(-outputs // per_tile)))
        share, depth = min(outputs, ceil_div(ceil_div(outputs, grain), blocks) * grain), ceil_div(left, keep)
        received = -(-share * depth * width // int(target.exchange_bytes_per_cycle))
        exchange += target.exchange_startup_cycles + received
        compute += int(reduce_cycles(monoid_of(dtype), dtype, np.asarray(share), np.asarray(depth), target))
        sync += target.internal_sync_cycles
        left = keep
    if out_dtype != dtype:
        compute += int(elementwise_cycles("convert_element_type", dtype, 1, 0, np.asarray(share), target))
        sync += target.internal_sync_cycles
    return PartialsCost(exchange, compute, sync)


def combine(graph: Graph, partials: Tensor, out_dtype: Any, prog: ProgramSequence, name: str) -> Tensor:
    """Combines dimension 0 of partial results by their monoid.

    Args:
        graph: graph to add to.
        partials: [slots, …], all of a variable with a monoid.
        out_dtype: dtype of the result.
        prog: program the compute sets are added to.
        name: debug name.

    Returns:
        A new tensor of shape `partials.shape[1:]` and `out_dtype`.
    """
    total = reduce_partials(graph, partials, prog, name)
    if total.dtype == out_dtype:
        return total
    return elementwise(graph, _cast(np.dtype(out_dtype)), [total], prog, f"{name}/cast")


@lru_cache(maxsize=64)
def _cast(dtype: np.dtype[Any]) -> Op:
    return Op("convert_element_type", lambda x: lax.convert_element_type(x, dtype), dtype, ("cast", dtype.name))
