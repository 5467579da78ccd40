"""Partial results of a split reduction: their dtype, their combination, and its cost.

The combination is popops' `reduce_partials`, in one to three stages; its cost here follows the same stages.
Source of the default partials type, float: poplibs `ConvOptions.hpp` (reference machine.md §2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.poplin.cycles import ceil_div
from ipujax.lowering.poplin.spec import arithmetic_of
from ipujax.lowering.popops import Op, longest_share, reduce_partials, stages
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.vertices.elementwise_cycles import elementwise_cycles
from ipujax.lowering.popops.vertices.reducers import reduce_cycles
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import GraphError
from ipujax.runtime.exchange import copy_cycles, receive_cycles, slow_copy_cycles, superstep, sync_cycles
from ipujax.runtime.graph import Builder, Graph
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, dtype_name, element_bytes


@dataclass(frozen=True, slots=True, eq=False)
class PartialsCost:
    """Expected cycles of combining partial results, int64[candidates] each."""

    exchange_cycles: np.ndarray
    compute_cycles: np.ndarray
    sync_cycles: np.ndarray


def out_dtypes(out_dtype: Any, partials_dtype: Any = None) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Dtypes of a result and of its partials, by default float32 for narrower floats."""
    out = np.dtype(out_dtype)
    is_narrow = jnp.issubdtype(out, jnp.floating) and out.itemsize < 4
    default = np.dtype(np.float32) if is_narrow else out
    return out, default if partials_dtype is None else np.dtype(partials_dtype)


def check_partials(
    graph: Graph, lhs_dtype: Any, rhs_dtype: Any, out_dtype: Any, partials_dtype: Any, name: str
) -> None:
    """Refuses partial results of a dtype that no codelet has; None, the default, is valid for all operands.

    A user may choose the dtype. Half operands have codelets with half and with float partials, other floats up to 32
    bits with float ones; a plain C++ codelet adds in the dtype of the result (poplibs `ConvVertexType.cpp`).
    """
    if partials_dtype is None:
        return
    precision = arithmetic_of(lhs_dtype, rhs_dtype, graph.target).precision
    accumulated = {"half": ("float16", "float32"), "float": ("float32",), None: ()}[precision]
    _, default = out_dtypes(out_dtype)
    allowed = dict.fromkeys((*accumulated, dtype_name(default)))  # each once, in this order
    got = dtype_name(np.dtype(partials_dtype))
    if got not in allowed:
        text = f"{name}: no codelet multiplies {dtype_name(lhs_dtype)} by {dtype_name(rhs_dtype)} with such partials"
        hint = "leave partials to their default"
        raise GraphError(text, where=graph.origin, expected=" or ".join(allowed), got=got, hint=hint)


def monoid_of(dtype: np.dtype[Any]) -> str:
    """Monoid of partial sums of products: products of bools are ands, their sums ors."""
    return "or" if dtype == np.bool_ else "add"


def partials_cost(
    slots: np.ndarray,
    tiles: np.ndarray,
    outputs: int,
    dtype: np.dtype[Any],
    out_dtype: np.dtype[Any],
    row: int,
    target: Target,
) -> PartialsCost:
    """Expected cycles to combine and cast partial results; a single one costs at most a cast.

    Args:
        slots: partial results of each element, int64[candidates].
        tiles: number of tiles, likewise.
        outputs: elements of the result.
        dtype: dtype of the partial results.
        out_dtype: dtype of the result.
        row: elements of a row of the result.
        target: the machine.
    """
    # `share`: elements of the fullest tile after the last stage that a candidate has.
    share, exchange, compute, sync = (np.zeros(len(slots), np.int64) for _ in range(4))
    counts, inverse = np.unique(slots, return_inverse=True)
    for stage_before, stage_after in zip(*stages(tuple(counts.tolist())), strict=True):
        slots_before = stage_before[inverse]
        slots_after = stage_after[inverse]
        is_run = slots_before > 1  # candidates with fewer stages have one slot by then
        depth = ceil_div(slots_before, slots_after)  # partial results that one element of the stage is the sum of
        share = np.where(is_run, longest_share(outputs, slots_before, slots_after, dtype, tiles), share)
        # Start-up of single messages is left out: how many there are depends on the mapping, which is not known yet.
        receiving = receive_cycles(share * depth * element_bytes(dtype), shared_bytes=0, receives=0, target=target)
        adding = reduce_cycles(monoid_of(dtype), dtype, share, depth, target)
        stage = superstep(target, receiving, compute_cycles=adding)
        exchange += is_run * stage.exchange_cycles
        compute += is_run * stage.compute_cycles
        sync += is_run * stage.sync_cycles
    # Rows that are no whole vectors are put in their place by a slow copy.
    slow_cycles = slow_copy_cycles(row, element_bytes(dtype), own=share, received=0)
    putting = copy_cycles(copied_bytes=0, copied_fragments=0, target=target, slow_cycles=slow_cycles)
    compute += np.where(slots > 1, putting, 0)
    if out_dtype != dtype:
        # A single partial result is the result itself, unless vertices accumulate in a wider dtype than it has.
        is_cast = element_bytes(dtype) > element_bytes(out_dtype)
        is_run = (slots > 1) | is_cast
        share = np.where(slots > 1, share, ceil_div(outputs, tiles))
        compute += is_run * elementwise_cycles(
            "convert_element_type", dtype, operands=1, immediates=0, elements=share, target=target
        ).astype(np.int64)
        sync += is_run * sync_cycles(1, target)
    return PartialsCost(exchange, compute, sync)


def combine_and_cast(builder: Builder, partials: Tensor, out_dtype: Any, max_tiles: int) -> Tensor:
    """Combines dimension 0 of partial results, the slots, by their variable's monoid on at most `max_tiles` tiles."""
    return cast_results(builder, reduce_partials(builder, partials, max_tiles), out_dtype)


def cast_results(builder: Builder, total: Tensor, out_dtype: Any) -> Tensor:
    """Casts results of another dtype, in a compute set of their own."""
    if total.dtype == out_dtype:
        return total
    return elementwise(builder.named("cast"), _cast_op(np.dtype(out_dtype)), [total])


@remembered
def _cast_op(dtype: np.dtype[Any]) -> Op:
    return Op("convert_element_type", lambda x: lax.convert_element_type(x, dtype), dtype, ("cast", dtype.name))
