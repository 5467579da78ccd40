"""One vertex on one tile: read its blocks from the tile's memory, compute, write the results to the tile's memory.

Input: a `Vertex`, the memory of all tiles and the race log of the running compute set. Blocks come to the codelet as
the vertex group says: clipped, filled around and between (unless the codelet takes its pads itself), without the
dimensions that are a block number. Codelets are compiled once for each signature of blocks, so that a run stays usable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

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
from ipujax.runtime.tensor import Tensor, Variable, dtype_name

Pads = list[tuple[int, int]]


@dataclass(frozen=True, eq=False, slots=True)
class Vertex:
    """One vertex of a compute set.

    Args:
        group: its group.
        index: its number among the vertices of the group that exist.
        block: block number along each axis.
        actor: its name, tile and number in the compute set.
    """

    group: VertexGroup
    index: int
    block: tuple[int, ...]
    actor: Actor


@dataclass(frozen=True, slots=True)
class View:
    """The elements of a tensor or a box of it: number of the variable and flat element of each, in flat order."""

    variables: tuple[Variable, ...]
    shape: tuple[int, ...]
    which: np.ndarray
    element: np.ndarray

    def parts(self) -> Iterator[tuple[Variable, np.ndarray, np.ndarray]]:
        """For each variable, which elements of the view lie in it, and where."""
        for number, variable in enumerate(self.variables):
            chosen = self.which == number
            yield variable, chosen, self.element[chosen]


@dataclass(slots=True)
class Views:
    """The elements of tensors and the blocks of accesses, each listed once."""

    _indices: dict[Tensor, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    _boxes: dict[Access, tuple[VertexGroup, VertexBlocks]] = field(default_factory=dict)

    def whole(self, tensor: Tensor) -> View:
        """The elements of a tensor."""
        return self.box(tensor, [0] * tensor.ndim, list(tensor.shape))

    def box(self, tensor: Tensor, starts: list[int], lengths: list[int]) -> View:
        """The elements of a box of a tensor."""
        if tensor not in self._indices:
            self._indices[tensor] = tensor.flat_indices()
        inside = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
        which, element = (table[inside] for table in self._indices[tensor])
        return View(tensor.variables(), which.shape, which.ravel(), element.ravel())

    def block(self, vertex: Vertex, access: Access) -> tuple[list[int], list[int], Pads]:
        """Start, length and (low, high) fill of a vertex's block in every dimension of the tensor."""
        group, box = self._boxes.get(access, (None, None))
        if box is None or group is not vertex.group:
            box = vertex_blocks(vertex.group, access)
            self._boxes[access] = vertex.group, box
        i = vertex.index
        pads = list(zip(box.pad_low[i].tolist(), box.pad_high[i].tolist(), strict=True))
        return box.start[i].tolist(), box.length[i].tolist(), pads


def vertices_of(group: VertexGroup, compute_set: str, first: int) -> list[Vertex]:
    """The vertices of a group that exist, numbered from `first`."""
    found = []
    for index, where in enumerate(np.argwhere(group.tile >= 0)):
        block = tuple(where.tolist())
        name = f"vertex {list(block)} of {group.codelet.name} in {compute_set}"
        actor = Actor(name, int(group.tile[block]), first + index, group.origin)
        found.append(Vertex(group, index, block, actor))
    return found


@remembered
def _compiled(codelet: Codelet) -> Callable[..., Any]:
    """The codelet's `compute`, compiled once for each signature of its blocks."""
    static = tuple(extra for extra in codelet.takes if extra != "origins")
    return jax.jit(codelet.compute, static_argnames=static)


def run_vertex(vertex: Vertex, memory: TileMemory, races: RaceLog, views: Views) -> None:
    """Runs one vertex.

    Raises:
        InterpreterError: if it reads what is not on its tile, races, or computes something of another type.
    """
    codelet = vertex.group.codelet
    connections = list(zip(codelet.fields, vertex.group.accesses, strict=True))
    _check_in_place(vertex, views)
    operands = [_operand(vertex, access, memory, races, views) for f, access in connections if f.is_read]
    written = [(f.name, access) for f, access in connections if f.is_written]
    extras: dict[str, Any] = {
        "pads": tuple(pads for _, pads in operands),
        "origins": _origins(vertex),
        "shapes": tuple(squeezed_shape(access, tuple(views.block(vertex, access)[1])) for _, access in written),
    }
    results = _compiled(codelet)(*(array for array, _ in operands), **{extra: extras[extra] for extra in codelet.takes})
    results = results if isinstance(results, tuple) else (results,)
    if len(results) != len(written):
        expected, got = f"{len(written)} blocks", f"{len(results)}"
        what = f"{vertex.actor.name} computes another number of blocks"
        raise InterpreterError("type-mismatch", what, where=vertex.actor.where, expected=expected, got=got)
    for (name, access), value in zip(written, results, strict=True):
        _result(vertex, name, access, value, memory, races, views)


