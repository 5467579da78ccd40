"""Elementwise operations over tensors of one shape, tile by tile where the data lies.

The output lies like the operand that is best spread (PopLibs' `createOutputForElementWiseOp`) without being in shreds,
so that no operand of the same mapping is exchanged; without such an operand, or where it is crowded on few tiles or in
many pieces, it is mapped linearly.
Constant scalars become immediates of the vertex, and an operation on nothing else is done at compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from ipujax.lowering.popops.elementwise_cycles import elementwise_cycles, total_elements
from ipujax.lowering.popops.emulation import kind_of
from ipujax.lowering.poputil import layout_like, linear_mapping, map_linearly
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import (
    Access,
    Axis,
    BlockShapes,
    Codelet,
    ComputeSet,
    Copy,
    Execute,
    Field,
    Graph,
    Sequence as ProgramSequence,
    VertexGroup,
    element,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Flat, Tensor, TileMapping, dtype_name, element_bytes, is_key_dtype


@dataclass(frozen=True, slots=True)
class Op:
    """An elementwise operation: its row in the cost table and its function of equally shaped arrays.

    Args:
        name: row of `OP_COSTS`, a JAX primitive name.
        fun: hashable function of arrays of one shape (a memoised partial, a `lax` function).
        out_dtype: dtype of the result.
        key: distinguishes two functions of one name.
    """

    name: str
    fun: Callable[..., jax.Array]
    out_dtype: Any
    key: Hashable = None


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
    immediates = tuple(immediate_of(t) for t in tensors)
    if all(value is not None for value in immediates):
        with jax.ensure_compile_time_eval():  # lowering runs while JAX traces
            value = np.asarray(op.fun(*immediates), op.out_dtype)
        folded = graph.add_constant(value, name).broadcast_in_dim(shape, ())
        return folded if out is None else _copied(graph, folded, out, prog, name)
    kept = [t for t, value in zip(tensors, immediates, strict=True) if value is None]
    for tensor in kept:
        map_linearly(graph, tensor)
    if out is None:
        layout, mapping = _layout(graph, op, kept, shape)
        result = graph.add_variable(layout, op.out_dtype, name, mapping)
    else:
        layout, mapping = layout_like(graph, out) or (shape, linear_mapping(graph, out.size, op.out_dtype))
        result = out
    codelet = _codelet(
        _Key(op), tuple(t.dtype for t in kept), tuple(None if i is None else freeze(i) for i in immediates)
    )
    compute_set = graph.add_compute_set(name)
    add_elementwise(graph, compute_set, codelet, [t.reshape(layout) for t in (*kept, result)], mapping)
    prog.add(Execute(compute_set))
    return result.reshape(shape) if out is None else out


def _copied(graph: Graph, source: Tensor, destination: Tensor, prog: ProgramSequence, name: str) -> Tensor:
    for tensor in (source, destination):
        map_linearly(graph, tensor)
    prog.add(Copy(source, destination, name, graph.origin))
    return destination


def _layout(
    graph: Graph, op: Op, operands: Sequence[Tensor], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], TileMapping]:
    """The layout to compute in: an operand's, unless spreading all linearly is cheaper."""
    size, target = operands[0].size, graph.target
    linear = linear_mapping(graph, size, op.out_dtype)

    def spread(mapping: TileMapping) -> _Spread:
        return _spread(mapping, target.num_tiles)

    def cycles(mapping: TileMapping) -> int:
        worst, _, pieces = spread(mapping)  # a vertex for each piece, one after the other
        longest = np.asarray(-(-worst // pieces))
        return pieces * int(elementwise_cycles(op.name, op.out_dtype, len(operands), 0, longest, target))

    layouts = _layouts_of(graph, operands)
    if not layouts:
        return shape, linear
    best = min(layouts, key=lambda layout: (cycles(layout[1]), spread(layout[1]).worst, -spread(layout[1]).tiles))
    stay, move = cycles(best[1]), cycles(linear)
    moved_bytes = spread(linear).worst * sum(element_bytes(x.dtype) for x in operands)
    exchange = target.exchange_startup_cycles + moved_bytes / target.exchange_bytes_per_cycle
    return (shape, linear) if move + exchange < stay else best


def _common_shape(graph: Graph, operands: Sequence[Tensor], name: str) -> tuple[int, ...]:
    rank = max(t.ndim for t in operands)
    shapes = [t.shape for t in operands if t.ndim]
    shape = tuple(max((n for n in sizes if n != 1), default=1) for sizes in zip(*shapes, strict=False))
    alike = all(n in (1, m) for given in shapes for n, m in zip(given, shape, strict=False))
    if not alike or any(len(given) != rank for given in shapes):
        raise GraphError(f"{name}: operands differ in shape", where=graph.origin, got=[t.shape for t in operands])
    return shape


def add_elementwise(
    graph: Graph, compute_set: ComputeSet, codelet: Codelet, tensors: Sequence[Tensor], mapping: TileMapping
) -> None:
    """Connects an elementwise codelet to tensors of one shape, one vertex a box of `mapping`."""
    if isinstance(mapping, Flat):
        bounds = np.append(mapping.starts, mapping.size) if mapping.size else np.zeros(1, np.int64)
        axes: tuple[Axis, ...] = (Axis("element", bounds),)
        accesses = tuple(Access(t.flatten(), (element(0),)) for t in tensors)
        tile = mapping.tiles
    else:
        axes = tuple(Axis(f"d{d}", cut) for d, cut in enumerate(mapping.cuts))
        accesses = tuple(Access(t, tuple(map(element, range(t.ndim)))) for t in tensors)
        tile = mapping.tile
    graph.add_vertices(compute_set, VertexGroup(codelet, axes, accesses, tile, origin=graph.origin))


def _layouts_of(graph: Graph, tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], TileMapping]]:
    """The layouts of operands that have a simple form."""
    return [layout for t in tensors if (layout := layout_like(graph, t)) is not None]


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


