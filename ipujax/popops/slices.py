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
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Builder, Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name


def create_sliceable_tensor(
    graph: Graph, dtype: Any, shape: Sequence[int], dims: Sequence[int], sizes: Sequence[int], name: str = "sliceable"
) -> Tensor:
    """A tensor mapped for slices without exchange: each tile holds the sliced dimensions whole.

    Args:
        graph: graph to add to.
        dtype: type of its elements.
        shape: its sizes.
        dims: the dimensions to slice.
        sizes: sizes of the slices in them.
        name: debug name.

    Raises:
        GraphError: slices that do not fit.

    Source: popops::createSliceableTensor.
    """
    tensor = graph.add_variable(tuple(shape), np.dtype(dtype), name)
    _box(name, tensor, dims, sizes)
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
    """Slices a box at a run-time offset.

    Args:
        graph: graph to add to.
        x: the tensor.
        offset: integers, the first index in each of `dims`; clamped to the tensor.
        dims: the dimensions that are sliced.
        sizes: size of the box in each of `dims`.
        prog: program the steps are added to.
        name: debug name.

    Returns:
        A new tensor.

    Raises:
        GraphError: a box that does not fit, or not one offset a dimension.
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
    """As `dynamic_slice`, written to `out`.

    Source: popops::dynamicSliceWithOutput.
    """
    add(graph, _slicer(x, offset, dims, sizes, name), [x, offset], prog, name, [out])


def _slicer(
    x: Tensor, offset: Tensor, dims: Sequence[int], sizes: Sequence[int], name: str
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    box = _box(name, x, dims, sizes)
    _check_offset(name, offset, dims)

    def sliced(a: jax.Array, starts: jax.Array) -> jax.Array:
        at = dict(zip(dims, starts.reshape(-1), strict=True))
        return lax.dynamic_slice(a, [at.get(d, jnp.zeros((), starts.dtype)) for d in range(a.ndim)], box)

    return sliced


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
    """Overwrites a box at a run-time offset, in place; arguments as of `dynamic_slice`."""
    expected = _box(name, x, dims, sizes)
    if update.shape != expected:
        raise GraphError(f"{name}: the update has another shape", expected=expected, got=update.shape)
    _check_offset(name, offset, dims)
    same_type(name, [x, update])
    with placing(graph, [x, update, offset]):
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
    """Slices boxes at many offsets; `multi_slice(graph, table, indices, [0], [1], prog)` looks up rows of a table.

    Args:
        graph: graph to add to.
        x: the tensor.
        offsets: [n, dims], or [n] for one dimension, integers; clamped to the tensor.
        dims: the dimensions that are sliced.
        sizes: size of a box in each of `dims`.
        prog: program the steps are added to.
        name: debug name.

    Returns:
        A new tensor [n, box…], the box of the rank of `x`.

    Raises:
        GraphError: a box that does not fit, or not one offset a dimension.

    Source: popops::multiSlice.
    """
    box = _box(name, x, dims, sizes)
    _check_offsets(name, offsets, dims)
    numbers = lax.GatherDimensionNumbers(tuple(range(1, x.ndim + 1)), (), tuple(dims))

    def sliced(a: jax.Array, at: jax.Array) -> jax.Array:
        return lax.gather(a, at.reshape(-1, len(dims)), numbers, box, mode=lax.GatherScatterMode.CLIP)

    return add_new(graph, sliced, [x, offsets], prog, name)


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
    """Overwrites boxes at many offsets, in place; with duplicate offsets any of the boxes may remain.

    `slices` is [n, box…], other arguments are as of `multi_slice`; a box out of bounds is dropped.

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
    """Adds `scale · slices` to boxes at many offsets, in place; as `multi_update`.

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
    """Takes the maximum of boxes at many offsets and `slices`, in place; as `multi_update`.

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
    box = _box(name, x, dims, sizes)
    _check_offsets(name, offsets, dims)
    same_type(name, [x, slices])
    if slices.shape != (expected := (offsets.shape[0], *box)):
        raise GraphError(f"{name}: the slices have another shape", expected=expected, got=slices.shape)
    numbers = lax.ScatterDimensionNumbers(tuple(range(1, x.ndim + 1)), (), tuple(dims))

    def updated(a: jax.Array, s: jax.Array, at: jax.Array, *given: jax.Array) -> jax.Array:
        if scale is not None:
            s = s * (given[0].reshape(()).astype(a.dtype) if given else jnp.asarray(scale, a.dtype))
        return scatter(a, at.reshape(-1, len(dims)), s, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)

    add(graph, updated, [x, slices, offsets, *([scale] if isinstance(scale, Tensor) else [])], prog, name, [x])


def _box(name: str, x: Tensor, dims: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a slice."""
    fits = len(dims) == len(sizes) == len(set(dims)) and all(0 <= d < x.ndim for d in dims)
    if not fits or not all(0 <= n <= x.shape[d] for d, n in zip(dims, sizes, strict=True)):
        expected = f"different dimensions of {list(x.shape)}, and sizes within them"
        raise GraphError(f"{name}: not a box of the tensor", expected=expected, got=f"{list(dims)}, {list(sizes)}")
    at = dict(zip(dims, sizes, strict=True))
    return tuple(at.get(d, n) for d, n in enumerate(x.shape))


def _check_offset(name: str, offset: Tensor, dims: Sequence[int]) -> None:
    if offset.size != len(dims) or offset.dtype not in (np.int32, np.uint32):
        expected, got = f"{len(dims)} of INT or UNSIGNED_INT", f"{dtype_name(offset.dtype)}{list(offset.shape)}"
        raise GraphError(f"{name}: not one offset a dimension", expected=expected, got=got)


def _check_offsets(name: str, offsets: Tensor, dims: Sequence[int]) -> None:
    columns = offsets.shape[1:] in ((len(dims),), () if len(dims) == 1 else None)
    if offsets.ndim not in (1, 2) or not columns or offsets.dtype not in (np.int32, np.uint32):
        expected, got = f"[n, {len(dims)}] of integers", f"{dtype_name(offsets.dtype)}{list(offsets.shape)}"
        raise GraphError(f"{name}: not one offset a dimension", expected=expected, got=got)
