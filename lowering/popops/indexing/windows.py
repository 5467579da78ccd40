"""Reductions over sliding windows, and the gradient of a maximum over windows (pooling and its backward pass).

Results are cut in boxes along every dimension. A box reads the hull of its windows, halo included; what lies outside of
the tensor is padding that the codelet adds. The gradient is cut where windows begin: a box of it reads all windows that
cover one of its elements and what these cover, so that each tile decides alone which elements they select. Grids of
boxes are chosen by their charge.

Source of the costs: poplibs `popnn` pooling is a reduction of window elements a result, charged as a strided reduction
(reference machine.md §1.3); that it reaches that rate is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Jaxpr
from ipujax.lowering.layout import MemoryOrder, map_linearly, memory_order, total_elements
from ipujax.lowering.layout.box_charge import Source, Span, Work, spans
from ipujax.lowering.layout.choose import choose, source_of
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
from ipujax.lowering.popops.indexing.select_and_scatter import functions_of, select_and_scatter_block
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.reduce_cycles import reduce_cycles, reduce_parts
from ipujax.lowering.popops.vertices.reducers import SELECTING
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import (
    Access,
    BlockShapes,
    Codelet,
    Dim,
    Field,
    Graph,
    Sequence as ProgramSequence,
    Term,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Tensor, dtype_name

Pads = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Windows:
    """The geometry of sliding windows, one entry for each dimension.

    Args:
        sizes: elements of a window.
        strides: distance of neighbouring windows.
        padding: `(low, high)` elements put around the tensor, or taken away where negative.
        base_dilation: distance of neighbouring elements of the tensor, as windows see it.
        window_dilation: distance of neighbouring elements of a window.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    base_dilation: tuple[int, ...]
    window_dilation: tuple[int, ...]

    def params(self) -> dict[str, Any]:
        """The parameters of primitives over windows without dilations."""
        return {"window_dimensions": self.sizes, "window_strides": self.strides, "padding": self.padding}

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Number of windows in each dimension of a tensor of `shape`."""
        sizes = []
        for d, n in enumerate(shape):
            padded = max(0, (n - 1) * self.base_dilation[d] + 1 if n else 0) + sum(self.padding[d])
            reach = (self.sizes[d] - 1) * self.window_dilation[d] + 1
            sizes.append(max(0, (padded - reach) // self.strides[d] + 1))
        return tuple(sizes)

    def covers_one(self, d: int) -> bool:
        """Whether a window along dimension `d` is one element, each element one window."""
        is_plain = self.padding[d] == (0, 0) and self.base_dilation[d] == 1
        return is_plain and self.sizes[d] == self.strides[d] == 1

    def of_dims(self, dims: Sequence[int]) -> Windows:
        """The windows of a tensor whose dimensions are, or are parts of, these ones."""
        return Windows(*(tuple(getattr(self, field.name)[d] for d in dims) for field in fields(self)))

    def span(self, d: int, extent: int) -> Span:
        """The span of dimension `d` of a tensor over windows."""
        reach = (self.sizes[d] - 1) * self.window_dilation[d] + 1
        return Span(d, extent, self.strides[d], reach, -self.padding[d][0], self.base_dilation[d])

    def cell_span(self, d: int, extent: int) -> Span:
        """The span of dimension `d` of a tensor over cells of one stride, in each of which one window begins."""
        return Span(d, extent, self.strides[d], self.strides[d], -self.padding[d][0])

    def windows_over_cell(self, d: int, extent: int) -> Span:
        """The span of the `extent` windows along dimension `d` over the cells that they cover."""
        return Span(d, extent, 1, 1 + (self.sizes[d] - 1) // self.strides[d])

    def halo(self, d: int) -> tuple[int, int]:
        """Elements before and after a row of cells that are in a window with one of the row."""
        stride = self.strides[d]
        return (self.sizes[d] - 1) // stride * stride, max(0, self.sizes[d] - stride)


def _order(tensors: Sequence[Tensor], windows: Windows) -> MemoryOrder | None:
    """In which order memory keeps the first tensor, if not as it is seen, and if windows can be along that."""
    held = memory_order(tensors[0])
    if held is None or held.is_own or not all(held.with_shape(tensor.shape).can_cut(tensor) for tensor in tensors):
        return None
    return held if all(len(row) == 1 or windows.covers_one(d) for d, row in enumerate(held.sizes)) else None


# What a window reduces by: the function of `lax`'s reduce_window family with keyword geometry, and its monoid.
WindowReducer = Callable[..., Any]


def reduce_window(
    graph: Graph,
    operands: Sequence[Tensor],
    windows: Windows,
    monoid: str,
    reducer: WindowReducer,
    prog: ProgramSequence,
    name: str,
    starts: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Reduces every window of a tensor to one element.

    Args:
        graph: graph to add to.
        operands: tensors of one shape with at least one element, windowed alike.
        windows: geometry; every result must exist.
        monoid: "max", "min", "add" or "mul", for the cost.
        reducer: called with the blocks, the starts and the geometry as `Windows` of that block; hashable.
        prog: program the compute set is added to.
        name: debug name.
        starts: scalars that the reduction of each operand starts with; the reducer knows them when empty.

    Returns:
        New tensors of `windows.result_shape(shape)`: one with the dtype of the last operand, or one for each of
        `starts`.
    """
    x, dtypes = operands[0], tuple(t.dtype for t in starts) or (operands[-1].dtype,)
    shape, rank = windows.result_shape(x.shape), x.ndim
    held = _order(operands, windows)
    if held is not None:
        own = [held.of_variable(tensor) for tensor in operands]
        made = reduce_window(graph, own, windows.of_dims(held.view_dims), monoid, reducer, prog, name, starts)
        return [held.with_shape(shape).of_view(result) for result in made]
    codelet = _codelet(tuple(t.dtype for t in operands), tuple(t.dtype for t in starts), windows, monoid, reducer)
    read = tuple(windows.span(d, n) for d, n in enumerate(x.shape))
    sources: list[Source] = [source_of(graph, t) for t in (*operands, *starts)]
    sources += ["here"] * len(dtypes)
    fields = (*[read] * len(operands), *[()] * len(starts), *[spans(shape, range(rank))] * len(dtypes))
    work = Work(codelet, fields, tuple(sources))

    def add(graph: Graph, prog: ProgramSequence, placement: Blocked) -> list[Tensor]:
        for tensor in operands:
            place_operand(graph, tensor, read, placement)
        for tensor in starts:
            map_linearly(graph, tensor)
        outs = [mapped_variable(graph, shape, dtype, name, range(rank), placement) for dtype in dtypes]
        windowed = [d for d in range(rank) if windows.sizes[d] > 1]
        axes = placed_axes(placement) + [whole_axis(f"window{d}", windows.sizes[d]) for d in windowed]
        dims = tuple(_window_dim(windows, d, rank + windowed.index(d) if d in windowed else None) for d in range(rank))
        # No codelet sees the fill: they pad by themselves.
        read_by = (*(Access(tensor, dims, np.zeros((), tensor.dtype)) for tensor in operands), *map(scalar, starts))
        accesses = (*read_by, *(along(out, range(rank)) for out in outs))
        tile = tile_grid(placement, len(windowed))
        add_vertices(graph, codelet, axes, accesses, tile, prog, name)
        return outs

    return add(graph, prog, choose(graph, shape, range(rank), work, [*operands, *starts], add))


