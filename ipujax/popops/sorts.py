"""Sorting, and the largest or smallest elements of rows.

Source: popops `Sort.hpp`, `TopK.hpp`. Sorting is stable, and NaN is greater than all numbers, as in JAX.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.poplar.library import add
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor

SortOrder = Literal["none", "ascending", "descending"]


def sort(graph: Graph, x: Tensor, dim: int, prog: Program, name: str = "sort") -> Tensor:
    """Sort a tensor along one dimension, ascending, into a new one."""
    return add(graph, lambda a: lax.sort(a, dimension=dim), [x], prog, name)


def sort_in_place(graph: Graph, x: Tensor, dim: int, prog: Program, name: str = "sort") -> None:
    """Sort a tensor along one dimension, ascending, in place."""
    add(graph, lambda a: lax.sort(a, dimension=dim), [x], prog, name, [x])


def sort_key_value(
    graph: Graph, keys: Tensor, values: Tensor, dim: int, prog: Program, name: str = "sort"
) -> tuple[Tensor, Tensor]:
    """Sort keys along one dimension, ascending, and their values with them, into new tensors.

    Source: popops::sortKeyValue, which returns the values alone.
    """
    # One key: the values follow, and do not order equal keys.
    return add(graph, lambda *pair: lax.sort(pair, dimension=dim, num_keys=1), [keys, values], prog, name)


def sort_key_value_in_place(
    graph: Graph, keys: Tensor, values: Tensor, dim: int, prog: Program, name: str = "sort"
) -> None:
    """Sort keys along one dimension, ascending, and their values with them, in place; the two must not overlap."""
    add(graph, lambda *pair: lax.sort(pair, dimension=dim, num_keys=1), [keys, values], prog, name, [keys, values])


def top_k(
    graph: Graph,
    x: Tensor,
    k: int,
    prog: Program,
    name: str = "top_k",
    *,
    largest: bool = True,
    sort_order: SortOrder | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k largest, or smallest, elements along the last dimension, and their indices.

    Args:
        graph: graph to add to.
        x: [..., n].
        k: number of elements, at most n.
        prog: program to add to.
        name: debug name.
        largest: select the largest, else the smallest.
        sort_order: "descending", "ascending", or "none", any order; the best first when None.

    Returns:
        Values [..., k], and their UNSIGNED_INT indices; of equal elements those with the smallest index.

    Raises:
        GraphError: `k` out of range, or an unknown order.

    Source: popops::topKWithPermutation with TopKParams(k, largest, sortOrder).
    """
    _check(name, x, k, sort_order)
    return add(graph, lambda a: _select_top_k(a, k, largest, sort_order), [x], prog, name)


def top_k_key_value(
    graph: Graph,
    keys: Tensor,
    values: Tensor,
    k: int,
    prog: Program,
    name: str = "top_k",
    *,
    largest: bool = True,
    sort_order: SortOrder | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k largest, or smallest, keys along the last dimension, and their values.

    Arguments as of `top_k`; `values` has the shape of `keys`.

    Source: popops::topKKeyValue.
    """
    _check(name, keys, k, sort_order)
    if keys.shape != values.shape:
        raise GraphError(f"{name}: keys and values differ in shape", expected=keys.shape, got=values.shape)

    def select(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        top_keys, indices = _select_top_k(a, k, largest, sort_order)
        return top_keys, jnp.take_along_axis(b, indices.astype(jnp.int32), -1)

    return add(graph, select, [keys, values], prog, name)


def _select_top_k(x: jax.Array, k: int, largest: bool, order: SortOrder | None) -> tuple[jax.Array, jax.Array]:
    x = jnp.where(x == 0, 0, x).astype(x.dtype)  # zeros are equal, whatever their sign; `lax.top_k` orders them
    # Of an integer the complement: it decreases as the integer increases, and never overflows, unlike the negative.
    reverse = jnp.bitwise_not if np.dtype(x.dtype).kind in "iu" else jnp.negative
    values, indices = lax.top_k(x if largest else reverse(x), k)
    values = values if largest else reverse(values)
    indices = indices.astype(jnp.uint32)
    if order in ("none", None) or (order == "descending") == largest:  # `top_k` returns the best first
        return values, indices
    return jnp.flip(values, -1), jnp.flip(indices, -1)


def _check(name: str, x: Tensor, k: int, order: str | None) -> None:
    if not x.ndim or not 1 <= k <= x.shape[-1]:
        expected = f"1 to {x.shape[-1]}" if x.ndim else "a tensor with a dimension"
        raise GraphError(f"{name}: k must be a number of elements", expected=expected, got=k)
    if order not in (None, "none", "ascending", "descending"):
        expected = '"none", "ascending" or "descending"'
        raise GraphError(f"{name}: unknown order", expected=expected, got=repr(order))
