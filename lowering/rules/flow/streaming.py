"""Rules for transfers between tiles and streaming memory.

A tensor of a remote buffer's memory stands for the buffer; no tile has it. A loaded value is mapped by its first
user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ipujax.lowering.host_rows import on_io_tiles
from ipujax.lowering.layout import MemoryOrder, map_linearly, memory_order
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.runtime.graph import Copy, RemoteBuffer, RemoteIn, RemoteOut, Wait
from ipujax.runtime.tensor import Tensor


def host_put_rule(ctx: Context, value: Tensor) -> Tensor:
    """A row that the loop around it stores, see `scan_rule`; passes have replaced all other puts."""
    return value


def host_send_rule(ctx: Context, value: Tensor) -> Tensor:
    """A row that the loop around it stores in the host's memory, see `scan_rule`."""
    return value


def remote_load_rule(ctx: Context, remote: Tensor, *, in_groups: bool) -> Tensor:
    """Copies a buffer of streaming memory, or the rows of it that the tensor views, to a new variable on the chip."""
    loaded = MemoryOrder.for_argument(remote.shape, in_groups).add_variable(ctx.graph, remote.dtype, ctx.name)
    buffer = _buffer(ctx, remote)
    is_whole = remote.size == buffer.memory.size
    destination = loaded.reshape(buffer.memory.shape) if is_whole else loaded
    ctx.prog.add(RemoteIn(buffer, destination, None if is_whole else _rows_of(ctx, remote), ctx.graph.origin))
    return loaded


def remote_fetch_rule(ctx: Context, remote: Tensor, *, in_groups: bool) -> Tensor:
    """Loads to the I/O tiles, in parallel with other steps."""
    fetched = on_io_tiles(ctx.graph, ctx.name, MemoryOrder.for_argument(remote.shape, in_groups), remote.dtype)
    transfer = RemoteIn(_buffer(ctx, remote), fetched, _rows_of(ctx, remote), ctx.graph.origin, overlaps=True)
    ctx.prog.add(transfer)
    return fetched


def remote_take_rule(ctx: Context, fetched: Tensor, *, in_groups: bool) -> Tensor:
    """Copies a value from the I/O tiles that have loaded it."""
    value = MemoryOrder.for_argument(fetched.shape, in_groups).add_variable(ctx.graph, fetched.dtype, ctx.name)
    ctx.prog.add(Copy(fetched, value, ctx.name, ctx.graph.origin))
    return value


def remote_hand_rule(ctx: Context, value: Tensor) -> Tensor:
    """Copies a value to the I/O tiles that store it."""
    map_linearly(ctx.graph, value)
    handed = on_io_tiles(ctx.graph, ctx.name, memory_order(value) or MemoryOrder.own(value.shape), value.dtype)
    ctx.prog.add(Copy(value, handed, ctx.name, ctx.graph.origin))
    return handed


def remote_wait_rule(ctx: Context, handed: Tensor) -> list[Tensor]:
    """Waits until I/O tiles have stored a value."""
    ctx.prog.add(Wait(handed, ctx.graph.origin))
    return []


def remote_rows_rule(ctx: Context, remote: Tensor, rows: Tensor) -> Tensor:
    """Loads rows of a buffer in streaming memory, by their numbers `rows`, to a new variable on the chip."""
    loaded = ctx.graph.add_variable((*rows.shape, *remote.shape[1:]), remote.dtype, ctx.name)
    map_linearly(ctx.graph, rows)
    buffer = _buffer(ctx, remote)
    in_rows = loaded.reshape((*rows.shape, *buffer.memory.shape[1:]))  # the table may be a reshape of its buffer
    ctx.prog.add(RemoteIn(buffer, in_rows, rows, ctx.graph.origin))
    return loaded


def remote_store_rule(ctx: Context, remote: Tensor, value: Tensor) -> Tensor:
    """Stores a value in a buffer, or in the rows of it that the tensor views."""
    _store(ctx, value, _buffer(ctx, remote), _rows_of(ctx, remote))
    return remote


def remote_put_rule(ctx: Context, value: Tensor, *, is_result: bool) -> Tensor:
    """Stores a value in a new buffer."""
    buffer = ctx.graph.add_off_chip(value.shape, value.dtype, ctx.name, on_host=is_result)
    _store(ctx, value, buffer)
    return Tensor.of(buffer.memory)


def remote_empty_rule(ctx: Context, *, shape: Sequence[int], dtype: Any) -> Tensor:
    """New buffer without content."""
    return Tensor.of(ctx.graph.add_off_chip(shape, dtype, ctx.name).memory)


def remote_update_rule(ctx: Context, remote: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Stores a value in rows of a buffer."""
    map_linearly(ctx.graph, rows)
    _store(ctx, values, _buffer(ctx, remote), rows)
    return remote


def _store(ctx: Context, value: Tensor, buffer: RemoteBuffer, rows: Tensor | None = None) -> None:
    """Stores a value in rows of a buffer, or in all of it; from I/O tiles in parallel with other steps."""
    io_view = ctx.graph.io_view
    overlaps = io_view is not None and io_view.is_mapped(value)
    if not overlaps:
        map_linearly(ctx.graph, value)
    ctx.prog.add(RemoteOut(value, buffer, rows, ctx.graph.origin, overlaps))


def _buffer(ctx: Context, remote: Tensor) -> RemoteBuffer:
    """The buffer whose memory a tensor views."""
    (memory,) = remote.variables()
    return ctx.graph.off_chip[memory]


def _rows_of(ctx: Context, remote: Tensor) -> Tensor | None:
    """Numbers of the rows of its buffer that a tensor views, int32[rows]; None for all of them."""
    if remote.is_whole_variable:
        return None
    assert remote.affine is not None, "consecutive rows"
    first = remote.affine.offset // max(1, int(np.prod(remote.shape[1:])))
    rows = ctx.graph.add_constant(np.arange(first, first + remote.shape[0], dtype=np.int32), "rows")
    map_linearly(ctx.graph, rows)
    return rows


RULES: Mapping[str, Rule] = {
    "host_put": host_put_rule,
    "host_send": host_send_rule,
    "remote_empty": remote_empty_rule,
    "remote_fetch": remote_fetch_rule,
    "remote_hand": remote_hand_rule,
    "remote_load": remote_load_rule,
    "remote_put": remote_put_rule,
    "remote_rows": remote_rows_rule,
    "remote_store": remote_store_rule,
    "remote_take": remote_take_rule,
    "remote_update": remote_update_rule,
    "remote_wait": remote_wait_rule,
}
