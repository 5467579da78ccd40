"""One vertex on one tile: read its blocks from the tile's memory, compute, write the results to the tile's memory.

Input: a `Vertex`, the memory of all tiles and the race log of the running compute set. Blocks come to the codelet as
the vertex group says: clipped, with fill around and between elements (unless the codelet takes pads), without the
dimensions that are a block number. Codelets are compiled once for each signature of blocks, for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Access, Codelet, VertexBlocks, VertexGroup, squeezed_shape, vertex_blocks
from ipujax.runtime.interpreter.tile_memory import (
    Actor,
    InterpreterError,
    RaceLog,
    TileMemory,
    from_raw,
    raw_empty,
    to_raw,
)
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.tensor import Tensor, Variable, dtype_name

Pads = list[tuple[int, int]]


@dataclass(frozen=True, eq=False, slots=True)
class Vertex:
    """One vertex of a compute set.

    Args:
        group: its group.
        index: its number among the existing vertices of the group.
        block: block number along each axis.
        actor: its name, tile and number in the compute set.
    """

    group: VertexGroup
    index: int
    block: tuple[int, ...]
    actor: Actor


@dataclass(frozen=True, slots=True)
class View:
    """The elements of a tensor or of a block of it: number of the variable and flat element of each, in flat order."""

    variables: tuple[Variable, ...]
    shape: tuple[int, ...]
    which: np.ndarray
    element: np.ndarray

    def parts(self) -> Iterator[tuple[Variable, np.ndarray, np.ndarray]]:
        """Yield each variable, whether each element of the view is in it, bool[size], and those flat elements."""
        for number, variable in enumerate(self.variables):
            is_inside = self.which == number
            yield variable, is_inside, self.element[is_inside]


class VertexBlock(NamedTuple):
    """First index, length and (low, high) fill of a vertex's block in every dimension of its tensor."""

    starts: list[int]
    lengths: list[int]
    pads: Pads


