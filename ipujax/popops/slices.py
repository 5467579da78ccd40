"""Slices at run-time offsets: one slice, or one for each of many offsets.

Source: popops `DynamicSlice.hpp`. Offsets of one slice are clamped, as by `lax.dynamic_slice`.
Limits: no slice plans; every tile iterates over all offsets of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.emit import placing
from ipujax.lowering.popops import dynamic_update_slice_in_place, map_for_slicing
from ipujax.poplar.library import add, add_new, same_type
from ipujax.popops.elementwise import check_scales
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Builder, Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name


def create_sliceable_tensor(
    graph: Graph, dtype: Any, shape: Sequence[int], dims: Sequence[int], sizes: Sequence[int], name: str = "sliceable"
) -> Tensor:
    """Create a tensor mapped for slices without exchange: no sliced dimension is split over tiles.

    Args:
        graph: graph to add to.
        dtype: type of its elements.
        shape: sizes of its dimensions.
        dims: dimensions to slice.
        sizes: sizes of the slices in `dims`.
        name: debug name.

    Raises:
        GraphError: slices that do not fit.

    Source: popops::createSliceableTensor.
    """
    tensor = graph.add_variable(tuple(shape), np.dtype(dtype), name)
    _slice_shape(name, tensor, dims, sizes)
    with placing(graph):
        map_for_slicing(graph, tensor, dims)
    return tensor


def dynamic_slice(
    graph: Graph,
    x: Tensor,
    offset: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "dynamic_slice",
) -> Tensor:
    """Slice a tensor at a run-time offset.

    Args:
        graph: graph to add to.
        x: the tensor.
        offset: integers, the first index in each of `dims`; clamped to the tensor.
        dims: dimensions to slice.
        sizes: size of the slice in each of `dims`.
        prog: program to add to.
        name: debug name.

    Returns:
        A new tensor.

    Raises:
        GraphError: a slice that does not fit, or another number of offsets than of `dims`.
    """
    return add_new(graph, _slicer(x, offset, dims, sizes, name), [x, offset], prog, name)


def dynamic_slice_with_output(
    graph: Graph,
    out: Tensor,
    x: Tensor,
    offset: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "dynamic_slice",
) -> None:
    """Write a slice at a run-time offset to `out`; arguments as of `dynamic_slice`.

    Source: popops::dynamicSliceWithOutput.
    """
    add(graph, _slicer(x, offset, dims, sizes, name), [x, offset], prog, name, [out])


def _slicer(
    x: Tensor, offset: Tensor, dims: Sequence[int], sizes: Sequence[int], name: str
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Make the function that slices an array at offsets of `dims`, clamped to its bounds; refuse what does not fit."""
    shape = _slice_shape(name, x, dims, sizes)
    _check_offset(name, offset, dims)

    def slice_array(a: jax.Array, starts: jax.Array) -> jax.Array:
        start_of = dict(zip(dims, starts.reshape(-1), strict=True))
        return lax.dynamic_slice(a, [start_of.get(d, jnp.zeros((), starts.dtype)) for d in range(a.ndim)], shape)

    return slice_array


def dynamic_update(
    graph: Graph,
    x: Tensor,
    update: Tensor,
    offset: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "dynamic_update",
) -> None:
    """Overwrite a slice at a run-time offset, in place; arguments as of `dynamic_slice`."""
    expected = _slice_shape(name, x, dims, sizes)
    if update.shape != expected:
        raise GraphError(f"{name}: the update has the wrong shape", expected=expected, got=update.shape)
    _check_offset(name, offset, dims)
    same_type(name, [x, update])
    with placing(graph, [x, update, offset]):
        # PopLibs has one tensor of offsets, the op library a scalar for each dimension.
        starts = [offset.flatten()[n].reshape(()) for n in range(len(dims))]
        dynamic_update_slice_in_place(Builder(graph, prog, name), x, update, starts, tuple(dims))


def multi_slice(
    graph: Graph,
    x: Tensor,
    offsets: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "multi_slice",
) -> Tensor:
    """Slice at many offsets; `multi_slice(graph, table, indices, [0], [1], prog)` looks up rows of a table.

    Args:
        graph: graph to add to.
        x: the tensor.
        offsets: [n, dims], or [n] for one dimension, integers; clamped to the tensor.
        dims: dimensions to slice.
        sizes: size of a slice in each of `dims`.
        prog: program to add to.
        name: debug name.

    Returns:
        A new tensor [n, slice…], the slices of the rank of `x`.

    Raises:
        GraphError: a slice that does not fit, or another number of offsets than of `dims`.

    Source: popops::multiSlice.
    """
    shape = _slice_shape(name, x, dims, sizes)
    _check_offsets(name, offsets, dims)
    # Dimension 0 of the result numbers the slices, the others run along them; none is collapsed.
    numbers = lax.GatherDimensionNumbers(tuple(range(1, x.ndim + 1)), (), tuple(dims))

    def slice_rows(a: jax.Array, starts: jax.Array) -> jax.Array:
        return lax.gather(a, starts.reshape(-1, len(dims)), numbers, shape, mode=lax.GatherScatterMode.CLIP)

    return add_new(graph, slice_rows, [x, offsets], prog, name)


