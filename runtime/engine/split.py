"""Vertices by signature, and their codelets run on blocks of arrays.

Vertices of a group whose blocks have equal shapes and equal padding are one *signature*: they differ only in the starts
of their blocks, so one traced codelet serves all of them. A group computed unsplit has one vertex, whose blocks are
static slices; a signature of many vertices is run by `jax.vmap` along each axis of the grid its vertices form.

Blocks are taken out of arrays, and put into them, for many static starts at once. Starts are int64[*grid, dimensions]:
the first index, in each dimension, of the block at each point of a grid; all blocks have the same lengths. Blocks are
arrays [*grid, *lengths]. Planners make starts that follow one axis of the grid in each dimension: then slices, reshapes
and transposes suffice. Others need a gather, or a loop of updates in place.

Input: a vertex group and the values of variables. Output: `WrittenBlocks`, which `store_blocks` puts into the values
afterwards, so that all groups of a compute set read the values before it.

Limits: PRNG keys cannot be padded (JAX has no pad for key arrays).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.runtime.graph import NO_TILE, Access, Dim, Extent, Field, VertexGroup, extents
from ipujax.runtime.tensor import Tensor, Variable, dtype_name, read, write


def varying_axes(starts: np.ndarray) -> tuple[bool, ...]:
    """Return, for each axis of the grid, whether the starts, int64[*grid, dimensions], differ along it."""
    return tuple(bool(np.any(starts != starts.take([0], axis))) for axis in range(starts.ndim - 1))


def take_blocks(value: jax.Array, starts: np.ndarray, lengths: tuple[int, ...]) -> jax.Array:
    """Return the blocks of an array at `starts`, int64[*grid, dimensions], all inside of it, as [*grid, *lengths]."""
    grid = starts.shape[:-1]
    axes = _match_axes(starts)
    if axes is None:
        flat = starts.reshape(-1, value.ndim).astype(np.int32)
        blocks = jax.vmap(lambda start: lax.dynamic_slice(value, list(start), lengths))(flat)
        return blocks.reshape(*grid, *lengths)
    grid_positions = [0] * len(grid)
    block_positions = []
    position = 0
    for dimension, (axis, length) in enumerate(zip(axes, lengths, strict=True)):
        if axis is None:
            first = int(starts[(0,) * len(grid)][dimension])
            value = lax.slice_in_dim(value, first, first + length, axis=position)
        else:
            value = _split_dimension(value, position, _starts_along(starts, dimension, axis), length)
            grid_positions[axis] = position
            position += 1
        block_positions.append(position)
        position += 1
    return lax.transpose(value, [*grid_positions, *block_positions])


def _split_dimension(value: jax.Array, dimension: int, starts: np.ndarray, length: int) -> jax.Array:
    """Replace one dimension by two: number of the block, and index within the block."""
    if _are_adjacent(starts, length):
        shape = (*value.shape[:dimension], len(starts), length, *value.shape[dimension + 1 :])
        return lax.slice_in_dim(value, int(starts[0]), int(starts[-1]) + length, axis=dimension).reshape(shape)
    # All indices are inside the array: "clip" only keeps JAX from adding a test of each.
    return jnp.take(value, starts[:, None] + np.arange(length), axis=dimension, mode="clip")


JoinedBlock = tuple[tuple[int, ...], jax.Array]  # the first index of a block that adjacent blocks fill, and its values


def join_blocks(blocks: jax.Array, starts: np.ndarray) -> JoinedBlock | None:
    """Join blocks, [*grid, *lengths], at `starts`, int64[*grid, dimensions]; None if they do not fill one block."""
    rank = starts.ndim - 1
    grid = blocks.shape[:rank]
    lengths = blocks.shape[rank:]
    axes = _match_axes(starts)
    if axes is None:
        return None
    order = []
    shape = []
    for dimension, (axis, length) in enumerate(zip(axes, lengths, strict=True)):
        if axis is not None and not _are_adjacent(_starts_along(starts, dimension, axis), length):
            return None
        order += [rank + dimension] if axis is None else [axis, rank + dimension]
        shape.append(length if axis is None else grid[axis] * length)
    first = tuple(int(s) for s in starts[(0,) * rank])
    return first, lax.transpose(blocks, order).reshape(shape) if grid else blocks


def put_blocks(value: jax.Array, starts: np.ndarray, blocks: jax.Array) -> jax.Array:
    """Return an array with the blocks, [*grid, *lengths], put in at `starts`, int64[*grid, dimensions]."""
    rank = starts.ndim - 1
    flat_starts = jnp.asarray(starts.reshape(-1, value.ndim), jnp.int32)
    flat_blocks = blocks.reshape(len(flat_starts), *blocks.shape[rank:])

    def put(value: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        start, block = step
        return lax.dynamic_update_slice(value, block, list(start)), None

    # A scan updates its carry in place; blocks may overlap, so their order, row-major, counts.
    return lax.scan(put, value, (flat_starts, flat_blocks))[0]


def _match_axes(starts: np.ndarray) -> list[int | None] | None:
    """Return the axis of the grid that each dimension follows, or None for it; None in all if not one to one."""
    result: list[int | None] = []
    for dimension in range(starts.shape[-1]):
        axes = [axis for axis, varies in enumerate(varying_axes(starts[..., dimension, None])) if varies]
        if len(axes) > 1:
            return None
        result.append(axes[0] if axes else None)
    return result if sorted(a for a in result if a is not None) == list(range(starts.ndim - 1)) else None


def _starts_along(starts: np.ndarray, dimension: int, axis: int) -> np.ndarray:
    """Return the starts of a dimension along the only axis that it follows, int64[n]."""
    return np.moveaxis(starts[..., dimension], axis, -1).reshape(-1, starts.shape[axis])[0]


def _are_adjacent(starts: np.ndarray, length: int) -> bool:
    return bool(np.all(np.diff(starts) == length))


Pads = tuple[tuple[int, int], ...]
Values = MutableMapping[Variable, jax.Array]


@dataclass(frozen=True, eq=False, slots=True)
class Signature:
    """The vertices of one group whose blocks are equal in shape and padding.

    Args:
        lengths: per field, per dimension of its tensor, the length of the block.
        pads: per field, per dimension of its tensor, the `(low, high)` fill elements, in units of the dilated index.
        starts: per field, the first index of each block in its tensor, int64[vertices, dimensions].
        origins: first index along each axis in `VertexGroup.origins`, int64[vertices, origins].
        index: block number along each axis, in row-major order, int64[vertices, axes].
        tile: tile of each vertex, int32[vertices].
    """

    lengths: tuple[tuple[int, ...], ...]
    pads: tuple[Pads, ...]
    starts: tuple[np.ndarray, ...]
    origins: np.ndarray
    index: np.ndarray
    tile: np.ndarray


def signatures(group: VertexGroup) -> list[Signature]:
    """Split the vertices of a group into signatures that have each vertex once; [] without vertices."""
    index = np.argwhere(group.tile != NO_TILE)
    tile = group.tile[group.tile != NO_TILE]
    if not len(index):
        return []
    rows = _extents_of_one_vertex(group) if group.tile.size == 1 else _extents_of_vertices(group, index)
    origins = _origins(group, index)
    return [
        _signature(group, rows[members], origins[members], index[members], tile[members])
        for members in _group_equal_rows(rows[:, :, 1:].reshape(len(index), -1))
    ]


def _signature(
    group: VertexGroup, rows: np.ndarray, origins: np.ndarray, index: np.ndarray, tile: np.ndarray
) -> Signature:
    """Return the signature of vertices with the extents `rows`, int64[vertices, dimensions, 4]."""
    offsets = accumulate((len(access.dims) for access in group.accesses), initial=0)
    fields = list(pairwise(offsets))
    first = [_ExtentRow(*row) for row in rows[0].tolist()]  # lengths and pads of all vertices are equal to its
    return Signature(
        lengths=tuple(tuple(row.length for row in first[i:j]) for i, j in fields),
        pads=tuple(tuple((row.pad_low, row.pad_high) for row in first[i:j]) for i, j in fields),
        starts=tuple(rows[:, i:j, 0] for i, j in fields),
        origins=origins,
        index=index,
        tile=tile,
    )


class _ExtentRow(NamedTuple):
    """The extent of one block in a dimension of its tensor, as in `Extent`; a row of four columns in arrays."""

    start: int
    length: int
    pad_low: int
    pad_high: int


def _extents_of_one_vertex(group: VertexGroup) -> np.ndarray:
    """Return `_extents_of_vertices` of a group of one block, in plain integers: most groups of the engine have one."""
    rows = [
        _extent_of_dimension(group, dim, size)
        for access in group.accesses
        for dim, size in zip(access.dims, access.tensor.shape, strict=True)
    ]
    return np.array(rows, np.int64).reshape(1, -1, 4)  # [vertices, dimensions, columns]


def _extent_of_dimension(group: VertexGroup, dim: Dim, size: int) -> _ExtentRow:
    """Return the extent of a dimension where every axis is one block: `dim_extent` in plain integers."""
    low = high = dim.offset
    for term in dim.terms:
        reach = term.coeff * (group.axes[term.axis].extent - 1) if term.unit == "element" else 0
        low += min(0, reach)
        high += max(0, reach)
    start = min(max(-(-low // dim.divisor), 0), size)
    stop = min(max(high // dim.divisor + 1, start), size)
    if start == stop:
        return _ExtentRow(start, 0, high - low + 1, 0)
    return _ExtentRow(start, stop - start, start * dim.divisor - low, high - (stop - 1) * dim.divisor)


def _extents_of_vertices(group: VertexGroup, index: np.ndarray) -> np.ndarray:
    """Return the extents of all dimensions of all fields, int64[vertices, dimensions, columns of `_ExtentRow`]."""
    columns = [_extent_at(extent, index) for access in group.accesses for extent in extents(group, access)]
    return np.stack(columns, axis=1) if columns else np.zeros((len(index), 0, 4), np.int64)


def _extent_at(extent: Extent, index: np.ndarray) -> np.ndarray:
    """Return the extent of the blocks of number `index`, int64[vertices, axes], as int64[vertices, 4]."""
    rows = np.stack(np.broadcast_arrays(extent.start, extent.length, extent.pad_low, extent.pad_high), axis=-1)
    # Along an axis that the dimension does not follow the extent has one row, for all blocks.
    last = np.array(rows.shape[:-1], np.int64) - 1
    return rows[tuple(np.minimum(index, last).T)] if last.size else np.broadcast_to(rows, (len(index), 4))


def _origins(group: VertexGroup, index: np.ndarray) -> np.ndarray:
    names = [axis.name for axis in group.axes]
    numbers = [names.index(name) for name in group.origins]
    columns = [group.axes[number].cuts[index[:, number]] for number in numbers]
    return np.stack(columns, axis=1) if columns else np.zeros((len(index), 0), np.int64)


def _group_equal_rows(rows: np.ndarray) -> list[np.ndarray]:
    """Return the row numbers of each class of equal rows, rising."""
    if len(rows) == 1 or not rows.size or not np.any(rows != rows[0]):
        return [np.arange(len(rows))]
    _, inverse = np.unique(rows, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)  # its rank differs between versions of NumPy
    order = np.argsort(inverse, kind="stable")
    return np.split(order, np.cumsum(np.bincount(inverse))[:-1])


# --- one vertex -------------------------------------------------------------------------------------------------------


def run_codelet(group: VertexGroup, signature: Signature, blocks: list[jax.Array], origins: tuple) -> list[jax.Array]:
    """Run the codelet of a vertex on the unpadded blocks of its operands, and return the blocks of its results."""
    # Blocks have all dimensions of their tensors; an origin is the first index along an axis of `group.origins`.
    codelet = group.codelet
    takes = codelet.takes
    read_fields = [number for number, field in enumerate(codelet.fields) if field.is_read]
    written_fields = [number for number, field in enumerate(codelet.fields) if field.is_written]
    arrays = [
        _pad_and_squeeze(block, group.accesses[number], signature.pads[number], "pads" in takes, codelet.name)
        for number, block in zip(read_fields, blocks, strict=True)
    ]
    shapes = tuple(_drop_squeezed(group.accesses[number], signature.lengths[number]) for number in written_fields)
    extras: dict[str, Any] = {
        "pads": tuple(_drop_squeezed(group.accesses[number], signature.pads[number]) for number in read_fields),
        "origins": origins,
        "shapes": shapes,
    }
    result = codelet.compute(*arrays, **{key: extras[key] for key in takes})
    results = result if isinstance(result, tuple) else (result,)
    if len(results) != len(written_fields):
        raise AssertionError(f"{codelet.name} returned {len(results)} blocks for {len(written_fields)} written fields")
    return [
        _unsqueeze(_check_result(value, shape, codelet.fields[number], codelet.name), group.accesses[number])
        for number, value, shape in zip(written_fields, results, shapes, strict=True)
    ]


def _drop_squeezed(access: Access, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the items, one a dimension of an access, of the dimensions that the codelet sees."""
    return tuple(item for item, dim in zip(items, access.dims, strict=True) if not dim.is_squeezed)


