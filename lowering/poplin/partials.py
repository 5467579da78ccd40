"""Partial results of a split reduction: their dtype, what combining them costs, and combining them.

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
from ipujax.lowering.popops.vertices.reduce_cycles import reduce_cycles
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, dtype_name, element_bytes


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


def check_partials(
    graph: Graph, lhs_dtype: Any, rhs_dtype: Any, out_dtype: Any, partials_dtype: Any, name: str
) -> None:
    """Refuses partial results of a dtype that no codelet has.

    Half operands have codelets with half and with float partials, other floats up to 32 bits with float ones; what a
    plain C++ codelet multiplies is added in the dtype of the result (poplibs `ConvVertexType.cpp`).

    Args:
        graph: what the operation is added to.
        lhs_dtype: of the left operand.
        rhs_dtype: of the right operand.
        out_dtype: of the result.
        partials_dtype: that was asked for; None is right for all.
        name: debug name of the operation.

    Raises:
        GraphError: no codelet has them.
    """
    if partials_dtype is None:
        return
    precision = arithmetic_of(lhs_dtype, rhs_dtype, graph.target).precision
    own = {"half": ("float16", "float32"), "float": ("float32",), None: ()}[precision]
    allowed = dict.fromkeys((*own, dtype_name(out_dtypes(out_dtype)[1])))
    got = dtype_name(np.dtype(partials_dtype))
    if got not in allowed:
        what = f"{name}: no codelet multiplies {dtype_name(lhs_dtype)} by {dtype_name(rhs_dtype)} with such partials"
        hint = "leave partials to their default"
        raise GraphError(what, where=graph.origin, expected=" or ".join(allowed), got=got, hint=hint)


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
    share, exchange, compute, sync = (np.zeros(len(slots), np.int64) for _ in range(4))
    counts, which = np.unique(slots, return_inverse=True)
    for before, after in zip(*stages(tuple(counts.tolist())), strict=True):
        left, keep = before[which], after[which]
        runs, depth = left > 1, ceil_div(left, keep)
        share = np.where(runs, longest_share(outputs, left, keep, dtype, tiles), share)
        received = ceil_div(share * depth * element_bytes(dtype), int(target.exchange_bytes_per_cycle))
        exchange += runs * (target.exchange_startup_cycles + received)
        compute += runs * reduce_cycles(monoid_of(dtype), dtype, share, depth, target)
        sync += runs * target.internal_sync_cycles
    if out_dtype != dtype:
        runs = slots > 1
        compute += runs * elementwise_cycles("convert_element_type", dtype, 1, 0, share, target).astype(np.int64)
        sync += runs * target.internal_sync_cycles
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


@remembered
def _cast(dtype: np.dtype[Any]) -> Op:
    return Op("convert_element_type", lambda x: lax.convert_element_type(x, dtype), dtype, ("cast", dtype.name))