def _window_dim(windows: Windows, d: int, window_axis: int | None) -> Dim:
    """Index of a window's elements: result · stride + element · dilation − padding, in units of the dilated tensor."""
    terms = [Term(d, windows.strides[d])]
    if window_axis is not None:
        terms.append(Term(window_axis, windows.window_dilation[d]))
    return Dim(tuple(terms), -windows.padding[d][0], windows.base_dilation[d])


@remembered
def _codelet(
    dtypes: tuple[Any, ...], starts: tuple[Any, ...], windows: Windows, monoid: str, reducer: WindowReducer
) -> Codelet:
    out_dtypes = starts or dtypes[-1:]

    def compute(*blocks: jax.Array, pads: Sequence[Pads]) -> Any:
        results = reducer(*blocks, replace(windows, padding=tuple(pads[0])))
        return tuple(results) if isinstance(results, list | tuple) else results

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        depth = np.asarray(prod(windows.sizes) * len(dtypes), np.int64)
        return reduce_cycles(monoid, dtypes[-1], total_elements(shapes[-1]), depth, target)

    def parts(shapes: BlockShapes, target: Target) -> np.ndarray:
        depth = np.asarray(prod(windows.sizes) * len(dtypes), np.int64)
        return reduce_parts(monoid, dtypes[-1], total_elements(shapes[-1]), depth, target)

    fields = [Field(f"in{n}", "in", dtype) for n, dtype in enumerate((*dtypes, *starts))]
    fields += [Field(f"out{n}" if n else "out", "out", dtype) for n, dtype in enumerate(out_dtypes)]
    title = f"popnn::{monoid.title()}Pooling<{dtype_name(dtypes[-1])}>"
    compares = monoid in SELECTING
    return Codelet(title, tuple(fields), compute, cycles, 48, 900, takes=("pads",), compares=compares, parts=parts)