def _pad_and_squeeze(block: jax.Array, access: Access, pads: Pads, only_squeezed: bool, name: str) -> jax.Array:
    """Pad a block with fill, unless its codelet does, and drop the dimensions that the codelet does not see."""
    config = [
        (0, 0, 0) if only_squeezed and not dim.is_squeezed else (low, high, dim.divisor - 1)
        for dim, (low, high) in zip(access.dims, pads, strict=True)
    ]
    if any(c[0] or c[1] or (c[2] and n > 1) for c, n in zip(config, block.shape, strict=True)):
        if access.fill is None:
            raise AssertionError(f"{name} reads outside of {access.tensor!r}, which has no fill")
        block = lax.pad(block, np.asarray(access.fill, block.dtype), config)
    squeezed = [number for number, dim in enumerate(access.dims) if dim.is_squeezed]
    return lax.squeeze(block, squeezed) if squeezed else block


def _unsqueeze(block: jax.Array, access: Access) -> jax.Array:
    """Add the dimensions that the codelet does not see, of length 1."""
    squeezed = [number for number, dim in enumerate(access.dims) if dim.is_squeezed]
    return lax.expand_dims(block, squeezed) if squeezed else block


def _check_result(value: Any, shape: tuple[int, ...], field: Field, codelet: str) -> jax.Array:
    """Return a result of a codelet, without weak type; refuse another shape or dtype than that of the field."""
    array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    if array.shape != shape or array.dtype != field.dtype:
        raise AssertionError(
            f"field {field.name} of {codelet} must be {dtype_name(field.dtype)}{list(shape)}, "
            f"got {dtype_name(array.dtype)}{list(array.shape)}"
        )
    return lax.convert_element_type(array, field.dtype) if getattr(jax.typeof(array), "weak_type", False) else array


