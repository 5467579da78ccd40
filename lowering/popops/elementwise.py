"""Elementwise operations over tensors of one shape, tile by tile where the data lies.

Results lie like the operand for which the vertices and the exchange of the other operands are estimated cheapest;
without an operand that lies in a simple form, or where spreading everything is cheaper, they lie linearly. Operands
that lie nowhere yet are put where they are used. An operand that is repeated along dimensions is read once by a vertex.
Constant scalars become immediates of the vertex, and an operation on nothing else is done at compile time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import jax
import numpy as np

from ipujax.lowering.popops.blocks import place_operand, row_boxes
from ipujax.lowering.popops.kernel import Frozen, Input, Kernel, Op, Step, freeze, kernel_codelet, thawed
from ipujax.lowering.popops.work import spans
from ipujax.lowering.poputil import (
    MemoryOrder,
    layout_like,
    linear_mapping,
    map_alike,
    map_linearly,
    memory_order,
)
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import GraphError
from ipujax.runtime.exchange import access_traffic, receive_cycles
from ipujax.runtime.graph import (
    Access,
    Axis,
    Copy,
    Execute,
    Graph,
    Sequence as ProgramSequence,
    VertexGroup,
    element,
)
from ipujax.runtime.memory import INSTRUCTION_BYTES
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Flat, Tensor, TileMapping, element_bytes, is_key_dtype


def elementwise(
    graph: Graph, op: Op, operands: Sequence[Tensor], prog: ProgramSequence, name: str, out: Tensor | None = None
) -> Tensor:
    """Applies an operation to tensors of one shape (scalars and dimensions of size 1 are broadcast).

    Args:
        graph: graph to add to.
        op: the operation.
        operands: tensors of equal rank with equal sizes or 1 in each dimension, or of shape ().
        prog: program the compute set is added to.
        name: debug name.
        out: what the result is written to, of the broadcast shape; it may be one of the operands, but share no element
            with another part of one.

    Returns:
        A new tensor of the broadcast shape and `op.out_dtype`; `out` if that is given.

    Raises:
        GraphError: if shapes differ.
    """
    shape = _common_shape(graph, operands, name)
    tensors = [t if t.shape == shape else t.broadcast_in_dim(shape, range(t.ndim)) for t in operands]
    step = Step(op, tuple(range(len(tensors))))
    return apply_steps(graph, [step], [len(tensors)], tensors, shape, prog, name, [out])[0]


def apply_steps(
    graph: Graph,
    steps: Sequence[Step],
    results: Sequence[int],
    operands: Sequence[Tensor],
    shape: tuple[int, ...],
    prog: ProgramSequence,
    name: str,
    outs: Sequence[Tensor | None],
) -> list[Tensor]:
    """Applies several operations in one vertex a tile.

    Args:
        graph: graph to add to.
        steps: the operations; operand n is value n, the result of step k is value len(operands) + k.
        results: the values to return.
        operands: tensors of one shape.
        shape: that shape.
        prog: program the compute set is added to.
        name: debug name.
        outs: for each result what it is written to, as `elementwise` has it, or None.

    Returns:
        For each result a new tensor of `shape`, or what is given for it.
    """
    held = _order(operands, outs, shape)
    operands = [held.of_variable(x) for x in operands]
    turned = [None if out is None else held.of_variable(out) for out in outs]
    found = _apply_steps(graph, steps, results, operands, held.variable_shape, prog, name, turned)
    return [held.of_view(x) if out is None else out for x, out in zip(found, outs, strict=True)]


def _apply_steps(
    graph: Graph,
    steps: Sequence[Step],
    results: Sequence[int],
    operands: Sequence[Tensor],
    shape: tuple[int, ...],
    prog: ProgramSequence,
    name: str,
    outs: Sequence[Tensor | None],
) -> list[Tensor]:
    """`apply_steps` with the dimensions in the order that is given."""
    steps, values, operands = _with_immediates(steps, results, operands)
    if not all(isinstance(value, int) for value in values):
        return _with_constants(graph, steps, values, operands, shape, prog, name, outs)
    results = tuple(value for value in values if isinstance(value, int))
    narrow = [_narrow(x) for x in operands]
    flat = Kernel(1, tuple(Input(x.dtype, (0,)) for x in operands), steps, results)
    layout = _layout(graph, flat, operands, narrow, outs, shape)
    _place(graph, operands, narrow, layout, shape)
    for out in outs:
        if out is not None:
            map_alike(graph, out.reshape(layout.shape), layout.mapping)
    found = [
        graph.add_variable(layout.shape, dtype, name, layout.mapping).reshape(shape) if out is None else out
        for out, dtype in zip(outs, flat.result_dtypes, strict=True)
    ]
    grid = _grid(layout, operands, narrow, found, shape)
    inputs = tuple(Input(read.tensor.dtype, read.axes) for read in grid.inputs)
    codelet = kernel_codelet(replace(flat, rank=len(grid.axes), inputs=inputs))
    compute_set = graph.add_compute_set(name)
    accesses = tuple(Access(view.tensor, tuple(map(element, view.axes))) for view in (*grid.inputs, *grid.results))
    graph.add_vertices(compute_set, VertexGroup(codelet, grid.axes, accesses, grid.tile, origin=graph.origin))
    prog.add(Execute(compute_set))
    return found


def _order(operands: Sequence[Tensor], outs: Sequence[Tensor | None], shape: tuple[int, ...]) -> MemoryOrder:
    """The order of dimensions in which most bytes lie in memory; of two with as many, not that of `shape`."""
    own = MemoryOrder.own(shape)
    tensors = [x for x in (*operands, *(out for out in outs if out is not None)) if x.size > 1]
    held: Counter[MemoryOrder] = Counter({own: 0})
    for tensor in tensors:
        found = memory_order(tensor)
        if found is not None:
            held[own if found.is_own else found] += tensor.size * element_bytes(tensor.dtype)
    most = max(held, key=lambda order: (held[order], order != own))
    return most if all(most.can_cut(x) for x in tensors) else own


def _copied(graph: Graph, source: Tensor, destination: Tensor, prog: ProgramSequence, name: str) -> Tensor:
    for tensor in (source, destination):
        map_linearly(graph, tensor)
    prog.add(Copy(source, destination, name, graph.origin))
    return destination


def _common_shape(graph: Graph, operands: Sequence[Tensor], name: str) -> tuple[int, ...]:
    rank = max(t.ndim for t in operands)
    shapes = [t.shape for t in operands if t.ndim]
    shape = tuple(max((n for n in sizes if n != 1), default=1) for sizes in zip(*shapes, strict=False))
    alike = all(n in (1, m) for given in shapes for n, m in zip(given, shape, strict=False))
    if not alike or any(len(given) != rank for given in shapes):
        raise GraphError(f"{name}: operands differ in shape", where=graph.origin, got=[t.shape for t in operands])
    return shape


def immediate_of(tensor: Tensor) -> np.ndarray | None:
    """The value of a tensor whose elements are all one constant scalar, else None."""
    affine = tensor.affine
    if affine is None or not affine.variable.is_constant or affine.variable.size != 1 or affine.variable.by_replica:
        return None
    value = affine.variable.value
    if is_key_dtype(value.dtype):
        return None
    return np.asarray(value).reshape(())


def _with_immediates(
    steps: Sequence[Step], results: Sequence[int], operands: Sequence[Tensor]
) -> tuple[tuple[Step, ...], list[int | Frozen], list[Tensor]]:
    """The same operations with constant scalars in the steps, each other operand once; results may be constants."""
    values: list[int | Frozen] = []
    kept: list[Tensor] = []
    for tensor in operands:
        constant = immediate_of(tensor)
        same = next((n for n, other in enumerate(kept) if other.node == tensor.node), len(kept))
        kept += [tensor] if constant is None and same == len(kept) else []
        values.append(same if constant is None else freeze(constant))
    left: list[Step] = []
    for step in steps:
        given = tuple(values[x] if isinstance(x, int) else x for x in step.operands)
        if any(isinstance(x, int) for x in given):
            left.append(Step(step.op, given))
            values.append(len(kept) + len(left) - 1)
            continue
        with jax.ensure_compile_time_eval():  # lowering runs while JAX traces
            folded = step.op.fun(*(thawed(x) for x in given if not isinstance(x, int)))
        values.append(freeze(np.asarray(folded, step.op.out_dtype)))
    return tuple(left), [values[x] for x in results], kept


def _with_constants(
    graph: Graph,
    steps: Sequence[Step],
    values: Sequence[int | Frozen],
    operands: Sequence[Tensor],
    shape: tuple[int, ...],
    prog: ProgramSequence,
    name: str,
    outs: Sequence[Tensor | None],
) -> list[Tensor]:
    """The results where some of them are known constants."""
    computed = {n: value for n, value in enumerate(values) if isinstance(value, int)}
    found = dict[int, Tensor]()
    if computed:
        places = [outs[n] for n in computed]
        tensors = _apply_steps(graph, steps, list(computed.values()), operands, shape, prog, name, places)
        found.update(zip(computed, tensors, strict=True))
    for number, (value, out) in enumerate(zip(values, outs, strict=True)):
        if not isinstance(value, int):
            constant = graph.add_constant(thawed(value), name).broadcast_in_dim(shape, ())
            found[number] = constant if out is None else _copied(graph, constant, out, prog, name)
    return [found[number] for number in range(len(values))]


class _View(NamedTuple):
    """A tensor, and the dimensions of an index space that its own run along."""

    tensor: Tensor
    axes: tuple[int, ...]
    is_whole: bool = True


def _narrow(tensor: Tensor) -> _View:
    """The elements that a tensor repeats, once, and the dimensions of the tensor that they run along."""
    affine = tensor.affine
    repeated = [] if affine is None else [d for d, group in enumerate(affine.dims) if _repeats(group)]
    if not repeated or not tensor.size:
        return _View(tensor, tuple(range(tensor.ndim)))
    axes = tuple(d for d in range(tensor.ndim) if d not in repeated)
    limits = [1 if d in repeated else n for d, n in enumerate(tensor.shape)]
    first = tensor.slice([0] * tensor.ndim, limits)
    return _View(first.reshape(tuple(tensor.shape[d] for d in axes)), axes, is_whole=False)


def _repeats(group: tuple[tuple[int, int], ...]) -> bool:
    return bool(group) and all(stride == 0 for _, stride in group)


# --- layouts ----------------------------------------------------------------------------------------------------------


_MOST_LAYOUTS = 8  # assumed: those in which most operands lie; a sum of hundreds would charge each for all others


class _Layout(NamedTuple):
    """A shape of as many elements as the index space has, and a mapping of it."""

    shape: tuple[int, ...]
    mapping: TileMapping


def _layout(
    graph: Graph,
    kernel: Kernel,
    operands: Sequence[Tensor],
    narrow: Sequence[_View],
    outs: Sequence[Tensor | None],
    shape: tuple[int, ...],
) -> _Layout:
    """The layout to compute in: of a mapped tensor that results go to, or of an operand, or a linear one."""
    linear = _Layout(shape, linear_mapping(graph, prod(shape), kernel.result_dtypes[0]))
    given = [out for out in outs if out is not None and graph.is_mapped(out)]
    whole = [x for x, own in zip(operands, narrow, strict=True) if own.is_whole]
    homes = [home for x in given or whole if (home := _layout_of(graph, x)) is not None]
    most = {home for home, _ in Counter(homes).most_common(_MOST_LAYOUTS)}
    homes = [home for home in homes if home in most] + ([] if given and homes else [linear])
    repeats = len(whole) < len(operands)
    layouts = list(dict.fromkeys(_in_rows(home) if repeats and home.shape == shape else home for home in homes))
    if len(layouts) == 1:
        return layouts[0]

    def rank(layout: _Layout) -> tuple[float, int, int]:
        spread = _spread(layout.mapping, graph.target.num_tiles)
        cycles = _compute_cycles(kernel, layout.mapping, graph.target)
        return cycles + _exchange_price(graph, operands, narrow, layout, shape), spread.worst, -spread.tiles

    return min(layouts, key=rank)


def _layout_of(graph: Graph, tensor: Tensor) -> _Layout | None:
    found = layout_like(graph, tensor)
    return None if found is None else _Layout(*found)


def _compute_cycles(kernel: Kernel, mapping: TileMapping, target: Target) -> int:
    worst, _, pieces = _spread(mapping, target.num_tiles)  # a vertex for each piece, one after the other
    block = (np.asarray(-(-worst // pieces)),)
    fields = len(kernel.inputs) + len(kernel.results)
    return pieces * int(kernel_codelet(kernel).cycles([block] * fields, target))


def _exchange_price(
    graph: Graph, operands: Sequence[Tensor], narrow: Sequence[_View], layout: _Layout, shape: tuple[int, ...]
) -> float:
    """Cycles to receive the operands that lie somewhere, and what the code for that is worth."""
    target, grid = graph.target, _grid(layout, operands, narrow, (), shape)
    receiving, fragments = np.zeros(target.num_tiles, np.int64), np.zeros(target.num_tiles, np.int64)
    for view in grid.inputs:
        if graph.is_mapped(view.tensor):
            moved = access_traffic(grid.axes, grid.tile, Access(view.tensor, tuple(map(element, view.axes))), graph)
            cycles = receive_cycles(moved.received_bytes, moved.shared_bytes, moved.fragments, target)
            receiving, fragments = receiving + cycles, fragments + moved.fragments
    code_bytes = INSTRUCTION_BYTES * target.exchange_fragment_cycles * int(fragments.max())
    startup = target.exchange_startup_cycles if receiving.any() else 0
    return startup + float(receiving.max()) + graph.byte_price_cycles * code_bytes


class _Spread(NamedTuple):
    """Spread of a mapping: elements of the fullest tile, tiles in use, most pieces on one tile."""

    worst: int
    tiles: int
    pieces: int


@remembered
def _spread(mapping: TileMapping, num_tiles: int) -> _Spread:
    counts = mapping.elements_per_tile(num_tiles)
    pieces = np.bincount(mapping.tile.ravel() if isinstance(mapping, Blocked) else mapping.tiles)
    return _Spread(int(counts.max(initial=0)), int(np.count_nonzero(counts)), int(pieces.max(initial=1)))


def _in_rows(layout: _Layout) -> _Layout:
    """The same layout in boxes, where it is whole rows: then what is repeated along rows is read once."""
    if isinstance(layout.mapping, Blocked) or not layout.mapping.size:
        return layout
    return _Layout(layout.shape, row_boxes(layout.mapping, layout.shape) or layout.mapping)


def _place(
    graph: Graph, operands: Sequence[Tensor], narrow: Sequence[_View], layout: _Layout, shape: tuple[int, ...]
) -> None:
    """Puts operands that lie nowhere yet where they are used."""
    mapping = layout.mapping
    for tensor, own in zip(operands, narrow, strict=True):
        if own.is_whole:
            map_alike(graph, tensor.reshape(layout.shape), mapping)
        elif isinstance(mapping, Blocked) and layout.shape == shape:
            place_operand(graph, own.tensor, spans(own.tensor.shape, own.axes), mapping)
        map_linearly(graph, tensor)


# --- vertices ---------------------------------------------------------------------------------------------------------


class _Grid(NamedTuple):
    """Axes and tiles of vertices, and what they read and write over these axes."""

    axes: tuple[Axis, ...]
    tile: np.ndarray
    inputs: tuple[_View, ...]
    results: tuple[_View, ...]


def _grid(
    layout: _Layout,
    operands: Sequence[Tensor],
    narrow: Sequence[_View],
    results: Sequence[Tensor],
    shape: tuple[int, ...],
) -> _Grid:
    """One vertex a box of a layout."""
    mapping = layout.mapping
    if isinstance(mapping, Flat):
        bounds = np.append(mapping.starts, mapping.size) if mapping.size else np.zeros(1, np.int64)
        read, written = (tuple(_View(x.flatten(), (0,)) for x in tensors) for tensors in (operands, results))
        return _Grid((Axis("element", bounds),), mapping.tiles, read, written)
    axes, dims = tuple(Axis(f"d{d}", cut) for d, cut in enumerate(mapping.cuts)), tuple(range(len(layout.shape)))
    read, written = (tuple(_View(x.reshape(layout.shape), dims) for x in tensors) for tensors in (operands, results))
    return _Grid(axes, mapping.tile, tuple(narrow) if layout.shape == shape else read, written)
