"""Rules of the verifier on single mappings, types, tiles, writes, and the range of an index.

Each rule takes an `Inventory` and yields errors. All are O(rank) for an access, except that an index which may leave
its tensor is tested block by block.
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
    tile_gap,
    vertex_blocks,
)
from ipujax.runtime.tensor import Tensor, check_mapping, dtype_name
from ipujax.runtime.verify.inventory import Connection, Inventory, origin_of

# Poplar names rows of a remote buffer by unsigned int; JAX's index arrays are int32.
_ROW_DTYPES = (np.dtype(np.int32), np.dtype(np.uint32))


def unknown_compute_set(inventory: Inventory) -> Iterator[VerifyError]:
    """Every compute set that runs belongs to the graph."""
    for node in inventory.nodes:
        if isinstance(node, Execute) and node.compute_set not in inventory.connections:
            message = f"compute set {node.compute_set.name} is not of this graph"
            yield VerifyError("unknown-compute-set", message, where=node.compute_set.origin)


def foreign_tensor(inventory: Inventory) -> Iterator[VerifyError]:
    """Every variable that is read or written is of the graph."""
    graph = inventory.graph
    for tensor, user in inventory.tensors():
        # Whatever is mapped is of the graph, so that its list of variables is searched only for an error.
        for variable in (v for v in tensor.variables() if v not in graph.mappings and v not in graph.variables):
            yield VerifyError(
                "foreign-tensor",
                f"{variable!r} belongs to another graph",
                where=origin_of(user),
                expected="tensors, streams and compute sets of one graph",
                got=f"a variable added at {variable.origin.line or 'no known line'}",
            )


def unmapped_variable(inventory: Inventory) -> Iterator[VerifyError]:
    """Every variable that is read or written has a tile mapping."""
    mappings = inventory.graph.mappings
    for tensor, user in inventory.tensors():
        for variable in tensor.variables():
            if variable not in mappings:
                gap = tile_gap(inventory.graph, variable)
                where = origin_of(user)
                details = {"expected": gap.expected, "got": gap.got, "hint": gap.hint}
                yield VerifyError("unmapped-variable", gap.what, where=where, **details)


def mapping(inventory: Inventory) -> Iterator[VerifyError]:
    """Every tile mapping has each element of its variable once, on tiles of the target."""
    num_tiles = inventory.graph.target.num_tiles
    # Many variables share one mapping. The graph keeps all of them alive, so an id is not used twice.
    checked: set[tuple[int, tuple[int, ...]]] = set()
    for variable, tile_mapping in inventory.graph.mappings.items():
        key = (id(tile_mapping), variable.shape)
        if key not in checked:
            checked.add(key)
            try:
                check_mapping(tile_mapping, variable.shape, num_tiles, repr(variable))
            except MappingError as error:
                yield VerifyError("mapping", error.what, where=variable.origin, expected=error.expected, got=error.got)


def type_mismatch(inventory: Inventory) -> Iterator[VerifyError]:
    """Connected tensors agree in dtype and shape; grid, cuts and accesses of a group agree with each other."""
    checked_cuts: set[int] = set()
    for compute_set, group in inventory.groups():
        fault = _find_fault(group, checked_cuts)
        if fault:
            yield VerifyError(
                "type-mismatch", f"{group.codelet.name} in {compute_set.name}: {fault}", where=group.origin
            )
    for connection in inventory.fields():
        field = connection.field
        access = connection.access
        if access.tensor.dtype != field.dtype:
            yield VerifyError(
                "type-mismatch",
                f"{connection} has the wrong dtype",
                where=connection.origin,
                expected=dtype_name(field.dtype),
                got=dtype_name(access.tensor.dtype),
            )
        if len(access.dims) != access.tensor.ndim:
            yield VerifyError(
                "type-mismatch",
                f"{connection} has another rank",
                where=connection.origin,
                expected=f"{access.tensor.ndim} indices",
                got=len(access.dims),
            )
    for node in inventory.nodes:
        yield from _node_types(node)


def _find_fault(group: VertexGroup, checked_cuts: set[int]) -> str | None:
    """Return the first disagreement inside a group, or None; add the ids of its cuts to `checked_cuts`."""
    if len(group.accesses) != len(group.codelet.fields):
        return f"{len(group.codelet.fields)} fields, {len(group.accesses)} connected"
    if group.tile.shape != group.grid:
        return f"a grid of {list(group.grid)} blocks, tiles for {list(group.tile.shape)}"
    for axis in group.axes:
        # Groups of one plan share the arrays of their cuts, which may be long.
        if id(axis.cuts) not in checked_cuts:
            checked_cuts.add(id(axis.cuts))
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
    """Yield an error if both ends of a transfer, or a decision and its tensor, differ in shape or dtype."""
    pair: tuple[str, str] | None = None
    match node:
        case Copy(source, destination) | CrossReplicaCopy(source, destination):
            pair = _type(source), _type(destination)
        case StreamIn(stream, tensor) | StreamOut(tensor, stream):
            pair = f"{dtype_name(stream.dtype)}{list(stream.shape)}", _type(tensor)
        case RemoteIn(buffer, tensor, offset) | RemoteOut(tensor, buffer, offset):
            pair = _remote_type(buffer, offset), _type(tensor)
        case Decision():
            pair = _decider_types(node.decider_dtypes, node.decider)
    if pair and pair[0] != pair[1]:
        message = f"{type(node).__name__} has the wrong dtype or shape"
        yield VerifyError("type-mismatch", message, where=origin_of(node), expected=pair[0], got=pair[1])


def _decider_types(dtypes: tuple[np.dtype, ...], tensor: Tensor) -> tuple[str, str]:
    """Return the type that a decision expects, a scalar of one of some dtypes, and that of its tensor."""
    expected = tensor.dtype if tensor.dtype in dtypes else dtypes[0]
    return f"one {expected}", f"{'one' if tensor.size == 1 else tensor.size} {dtype_name(tensor.dtype)}"


def _remote_type(buffer: RemoteBuffer, offset: Tensor | None) -> str:
    """Return the type of a tensor that is copied to or from the rows `offset` of a buffer; None means all rows."""
    if offset is not None and (offset.ndim != 1 or offset.dtype not in _ROW_DTYPES):
        return f"rows named by int32 or uint32[rows], not by {_type(offset)}"
    memory = buffer.memory
    shape = memory.shape if offset is None else (offset.size, *memory.shape[1:])
    return f"{dtype_name(memory.dtype)}{list(shape)}"


def _type(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def missing_tile(inventory: Inventory) -> Iterator[VerifyError]:
    """Every vertex is on a tile of the target."""
    num_tiles = inventory.graph.target.num_tiles
    checked: set[int] = set()
    for compute_set, group in inventory.groups():
        tile = group.tile
        if id(tile) in checked or not tile.size:
            continue
        checked.add(id(tile))
        if tile.max() >= num_tiles or tile.min() < -1:
            message = f"{group.codelet.name} in {compute_set.name} has vertices on tiles the target lacks"
            got = f"{tile.min()} … {tile.max()}"
            yield VerifyError("missing-tile", message, where=group.origin, expected=f"0 … {num_tiles - 1}", got=got)


def read_only_output(inventory: Inventory) -> Iterator[VerifyError]:
    """No constant is written, nor a view that shows an element twice."""
    written: list[tuple[Tensor, Connection | Program]] = [
        (connection.access.tensor, connection) for connection in inventory.fields() if connection.field.is_written
    ]
    written += [(tensor, node) for node in inventory.nodes for tensor in node.writes]
    for tensor, writer in written:
        constant = next((v for v in tensor.variables() if v.is_constant), None)
        if constant is not None:
            message = f"{_writer_name(writer)} writes to the constant {constant!r}"
            yield VerifyError("read-only-output", message, where=origin_of(writer))
        elif not (tensor.is_whole_variable or tensor.is_writable):
            message = f"{_writer_name(writer)} writes to {tensor!r}"
            got = "a broadcast or overlapping pieces"
            yield VerifyError("read-only-output", message, where=origin_of(writer), got=got)


def _writer_name(writer: Connection | Program) -> str:
    """Return the name of a field or a step that writes, as messages have it."""
    match writer:
        case Copy() | CrossReplicaCopy():
            return f"copy {writer.name}"
        case StreamIn():
            return f"stream {writer.stream.name}"
        case RemoteIn():
            return f"remote buffer {writer.buffer.name}"
        case WriteUndef():
            return "WriteUndef"
    return str(writer)


def out_of_tensor(inventory: Inventory) -> Iterator[VerifyError]:
    """No index leaves its tensor, or falls between its elements, unless the access is a read that has a fill."""
    for connection in inventory.fields():
        access = connection.access
        writes = connection.field.is_written
        if access.fill is not None and not writes:
            continue
        shape = access.tensor.shape
        inside = all(_is_inside(connection.group, dim, n) for dim, n in zip(access.dims, shape, strict=True))
        # The range of a whole grid may leave the tensor only in blocks that have no vertex.
        if not inside and _reads_fill(connection):
            expected = "indices inside of it" if writes else "indices inside of it, or a fill"
            message = f"{connection} reaches out of {access.tensor!r}"
            got = _range_text(connection)
            yield VerifyError("out-of-tensor", message, where=connection.origin, expected=expected, got=got)


def _index_range(group: VertexGroup, dim: Dim) -> tuple[int, int]:
    """Return the lowest and highest index, before division, of all blocks; the grid must not be empty."""
    low = high = dim.offset
    for term in dim.terms:
        axis = group.axes[term.axis]
        far = term.coeff * ((axis.blocks if term.unit == "block" else axis.extent) - 1)
        low += min(0, far)
        high += max(0, far)
    return low, high


def _is_inside(group: VertexGroup, dim: Dim, size: int) -> bool:
    low, high = _index_range(group, dim)
    return dim.divisor == 1 and low >= 0 and high < size


def _reads_fill(connection: Connection) -> bool:
    blocks = vertex_blocks(connection.group, connection.access)
    is_divided = np.array([dim.divisor > 1 for dim in connection.access.dims], bool)
    # With a divisor, two neighbouring elements have fill between them.
    between = (blocks.length > 1) & is_divided
    return bool((blocks.pad_low > 0).any() or (blocks.pad_high > 0).any() or between.any())


def _range_text(connection: Connection) -> str:
    ranges = [_index_range(connection.group, dim) for dim in connection.access.dims]
    divisors = [f" / {dim.divisor}" if dim.divisor > 1 else "" for dim in connection.access.dims]
    return ", ".join(f"({low} … {high}){by}" for (low, high), by in zip(ranges, divisors, strict=True))
