"""Vertices as they are split: groups of equal signature, and running them on arrays.

Vertices of a group whose blocks have equal shapes and equal padding are one *signature*: they differ only in where
their blocks start, so one traced codelet serves all of them. A group computed unsplit has one vertex, whose blocks are
static slices; a signature of many vertices is run by `jax.vmap` along each axis of the grid its vertices form.

Input: a vertex group and the values of variables. Output: `Written` blocks, which `apply` puts into the values
afterwards, so that all groups of a compute set read what was there before it.

Limits: PRNG keys cannot be padded (JAX has no pad for key arrays).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.runtime.engine.block_access import join_blocks, put_blocks, take_blocks, varying_axes
from ipujax.runtime.graph import NO_TILE, Access, Dim, Extent, Field, VertexGroup, extents
from ipujax.runtime.tensor import Tensor, Variable, dtype_name, read, write

Pads = tuple[tuple[int, int], ...]
Values = MutableMapping[Variable, jax.Array]


@dataclass(frozen=True, eq=False, slots=True)
class Signature:
    """The vertices of one group whose blocks are equal in shape and padding.

    Args:
        lengths: per field, per dimension of its tensor, the length of the block.
        pads: per field, per dimension of its tensor, the `(low, high)` fill elements, in units of the dilated index.
        starts: per field, where the blocks start in its tensor, int64[vertices, dimensions].
        origins: first index along each axis in `VertexGroup.origins`, int64[vertices, origins].
        index: block number along each axis, in row-major order, int64[vertices, axes].
        tile: int32[vertices].
    """

    lengths: tuple[tuple[int, ...], ...]
    pads: tuple[Pads, ...]
    starts: tuple[np.ndarray, ...]
    origins: np.ndarray
    index: np.ndarray
    tile: np.ndarray


def signatures(group: VertexGroup) -> list[Signature]:
    """Sorts the vertices of a group by signature.

    Args:
        group: any vertex group; blocks without a vertex are left out.

    Returns:
        Signatures that together hold each vertex once; none for a group without vertices.
    """
    index, tile = np.argwhere(group.tile != NO_TILE), group.tile[group.tile != NO_TILE]
    if not len(index):
        return []
    facts = _facts_of_one_vertex(group) if group.tile.size == 1 else _facts_of_vertices(group, index)
    origins = _origins(group, index)
    return [
        _signature(group, facts[members], origins[members], index[members], tile[members])
        for members in _equal_rows(facts[:, :, 1:].reshape(len(index), -1))
    ]


def _signature(
    group: VertexGroup, facts: np.ndarray, origins: np.ndarray, index: np.ndarray, tile: np.ndarray
) -> Signature:
    """The signature of vertices with these facts, int64[vertices, dimensions, 4]."""
    ends = list(accumulate((len(access.dims) for access in group.accesses), initial=0))
    fields, first = list(pairwise(ends)), facts[0].tolist()
    return Signature(
        lengths=tuple(tuple(length for _, length, _, _ in first[i:j]) for i, j in fields),
        pads=tuple(tuple((low, high) for _, _, low, high in first[i:j]) for i, j in fields),
        starts=tuple(facts[:, i:j, 0] for i, j in fields),
        origins=origins,
        index=index,
        tile=tile,
    )


def _facts_of_one_vertex(group: VertexGroup) -> np.ndarray:
    """What `_facts_of_vertices` gives for a group of one block, many times faster; int64[1, dimensions, 4]."""
    rows = [
        _facts_of_dimension(group, dim, size)
        for access in group.accesses
        for dim, size in zip(access.dims, access.tensor.shape, strict=True)
    ]
    return np.array(rows, np.int64).reshape(1, -1, 4)


def _facts_of_dimension(group: VertexGroup, dim: Dim, size: int) -> tuple[int, int, int, int]:
    """Start, length, pad_low and pad_high where every axis is one block: `dim_extent` in plain integers."""
    low = high = dim.offset
    for term in dim.terms:
        reach = term.coeff * (group.axes[term.axis].extent - 1) if term.unit == "element" else 0
        low, high = low + min(0, reach), high + max(0, reach)
    start = min(max(-(-low // dim.divisor), 0), size)
    stop = min(max(high // dim.divisor + 1, start), size)
    if start == stop:
        return start, 0, high - low + 1, 0
    return start, stop - start, start * dim.divisor - low, high - (stop - 1) * dim.divisor


def _facts_of_vertices(group: VertexGroup, index: np.ndarray) -> np.ndarray:
    """Start, length, pad_low and pad_high of all dimensions of all fields, int64[vertices, dimensions, 4]."""
    columns = [_pick(extent, index) for access in group.accesses for extent in extents(group, access)]
    return np.stack(columns, axis=1) if columns else np.zeros((len(index), 0, 4), np.int64)


def _pick(extent: Extent, index: np.ndarray) -> np.ndarray:
    """The four facts of an extent at some blocks, int64[vertices, 4]."""
    facts = np.stack(np.broadcast_arrays(extent.start, extent.length, extent.pad_low, extent.pad_high), axis=-1)
    last = np.array(facts.shape[:-1], np.int64) - 1
    return facts[tuple(np.minimum(index, last).T)] if last.size else np.broadcast_to(facts, (len(index), 4))


def _origins(group: VertexGroup, index: np.ndarray) -> np.ndarray:
    names = [axis.name for axis in group.axes]
    numbers = [names.index(name) for name in group.origins]
    columns = [group.axes[number].cuts[index[:, number]] for number in numbers]
    return np.stack(columns, axis=1) if columns else np.zeros((len(index), 0), np.int64)


def _equal_rows(rows: np.ndarray) -> list[np.ndarray]:
    """Row numbers by equal rows, rising in each class."""
    if len(rows) == 1 or not rows.size or not np.any(rows != rows[0]):
        return [np.arange(len(rows))]
    _, inverse = np.unique(rows, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    return np.split(order, np.cumsum(np.bincount(inverse))[:-1])


# --- one vertex -------------------------------------------------------------------------------------------------------


def run_codelet(group: VertexGroup, signature: Signature, blocks: list[jax.Array], origins: tuple) -> list[jax.Array]:
    """Runs the codelet of one vertex on its own blocks.

    Args:
        group: the vertex group.
        signature: the signature the vertex belongs to.
        blocks: for each field that is read its block, unpadded, with all dimensions of the tensor.
        origins: for each axis in `VertexGroup.origins` the first index of the block, int or int32 scalar.

    Returns:
        For each field that is written its block, with all dimensions of the tensor.

    Raises:
        AssertionError: if the codelet returns blocks of other shapes or dtypes, or a block lacks a fill it needs.
    """
    codelet, takes = group.codelet, group.codelet.takes
    read_fields = [number for number, field in enumerate(codelet.fields) if field.is_read]
    written_fields = [number for number, field in enumerate(codelet.fields) if field.is_written]
    arrays = [
        _visible_block(block, group.accesses[number], signature.pads[number], "pads" in takes, codelet.name)
        for number, block in zip(read_fields, blocks, strict=True)
    ]
    shapes = tuple(_visible(group.accesses[number], signature.lengths[number]) for number in written_fields)
    extras: dict[str, Any] = {
        "pads": tuple(_visible(group.accesses[number], signature.pads[number]) for number in read_fields),
        "origins": origins,
        "shapes": shapes,
    }
    result = codelet.compute(*arrays, **{key: extras[key] for key in takes})
    results = result if isinstance(result, tuple) else (result,)
    if len(results) != len(written_fields):
        raise AssertionError(f"{codelet.name} returned {len(results)} blocks for {len(written_fields)} written fields")
    return [
        _whole_block(_checked(value, shape, codelet.fields[number], codelet.name), group.accesses[number])
        for number, value, shape in zip(written_fields, results, shapes, strict=True)
    ]


def _visible(access: Access, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """What concerns the dimensions a codelet sees."""
    return tuple(item for item, dim in zip(items, access.dims, strict=True) if not dim.is_squeezed)


def _visible_block(block: jax.Array, access: Access, pads: Pads, only_squeezed: bool, name: str) -> jax.Array:
    """Pads a block with fill, unless its codelet does, and drops the dimensions the codelet does not see."""
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


def _whole_block(block: jax.Array, access: Access) -> jax.Array:
    """Puts the dimensions back that the codelet does not see."""
    squeezed = [number for number, dim in enumerate(access.dims) if dim.is_squeezed]
    return lax.expand_dims(block, squeezed) if squeezed else block


def _checked(value: Any, shape: tuple[int, ...], field: Field, codelet: str) -> jax.Array:
    """The array itself, without weak type, if it is what the field holds."""
    array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    if array.shape != shape or array.dtype != field.dtype:
        raise AssertionError(
            f"field {field.name} of {codelet} is {dtype_name(field.dtype)}{list(shape)}, "
            f"but was given {dtype_name(array.dtype)}{list(array.shape)}"
        )
    return lax.convert_element_type(array, field.dtype) if getattr(jax.typeof(array), "weak_type", False) else array


# --- all vertices of a group ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Written:
    """Blocks that vertices write.

    Args:
        tensor: the tensor of the field.
        starts: where each block starts in it, int64[*grid, dimensions].
        blocks: [*grid, *lengths].
    """

    tensor: Tensor
    starts: np.ndarray
    blocks: jax.Array


def apply(written: Written, values: Values) -> None:
    """Puts written blocks into the values, which are changed."""
    tensor, starts, blocks = written.tensor, written.starts, written.blocks
    if not blocks.size:
        return
    box = join_blocks(blocks, starts)
    if box is None:
        values.update(write(tensor, values, put_blocks(read(tensor, values), starts, blocks)))
    else:
        first, value = box
        values.update(write(_box(tensor, first, value.shape), values, value))


def run_group(group: VertexGroup, sorted_vertices: list[Signature], values: Values) -> list[Written]:
    """Runs all vertices of a group on values that stay as they are.

    Args:
        group: the vertex group.
        sorted_vertices: its `signatures`.
        values: arrays of the variables it reads.

    Returns:
        What its vertices write, for `apply`.
    """
    return [
        written
        for signature in sorted_vertices
        for written in (_run_one if len(signature.tile) == 1 else _run_many)(group, signature, values)
    ]


def _run_one(group: VertexGroup, signature: Signature, values: Values) -> list[Written]:
    """Runs a signature of one vertex, with static slices."""
    blocks, fields = [], group.codelet.fields
    for number, field in enumerate(fields):
        if field.is_read:
            tensor = group.accesses[number].tensor
            blocks.append(read(_box(tensor, signature.starts[number][0], signature.lengths[number]), values))
    results = run_codelet(group, signature, blocks, tuple(signature.origins[0].tolist()))
    starts = [signature.starts[number][0] for number, field in enumerate(fields) if field.is_written]
    return [Written(t, s, r) for t, s, r in zip(_written_tensors(group), starts, results, strict=True)]


def _run_many(group: VertexGroup, signature: Signature, values: Values) -> list[Written]:
    """Runs a signature of many vertices: one vmap for each axis of the grid they form."""
    grid, fields = _grid(signature.index), group.codelet.fields
    starts = [s.reshape(*grid, s.shape[1]) for s in signature.starts]
    blocks, mapped = [], []
    for number, field in enumerate(fields):
        if field.is_read:
            varying = varying_axes(starts[number])
            value = read(group.accesses[number].tensor, values)
            where = starts[number][tuple(slice(None) if v else 0 for v in varying)]
            blocks.append(take_blocks(value, where, signature.lengths[number]))
            mapped.append(varying)
    columns = signature.origins.astype(np.int32).reshape(*grid, -1)
    origins = tuple(columns[..., column] for column in range(columns.shape[-1]))
    # A vmap needs something to map over even when no block differs along its axis.
    counters = tuple(np.arange(n) for n in grid)

    def vertex(blocks: list[jax.Array], origins: tuple, counters: tuple) -> list[jax.Array]:
        del counters
        return run_codelet(group, signature, blocks, origins)

    run: Callable[..., list[jax.Array]] = vertex
    for axis in reversed(range(len(grid))):
        block_axes = [0 if varying[axis] else None for varying in mapped]
        counter_axes = tuple(0 if number == axis else None for number in range(len(grid)))
        run = jax.vmap(run, in_axes=(block_axes, 0 if origins else None, counter_axes))
    written = [s for s, field in zip(starts, fields, strict=True) if field.is_written]
    results = run(blocks, origins, counters)
    return [Written(t, s, r) for t, s, r in zip(_written_tensors(group), written, results, strict=True)]


def _written_tensors(group: VertexGroup) -> list[Tensor]:
    pairs = zip(group.codelet.fields, group.accesses, strict=True)
    return [access.tensor for field, access in pairs if field.is_written]


def _box(tensor: Tensor, starts: Iterable[int], lengths: tuple[int, ...]) -> Tensor:
    """The box of a tensor that starts at `starts`; the tensor itself where that is all of it."""
    if lengths == tensor.shape:
        return tensor
    first = [int(s) for s in starts]
    return tensor.slice(first, [s + n for s, n in zip(first, lengths, strict=True)])


def _grid(index: np.ndarray) -> tuple[int, ...]:
    """The shape of the grid some vertices form, or one long axis when they form none.

    Args:
        index: their block numbers in row-major order, int64[vertices, axes].
    """
    counts = [len(np.unique(column)) for column in index.T]
    grid = tuple(n for n in counts if n > 1)
    return grid if prod(grid) == len(index) else (len(index),)
