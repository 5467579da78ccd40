"""Slices at places known only when the program runs: read, and written in place.

A sliced dimension is whole in every vertex, and the others are cut, so that each tile slices what it holds and nothing
moves if the tensor is mapped that way: `map_for_slicing` does so. A tensor that is mapped otherwise is exchanged first.
A box is kept as the tensor is, with its dimensions in the same order.

Source of the layout: poplibs `popops/DynamicSlice.cpp`; of the cost: `indexing_cycles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.layout import MemoryOrder, map_linearly, mapping_like, memory_order, total_elements
from ipujax.lowering.layout.box_charge import spans
from ipujax.lowering.layout.place import (
    along,
    follow,
    mapped_variable,
    place_operand,
    placed_axes,
    scalar,
    spread,
    tile_grid,
    whole_axis,
)
from ipujax.lowering.popops.indexing.indexing_cycles import slice_cycles, vectors
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import (
    BlockShapes,
    Codelet,
    Copy,
    Field,
    Graph,
    Sequence as ProgramSequence,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Tensor, dtype_name, element_bytes


def dynamic_slice(
    graph: Graph,
    x: Tensor,
    starts: Sequence[Tensor],
    sizes: Sequence[int],
    prog: ProgramSequence,
    name: str,
    dims: Sequence[int] | None = None,
) -> Tensor:
    """Copies a box of static sizes from a dynamic place, as `lax.dynamic_slice`.

    Args:
        graph: graph to add to.
        x: tensor with at least one element.
        starts: integer scalars of one dtype, the first index in each of `dims`; clamped so that the box fits.
        sizes: size of the box in every dimension of `x`, at least 1.
        prog: program the compute set is added to.
        name: debug name.
        dims: the dimensions `starts` are for, all when None; in the others the box is as large as `x`.

    Returns:
        A new tensor of shape `sizes`; `x` itself when the box is all of it.
    """
    starts, dims = _moving(x, starts, sizes, dims)
    if not dims:
        return x
    held = memory_order(x)
    if held is not None and not held.is_own and all(len(held.sizes[d]) == 1 for d in dims):
        return _in_order_of_memory(graph, x, held, starts, sizes, prog, name, dims)
    map_for_slicing(graph, x, dims)
    placement = _placement(graph, x, dims)
    out_dims = [None if d in dims else d for d in range(x.ndim)]
    out = mapped_variable(graph, tuple(sizes), x.dtype, name, out_dims, placement)
    codelet = _slice_codelet(x.dtype, x.ndim, dims, starts[0].dtype)
    _add(graph, codelet, x, out, starts, dims, placement, prog, name)
    return out


def _in_order_of_memory(
    graph: Graph,
    x: Tensor,
    held: MemoryOrder,
    starts: Sequence[Tensor],
    sizes: Sequence[int],
    prog: ProgramSequence,
    name: str,
    dims: Sequence[int],
) -> Tensor:
    """The box of a tensor whose memory has dimensions in another order, kept as the tensor is."""
    box = held.with_shape(sizes)
    moving = [held.view_dims.index(d) for d in dims]
    part = dynamic_slice(graph, held.of_variable(x), starts, box.variable_shape, prog, name, moving)
    return box.of_view(part)


def dynamic_update_slice_in_place(
    graph: Graph,
    buffer: Tensor,
    update: Tensor,
    starts: Sequence[Tensor],
    prog: ProgramSequence,
    name: str,
    dims: Sequence[int] | None = None,
) -> None:
    """Overwrites a box of a buffer at a dynamic place.

    Args:
        graph: graph to add to.
        buffer: a writable tensor, changed.
        update: what to write, of the buffer's rank and dtype, nowhere larger than it.
        starts: integer scalars of one dtype, the first index in each of `dims`; clamped so that the box fits.
        prog: program the compute set is added to.
        name: debug name.
        dims: the dimensions `starts` are for, all when None; in the others `update` is as large as the buffer.
    """
    starts, dims = _moving(buffer, starts, update.shape, dims)
    if not dims:
        map_linearly(graph, update)
        map_linearly(graph, buffer)
        prog.add(Copy(update, buffer, name, graph.origin))
        return
    held = memory_order(buffer)
    if held is not None and not held.is_own and all(len(held.sizes[d]) == 1 for d in dims):
        box, moving = held.with_shape(update.shape), [held.view_dims.index(d) for d in dims]
        own, update = held.of_variable(buffer), box.of_variable(update)
        dynamic_update_slice_in_place(graph, own, update, starts, prog, name, moving)
        return
    map_for_slicing(graph, buffer, dims)
    placement = _placement(graph, buffer, dims)
    update_dims = [None if d in dims else d for d in range(buffer.ndim)]
    place_operand(graph, update, spans(update.shape, update_dims), placement)
    codelet = _update_codelet(buffer.dtype, buffer.ndim, dims, starts[0].dtype)
    _add(graph, codelet, buffer, update, starts, dims, placement, prog, name)


def dynamic_update_slice(
    graph: Graph,
    x: Tensor,
    update: Tensor,
    starts: Sequence[Tensor],
    prog: ProgramSequence,
    name: str,
    dims: Sequence[int] | None = None,
) -> Tensor:
    """A copy of `x` with a box overwritten, as `lax.dynamic_update_slice`; arguments as the function in place."""
    moving = [d for d, n in enumerate(x.shape) if n != update.shape[d]]
    map_for_slicing(graph, x, moving)
    out = graph.add_variable(x.shape, x.dtype, name, mapping_like(graph, x) or _placement(graph, x, moving))
    prog.add(Copy(x, out, f"{name}/copy", graph.origin))
    dynamic_update_slice_in_place(graph, out, update, starts, prog, name, dims)
    return out


def map_for_slicing(graph: Graph, tensor: Tensor, dims: Sequence[int]) -> None:
    """Maps an unmapped tensor with `dims` whole on every tile, so that slices along them need no exchange.

    Args:
        graph: holds the tensor's variables.
        tensor: nothing happens when it is mapped already.
        dims: the dimensions that are going to be sliced.
    """
    if not graph.is_mapped(tensor) and tensor.size:
        whole = spans(tensor.shape, range(tensor.ndim))
        place_operand(graph, tensor, whole, _placement(graph, tensor, dims))
    map_linearly(graph, tensor)


def is_sliced_in_place(graph: Graph, x: Tensor, dims: Sequence[int]) -> bool:
    """Whether a tensor is mapped so that slices along `dims` need no exchange of it."""
    held = memory_order(x)
    if held is not None and not held.is_own and all(len(held.sizes[d]) == 1 for d in dims):
        x, dims = held.of_variable(x), [held.view_dims.index(d) for d in dims]
    return graph.is_mapped(x) and _followed(graph, x, dims) is not None


def _moving(
    x: Tensor, starts: Sequence[Tensor], sizes: Sequence[int], dims: Sequence[int] | None
) -> tuple[list[Tensor], tuple[int, ...]]:
    """The starts and dimensions of a box that can lie in more than one place."""
    dims = range(x.ndim) if dims is None else dims
    kept = [(start, d) for start, d in zip(starts, dims, strict=True) if sizes[d] != x.shape[d]]
    return [start for start, _ in kept], tuple(d for _, d in kept)


def _followed(graph: Graph, x: Tensor, dims: Sequence[int]) -> Blocked | None:
    order = tuple(d for d in range(x.ndim) if d not in dims)
    return follow(graph, x, spans(x.shape, range(x.ndim)), x.shape, order)


def _placement(graph: Graph, x: Tensor, dims: Sequence[int]) -> Blocked:
    order = tuple(d for d in range(x.ndim) if d not in dims)
    # What lies right is sliced where it lies, however it is spread: to move it costs more than any slice of it.
    followed = _followed(graph, x, dims) if graph.is_mapped(x) else None
    return followed or spread(x.shape, order, element_bytes(x.dtype), graph.target.tiles_per_ipu)


def _add(
    graph: Graph,
    codelet: Codelet,
    whole: Tensor,
    box: Tensor,
    starts: Sequence[Tensor],
    dims: tuple[int, ...],
    placement: Blocked,
    prog: ProgramSequence,
    name: str,
) -> None:
    for start in starts:
        map_linearly(graph, start)
    axes = placed_axes(placement) + [whole_axis(f"box{d}", box.shape[d]) for d in dims]
    box_dims = [whole.ndim + dims.index(d) if d in dims else d for d in range(whole.ndim)]
    accesses = (along(whole, range(whole.ndim)), along(box, box_dims), *map(scalar, starts))
    tile = tile_grid(placement, len(dims))
    add_vertices(graph, codelet, axes, accesses, tile, prog, name)


def _all_starts(starts: Sequence[jax.Array], dims: tuple[int, ...], rank: int) -> list[jax.Array]:
    at = dict(zip(dims, starts, strict=True))
    return [at.get(d, lax.full((), 0, starts[0].dtype)) for d in range(rank)]


def _box_cycles(dims: tuple[int, ...], dtype: Any, shapes: BlockShapes, target: Target) -> np.ndarray:
    """Cost of copying the box, field 1: rows are what is contiguous behind the last sliced dimension."""
    box, last = shapes[1], max(dims)
    return slice_cycles(total_elements(box[: last + 1]), total_elements(box[last + 1 :]), dtype, target)


def _row_vectors(dims: tuple[int, ...], dtype: Any, shapes: BlockShapes, target: Target) -> np.ndarray:
    """Vectors of a row of the box: workers share each row."""
    return vectors(total_elements(shapes[1][max(dims) + 1 :]), dtype, target)


@remembered
def _slice_codelet(dtype: Any, rank: int, dims: tuple[int, ...], index_dtype: Any) -> Codelet:
    def compute(x: jax.Array, *starts: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> jax.Array:
        # A negative start is clamped: what counts from the end was resolved where the equation was traced.
        return lax.dynamic_slice(x, _all_starts(starts, dims, rank), shapes[0], allow_negative_indices=False)

    cycles, parts = (partial(each, dims, dtype) for each in (_box_cycles, _row_vectors))
    scalars = [Field(f"start{d}", "in", index_dtype) for d in dims]
    fields = (Field("x", "in", dtype), Field("out", "out", dtype), *scalars)
    title = f"popops::DynamicSlice<{dtype_name(dtype)}>"
    return Codelet(title, fields, compute, cycles, 32, 300, takes=("shapes",), moves=True, parts=parts)


@remembered
def _update_codelet(dtype: Any, rank: int, dims: tuple[int, ...], index_dtype: Any) -> Codelet:
    def compute(buffer: jax.Array, update: jax.Array, *starts: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(buffer, update, _all_starts(starts, dims, rank), allow_negative_indices=False)

    cycles, parts = (partial(each, dims, dtype) for each in (_box_cycles, _row_vectors))
    scalars = [Field(f"start{d}", "in", index_dtype) for d in dims]
    fields = (Field("buffer", "inout", dtype), Field("update", "in", dtype), *scalars)
    title = f"popops::DynamicUpdateSlice<{dtype_name(dtype)}>"
    return Codelet(title, fields, compute, cycles, 32, 300, moves=True, parts=parts)
