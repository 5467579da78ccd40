"""Vertex groups: all vertices of one codelet that differ only in tile and region, as arrays over a grid of blocks.

    group  ::= codelet, axes, one access a field, tile of each block
    axis   ::= name, cuts 0 = c0 < … < cn = extent, kind
    access ::= tensor, one dim for each of its dimensions, fill
    dim    ::= (Σ coefficient · index + offset) / divisor over some axes

Block g of an axis is [c_g, c_{g+1}). A vertex reads, in each dimension, the hull of the indices its block names,
clipped to the tensor; indices outside, or between (divisor > 1), read `fill`. An axis in no dim of an access is a
broadcast. A term in units of blocks names the block's number instead of its elements: that is how a split reduction
writes partials.

The kind of an axis says whether it can be computed unsplit: a `map` axis with the same numbers, a `reduce` axis if its
monoid may be reassociated; the split of a `literal` axis is part of the meaning.

`extents` gives the blocks of an access over the grid; `vertex_blocks` lists them for the vertices that exist, for the
tile interpreter and for the verifier where its quick tests decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ipujax.runtime.graph.codelet import Codelet
from ipujax.runtime.tensor import Origin, Tensor, frozen

Kind = Literal["map", "reduce", "literal"]
NO_TILE = -1  # tile of a block that has no vertex


@dataclass(frozen=True, eq=False, slots=True)
class Axis:
    """One axis of a grid of blocks.

    Args:
        name: for messages and for `origins`.
        cuts: boundaries, int64[n + 1]; `[0]` for an axis of extent 0.
        kind: whether it can be computed unsplit, see above.
    """

    name: str
    cuts: np.ndarray
    kind: Kind = "map"

    @property
    def extent(self) -> int:
        return int(self.cuts[-1])

    @property
    def blocks(self) -> int:
        return len(self.cuts) - 1


@dataclass(frozen=True, slots=True)
class Term:
    """`coeff` times the element index (or the block number) along axis number `axis` of the group."""

    axis: int
    coeff: int = 1
    unit: Literal["element", "block"] = "element"


@dataclass(frozen=True, slots=True)
class Dim:
    """The index in one dimension of a tensor: `(Σ terms + offset) / divisor`; no terms is a constant index."""

    terms: tuple[Term, ...] = ()
    offset: int = 0
    divisor: int = 1

    @property
    def is_squeezed(self) -> bool:
        """True if a block has one index only in this dimension, which codelets do not see."""
        return all(term.unit == "block" for term in self.terms)


def element(axis: int, coeff: int = 1, offset: int = 0) -> Dim:
    """Return the index of a dimension that follows the elements of one axis."""
    return Dim((Term(axis, coeff),), offset)


def block(axis: int) -> Dim:
    """Return the index of a dimension that is the block number of one axis."""
    return Dim((Term(axis, 1, "block"),))


@dataclass(frozen=True, eq=False, slots=True)
class Access:
    """Connection of a field of a codelet: a tensor, and the index in each of its dimensions.

    An index outside of the tensor reads `fill`; if that is None, the verifier refuses such an index.
    """

    tensor: Tensor
    dims: tuple[Dim, ...]
    fill: Any = None

    def is_same(self, other: Access) -> bool:
        """Return whether both surely give each vertex the same elements in the same order, so it can work in place."""
        a = self.tensor
        b = other.tensor
        # Nodes compare by value: two slices of one variable, made apart, are equal.
        return self is other or (self.dims == other.dims and (a is b or a.node == b.node))


@dataclass(frozen=True, slots=True)
class VertexPart:
    """One equation among several that each vertex of a group computes.

    Args:
        origin: source line, layer and part.
        name: its operation.
        cycles: cycles of a tile that computes it alone; its weight among the parts.
    """

    origin: Origin
    name: str
    cycles: int


def no_parts() -> tuple[VertexPart, ...]:
    """Return the parts of a vertex group that has one origin."""
    return ()


@dataclass(frozen=True, eq=False, slots=True)
class VertexGroup:
    """All vertices of one codelet in one compute set that differ only in tile and region.

    Args:
        codelet: code of each vertex.
        axes: the grid.
        accesses: one for each field of the codelet.
        tile: tile of each vertex, int32[axes[0].blocks, …]; −1 for no vertex.
        origins: names of axes whose first index each vertex gets as a scalar.
        origin: source line, layer and part.
        name: debug name, if it is not that of its compute set.
        parts: returns the equations that its vertices compute, if these have several origins; for profiles.
    """

    codelet: Codelet
    axes: tuple[Axis, ...]
    accesses: tuple[Access, ...]
    tile: np.ndarray
    origins: tuple[str, ...] = ()
    origin: Origin = Origin()
    name: str = ""
    parts: Callable[[], tuple[VertexPart, ...]] = no_parts

    @property
    def num_vertices(self) -> int:
        return int(np.count_nonzero(self.tile != NO_TILE))

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(axis.blocks for axis in self.axes)


def shift_vertices(tile: np.ndarray, shift: int) -> np.ndarray:
    """Return the tile of each vertex of a group, `NO_TILE` for none, on as many tiles further."""
    return frozen(np.where(tile == NO_TILE, NO_TILE, tile + shift), np.int32) if shift else tile


@dataclass(frozen=True, eq=False, slots=True)
class Extent:
    """The blocks of one dimension of an access, over the grid of vertices.

    Every member is an int64 array with one dimension for each axis of the group, of size 1 along axes that are not in
    the index, so that it broadcasts to the grid.

    Args:
        start: first index of the block in the tensor, clipped.
        length: number of indices of the block in the tensor; 0 if all of it is fill.
        pad_low: fill before the block, in units of the dilated index (`divisor` to an index).
        pad_high: fill after it.
    """

    start: np.ndarray
    length: np.ndarray
    pad_low: np.ndarray
    pad_high: np.ndarray


def dim_extent(group: VertexGroup, access: Access, number: int) -> Extent:
    """Return the blocks of dimension `number` of `access`, for all vertices of `group`."""
    dim = access.dims[number]
    size = access.tensor.shape[number]
    axis_extent = _axis_extent(group, dim, size)
    if axis_extent is not None:
        return axis_extent
    # The lowest and highest index of each block, before division: the sum over terms of theirs.
    low = np.full((1,) * len(group.axes), dim.offset, np.int64)
    high = low
    for term in dim.terms:
        axis = group.axes[term.axis]
        shape = [-1 if a == term.axis else 1 for a in range(len(group.axes))]
        if term.unit == "block":
            first = last = np.arange(axis.blocks, dtype=np.int64)
        else:
            first = axis.cuts[:-1]
            last = axis.cuts[1:] - 1
        # A negative coefficient swaps the ends.
        bounds = first * term.coeff, last * term.coeff
        low = low + np.minimum(*bounds).reshape(shape)
        high = high + np.maximum(*bounds).reshape(shape)
    # The first multiple of the divisor from `low` on (−(−a // b) rounds up), and the last one up to `high`.
    start = np.clip(-(-low // dim.divisor), 0, size)
    stop = np.clip(high // dim.divisor + 1, start, size)
    # A block outside of the tensor is all fill, and all of it counts as `pad_low`.
    empty = stop == start
    pad_low = np.where(empty, high - low + 1, start * dim.divisor - low)
    pad_high = np.where(empty, 0, high - (stop - 1) * dim.divisor)
    return Extent(start, stop - start, pad_low, pad_high)


_NO_FILL = np.zeros((), np.int64)  # shared by the many dimensions without fill


def _axis_extent(group: VertexGroup, dim: Dim, size: int) -> Extent | None:
    """Return the blocks of a dimension that is one axis, as most are: its cuts, without fill; None for others."""
    number = _axis_of(group, dim, size)
    if number is None:
        return None
    axis = group.axes[number]
    shape = [-1 if a == number else 1 for a in range(len(group.axes))]
    fill = _NO_FILL.reshape([1] * len(group.axes))
    start = axis.cuts[:-1]
    end = axis.cuts[1:]
    return Extent(start.reshape(shape), (end - start).reshape(shape), fill, fill)


def _axis_of(group: VertexGroup, dim: Dim, size: int) -> int | None:
    """Return the axis that a dimension of `size` follows element by element; None if there is no such axis."""
    if len(dim.terms) != 1 or dim.offset or dim.divisor != 1:
        return None
    (term,) = dim.terms
    is_axis = term.unit == "element" and term.coeff == 1 and group.axes[term.axis].extent == size
    return term.axis if is_axis else None


def whole_axes(group: VertexGroup, access: Access) -> frozenset[int] | None:
    """Return the axes of an access whose dimensions each follow another axis element by element; None for others."""
    axis_of_dims = [_axis_of(group, dim, size) for dim, size in zip(access.dims, access.tensor.shape, strict=True)]
    axes = frozenset(axis for axis in axis_of_dims if axis is not None)
    return axes if len(axes) == len(axis_of_dims) else None


def extents(group: VertexGroup, access: Access) -> tuple[Extent, ...]:
    """Return the blocks of every dimension of `access`."""
    return tuple(dim_extent(group, access, number) for number in range(len(access.dims)))


def unsplit(group: VertexGroup, literal_axes: frozenset[int] = frozenset()) -> VertexGroup:
    """Return the group with every axis in one block, except those in `literal_axes`."""
    axes = tuple(
        axis if number in literal_axes or axis.extent == 0 else replace(axis, cuts=axis.cuts[[0, -1]])
        for number, axis in enumerate(group.axes)
    )
    # Every block has a vertex now, on tile 0: an engine does not look at tiles.
    counts = [axis.blocks for axis in axes]
    return replace(group, axes=axes, tile=np.zeros(counts, np.int32))


def squeezed_shape(access: Access, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a block as the codelet sees it, from its lengths in all dimensions of the tensor."""
    return tuple(n for n, dim in zip(lengths, access.dims, strict=True) if not dim.is_squeezed)


@dataclass(frozen=True, eq=False, slots=True)
class VertexBlocks:
    """The blocks of one access, for the vertices that exist, in row-major order of the grid.

    Args:
        start: first index of each block in each dimension of the tensor, int64[vertices, dims].
        length: number of indices, int64[vertices, dims].
        pad_low: fill before the block, in dilated indices, int64[vertices, dims].
        pad_high: fill after it, int64[vertices, dims].
        tile: the tile of each vertex, int32[vertices].
    """

    start: np.ndarray
    length: np.ndarray
    pad_low: np.ndarray
    pad_high: np.ndarray
    tile: np.ndarray


def vertex_blocks(group: VertexGroup, access: Access) -> VertexBlocks:
    """Return the blocks of `access` for the vertices of `group` that exist."""
    exists = group.tile >= 0
    per_dim = extents(group, access)

    def column(name: str) -> np.ndarray:
        columns = [np.broadcast_to(getattr(extent, name), group.grid)[exists] for extent in per_dim]
        return np.stack(columns, axis=1) if columns else np.zeros((int(exists.sum()), 0), np.int64)

    return VertexBlocks(column("start"), column("length"), column("pad_low"), column("pad_high"), group.tile[exists])