def select_and_scatter(
    graph: Graph,
    source: Tensor,
    x: Tensor,
    windows: Windows,
    scatter: Callable[..., jax.Array],
    prog: ProgramSequence,
    name: str,
    start: Tensor | None = None,
) -> Tensor:
    """Combines each element of `source` with the place of `x` that its window selects.

    Args:
        graph: graph to add to.
        source: one element for each window.
        x: tensor the windows are of.
        windows: geometry without dilations.
        scatter: called with blocks of `source` and `x`, with `start` and the geometry, hashable; computes their result.
        prog: program the compute set is added to.
        name: debug name.
        start: scalar that every element of the result starts as; 0 when None, and `scatter` is called without it.

    Returns:
        A new tensor like `x`.
    """
    rank = x.ndim
    held = _order([x, source], windows)
    if held is not None:
        of_x, of_source = held.with_shape(x.shape), held.with_shape(source.shape)
        own, finer = (of_source.of_variable(source), of_x.of_variable(x)), windows.of_dims(held.view_dims)
        return of_x.of_view(select_and_scatter(graph, *own, finer, scatter, prog, name, start))
    cells = [windows.cell_span(d, n) for d, n in enumerate(x.shape)]
    over = tuple(windows.windows_over_cell(d, n) for d, n in enumerate(source.shape))
    read = tuple(replace(cell, reach=cell.stride + sum(windows.halo(d))) for d, cell in enumerate(cells))
    codelet, starts = _scatter_codelet(x.dtype, windows, scatter, start is not None), [] if start is None else [start]
    operands = [source, x, *starts]
    sources: list[Source] = [*(source_of(graph, tensor) for tensor in operands), "here"]
    work = Work(codelet, (over, read, *(() for _ in starts), tuple(cells)), tuple(sources))

    def add(graph: Graph, prog: ProgramSequence, placement: Blocked) -> Tensor:
        place_operand(graph, x, cells, placement)
        place_operand(graph, source, over, placement)
        for tensor in starts:
            map_linearly(graph, tensor)
        boxes = Blocked(*block_mapping(cells, placement))
        out = mapped_variable(graph, x.shape, x.dtype, name, range(rank), boxes)
        axes, source_dims, x_dims = placed_axes(boxes), list[Dim](), list[Dim]()
        for d in range(rank):
            (low, high), (size, stride) = windows.halo(d), (windows.sizes[d], windows.strides[d])
            # The windows that cover element i begin at i - size + 1 + padding … i + padding.
            begins, reached = [Term(d)], [Term(d)]
            if size > 1:
                begins.append(Term(len(axes)))
                axes.append(whole_axis(f"window{d}", size))
            if low + high:
                reached.append(Term(len(axes)))
                axes.append(whole_axis(f"halo{d}", 1 + low + high))
            source_dims.append(Dim(tuple(begins), windows.padding[d][0] - size + 1, stride))
            x_dims.append(Dim(tuple(reached), -low))
        fill, tile = np.zeros((), x.dtype), tile_grid(boxes, len(axes) - rank)
        accesses = (
            Access(source, tuple(source_dims), fill),
            Access(x, tuple(x_dims), fill),
            *map(scalar, starts),
            along(out, range(rank)),
        )
        add_vertices(graph, codelet, axes, accesses, tile, prog, name)
        return out

    shape = [max(1, -(-(n - cell.offset) // cell.stride)) for n, cell in zip(x.shape, cells, strict=True)]
    return add(graph, prog, choose(graph, shape, range(rank), work, operands, add))


@remembered
def _scatter_codelet(dtype: Any, windows: Windows, scatter: Callable[..., jax.Array], starts: bool) -> Codelet:
    def compute(
        source: jax.Array, x: jax.Array, *start: jax.Array, pads: Sequence[Pads], shapes: tuple[tuple[int, ...], ...]
    ) -> jax.Array:
        first = start[0] if start else jnp.zeros((), dtype)
        if 0 in source.shape:  # no window covers the block
            return lax.broadcast(first, shapes[0])
        box = [_local(windows, d, *sizes) for d, sizes in enumerate(zip(source.shape, x.shape, *pads[:2], strict=True))]
        begins, ends = ([max(0, bounds[n]) for bounds in box] for n in (0, 1))
        ends = [min(n, end) for n, end in zip(x.shape, ends, strict=True)]
        padding = [(begin - low, high - end) for (low, high), begin, end in zip(box, begins, ends, strict=True)]
        inner = replace(windows, padding=tuple(padding))
        found = scatter(source, lax.slice(x, begins, ends), *start, inner)
        # From what the windows reach to what the block is: what is beside it goes, what no window reaches is the start.
        lows = [windows.halo(d)[0] - pads[1][d][0] for d in range(x.ndim)]
        rows = zip(begins, lows, found.shape, shapes[0], strict=True)
        return lax.pad(found, first, [(s - low, n - (s - low) - m, 0) for s, low, m, n in rows])

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        # Comparing the elements of every window, then clearing and adding: two more passes over results (assumed).
        compare = reduce_cycles("max", dtype, total_elements(shapes[0]), np.asarray(prod(windows.sizes)), target)
        return compare + reduce_cycles("add", dtype, total_elements(shapes[-1]), np.asarray(2), target)

    def parts(shapes: BlockShapes, target: Target) -> np.ndarray:
        return reduce_parts("max", dtype, total_elements(shapes[0]), np.asarray(prod(windows.sizes)), target)

    fields = [Field(name, "in", dtype) for name in ("source", "x", *(["start"] if starts else []))]
    fields.append(Field("out", "out", dtype))
    title = f"popnn::MaxPoolingGrad<{dtype_name(dtype)}>"
    return Codelet(title, tuple(fields), compute, cycles, 48, 900, takes=("pads", "shapes"), compares=True, parts=parts)


def _local(
    windows: Windows, d: int, count: int, size: int, source_pads: tuple[int, int], x_pads: tuple[int, int]
) -> tuple[int, int]:
    """Bounds of the windows of a block within its part of x, along one dimension."""
    low, _ = windows.halo(d)
    begin = low - x_pads[0] + source_pads[0] - windows.sizes[d] + 1
    return begin, begin + (count - 1) * windows.strides[d] + windows.sizes[d]


@remembered
def primitive_reducer(primitive: Any, **params: Any) -> WindowReducer:
    """The reducer that calls a primitive of the reduce_window family, with parameters besides the geometry."""

    def reducer(*arguments: Any) -> Any:
        *blocks, windows = arguments
        dilations = {"base_dilation": windows.base_dilation, "window_dilation": windows.window_dilation}
        return primitive.bind(*blocks, **windows.params(), **dilations, **params)

    return reducer


@remembered
def primitive_scatter(primitive: Any, **params: Any) -> Callable[..., jax.Array]:
    """The scatter that calls a primitive like `select_and_scatter_add`, with parameters besides the geometry."""

    def scatter(source: jax.Array, x: jax.Array, windows: Windows) -> jax.Array:
        return primitive.bind(source, x, **windows.params(), **params)

    return scatter


@remembered
def scatter_by_functions(select: Jaxpr, combine: Jaxpr) -> Callable[..., jax.Array]:
    """The scatter of `select_and_scatter`, by the functions of two scalars that it holds."""
    functions = functions_of(select, combine)

    def scatter(source: jax.Array, x: jax.Array, start: jax.Array, windows: Windows) -> jax.Array:
        return select_and_scatter_block(x, source, start, windows.sizes, windows.strides, windows.padding, functions)

    return scatter