# --- all vertices of a group ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class WrittenBlocks:
    """Blocks that vertices write.

    Args:
        tensor: the tensor of the field.
        starts: first index of each block in it, int64[*grid, dimensions].
        blocks: values, [*grid, *lengths].
    """

    tensor: Tensor
    starts: np.ndarray
    blocks: jax.Array


def store_blocks(written: WrittenBlocks, values: Values) -> None:
    """Put written blocks into `values`, which change."""
    tensor = written.tensor
    blocks = written.blocks
    if not blocks.size:
        return
    whole_block = join_blocks(blocks, written.starts)
    if whole_block is None:
        values.update(write(tensor, values, put_blocks(read(tensor, values), written.starts, blocks)))
    else:
        # One write, which reads nothing of the old value.
        first, value = whole_block
        values.update(write(_slice(tensor, first, value.shape), values, value))


def run_group(group: VertexGroup, sorted_vertices: list[Signature], values: Values) -> list[WrittenBlocks]:
    """Run all vertices of a group on `values`, which do not change; return their results, for `store_blocks`."""
    return [
        written
        for signature in sorted_vertices
        for written in (_run_single if len(signature.tile) == 1 else _run_many)(group, signature, values)
    ]


def _run_single(group: VertexGroup, signature: Signature, values: Values) -> list[WrittenBlocks]:
    """Run a signature of one vertex, with static slices."""
    blocks = []
    fields = group.codelet.fields
    for number, field in enumerate(fields):
        if field.is_read:
            tensor = group.accesses[number].tensor
            blocks.append(read(_slice(tensor, signature.starts[number][0], signature.lengths[number]), values))
    results = run_codelet(group, signature, blocks, tuple(signature.origins[0].tolist()))
    starts = [signature.starts[number][0] for number, field in enumerate(fields) if field.is_written]
    return [WrittenBlocks(t, s, r) for t, s, r in zip(_written_tensors(group), starts, results, strict=True)]


