"""Gather and scatter with XLA's dimension numbers, and one element of each row by index.

Source: popops `Gather.hpp`, `Scatter.hpp`, `SelectScalarFromRows.hpp`, `UpdateScalarInRows.hpp`;
https://openxla.org/xla/operation_semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.poplar.library import add, add_new, look_up, same_type
from ipujax.popops.fills import MASKED_LABEL_CODE
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name

UpdateComputation = Literal["replace", "add", "sub", "mul", "min", "max"]
# By the names of `update_computation`.
_SCATTERS: dict[str, Callable[..., jax.Array]] = {
    "replace": lax.scatter,
    "add": lax.scatter_add,
    "sub": lax.scatter_sub,
    "mul": lax.scatter_mul,
    "min": lax.scatter_min,
    "max": lax.scatter_max,
}


def gather(
    graph: Graph,
    operand: Tensor,
    indices: Tensor,
    index_vector_dim: int,
    offset_dims: Sequence[int],
    slice_sizes: Sequence[int],
    collapsed_slice_dims: Sequence[int],
    start_index_map: Sequence[int],
    prog: Program,
    name: str = "gather",
) -> Tensor:
    """Gather slices of a tensor.

    Args:
        graph: graph to add to.
        operand: tensor to slice.
        indices: integers, starts of the slices; clamped to the tensor.
        index_vector_dim: dimension of `indices` that holds the components of a start; its rank for scalar starts.
        offset_dims: dimensions of the result that run along a slice.
        slice_sizes: sizes of a slice in every dimension of `operand`.
        collapsed_slice_dims: dimensions of a slice of size 1 that the result leaves out.
        start_index_map: dimension of `operand` for each component of a start.
        prog: program to add to.
        name: debug name.

    Returns:
        A new tensor.

    Raises:
        GraphError: inconsistent dimension numbers.
    """
    _check_indices(name, indices, index_vector_dim)
    numbers = lax.GatherDimensionNumbers(tuple(offset_dims), tuple(collapsed_slice_dims), tuple(start_index_map))

    def gather_array(a: jax.Array, i: jax.Array) -> jax.Array:
        starts = _move_components_last(i, index_vector_dim)
        return lax.gather(a, starts, numbers, tuple(slice_sizes), mode=lax.GatherScatterMode.CLIP)

    return add_new(graph, gather_array, [operand, indices], prog, name)


def scatter(
    graph: Graph,
    operand: Tensor,
    indices: Tensor,
    updates: Tensor,
    index_vector_dim: int,
    update_window_dims: Sequence[int],
    insert_window_dims: Sequence[int],
    scatter_dims_to_operand_dims: Sequence[int],
    prog: Program,
    name: str = "scatter",
    *,
    update_computation: UpdateComputation = "replace",
) -> None:
    """Combine slices of a tensor with updates, in place.

    Args:
        graph: graph to add to.
        operand: tensor, written.
        indices: integers, starts of the slices; slices out of bounds are dropped.
        updates: second operands of the combination, of the type of `operand`.
        index_vector_dim: see `gather`.
        update_window_dims: dimensions of `updates` that run along a slice.
        insert_window_dims: dimensions of `operand` in which a slice has size 1 that `updates` leaves out.
        scatter_dims_to_operand_dims: dimension of `operand` for each component of a start.
        prog: program to add to.
        name: debug name.
        update_computation: "replace", "add", "sub", "mul", "min" or "max".

    Raises:
        GraphError: inconsistent dimension numbers or types.

    Source: popops::scatter; PopLibs takes a function for the combination, here it is one of those with a codelet.
    """
    combine = look_up(update_computation, _SCATTERS, f"update_computation of {name}")
    _check_indices(name, indices, index_vector_dim)
    same_type(name, [operand, updates])
    numbers = lax.ScatterDimensionNumbers(
        tuple(update_window_dims), tuple(insert_window_dims), tuple(scatter_dims_to_operand_dims)
    )

    def scatter_array(a: jax.Array, i: jax.Array, new: jax.Array) -> jax.Array:
        starts = _move_components_last(i, index_vector_dim)
        return combine(a, starts, new, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)

    add(graph, scatter_array, [operand, indices, updates], prog, name, [operand])


def _check_indices(name: str, indices: Tensor, index_vector_dim: int) -> None:
    if not 0 <= index_vector_dim <= indices.ndim or indices.dtype not in (np.int32, np.uint32):
        expected = f"INT or UNSIGNED_INT, and a dimension from 0 to {indices.ndim}"
        got = f"{dtype_name(indices.dtype)}{list(indices.shape)}, {index_vector_dim}"
        raise GraphError(f"{name}: indices must be integers", expected=expected, got=got)


def _move_components_last(indices: jax.Array, index_vector_dim: int) -> jax.Array:
    # JAX has the components of a start in the last dimension; XLA in any, or in none for scalar starts.
    return indices[..., None] if index_vector_dim == indices.ndim else jnp.moveaxis(indices, index_vector_dim, -1)


def select_scalar_from_rows(
    graph: Graph, params: Tensor, indices: Tensor, prog: Program, name: str = "select_scalar_from_rows"
) -> Tensor:
    """Select an element of each row by index: NaN for an index out of bounds, 0 for `MASKED_LABEL_CODE`.

    Args:
        graph: graph to add to.
        params: [rows, columns], FLOAT or HALF.
        indices: [rows], UNSIGNED_INT.
        prog: program to add to.
        name: debug name.

    Returns:
        A new tensor [rows].

    Raises:
        GraphError: another number of indices than of rows, or other types.
    """
    _check_rows(name, params, indices)

    def select(a: jax.Array, i: jax.Array) -> jax.Array:
        # Clamped first: an unsigned index beyond int32 would become negative and count from the end.
        inside = jnp.minimum(i, a.shape[1] - 1).astype(jnp.int32)
        values = jnp.take_along_axis(a, inside[:, None], 1)[:, 0]
        values = jnp.where(i < a.shape[1], values, jnp.asarray(np.nan, a.dtype))
        return jnp.where(i == np.uint32(MASKED_LABEL_CODE), jnp.zeros((), a.dtype), values)

    return add_new(graph, select, [params, indices], prog, name)


def update_scalar_in_rows(
    graph: Graph, params: Tensor, indices: Tensor, prog: Program, name: str = "update_scalar_in_rows"
) -> None:
    """Subtract 1 from the element of each row at its index, in place: the gradient of a cross entropy.

    Arguments as of `select_scalar_from_rows`; a row with `MASKED_LABEL_CODE` stays, and a row with an index
    out of bounds becomes NaN.
    """
    _check_rows(name, params, indices)

    def subtract(a: jax.Array, i: jax.Array) -> jax.Array:
        # Elementwise, so that each tile updates its part: in a scatter every tile iterates over all indices.
        hit = lax.broadcasted_iota(i.dtype, a.shape, 1) == i[:, None]
        beyond = (i >= a.shape[1]) & (i != np.uint32(MASKED_LABEL_CODE))
        return jnp.where(beyond[:, None], jnp.asarray(np.nan, a.dtype), a - hit.astype(a.dtype))

    add(graph, subtract, [params, indices], prog, name, [params])


def _check_rows(name: str, params: Tensor, indices: Tensor) -> None:
    floats = params.dtype in (np.float16, np.float32)
    if params.ndim != 2 or indices.shape != params.shape[:1] or not floats or indices.dtype != np.uint32:
        got = f"{dtype_name(params.dtype)}{list(params.shape)} and {dtype_name(indices.dtype)}{list(indices.shape)}"
        raise GraphError(f"{name}: must have one index a row", expected="floats [n, m] and uint32[n]", got=got)
