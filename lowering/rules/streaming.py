"""Rules for what moves between tiles and streaming memory.

A tensor of a remote buffer's memory stands for what lies there; no tile holds it. What is loaded lies where its first
user wants it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ipujax.lowering.layout import MemoryOrder, map_linearly
from ipujax.lowering.rules.context import Context, Rule
from ipujax.runtime.graph import RemoteBuffer, RemoteIn, RemoteOut
from ipujax.runtime.tensor import Tensor


def remote_load_rule(ctx: Context, remote: Tensor, *, in_groups: bool) -> Tensor:
    """Moves a whole buffer, or the rows of it that the tensor shows, to the chip."""
    loaded = MemoryOrder.for_argument(remote.shape, in_groups).add_variable(ctx.graph, remote.dtype, ctx.name)
    ctx.prog.add(RemoteIn(_buffer(ctx, remote), loaded, _rows_of(ctx, remote), ctx.graph.origin))
    return loaded


def remote_rows_rule(ctx: Context, remote: Tensor, rows: Tensor) -> Tensor:
    """Moves rows to the chip."""
    loaded = ctx.graph.add_variable((*rows.shape, *remote.shape[1:]), remote.dtype, ctx.name)
    map_linearly(ctx.graph, rows)
    ctx.prog.add(RemoteIn(_buffer(ctx, remote), loaded, rows, ctx.graph.origin))
    return loaded


def remote_store_rule(ctx: Context, remote: Tensor, value: Tensor) -> Tensor:
    """Moves a value into a buffer, or into the rows of it that the tensor shows."""
    map_linearly(ctx.graph, value)
    ctx.prog.add(RemoteOut(value, _buffer(ctx, remote), _rows_of(ctx, remote), ctx.graph.origin))
    return remote


def remote_put_rule(ctx: Context, value: Tensor) -> Tensor:
    """Moves a value into a buffer of its own."""
    map_linearly(ctx.graph, value)
    buffer = ctx.graph.add_off_chip(value.shape, value.dtype, ctx.name)
    ctx.prog.add(RemoteOut(value, buffer, None, ctx.graph.origin))
    return Tensor.of(buffer.memory)


def remote_update_rule(ctx: Context, remote: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Moves a value into rows of a buffer."""
    for tensor in (rows, values):
        map_linearly(ctx.graph, tensor)
    ctx.prog.add(RemoteOut(values, _buffer(ctx, remote), rows, ctx.graph.origin))
    return remote


def _buffer(ctx: Context, remote: Tensor) -> RemoteBuffer:
    (memory,) = remote.variables()
    return ctx.graph.off_chip[memory]


def _rows_of(ctx: Context, remote: Tensor) -> Tensor | None:
    """The numbers of the rows that a tensor shows of its buffer, None for all of them."""
    if remote.is_whole_variable:
        return None
    assert remote.affine is not None, "rows that lie one after the other"
    first = remote.affine.offset // max(1, int(np.prod(remote.shape[1:])))
    rows = ctx.graph.add_constant(np.arange(first, first + remote.shape[0], dtype=np.int32), "rows")
    map_linearly(ctx.graph, rows)
    return rows


RULES: Mapping[str, Rule] = {
    "remote_load": remote_load_rule,
    "remote_put": remote_put_rule,
    "remote_rows": remote_rows_rule,
    "remote_store": remote_store_rule,
    "remote_update": remote_update_rule,
}