def immediate_of(tensor: Tensor) -> np.ndarray | None:
    """The value of a tensor whose elements are all one constant scalar, else None."""
    affine = tensor.affine
    if affine is None or not affine.variable.is_constant or affine.variable.size != 1 or affine.variable.by_replica:
        return None
    value = affine.variable.value
    if is_key_dtype(value.dtype):
        return None
    return np.asarray(value).reshape(())


class _Key:
    """An `Op` compared by name, dtype and key instead of its function's identity."""

    __slots__ = ("identity", "op")

    def __init__(self, op: Op) -> None:
        self.op = op
        self.identity = (op.name, op.out_dtype, op.key if op.key is not None else op.fun)

    def __hash__(self) -> int:
        return hash(self.identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.identity == other.identity


Frozen = tuple[str, bytes]


def freeze(value: np.ndarray) -> Frozen:
    """A scalar as a key by its bits: 0.0 equals -0.0, and True 1, but they are not the same constant."""
    return value.dtype.name, value.tobytes()


def thawed(value: Frozen) -> np.ndarray:
    """The scalar of a key."""
    return np.frombuffer(value[1], jax.numpy.dtype(value[0])).reshape(())


@remembered
def _codelet(key: _Key, dtypes: tuple[Any, ...], immediates: tuple[Frozen | None, ...]) -> Codelet:
    op = key.op
    # Comparisons work in what they compare, casts of integers in integers.
    by_operand = op.out_dtype == np.bool_ or (
        op.name == "convert_element_type" and not jax.numpy.issubdtype(dtypes[-1], np.inexact)
    )
    dtype = dtypes[-1] if by_operand else op.out_dtype
    scalars = [None if i is None else thawed(i) for i in immediates]

    def compute(*arrays: jax.Array) -> jax.Array:
        given = iter(arrays)
        shape = arrays[0].shape
        return op.fun(*(next(given) if s is None else lax.full(shape, s) for s in scalars))

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        count = sum(s is not None for s in scalars)
        return elementwise_cycles(op.name, dtype, len(dtypes), count, total_elements(shapes[-1]), target)

    fields = (*(Field(f"in{n}", "in", dtype) for n, dtype in enumerate(dtypes)), Field("out", "out", op.out_dtype))
    title, moves = op.name.title().replace("_", ""), kind_of(op.name) == "move"
    return Codelet(
        f"popops::{title}<{dtype_name(dtype)}>", fields, compute, cycles, code_bytes=_CODE_BYTES, moves=moves
    )


_CODE_BYTES = 400  # assumed: one assembly codelet with its dispatch, from the size of popops objects
