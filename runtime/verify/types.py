"""Rules of the verifier on single things: mappings, types, tiles, and what an access may reach.

Each rule takes `Facts` and yields the errors it finds. Everything here is O(rank) for an access, but for an index that
may leave its tensor, which is looked at block by block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ipujax.runtime.errors import MappingError, VerifyError
from ipujax.runtime.graph import (
    Copy,
    CrossReplicaCopy,
    Decision,
    Dim,
    Execute,
    Program,
    RemoteBuffer,
    RemoteIn,
    RemoteOut,
    StreamIn,
    StreamOut,
    VertexGroup,
    WriteUndef,
    boxes,
)
from ipujax.runtime.tensor import Tensor, check_mapping, dtype_name
from ipujax.runtime.verify.facts import Connection, Facts, where

_ROW_DTYPES = (np.dtype(np.int32), np.dtype(np.uint32))


def unknown_compute_set(facts: Facts) -> Iterator[VerifyError]:
    """Every compute set that runs belongs to the graph."""
    for node in facts.nodes:
        if isinstance(node, Execute) and node.compute_set not in facts.connections:
            name, where = node.compute_set.name, node.compute_set.origin
            yield VerifyError("unknown-compute-set", f"compute set {name} is not of this graph", where=where)


def unmapped_variable(facts: Facts) -> Iterator[VerifyError]:
    """Every variable that is touched has a tile mapping."""
    mappings = facts.graph.mappings
    for tensor, what in facts.tensors():
        for variable in tensor.variables():
            if variable not in mappings:
                yield VerifyError(
                    "unmapped-variable",
                    f"{variable!r} lies on no tile",
                    where=where(what),
                    expected="a tile mapping",
                    hint="graph.set_tile_mapping",
                )


def mapping(facts: Facts) -> Iterator[VerifyError]:
    """Every tile mapping holds each element of its variable once, on tiles there are."""
    num_tiles = facts.graph.target.num_tiles
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for variable, each in facts.graph.mappings.items():
        if (id(each), variable.shape) not in seen:
            seen.add((id(each), variable.shape))
            try:
                check_mapping(each, variable.shape, num_tiles, repr(variable))
            except MappingError as error:
                yield VerifyError("mapping", error.what, where=variable.origin, expected=error.expected, got=error.got)


def type_mismatch(facts: Facts) -> Iterator[VerifyError]:
    """What is connected agrees in dtype and shape, and group descriptions agree with themselves."""
    checked: set[int] = set()
    for compute_set, group in facts.groups():
        what = _malformed(group, checked)
        if what:
            yield VerifyError(
                "type-mismatch", f"{group.codelet.name} in {compute_set.name}: {what}", where=group.origin
            )
    for connection in facts.fields():
        field, access = connection.field, connection.access
        if access.tensor.dtype != field.dtype:
            expected, got = dtype_name(field.dtype), dtype_name(access.tensor.dtype)
            yield VerifyError(
                "type-mismatch", f"{connection} has another dtype", where=connection.where, expected=expected, got=got
            )
        if len(access.dims) != access.tensor.ndim:
            expected, got = f"{access.tensor.ndim} indices", f"{len(access.dims)}"
            yield VerifyError(
                "type-mismatch", f"{connection} has another rank", where=connection.where, expected=expected, got=got
            )
    for node in facts.nodes:
        yield from _node_types(node)


def _malformed(group: VertexGroup, checked: set[int]) -> str | None:
    """What is wrong with the shape of a group; cuts once looked at are not looked at again."""
    if len(group.accesses) != len(group.codelet.fields):
        return f"{len(group.codelet.fields)} fields, {len(group.accesses)} connected"
    if group.tile.shape != group.grid:
        return f"a grid of {list(group.grid)} blocks, tiles for {list(group.tile.shape)}"
    for axis in group.axes:
        if id(axis.cuts) not in checked:
            checked.add(id(axis.cuts))
            if axis.cuts[0] != 0 or (axis.cuts[1:] <= axis.cuts[:-1]).any():
                return f"the cuts of axis {axis.name} do not rise from 0"
    num_axes = len(group.axes)
    for access in group.accesses:
        for dim in access.dims:
            if dim.divisor < 1 or any(not 0 <= term.axis < num_axes for term in dim.terms):
                return f"an index {dim} over {num_axes} axes"
    if group.origins and not set(group.origins) <= {axis.name for axis in group.axes}:
        return f"no axes named {', '.join(group.origins)}"
    return None


def _node_types(node: Program) -> Iterator[VerifyError]:
    pair: tuple[str, str] | None = None
    match node:
        case Copy(source, destination) | CrossReplicaCopy(source, destination):
            pair = _type(source), _type(destination)
        case StreamIn(stream, tensor) | StreamOut(tensor, stream):
            pair = f"{dtype_name(stream.dtype)}{list(stream.shape)}", _type(tensor)
        case RemoteIn(buffer, tensor, offset) | RemoteOut(tensor, buffer, offset):
            pair = _remote_type(buffer, offset), _type(tensor)
        case Decision():
            pair = _one_of(node.decider_dtypes, node.decider)
    if pair and pair[0] != pair[1]:
        where = getattr(node, "origin", None)
        what = f"{type(node).__name__} has another dtype or shape"
        yield VerifyError("type-mismatch", what, where=where, expected=pair[0], got=pair[1])


def _one_of(dtypes: tuple[np.dtype, ...], tensor: Tensor) -> tuple[str, str]:
    """What a scalar of one of some dtypes is called, the first where it has none of them, and what a tensor is."""
    expected = tensor.dtype if tensor.dtype in dtypes else dtypes[0]
    return f"one {expected}", f"{'one' if tensor.size == 1 else tensor.size} {dtype_name(tensor.dtype)}"


def _remote_type(buffer: RemoteBuffer, offset: Tensor | None) -> str:
    """The type of a tensor that some rows of a buffer, or all of them, move to or from."""
    if offset is not None and (offset.ndim != 1 or offset.dtype not in _ROW_DTYPES):
        return f"rows named by int32 or uint32[rows], not by {_type(offset)}"
    held = buffer.memory
    shape = held.shape if offset is None else (offset.size, *held.shape[1:])
    return f"{dtype_name(held.dtype)}{list(shape)}"


def _type(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def missing_tile(facts: Facts) -> Iterator[VerifyError]:
    """Every vertex is on a tile there is."""
    num_tiles = facts.graph.target.num_tiles
    checked: set[int] = set()
    for compute_set, group in facts.groups():
        tile = group.tile
        if id(tile) in checked or not tile.size:
            continue
        checked.add(id(tile))
        if tile.max() >= num_tiles or tile.min() < -1:
            what = f"{group.codelet.name} in {compute_set.name} has vertices on tiles the target lacks"
            expected, got = f"0 … {num_tiles - 1}", f"{tile.min()} … {tile.max()}"
            yield VerifyError("missing-tile", what, where=group.origin, expected=expected, got=got)


def read_only_output(facts: Facts) -> Iterator[VerifyError]:
    """What is written is neither a constant nor a view that shows an element twice."""
    written: list[tuple[Tensor, Connection | Program]] = [
        (connection.access.tensor, connection) for connection in facts.fields() if connection.field.is_written
    ]
    written += [(tensor, node) for node in facts.nodes for tensor in node.writes]
    for tensor, what in written:
        constant = next((v for v in tensor.variables() if v.is_constant), None)
        if constant is not None:
            message = f"{_writer(what)} writes to the constant {constant!r}"
            yield VerifyError("read-only-output", message, where=where(what))
        elif not (tensor.is_whole_variable or tensor.is_writable):
            message, got = f"{_writer(what)} writes to {tensor!r}", "a broadcast or overlapping pieces"
            yield VerifyError("read-only-output", message, where=where(what), got=got)


def _writer(what: Connection | Program) -> str:
    """What writes, as messages call it."""
    match what:
        case Copy() | CrossReplicaCopy():
            return f"copy {what.name}"
        case StreamIn():
            return f"stream {what.stream.name}"
        case RemoteIn():
            return f"remote buffer {what.buffer.name}"
        case WriteUndef():
            return "WriteUndef"
    return str(what)


def out_of_tensor(facts: Facts) -> Iterator[VerifyError]:
    """No index leaves its tensor, or falls between its elements, unless the access says what that reads."""
    for connection in facts.fields():
        access, writes = connection.access, connection.field.is_written
        if access.fill is not None and not writes:
            continue
        shape = access.tensor.shape
        inside = all(_inside(connection.group, dim, n) for dim, n in zip(access.dims, shape, strict=True))
        if not inside and _any_fill(connection):
            expected = "indices inside of it" if writes else "indices inside of it, or a fill"
            what = f"{connection} reaches out of {access.tensor!r}"
            yield VerifyError("out-of-tensor", what, where=connection.where, expected=expected, got=_range(connection))


def index_range(group: VertexGroup, dim: Dim) -> tuple[int, int]:
    """Least and greatest index, before division, that any block of the grid names; the grid is not empty."""
    low = high = dim.offset
    for term in dim.terms:
        axis = group.axes[term.axis]
        far = term.coeff * ((axis.blocks if term.unit == "block" else axis.extent) - 1)
        low, high = low + min(0, far), high + max(0, far)
    return low, high


def _inside(group: VertexGroup, dim: Dim, size: int) -> bool:
    low, high = index_range(group, dim)
    return dim.divisor == 1 and low >= 0 and high < size


def _any_fill(connection: Connection) -> bool:
    """Whether a block of a vertex that exists holds fill."""
    box = boxes(connection.group, connection.access)
    divided = np.array([dim.divisor > 1 for dim in connection.access.dims], bool)
    between = (box.length > 1) & divided
    return bool((box.pad_low > 0).any() or (box.pad_high > 0).any() or between.any())


def _range(connection: Connection) -> str:
    ranges = [index_range(connection.group, dim) for dim in connection.access.dims]
    divisors = [f" / {dim.divisor}" if dim.divisor > 1 else "" for dim in connection.access.dims]
    return ", ".join(f"({low} … {high}){by}" for (low, high), by in zip(ranges, divisors, strict=True))