def multi_update(
    graph: Graph,
    x: Tensor,
    slices: Tensor,
    offsets: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "multi_update",
) -> None:
    """Overwrite slices at many offsets, in place; with duplicate offsets any of the slices may remain.

    `slices` is [n, slice…], other arguments are as of `multi_slice`; a slice out of bounds is dropped.

    Source: popops::multiUpdate.
    """
    _update(graph, x, slices, offsets, dims, sizes, lax.scatter, None, prog, name)


def multi_update_add(
    graph: Graph,
    x: Tensor,
    slices: Tensor,
    offsets: Tensor,
    scale: float | Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "multi_update_add",
) -> None:
    """Add `scale · slices` at many offsets, in place; other arguments as of `multi_update`.

    Source: popops::multiUpdateAdd.
    """
    _update(graph, x, slices, offsets, dims, sizes, lax.scatter_add, scale, prog, name)


def multi_update_max(
    graph: Graph,
    x: Tensor,
    slices: Tensor,
    offsets: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "multi_update_max",
) -> None:
    """Write the maximum of a tensor and `slices` at many offsets, in place; arguments as of `multi_update`.

    Source: popops::multiUpdateMax.
    """
    _update(graph, x, slices, offsets, dims, sizes, lax.scatter_max, None, prog, name)


def _update(
    graph: Graph,
    x: Tensor,
    slices: Tensor,
    offsets: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    scatter: Callable[..., jax.Array],
    scale: float | Tensor | None,
    prog: Program,
    name: str,
) -> None:
    """Add to a program the update of slices of `x` in place, by JAX's `scatter` of one kind, after checks."""
    shape = _slice_shape(name, x, dims, sizes)
    _check_offsets(name, offsets, dims)
    same_type(name, [x, slices])
    check_scales(name, x.dtype, scale)
    # Slices have the rank of `x`: dimensions that are not sliced are entire, not dropped.
    if slices.shape != (expected := (offsets.shape[0], *shape)):
        raise GraphError(f"{name}: the slices have the wrong shape", expected=expected, got=slices.shape)
    numbers = lax.ScatterDimensionNumbers(tuple(range(1, x.ndim + 1)), (), tuple(dims))

    def update(a: jax.Array, s: jax.Array, starts: jax.Array, *factor: jax.Array) -> jax.Array:
        if scale is not None:
            s = s * (factor[0].reshape(()).astype(a.dtype) if factor else jnp.asarray(scale, a.dtype))
        # Unlike a slice, an update out of bounds must not be clamped: it would change other elements.
        return scatter(a, starts.reshape(-1, len(dims)), s, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)

    add(graph, update, [x, slices, offsets, *([scale] if isinstance(scale, Tensor) else [])], prog, name, [x])


def _slice_shape(name: str, x: Tensor, dims: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    # Checks the arguments too; a size of 0 is a slice without elements.
    fits = len(dims) == len(sizes) == len(set(dims)) and all(0 <= d < x.ndim for d in dims)
    if not fits or not all(0 <= n <= x.shape[d] for d, n in zip(dims, sizes, strict=True)):
        expected = f"different dimensions of {list(x.shape)}, and sizes within them"
        raise GraphError(
            f"{name}: the slice must fit the tensor", expected=expected, got=f"{list(dims)}, {list(sizes)}"
        )
    size_of = dict(zip(dims, sizes, strict=True))
    return tuple(size_of.get(d, n) for d, n in enumerate(x.shape))


def _check_offset(name: str, offset: Tensor, dims: Sequence[int]) -> None:
    if offset.size != len(dims) or offset.dtype not in (np.int32, np.uint32):
        got = f"{dtype_name(offset.dtype)}{list(offset.shape)}"
        raise GraphError(f"{name}: must have one offset a dimension", expected=f"{len(dims)} integers", got=got)


def _check_offsets(name: str, offsets: Tensor, dims: Sequence[int]) -> None:
    # Popops' shape is [n, dims]; [n] is accepted too where the dimension of size 1 says nothing.
    columns_fit = offsets.shape[1:] in ((len(dims),), () if len(dims) == 1 else None)
    if offsets.ndim not in (1, 2) or not columns_fit or offsets.dtype not in (np.int32, np.uint32):
        got = f"{dtype_name(offsets.dtype)}{list(offsets.shape)}"
        raise GraphError(f"{name}: must have one offset a dimension", expected=f"[n, {len(dims)}] of integers", got=got)
