"""Layouts of elementwise operations: the tiles of their vertices, and the tensors that these read and write.

Input: the operands of an operation over one index space, and its kernel. Output: a layout, which is a shape of as
many elements and a tile mapping of it, and the grid of vertices on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ipujax.lowering.layout import SharedWindow, layout_like, linear_mapping, map_alike, map_linearly, shared_windows
from ipujax.lowering.layout.grid_cost import spans
from ipujax.lowering.layout.place import along, place_operand, row_blocks, spread, whole_axis
from ipujax.lowering.popops.reductions.partials import combining_cycles
from ipujax.lowering.popops.reductions.reduce import even_reduction, num_slots
from ipujax.lowering.popops.vertices.kernel import Input, Kernel, Reduction
from ipujax.lowering.popops.vertices.kernel_codelet import kernel_codelet
from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange import access_traffic, exchange_cycles, receive_code_bytes, receive_cycles, send_code_bytes
from ipujax.runtime.graph import Access, Axis, Dim, Graph, Term, element
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import (
    MIN_BYTES_PER_TILE,
    VECTOR_BYTES,
    Blocked,
    Flat,
    Tensor,
    TileMapping,
    element_bytes,
    even_cuts,
    flat_mapping,
    owners,
)


class View(NamedTuple):
    """Part of an operand that is different elements, and where it is in the index space.

    Args:
        tensor: the operand without dimensions along which it is repeated.
        axes: for each of its dimensions that of the index space.
        is_whole: whether it is the operand itself, with all dimensions of the index space.
    """

    tensor: Tensor
    axes: tuple[int, ...]
    is_whole: bool = True


def unrepeated_view(tensor: Tensor) -> View:
    """View of an operand without the dimensions along which it is repeated.

    Only repetitions along entire dimensions are found: those of an affine view with stride 0.
    """
    affine = tensor.affine  # sizes and strides of each dimension; None for other views, as concatenations
    repeated = [] if affine is None else [d for d, group in enumerate(affine.dims) if _has_no_stride(group)]
    if not repeated or not tensor.size:
        return View(tensor, tuple(range(tensor.ndim)))
    axes = tuple(d for d in range(tensor.ndim) if d not in repeated)
    # Of repeated elements the first, then without the dimensions of 1 that this leaves.
    limits = [1 if d in repeated else n for d, n in enumerate(tensor.shape)]
    first = tensor.slice([0] * tensor.ndim, limits)
    return View(first.reshape(tuple(tensor.shape[d] for d in axes)), axes, is_whole=False)


def _has_no_stride(group: tuple[tuple[int, int], ...]) -> bool:
    """True for a dimension, given by sizes and strides of its pieces, of which all elements are one."""
    return bool(group) and all(stride == 0 for _, stride in group)


# Assumed: layouts of most operands. A sum of hundreds would estimate each layout on all operands.
_MAX_LAYOUTS = 8


class Layout(NamedTuple):
    """Shape of as many elements as the index space has, and a tile mapping of it."""

    shape: tuple[int, ...]
    mapping: TileMapping

    def can_reduce(self, shape: tuple[int, ...], axes: Sequence[int]) -> bool:
        """True if vertices can reduce an index space of a shape over some axes: all of them, or sides of blocks."""
        is_blocked = isinstance(self.mapping, Blocked) and self.shape == shape
        return prod(shape) > 0 and (is_blocked or len(axes) == len(shape))


def choose_layout(
    graph: Graph,
    kernel: Kernel,
    operands: Sequence[Tensor],
    views: Sequence[View],
    outs: Sequence[Tensor | None],
    shape: tuple[int, ...],
    reductions: Sequence[Reduction] = (),
) -> Layout:
    """Chooses the cheapest layout: that of a mapped tensor of `outs`, or of an operand, or an even one.

    A graph that keeps layouts has no choice, see `kept_layout`.

    Args:
        graph: the graph.
        kernel: the operations and reductions, over one dimension.
        operands: tensors of `shape`.
        views: `unrepeated_view` of each operand.
        outs: for each result the tensor to overwrite with it, or None.
        shape: shape of the index space.
        reductions: reductions with their axes in the index space.
    """
    # A tensor that is overwritten has to stay where it is: its layout excludes even ones.
    mapped_outs = [out for out in outs if out is not None and graph.is_mapped(out)]
    if graph.keeps_layouts and not reductions:
        dtype = kernel.dtype_of(kernel.results[0])
        if mapped_outs:
            return _layout_of_view(graph, mapped_outs[0])
        return kept_layout(graph, operands, views, shape, dtype)
    unrepeated = [x for x, view in zip(operands, views, strict=True) if view.is_whole]
    proposals = _commonest([x for view in mapped_outs or unrepeated if (x := _layout_of(graph, view)) is not None])
    # Values that no vertex can reduce are stored first: an even layout that exceeds a tile takes less memory than that.
    must_fit = any(all(x.can_reduce(shape, r.axes) for r in reductions) for x in proposals)
    if not (mapped_outs and proposals):
        proposals += _even_layouts(graph, kernel, shape, reductions, must_fit=must_fit)
    # Repeated operands and reductions are by dimension: vertices need blocks of whole rows, not ranges of elements.
    needs_rows = len(unrepeated) < len(operands) or bool(reductions)
    layouts = _for_vertices(proposals, shape, reductions, needs_rows=needs_rows)
    if not reductions and not (mapped_outs and proposals):
        layouts += _finest_layout(graph, kernel, layouts, shape, needs_rows=needs_rows)
    if len(layouts) == 1:
        return layouts[0]

    stored_bytes = sum(element_bytes(dtype) for dtype in kernel.result_dtypes)  # of each element
    evenness = [_evenness(layout.mapping, graph.target.num_tiles) for layout in layouts]
    vertex_costs = [
        float(_compute_cycles(kernel, layout.mapping, graph.target))
        + sum(_combining_cycles(graph, kernel.dtype_of(r.value), r, layout, shape) for r in reductions)
        for layout in layouts
    ]
    memory_costs = [graph.byte_cost_cycles * each.worst * stored_bytes for each in evenness]
    # Cost in cycles, memory included; of equals the most even layout: elements of the fullest tile, then tiles.
    best = (float("inf"), 0, 0, 0)
    for number in sorted(range(len(layouts)), key=lambda n: vertex_costs[n] + memory_costs[n]):
        most = best[0] - vertex_costs[number] - memory_costs[number]
        if most < 0:  # rising costs without the exchange, which takes longest to count: no later layout costs less
            break
        exchange_cost = _exchange_cost(graph, operands, views, layouts[number], shape, most)
        cost = vertex_costs[number] + exchange_cost + memory_costs[number]
        best = min(best, (cost, evenness[number].worst, -evenness[number].tiles, number))
    return layouts[best[-1]]


def _finest_layout(
    graph: Graph, kernel: Kernel, layouts: Sequence[Layout], shape: tuple[int, ...], *, needs_rows: bool
) -> list[Layout]:
    """Layout on all tiles, in parts below the least share of a tile, where functions of many instructions gain by it.

    Returns it in a list, which is empty where it does not save more than a tile takes that reads all results, as a
    look-up reads indices, for the parts that it adds to those of the fastest of `layouts`. With `needs_rows` the layout
    is in blocks of the dimensions of `shape`, else in ranges of elements.
    """
    target = graph.target
    tiles = target.tiles_per_ipu
    width = element_bytes(kernel.dtype_of(kernel.results[0]))
    mapping: TileMapping = _spread_by_vectors(prod(shape), width, tiles)
    if needs_rows:  # as if each element were a whole least share, so that all tiles take part
        mapping = spread(shape, tuple(range(len(shape))), MIN_BYTES_PER_TILE, tiles)
    best = min(layouts, key=lambda layout: _compute_cycles(kernel, layout.mapping, target))
    saved = _compute_cycles(kernel, best.mapping, target) - _compute_cycles(kernel, mapping, target)
    finest_tiles, best_tiles = (_evenness(x, target.num_tiles).tiles for x in (mapping, best.mapping))
    # What a part more costs the reader: its message, and the code for that.
    part_cycles = target.exchange_receive_cycles + graph.byte_cost_cycles * receive_code_bytes(1, target)
    return [Layout(shape, mapping)] if saved > part_cycles * max(0, finest_tiles - best_tiles) else []


def _commonest(proposals: Sequence[Layout]) -> list[Layout]:
    """The layouts that most operands have, in the order of operands."""
    commonest = {layout for layout, _ in Counter(proposals).most_common(_MAX_LAYOUTS)}
    return [layout for layout in proposals if layout in commonest]


def _for_vertices(
    proposals: Sequence[Layout], shape: tuple[int, ...], reductions: Sequence[Reduction], *, needs_rows: bool
) -> list[Layout]:
    """Distinct layouts, in rows where vertices need them; those in which vertices can reduce, if there are any."""
    layouts = list(dict.fromkeys(_in_rows(x) if needs_rows and x.shape == shape else x for x in proposals))
    return [x for x in layouts if all(x.can_reduce(shape, r.axes) for r in reductions)] or layouts


def kept_layout(
    graph: Graph, operands: Sequence[Tensor], views: Sequence[View], shape: tuple[int, ...], dtype: Any
) -> Layout:
    """Layout of a result by PopLibs' rule: that of the operand of fewest elements on its fullest tile.

    Then that on most tiles, then that of fewest pieces, then the first. Operands with repeated elements do not count;
    if all have, the result is spread over all tiles by vectors, or mapped like the first operand, if it is one element.

    Source: poplibs `popops/ElementWiseUtil.cpp`, createOutputForElementWiseOp.
    """
    mapped = [(x, view) for x, view in zip(operands, views, strict=True) if graph.is_mapped(x)]
    layouts = list(dict.fromkeys(_layout_of_view(graph, x) for x, view in mapped if view.is_whole))
    if not layouts and mapped and prod(shape) == 1:
        first_operand, _ = mapped[0]
        return _layout_of_view(graph, first_operand)
    if not layouts:
        return Layout(shape, _spread_by_vectors(prod(shape), element_bytes(dtype), graph.target.tiles_per_ipu))

    def rank(layout: Layout) -> tuple[int, int, int]:
        evenness = _evenness(layout.mapping, graph.target.num_tiles)
        piece_starts, _, _ = layout.mapping.runs()
        return evenness.worst, -evenness.tiles, len(piece_starts)

    best = min(layouts, key=rank)
    # The tiles are kept; only the elements of a tile are cut into rows, as vertices read repeated operands by
    # dimension.
    has_repeated = not all(view.is_whole for view in views)
    return _in_rows(best) if has_repeated and best.shape == shape else best


def _layout_of_view(graph: Graph, tensor: Tensor) -> Layout:
    """Layout of any view of mapped variables, element by element where it has no simpler form."""
    layout = _layout_of(graph, tensor)
    return layout or Layout((tensor.size,), _mapping_of_elements(graph, tensor))


def _mapping_of_elements(graph: Graph, tensor: Tensor) -> Flat:
    """Mapping of a view, found by listing the tile of each element."""
    variable_numbers, element_numbers = (numbers.reshape(-1) for numbers in tensor.flat_indices())
    tiles = np.zeros(tensor.size, np.int32)
    for number, variable in enumerate(tensor.variables()):
        is_of_variable = variable_numbers == number
        tiles[is_of_variable] = owners(graph.mappings[variable])[element_numbers[is_of_variable]]
    starts = np.flatnonzero(np.diff(tiles, prepend=-1))
    return flat_mapping(tensor.size, starts, tiles[starts])


def _spread_by_vectors(size: int, width: int, num_tiles: int) -> Flat:
    starts = even_cuts(size, num_tiles, max(1, VECTOR_BYTES // width))[:-1]
    return flat_mapping(size, starts, np.arange(len(starts), dtype=np.int32))


def _even_layouts(
    graph: Graph, kernel: Kernel, shape: tuple[int, ...], reductions: Sequence[Reduction], *, must_fit: bool
) -> list[Layout]:
    """Layouts that spread a kernel evenly over tiles: linear, or with reductions in blocks.

    Where no value is stored, the blocks are tried too in which the first reduction costs least.

    Args:
        graph: the graph.
        kernel: the operations.
        shape: index space of the kernel.
        reductions: reductions of its values.
        must_fit: whether to leave out blocks whose fullest tile exceeds the memory of one operation, as the layout of
            an operand reduces all values without storing them. Else the first is returned where all exceed it.
    """
    first_value = [*kernel.results, *(reduction.value for reduction in reductions)][0]
    dtype = kernel.dtype_of(first_value)
    if not reductions:
        return [Layout(shape, linear_mapping(graph, prod(shape), dtype))]
    width = element_bytes(dtype)
    mappings = [spread(shape, tuple(range(len(shape))), width, graph.target.tiles_per_ipu)]
    # Only if no value is stored: readers would inherit a layout that suits nothing but this reduction.
    if not kernel.results and 0 not in shape:
        first = reductions[0]
        axes = tuple(sorted(first.axes))
        mappings.append(even_reduction(graph, shape, axes, kernel.dtype_of(first.value), first.monoid))
    layouts = [Layout(shape, mapping) for mapping in mappings]
    fitting = [
        x for x in layouts if _evenness(x.mapping, graph.target.num_tiles).worst * width <= graph.target.operation_bytes
    ]
    return fitting if must_fit or fitting else layouts[:1]


def _layout_of(graph: Graph, tensor: Tensor) -> Layout | None:
    """Layout of a view whose mapping has a closed form; None for others, and without a mapping."""
    layout = layout_like(graph, tensor)
    return None if layout is None else Layout(*layout)


def _compute_cycles(kernel: Kernel, mapping: TileMapping, target: Target) -> int:
    """Cycles of the fullest tile: a vertex for each piece, one after the other."""
    elements, _, pieces = _evenness(mapping, target.num_tiles)
    return pieces * int(flat_cycles(kernel, np.asarray(-(-elements // pieces)), target))


def flat_cycles(kernel: Kernel, elements: np.ndarray, target: Target) -> np.ndarray:
    """Cycles of a vertex of a kernel of one dimension, for numbers of elements."""
    fields = len(kernel.inputs) + len(kernel.results)
    return kernel_codelet(kernel).cycles([(elements,)] * fields, target)


def _combining_cycles(graph: Graph, dtype: Any, reduction: Reduction, layout: Layout, shape: tuple[int, ...]) -> int:
    """Cycles to combine partial results of a reduction; 0 where vertices do not reduce in this layout."""
    if not isinstance(layout.mapping, Blocked) or layout.shape != shape:
        return 0
    result_dims = [d for d in range(len(shape)) if d not in reduction.axes]
    longest = tuple(int(np.diff(layout.mapping.cuts[d]).max(initial=0)) for d in result_dims)
    num_partials = num_slots(layout.mapping, reduction.axes)
    result_shape = tuple(shape[d] for d in result_dims)
    return combining_cycles(
        num_partials, longest, result_shape, dtype, reduction.monoid, graph.target, graph.byte_cost_cycles
    )


def _exchange_cost(
    graph: Graph,
    operands: Sequence[Tensor],
    views: Sequence[View],
    layout: Layout,
    shape: tuple[int, ...],
    most: float,
) -> float:
    """Cycles to receive the mapped operands, and the cost of the code and of the buffers for that.

    `views` are the operands without repetitions; operands that are not mapped will be mapped to their readers. Once
    the cost exceeds `most`, no further operand is counted.
    """
    target = graph.target
    grid = grid_of(layout, operands, views, (), shape)
    # Of each tile: cycles to receive, bytes sent, messages sent, bytes of buffers and of the code that receives.
    receiving, sent, sends, needed_bytes = (np.zeros(target.num_tiles, np.int64) for _ in range(4))
    axes, tile, accesses = grid.with_windows()
    cost = 0.0
    for access in accesses:
        traffic = access_traffic(axes, tile, access, graph) if graph.is_mapped(access.tensor) else None
        if traffic is None or not traffic.sent_bytes.any():
            continue
        receiving = receiving + receive_cycles(
            traffic.received_bytes, traffic.shared_bytes, traffic.receives, target, traffic.fragments
        )
        sent = sent + traffic.sent_bytes
        sends = sends + traffic.sends
        needed_bytes = needed_bytes + receive_code_bytes(traffic.receives, target) + traffic.received_bytes
        most_bytes = (needed_bytes + send_code_bytes(sends, sent)).max()
        cost = float(exchange_cycles(receiving, sent, target, sends).max() + graph.byte_cost_cycles * most_bytes)
        if cost > most:
            break
    return cost


class _Evenness(NamedTuple):
    """Evenness of a mapping: elements of the fullest tile, tiles in use, largest number of pieces on a tile."""

    worst: int
    tiles: int
    pieces: int


@remembered
def _evenness(mapping: TileMapping, num_tiles: int) -> _Evenness:
    counts = mapping.elements_per_tile(num_tiles)
    pieces = np.bincount(mapping.tile.ravel() if isinstance(mapping, Blocked) else mapping.tiles)
    return _Evenness(int(counts.max(initial=0)), int(np.count_nonzero(counts)), int(pieces.max(initial=1)))


def _in_rows(layout: Layout) -> Layout:
    """Layout in blocks of full rows, where it has such: then an operand repeated along rows is read once."""
    if isinstance(layout.mapping, Blocked) or not layout.mapping.size:
        return layout
    return Layout(layout.shape, row_blocks(layout.mapping, layout.shape) or layout.mapping)


def has_operands_in(graph: Graph, layout: Layout, operands: Sequence[Tensor], views: Sequence[View]) -> bool:
    """True if all mapped operands of which no element is repeated have a layout, so that none of them moves."""
    unrepeated = [x for x, view in zip(operands, views, strict=True) if view.is_whole and graph.is_mapped(x)]
    return all(_layout_of(graph, x) == layout for x in unrepeated)


def place_operands(
    graph: Graph, operands: Sequence[Tensor], views: Sequence[View], layout: Layout, shape: tuple[int, ...]
) -> None:
    """Maps unmapped operands to the tiles of a layout that use them; linearly where the layout has no such tiles."""
    mapping = layout.mapping
    for tensor, view in zip(operands, views, strict=True):
        if graph.is_mapped(tensor):
            continue
        if view.is_whole:
            map_alike(graph, tensor.reshape(layout.shape), mapping)
        elif isinstance(mapping, Blocked) and layout.shape == shape:
            place_operand(graph, view.tensor, spans(view.tensor.shape, view.axes), mapping)
        map_linearly(graph, tensor)  # what is not mapped yet


class Grid(NamedTuple):
    """Axes and tiles of vertices, and the tensors that they read and write over these axes."""

    axes: tuple[Axis, ...]  # axes of the index space
    tile: np.ndarray  # tile of each vertex
    inputs: tuple[View, ...]  # view of each operand
    results: tuple[View, ...]  # view of each result
    windows: tuple[SharedWindow, ...] = ()  # blocks that vertices read once for several operands

    def kernel_inputs(self) -> tuple[Input, ...]:
        """Inputs of the kernel; those that are parts of a window share a field, that of the first of them."""
        inputs = [Input(read.tensor.dtype, read.axes) for read in self.inputs]
        for window in self.windows:
            for number, begins in window.begins.items():
                inputs[number] = replace(inputs[number], field=min(window.begins), begins=begins, reach=window.reach)
        return tuple(inputs)

    def with_windows(self) -> tuple[list[Axis], np.ndarray, list[Access]]:
        """Axes with those of windows last, the tile of each vertex, and the accesses of the fields read.

        Operands that are parts of one window, shifted views of one variable, are read as one field.
        """
        axes = list(self.axes)
        read = {n: along(view.tensor, view.axes) for n, view in enumerate(self.inputs)}  # by number of the operand
        if not self.windows:
            return axes, self.tile, list(read.values())
        for window in self.windows:
            # One access, of the reach of all inputs that are parts of it, is the field of the first of them.
            dims = list(map(element, range(len(self.axes))))
            for d, reach in enumerate(window.reach):
                if reach:
                    # Index in the variable: that of the block, plus a position in the window along an axis of its own.
                    dims[d] = Dim((Term(d), Term(len(axes))))
                    axes.append(whole_axis(f"window{len(axes)}", 1 + reach))
            read = {n: access for n, access in read.items() if n not in window.begins}
            read[min(window.begins)] = Access(window.tensor, tuple(dims))
        tile = self.tile.reshape((*self.tile.shape, *(1,) * (len(axes) - len(self.axes))))  # windows are not cut
        return axes, tile, [read[number] for number in sorted(read)]

    def axes_of(self, axes: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...]:
        """Axes for some dimensions, or for all, of an index space of a shape."""
        return tuple(range(len(self.axes))) if len(axes) == len(shape) else tuple(axes)


def grid_of(
    layout: Layout,
    operands: Sequence[Tensor],
    views: Sequence[View],
    results: Sequence[Tensor],
    shape: tuple[int, ...],
) -> Grid:
    """Grid of one vertex a block of a layout; one of a flat mapping has a single axis.

    Args:
        layout: mapping of the index space to tiles, and the shape that the mapping is of.
        operands: tensors of `shape`.
        views: `unrepeated_view` of each operand.
        results: tensors of `shape`.
        shape: shape of the index space.
    """
    mapping = layout.mapping
    if isinstance(mapping, Flat):
        # Cuts: the start of each run of elements on a tile, and the end.
        bounds = np.append(mapping.starts, mapping.size) if mapping.size else np.zeros(1, np.int64)
        read, written = (tuple(View(x.flatten(), (0,)) for x in tensors) for tensors in (operands, results))
        return Grid((Axis("element", bounds),), mapping.tiles, read, written)
    axes = tuple(Axis(f"d{d}", cut) for d, cut in enumerate(mapping.cuts))
    dims = tuple(range(len(layout.shape)))
    read, written = (tuple(View(x.reshape(layout.shape), dims) for x in tensors) for tensors in (operands, results))
    # In another shape the dimensions along which operands repeat or are shifted views of one array do not show.
    if layout.shape != shape:
        return Grid(axes, mapping.tile, read, written)
    # Shifted views of one array, as those of a stencil, are received as one window for each block.
    block_lengths = [int(np.diff(cut).max(initial=0)) for cut in mapping.cuts]  # of the largest block
    unrepeated = [x if view.is_whole else None for x, view in zip(operands, views, strict=True)]
    windows = tuple(shared_windows(unrepeated, block_lengths))
    return Grid(axes, mapping.tile, tuple(views), written, windows)