def _check_in_place(vertex: Vertex, views: Views) -> None:
    """Refuses a vertex that reads elements which it writes through a field of another region."""
    connections = list(zip(vertex.group.codelet.fields, vertex.group.accesses, strict=True))
    for read in (access for f, access in connections if f.is_read):
        for written in (access for f, access in connections if f.is_written):
            if read.is_same(written) or set(read.tensor.variables()).isdisjoint(written.tensor.variables()):
                continue
            mine, others = (_elements(vertex, access, views) for access in (read, written))
            for variable in mine.keys() & others.keys():
                both = np.intersect1d(mine[variable], others[variable])
                if both.size:
                    what = "reads what it writes through a field of another region:"
                    raise vertex.actor.error("read-write-race", what, variable, both[0])


def _elements(vertex: Vertex, access: Access, views: Views) -> dict[Variable, np.ndarray]:
    """The elements of each variable that a vertex touches through one field."""
    starts, lengths, _ = views.block(vertex, access)
    return {variable: elements for variable, _, elements in views.box(access.tensor, starts, lengths).parts()}


def _origins(vertex: Vertex) -> tuple[np.ndarray, ...]:
    """The first index of the block along each axis the group names as an origin."""
    first = {axis.name: axis.cuts[b] for axis, b in zip(vertex.group.axes, vertex.block, strict=True)}
    return tuple(np.asarray(first[name], np.int32) for name in vertex.group.origins)


def _operand(
    vertex: Vertex, access: Access, memory: TileMemory, races: RaceLog, views: Views
) -> tuple[jax.Array, tuple[tuple[int, int], ...]]:
    """The block one field reads, as the codelet sees it, and the fill that its dimensions lack."""
    starts, lengths, pads = views.block(vertex, access)
    view, tensor = views.box(access.tensor, starts, lengths), access.tensor
    raw = raw_empty(tensor.dtype, view.which.shape)
    for variable, chosen, elements in view.parts():
        races.read(variable, elements, vertex.actor)
        raw[chosen] = memory.read(vertex.actor.tile, variable, elements, vertex.actor)
    visible = [not dim.is_squeezed for dim in access.dims]
    own = ["pads" in vertex.group.codelet.takes and seen for seen in visible]
    around = [(0, 0) if left else pad for left, pad in zip(own, pads, strict=True)]
    apart = [1 if left else dim.divisor for left, dim in zip(own, access.dims, strict=True)]
    block = _filled(raw.reshape(view.shape), around, apart, access, vertex.actor)
    seen_shape = [n for n, seen in zip(block.shape, visible, strict=True) if seen]
    seen_pads = tuple(pad for pad, seen in zip(pads, visible, strict=True) if seen)
    return from_raw(block.reshape(seen_shape), tensor.dtype), seen_pads


def _filled(block: np.ndarray, pads: Pads, apart: list[int], access: Access, actor: Actor) -> np.ndarray:
    """A block with fill around it, and between its elements where they lie more than one `apart`."""
    spread = [max(0, (n - 1) * step + 1) for n, step in zip(block.shape, apart, strict=True)]
    shape = tuple(low + n + high for n, (low, high) in zip(spread, pads, strict=True))
    if shape == block.shape:
        return block
    if access.fill is None:
        what = f"{actor.name} reads out of {access.tensor!r}, which has no fill"
        raise InterpreterError("out-of-tensor", what, where=actor.where)
    filled = np.full(shape, to_raw(access.fill), block.dtype)
    inside = tuple(slice(low, low + n, step) for n, (low, _), step in zip(spread, pads, apart, strict=True))
    filled[inside] = block
    return filled


def _result(
    vertex: Vertex, name: str, access: Access, value: Any, memory: TileMemory, races: RaceLog, views: Views
) -> None:
    """Writes what a codelet computed for one field."""
    actor = vertex.actor
    starts, lengths, pads = views.block(vertex, access)
    check_writable(access.tensor, actor)
    if any(low or high for low, high in pads):
        what = f"{actor.name} writes {name} out of {access.tensor!r}"
        raise InterpreterError("out-of-tensor", what, where=actor.where)
    expected = type_name(access.tensor.dtype, squeezed_shape(access, tuple(lengths)))
    got = type_name(value.dtype, value.shape)
    if expected != got:
        what = f"{actor.name} computes {name} of another type"
        raise InterpreterError("type-mismatch", what, where=actor.where, expected=expected, got=got)
    raw = to_raw(value).ravel()
    for variable, chosen, elements in views.box(access.tensor, starts, lengths).parts():
        races.write(variable, elements, actor)
        memory.write(actor.tile, variable, elements, raw[chosen])


def check_writable(tensor: Tensor, actor: Actor) -> None:
    """Refuses to write constants, and views that show an element twice."""
    constant = next((v for v in tensor.variables() if v.is_constant), None)
    if constant is not None or not tensor.is_writable:
        what = f"{actor.name} writes to {tensor if constant is None else constant!r}"
        raise InterpreterError("read-only-output", what, where=actor.where)


def type_name(dtype: Any, shape: tuple[int, ...]) -> str:
    """A dtype and shape as errors show them."""
    return f"{dtype_name(dtype)}{list(shape)}"