@dataclass(slots=True)
class Views:
    """The elements of tensors and the blocks of accesses, each listed once."""

    _indices: dict[Tensor, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    _blocks: dict[Access, tuple[VertexGroup, VertexBlocks]] = field(default_factory=dict)

    def of_tensor(self, tensor: Tensor) -> View:
        """Return the elements of a tensor."""
        return self.of_block(tensor, [0] * tensor.ndim, list(tensor.shape))

    def of_block(self, tensor: Tensor, starts: list[int], lengths: list[int]) -> View:
        """Return the elements of a block of a tensor."""
        if tensor not in self._indices:
            self._indices[tensor] = tensor.flat_indices()
        inside = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
        which, element = (table[inside] for table in self._indices[tensor])
        return View(tensor.variables(), which.shape, which.ravel(), element.ravel())

    def block(self, vertex: Vertex, access: Access) -> VertexBlock:
        """Return the block of a vertex in the tensor of an access."""
        # Two groups may share an access, which then has other blocks.
        group, blocks = self._blocks.get(access, (None, None))
        if blocks is None or group is not vertex.group:
            blocks = vertex_blocks(vertex.group, access)
            self._blocks[access] = vertex.group, blocks
        i = vertex.index
        pads = list(zip(blocks.pad_low[i].tolist(), blocks.pad_high[i].tolist(), strict=True))
        return VertexBlock(blocks.start[i].tolist(), blocks.length[i].tolist(), pads)


def vertices_of(group: VertexGroup, compute_set: str, first: int) -> list[Vertex]:
    """List the existing vertices of a group, numbered from `first`."""
    vertices = []
    for index, position in enumerate(np.argwhere(group.tile >= 0)):
        block = tuple(position.tolist())
        name = f"vertex {list(block)} of {group.codelet.name} in {compute_set}"
        actor = Actor(name, int(group.tile[block]), first + index, group.origin)
        vertices.append(Vertex(group, index, block, actor))
    return vertices


@remembered
def _jit_codelet(codelet: Codelet) -> Callable[..., Any]:
    # Origins are values; pads and shapes are static, and part of the signature.
    static = tuple(extra for extra in codelet.takes if extra != "origins")
    return jax_jit(codelet.compute, static_argnames=static)


def run_vertex(vertex: Vertex, memory: TileMemory, races: RaceLog, views: Views) -> None:
    """Run a vertex; refuse reads of elements that are not on its tile, races, and results of another dtype or shape."""
    codelet = vertex.group.codelet
    connections = list(zip(codelet.fields, vertex.group.accesses, strict=True))
    _check_in_place(vertex, views)
    operands = [_read_operand(vertex, access, memory, races, views) for f, access in connections if f.is_read]
    written = [(f.name, access) for f, access in connections if f.is_written]
    extras: dict[str, Any] = {
        "pads": tuple(pads for _, pads in operands),
        "origins": _origins(vertex),
        "shapes": tuple(squeezed_shape(access, tuple(views.block(vertex, access).lengths)) for _, access in written),
    }
    results = _jit_codelet(codelet)(
        *(array for array, _ in operands), **{extra: extras[extra] for extra in codelet.takes}
    )
    results = results if isinstance(results, tuple) else (results,)
    if len(results) != len(written):
        message = f"{vertex.actor.name} computes another number of blocks"
        expected = f"{len(written)} blocks"
        raise InterpreterError("type-mismatch", message, where=vertex.actor.where, expected=expected, got=len(results))
    for (name, access), value in zip(written, results, strict=True):
        _write_result(vertex, name, access, value, memory, races, views)


def _check_in_place(vertex: Vertex, views: Views) -> None:
    """Refuse a vertex that reads elements which it writes through a field of another region: their order is not set."""
    connections = list(zip(vertex.group.codelet.fields, vertex.group.accesses, strict=True))
    for read in (access for f, access in connections if f.is_read):
        for written in (access for f, access in connections if f.is_written):
            if read.is_same(written) or set(read.tensor.variables()).isdisjoint(written.tensor.variables()):
                continue
            read_elements = _elements(vertex, read, views)
            written_elements = _elements(vertex, written, views)
            for variable in read_elements.keys() & written_elements.keys():
                common = np.intersect1d(read_elements[variable], written_elements[variable])
                if common.size:
                    action = "reads an element that it writes through a field of another region:"
                    raise vertex.actor.error("read-write-race", action, variable, common[0])


def _elements(vertex: Vertex, access: Access, views: Views) -> dict[Variable, np.ndarray]:
    """Return the elements of each variable that a vertex reads or writes through one field."""
    starts, lengths, _ = views.block(vertex, access)
    return {variable: elements for variable, _, elements in views.of_block(access.tensor, starts, lengths).parts()}


def _origins(vertex: Vertex) -> tuple[np.ndarray, ...]:
    """Return the first index of the block along each axis in `VertexGroup.origins`."""
    # As arrays, not ints: equal blocks at other origins share one compiled codelet.
    first = {axis.name: axis.cuts[b] for axis, b in zip(vertex.group.axes, vertex.block, strict=True)}
    return tuple(np.asarray(first[name], np.int32) for name in vertex.group.origins)


def _read_operand(
    vertex: Vertex, access: Access, memory: TileMemory, races: RaceLog, views: Views
) -> tuple[jax.Array, tuple[tuple[int, int], ...]]:
    """Return the block that a field reads, as the codelet sees it, and the pads of its dimensions."""
    starts, lengths, pads = views.block(vertex, access)
    tensor = access.tensor
    view = views.of_block(tensor, starts, lengths)
    raw = raw_empty(tensor.dtype, view.which.shape)
    for variable, mask, elements in view.parts():
        races.read(variable, elements, vertex.actor)
        raw[mask] = memory.read(vertex.actor.tile, variable, elements, vertex.actor)
    visible = [not dim.is_squeezed for dim in access.dims]
    # A codelet that takes pads adds the fill of the dimensions that it sees.
    by_codelet = ["pads" in vertex.group.codelet.takes and is_visible for is_visible in visible]
    low_high = [(0, 0) if skip else pad for skip, pad in zip(by_codelet, pads, strict=True)]
    strides = [1 if skip else dim.divisor for skip, dim in zip(by_codelet, access.dims, strict=True)]
    block = _surround_with_fill(raw.reshape(view.shape), low_high, strides, access, vertex.actor)
    visible_shape = [n for n, is_visible in zip(block.shape, visible, strict=True) if is_visible]
    visible_pads = tuple(pad for pad, is_visible in zip(pads, visible, strict=True) if is_visible)
    return from_raw(block.reshape(visible_shape), tensor.dtype), visible_pads


def _surround_with_fill(block: np.ndarray, pads: Pads, strides: list[int], access: Access, actor: Actor) -> np.ndarray:
    """Return a block with fill around it, and between its elements, which come to be `strides` apart."""
    dilated = [max(0, (n - 1) * stride + 1) for n, stride in zip(block.shape, strides, strict=True)]
    shape = tuple(low + n + high for n, (low, high) in zip(dilated, pads, strict=True))
    if shape == block.shape:
        return block
    if access.fill is None:
        message = f"{actor.name} reads out of {access.tensor!r}, which has no fill"
        raise InterpreterError("out-of-tensor", message, where=actor.where)
    result = np.full(shape, to_raw(access.fill), block.dtype)
    inside = tuple(slice(low, low + n, stride) for n, (low, _), stride in zip(dilated, pads, strides, strict=True))
    result[inside] = block
    return result


def _write_result(
    vertex: Vertex, name: str, access: Access, value: Any, memory: TileMemory, races: RaceLog, views: Views
) -> None:
    """Check the result of a codelet for one field, and write it to the memory of the tile."""
    actor = vertex.actor
    starts, lengths, pads = views.block(vertex, access)
    check_writable(access.tensor, actor)
    if any(low or high for low, high in pads):
        message = f"{actor.name} writes {name} out of {access.tensor!r}"
        raise InterpreterError("out-of-tensor", message, where=actor.where)
    expected = type_name(access.tensor.dtype, squeezed_shape(access, tuple(lengths)))
    got = type_name(value.dtype, value.shape)
    if expected != got:
        message = f"{actor.name} computes {name} of the wrong type"
        raise InterpreterError("type-mismatch", message, where=actor.where, expected=expected, got=got)
    raw = to_raw(value).ravel()
    for variable, mask, elements in views.of_block(access.tensor, starts, lengths).parts():
        races.write(variable, elements, actor)
        memory.write(actor.tile, variable, elements, raw[mask])


def check_writable(tensor: Tensor, actor: Actor) -> None:
    """Refuse to write to constants, and to views that show an element twice."""
    constant = next((v for v in tensor.variables() if v.is_constant), None)
    if constant is not None or not tensor.is_writable:
        message = f"{actor.name} writes to {tensor if constant is None else constant!r}"
        raise InterpreterError("read-only-output", message, where=actor.where)


def type_name(dtype: Any, shape: tuple[int, ...]) -> str:
    """Return a dtype and shape as errors show them, `float32[2, 3]`."""
    return f"{dtype_name(dtype)}{list(shape)}"
