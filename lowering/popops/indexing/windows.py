"""Reductions over sliding windows, and the gradient of a maximum over windows (pooling and its backward pass).

Results are cut in blocks along every dimension. A block reads the hull of its windows, halo included; beyond the tensor
the codelet pads. The gradient is cut into cells of one stride, in each of which one window begins: a block of it reads
all windows that cover one of its elements and all elements that these cover, so that each tile alone decides the
elements they select. The partition is the one of least cost.

Source of the costs: `indexing_cycles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Jaxpr
from ipujax.lowering.layout import MemoryOrder, map_linearly, memory_order
from ipujax.lowering.layout.choose import choose, source_of
from ipujax.lowering.layout.grid_cost import FieldUse, Span, Work, spans
from ipujax.lowering.layout.place import (
    along,
    block_mapping,
    mapped_variable,
    place_operand,
    placed_axes,
    scalar,
    tile_grid,
    whole_axis,
)
from ipujax.lowering.popops.indexing.indexing_cycles import (
    GRADIENT_CYCLES,
    POOLING_CYCLES,
    pooling_cycles,
    rows_of_vectors,
)
from ipujax.lowering.popops.indexing.select_and_scatter import functions_of, select_and_scatter_block
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.reducers import comparison_of
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Access, Axis, BlockShapes, Builder, Codelet, Dim, Field, Term
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Tensor, dtype_name

Pads = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Windows:
    """Geometry of sliding windows, one entry for each dimension."""

    sizes: tuple[int, ...]  # elements of a window
    strides: tuple[int, ...]  # distance of neighbouring windows
    # `(low, high)` elements added around the tensor, or removed where negative
    padding: tuple[tuple[int, int], ...]
    base_dilation: tuple[int, ...]  # distance of neighbouring elements of the tensor, as windows see it
    window_dilation: tuple[int, ...]  # distance of neighbouring elements of a window

    def params(self) -> dict[str, Any]:
        """Parameters of a primitive over windows without dilations."""
        return {"window_dimensions": self.sizes, "window_strides": self.strides, "padding": self.padding}

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Number of windows in each dimension of a tensor of `shape`."""
        sizes = []
        for d, n in enumerate(shape):
            padded = max(0, (n - 1) * self.base_dilation[d] + 1 if n else 0) + sum(self.padding[d])
            reach = (self.sizes[d] - 1) * self.window_dilation[d] + 1
            sizes.append(max(0, (padded - reach) // self.strides[d] + 1))
        return tuple(sizes)

    def is_elementwise(self, d: int) -> bool:
        """True if each window along dimension `d` is one element, and each element one window."""
        is_plain = self.padding[d] == (0, 0) and self.base_dilation[d] == 1
        return is_plain and self.sizes[d] == self.strides[d] == 1

    def select_dims(self, dims: Sequence[int]) -> Windows:
        """Windows of a view whose dimension n is, or is part of, dimension `dims[n]` of this tensor."""
        return Windows(*(tuple(getattr(self, field.name)[d] for d in dims) for field in fields(self)))

    def span(self, d: int, extent: int) -> Span:
        """Span of dimension `d`, of `extent` elements, over windows: what a range of windows reads of it."""
        reach = (self.sizes[d] - 1) * self.window_dilation[d] + 1
        return Span(d, extent, self.strides[d], reach, -self.padding[d][0], self.base_dilation[d])

    def cell_span(self, d: int, extent: int) -> Span:
        """Span of dimension `d` of a tensor over cells of one stride, in each of which one window begins."""
        return Span(d, extent, self.strides[d], self.strides[d], -self.padding[d][0])

    def windows_over_cell(self, d: int, extent: int) -> Span:
        """Span of the `extent` windows along dimension `d` over the cells that they cover."""
        return Span(d, extent, 1, 1 + (self.sizes[d] - 1) // self.strides[d])

    def halo(self, d: int) -> tuple[int, int]:
        """Elements before and after a row of cells along dimension `d` that share a window with the row."""
        stride = self.strides[d]
        return (self.sizes[d] - 1) // stride * stride, max(0, self.sizes[d] - stride)


def _order_of_variable(tensors: Sequence[Tensor], windows: Windows) -> MemoryOrder | None:
    """Memory order of the first tensor, where it is not row-major and windows can run along its variable's dimensions.

    None where that is not so: then windows run along the dimensions of the tensors as they are.
    """
    order = memory_order(tensors[0])
    if order is None or order.is_own or not all(order.with_shape(x.shape).can_cut(x) for x in tensors):
        return None
    # A window over a dimension that is cut finer would reach over the cuts.
    return order if all(len(row) == 1 or windows.is_elementwise(d) for d, row in enumerate(order.sizes)) else None


# Reduces windows of blocks, as a function of `lax`'s reduce_window family: from blocks, starts and `Windows`.
WindowReducer = Callable[..., Any]


def reduce_window(
    builder: Builder,
    operands: Sequence[Tensor],
    windows: Windows,
    monoid: str,
    reducer: WindowReducer,
    starts: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Reduces every window of a tensor to one element, on the partition of the result that costs least.

    Args:
        builder: graph and program to add to, and the debug name.
        operands: tensors of one shape with at least one element, reduced over equal windows.
        windows: geometry; every result must exist.
        monoid: "max", "min", "add" or "mul", for the cost.
        reducer: hashable function of the blocks, the starts and the `Windows` of these blocks.
        starts: scalar that the reduction of each operand starts with; empty if the reducer has its own.

    Returns:
        New tensors of `windows.result_shape(shape)`: one with the dtype of the last operand, or one for each of
        `starts`.
    """
    x = operands[0]
    out_dtypes = tuple(t.dtype for t in starts) or (operands[-1].dtype,)
    shape = windows.result_shape(x.shape)
    rank = x.ndim
    order = _order_of_variable(operands, windows)
    if order is not None:  # views: the same windows over their variables, so that nothing is rearranged
        tensors = [order.of_variable(tensor) for tensor in operands]
        variable_windows = windows.select_dims(order.view_dims)
        results = reduce_window(builder, tensors, variable_windows, monoid, reducer, starts)
        return [order.with_shape(shape).of_view(result) for result in results]
    start_dtypes = tuple(t.dtype for t in starts)
    codelet = _window_codelet(tuple(t.dtype for t in operands), start_dtypes, windows, monoid, reducer)
    # The work of a vertex, for the estimate of partitions: what it reads and writes for a block of the result.
    read = tuple(windows.span(d, n) for d, n in enumerate(x.shape))
    fields = [FieldUse(read, source_of(builder.graph, tensor)) for tensor in operands]
    fields += [FieldUse((), source_of(builder.graph, tensor)) for tensor in starts]
    fields += [FieldUse(spans(shape, range(rank)))] * len(out_dtypes)
    work = Work(codelet, tuple(fields))

    # Each vertex reads the elements from its first window to its last.
    placement = choose(builder.graph, shape, range(rank), work, [*operands, *starts])
    graph = builder.graph
    for tensor in operands:
        place_operand(graph, tensor, read, placement)
    for tensor in starts:
        map_linearly(graph, tensor)
    outs = [mapped_variable(graph, shape, dtype, builder.name, range(rank), placement) for dtype in out_dtypes]
    windowed = [d for d in range(rank) if windows.sizes[d] > 1]
    axes = placed_axes(placement) + [whole_axis(f"window{d}", windows.sizes[d]) for d in windowed]
    dims = tuple(_window_dim(windows, d, rank + windowed.index(d) if d in windowed else None) for d in range(rank))
    # The fill is never read: the codelet pads with its own neutral element.
    read_by = (*(Access(tensor, dims, np.zeros((), tensor.dtype)) for tensor in operands), *map(scalar, starts))
    accesses = (*read_by, *(along(out, range(rank)) for out in outs))
    tile = tile_grid(placement, len(windowed))
    add_vertices(builder, codelet, axes, accesses, tile)
    return outs


def _window_dim(windows: Windows, d: int, window_axis: int | None) -> Dim:
    """Index of a window's elements: result · stride + element · dilation − padding, in units of the dilated tensor."""
    terms = [Term(d, windows.strides[d])]
    if window_axis is not None:
        terms.append(Term(window_axis, windows.window_dilation[d]))
    return Dim(tuple(terms), -windows.padding[d][0], windows.base_dilation[d])


@remembered
def _window_codelet(
    dtypes: tuple[Any, ...], start_dtypes: tuple[Any, ...], windows: Windows, monoid: str, reducer: WindowReducer
) -> Codelet:
    """Codelet whose vertices reduce the windows of a block; it pads the block where windows reach beyond the tensor.

    Args:
        dtypes: dtype of each operand.
        start_dtypes: dtype of the initial value of each operand, if there are any.
        windows: geometry of the windows of the whole tensor; only the padding of a block differs.
        monoid: "max", "min", "add" or "mul", for the cost.
        reducer: function of the blocks, the initial values and the `Windows` of these blocks.
    """
    # One result an operand, with a start each; without starts one, of the last operand: the others select its elements.
    out_dtypes = start_dtypes or dtypes[-1:]
    depth = prod(windows.sizes) * len(dtypes)  # elements that are reduced to one

    def compute(*blocks: jax.Array, pads: Sequence[Pads]) -> Any:
        results = reducer(*blocks, replace(windows, padding=tuple(pads[0])))
        return tuple(results) if isinstance(results, list | tuple) else results

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        return pooling_cycles(dtypes[-1], windows.sizes, shapes[-1], depth, POOLING_CYCLES, target)

    def parts(shapes: BlockShapes, target: Target) -> np.ndarray:
        return rows_of_vectors(dtypes[-1], windows.sizes, shapes[-1], target)

    fields = [Field(f"in{n}", "in", dtype) for n, dtype in enumerate((*dtypes, *start_dtypes))]
    fields += [Field(f"out{n}" if n else "out", "out", dtype) for n, dtype in enumerate(out_dtypes)]
    title = f"popnn::{monoid.title()}Pooling<{dtype_name(dtypes[-1])}>"
    return Codelet(
        title,
        tuple(fields),
        compute,
        cycles,
        state_bytes=48,
        code_bytes=900,
        takes=("pads",),
        compares=comparison_of(monoid),
        parts=parts,
    )


def select_and_scatter(
    builder: Builder,
    source: Tensor,
    x: Tensor,
    windows: Windows,
    scatter: Callable[..., jax.Array],
    start: Tensor | None = None,
) -> Tensor:
    """Combines each element of `source` with the element of `x` that its window selects; returns a tensor like `x`.

    That is the gradient of a reduction of windows that selects. Vertices are on the partition of `x` that costs least.

    Args:
        builder: graph and program to add to, and the debug name.
        source: one element for each window.
        x: tensor under the windows.
        windows: geometry without dilations.
        scatter: hashable function of blocks of `source` and `x`, `start` and the `Windows` of these blocks.
        start: initial value of every element of the result; 0 when None, and `scatter` is called without it.
    """
    rank = x.ndim
    order = _order_of_variable([x, source], windows)
    if order is not None:  # views: the same windows over their variables, so that nothing is rearranged
        x_order = order.with_shape(x.shape)
        source_variable = order.with_shape(source.shape).of_variable(source)
        variable_windows = windows.select_dims(order.view_dims)
        result = select_and_scatter(builder, source_variable, x_order.of_variable(x), variable_windows, scatter, start)
        return x_order.of_view(result)
    # Partitions cut the result into blocks of cells: as many elements as a stride, in which one window begins.
    cells = [windows.cell_span(d, n) for d, n in enumerate(x.shape)]
    windows_read = tuple(windows.windows_over_cell(d, n) for d, n in enumerate(source.shape))
    x_read = tuple(replace(cell, reach=cell.stride + sum(windows.halo(d))) for d, cell in enumerate(cells))
    codelet = _scatter_codelet(x.dtype, windows, scatter, has_start=start is not None)
    starts = [] if start is None else [start]
    operands = [source, x, *starts]
    operand_spans = (windows_read, x_read, *(() for _ in starts))
    pairs = zip(operand_spans, operands, strict=True)
    read = [FieldUse(operand_span, source_of(builder.graph, tensor)) for operand_span, tensor in pairs]
    work = Work(codelet, (*read, FieldUse(tuple(cells))))

    num_cells = [max(1, -(-(n - cell.offset) // cell.stride)) for n, cell in zip(x.shape, cells, strict=True)]
    # Each vertex reads the windows over its block of cells, and `x` under those.
    placement = choose(builder.graph, num_cells, range(rank), work, operands)
    graph = builder.graph
    # `x` has the mapping of the result, whose blocks are cells, and each tile receives the halo of its block; a window
    # over two blocks is mapped to the tile of the first.
    place_operand(graph, x, cells, placement)
    place_operand(graph, source, windows_read, placement)
    for tensor in starts:
        map_linearly(graph, tensor)
    blocks = Blocked(*block_mapping(cells, placement))
    out = mapped_variable(graph, x.shape, x.dtype, builder.name, range(rank), blocks)
    axes = placed_axes(blocks)
    source_dims, x_dims = _dims_under_windows(windows, axes)  # appends axes of windows and halos
    fill = np.zeros((), x.dtype)  # declares reads beyond the tensors, which the vertex cuts off
    accesses = (
        Access(source, source_dims, fill),
        Access(x, x_dims, fill),
        *map(scalar, starts),
        along(out, range(rank)),
    )
    tile = tile_grid(blocks, len(axes) - rank)
    add_vertices(builder, codelet, axes, accesses, tile)
    return out


def _dims_under_windows(windows: Windows, axes: list[Axis]) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """Indices by which a vertex reads the windows that cover its block, and the elements of `x` under these windows.

    Args:
        windows: geometry of the windows.
        axes: vertex axes, one for each dimension of the block; axes that run over the windows of an element, and over
            the elements beside the block that share a window with it (the halo), are appended.

    Returns:
        Along each dimension the index into the windows, and the index into `x`.
    """
    source_dims: list[Dim] = []
    x_dims: list[Dim] = []
    for d, size in enumerate(windows.sizes):
        low, high = windows.halo(d)
        # The windows that cover element i begin at i - size + 1 + padding … i + padding.
        begins = [Term(d)]
        under_windows = [Term(d)]
        if size > 1:
            begins.append(Term(len(axes)))
            axes.append(whole_axis(f"window{d}", size))
        if low + high:
            under_windows.append(Term(len(axes)))
            axes.append(whole_axis(f"halo{d}", 1 + low + high))
        source_dims.append(Dim(tuple(begins), windows.padding[d][0] - size + 1, windows.strides[d]))
        x_dims.append(Dim(tuple(under_windows), -low))
    return tuple(source_dims), tuple(x_dims)


@remembered
def _scatter_codelet(dtype: Any, windows: Windows, scatter: Callable[..., jax.Array], *, has_start: bool) -> Codelet:
    """Codelet whose vertices compute a block of the gradient of a reduction that selects an element of each window.

    Args:
        dtype: dtype of source, `x` and the gradient.
        windows: geometry of the windows of all of `x`.
        scatter: function of blocks of the source and of `x`, the start if there is one, and their `Windows`.
        has_start: whether the initial value of the gradient is an operand; else 0.
    """

    # The work is that of the windows: it is counted by the block of the source, which has an element for each.
    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        return pooling_cycles(dtype, windows.sizes, shapes[0], prod(windows.sizes), GRADIENT_CYCLES, target)

    def parts(shapes: BlockShapes, target: Target) -> np.ndarray:
        return rows_of_vectors(dtype, windows.sizes, shapes[0], target)  # shared by the workers

    fields = [Field(name, "in", dtype) for name in ("source", "x", *(["start"] if has_start else []))]
    fields.append(Field("out", "out", dtype))
    title = f"popnn::MaxPoolingGrad<{dtype_name(dtype)}>"
    return Codelet(
        title,
        tuple(fields),
        partial(_scatter_in_block, dtype, windows, scatter),
        cycles,
        state_bytes=48,
        code_bytes=900,
        takes=("pads", "shapes"),  # what a block lacks at the edges of `x`, and the shape of the result's block
        compares="equality",  # of the elements of a window with the one that is selected
        parts=parts,
    )


def _scatter_in_block(
    dtype: Any,
    windows: Windows,
    scatter: Callable[..., jax.Array],
    source: jax.Array,
    x: jax.Array,
    *start: jax.Array,
    pads: Sequence[Pads],
    shapes: tuple[tuple[int, ...], ...],
) -> jax.Array:
    """Computes the block of a vertex of `select_and_scatter`, from all windows over it.

    Args:
        dtype: dtype of the result.
        windows: geometry of the windows of all of `x`.
        scatter: function of blocks of source and `x`, the start if there is one, and the `Windows` of these blocks.
        source: the vertex's block of the source, an element for each window over its block of the result.
        x: its block of `x`, the elements under these windows.
        start: initial value of the result, if there is one; else 0.
        pads: of source and `x`, by how much a block would reach beyond its tensor, before and after, where it is cut
            off; in elements of `x`, see `_window_bounds`.
        shapes: shape of the block of the result.
    """
    initial = start[0] if start else jnp.zeros((), dtype)
    if 0 in source.shape:  # no window covers the block
        return lax.broadcast(initial, shapes[0])
    counts_and_pads = zip(source.shape, *pads[:2], strict=True)
    # Range of the windows along each dimension, in elements of the block of `x`: where it reaches beyond, it is cut off
    # and the windows are padded.
    bounds = [_window_bounds(windows, d, *row) for d, row in enumerate(counts_and_pads)]
    begins = [max(0, begin) for begin, _ in bounds]
    ends = [min(n, max(0, end)) for n, (_, end) in zip(x.shape, bounds, strict=True)]
    padding = [(begin - low, high - end) for (low, high), begin, end in zip(bounds, begins, ends, strict=True)]
    block_windows = replace(windows, padding=tuple(padding))
    result = scatter(source, lax.slice(x, begins, ends), *start, block_windows)
    # Windows may reach beyond the block of the result: that is cropped. Elements that none reaches are the start.
    block_starts = [windows.halo(d)[0] - pads[1][d][0] for d in range(x.ndim)]
    befores = [begin - block_start for begin, block_start in zip(begins, block_starts, strict=True)]
    rows = zip(befores, result.shape, shapes[0], strict=True)
    return lax.pad(result, initial, [(before, n - before - size, 0) for before, size, n in rows])


def _window_bounds(
    windows: Windows, d: int, count: int, source_pads: tuple[int, int], x_pads: tuple[int, int]
) -> tuple[int, int]:
    """First element under the windows over a block, and the one past the last, along dimension `d`.

    They count from the first element of `x` that the vertex of the block has.

    Args:
        windows: the windows of all of `x`.
        d: the dimension.
        count: windows over the block that exist.
        source_pads: positions, elements of `x` apart, at which a window over the block might begin, but before that
            of the first that does, and after that of the last.
        x_pads: elements under such windows that `x` lacks at its edges, before and after.
    """
    # The vertex has the elements of `x` from a halo before the block on, less those that `x` lacks.
    halo_before, _ = windows.halo(d)
    block_begin = halo_before - x_pads[0]
    # A window over the first element of the block has it as its last one at the earliest.
    first_position = block_begin - (windows.sizes[d] - 1)
    begin = first_position + source_pads[0]
    return begin, begin + (count - 1) * windows.strides[d] + windows.sizes[d]


@remembered
def primitive_reducer(primitive: Any, **params: Any) -> WindowReducer:
    """Reducer that calls a primitive of the reduce_window family, with parameters besides the geometry."""

    def reducer(*arguments: Any) -> Any:
        *blocks, windows = arguments
        dilations = {"base_dilation": windows.base_dilation, "window_dilation": windows.window_dilation}
        return primitive.bind(*blocks, **windows.params(), **dilations, **params)

    return reducer


@remembered
def primitive_scatter(primitive: Any, **params: Any) -> Callable[..., jax.Array]:
    """Scatter that calls a primitive like `select_and_scatter_add`, with parameters besides the geometry."""

    def scatter(source: jax.Array, x: jax.Array, windows: Windows) -> jax.Array:
        return primitive.bind(source, x, **windows.params(), **params)

    return scatter


@remembered
def scatter_by_functions(select: Jaxpr, combine: Jaxpr) -> Callable[..., jax.Array]:
    """Scatter of `select_and_scatter` by the two jaxprs of scalars that the primitive has."""
    functions = functions_of(select, combine)

    def scatter(source: jax.Array, x: jax.Array, start: jax.Array, windows: Windows) -> jax.Array:
        return select_and_scatter_block(x, source, start, windows.sizes, windows.strides, windows.padding, functions)

    return scatter