def _run_many(group: VertexGroup, signature: Signature, values: Values) -> list[WrittenBlocks]:
    """Run a signature of many vertices: one vmap for each axis of the grid they form."""
    grid = _grid(signature.index)
    fields = group.codelet.fields
    starts = [s.reshape(*grid, s.shape[1]) for s in signature.starts]
    blocks = []
    varying_of_blocks = []
    for number, field in enumerate(fields):
        if field.is_read:
            varying = varying_axes(starts[number])
            value = read(group.accesses[number].tensor, values)
            # A block that all vertices along an axis share is taken once, and not mapped over.
            distinct_starts = starts[number][tuple(slice(None) if v else 0 for v in varying)]
            blocks.append(take_blocks(value, distinct_starts, signature.lengths[number]))
            varying_of_blocks.append(varying)
    columns = signature.origins.astype(np.int32).reshape(*grid, -1)
    origins = tuple(columns[..., column] for column in range(columns.shape[-1]))
    # A vmap needs something to map over even when no block differs along its axis.
    counters = tuple(np.arange(n) for n in grid)

    def vertex(blocks: list[jax.Array], origins: tuple, counters: tuple) -> list[jax.Array]:
        del counters
        return run_codelet(group, signature, blocks, origins)

    run: Callable[..., list[jax.Array]] = vertex
    for axis in reversed(range(len(grid))):
        block_axes = [0 if varying[axis] else None for varying in varying_of_blocks]
        counter_axes = tuple(0 if number == axis else None for number in range(len(grid)))
        run = jax.vmap(run, in_axes=(block_axes, 0 if origins else None, counter_axes))
    written_starts = [s for s, field in zip(starts, fields, strict=True) if field.is_written]
    results = run(blocks, origins, counters)
    return [WrittenBlocks(t, s, r) for t, s, r in zip(_written_tensors(group), written_starts, results, strict=True)]


def _written_tensors(group: VertexGroup) -> list[Tensor]:
    pairs = zip(group.codelet.fields, group.accesses, strict=True)
    return [access.tensor for field, access in pairs if field.is_written]


def _slice(tensor: Tensor, starts: Iterable[int], lengths: tuple[int, ...]) -> Tensor:
    if lengths == tensor.shape:
        return tensor
    first = [int(s) for s in starts]
    return tensor.slice(first, [s + n for s, n in zip(first, lengths, strict=True)])


def _grid(index: np.ndarray) -> tuple[int, ...]:
    """Return the shape of the grid that vertices form, of their block numbers, int64[vertices, axes]; else one axis."""
    counts = [len(np.unique(column)) for column in index.T]
    grid = tuple(n for n in counts if n > 1)
    return grid if prod(grid) == len(index) else (len(index),)
