"""Rules for exchange with the host: streaming memory, and calls of Python functions from a program.

A tensor of a remote buffer's memory stands for the buffer; no tile has it. A loaded value is mapped by its first
user.

Prints and callbacks are host exchanges in program order. A control program has one order, so calls that JAX leaves
unordered are ordered too. A function gets keys as words of 32 bits, as by JAX, and JAX lets none return keys. Results
of 64 bits, such as Python's numbers, are narrowed to 32 where JAX has no 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.random import key_data

from ipujax.lowering.host_rows import on_io_tiles
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.layout import MemoryOrder, map_linearly, memory_order
from ipujax.lowering.replicas import HOST_CALLS
from ipujax.lowering.rules.base.context import Context, Rule, composed
from ipujax.runtime.graph import Copy, RemoteBuffer, RemoteIn, RemoteOut, StreamIn, StreamOut, Wait
from ipujax.runtime.host import CallStream, HostCall
from ipujax.runtime.tensor import Tensor, is_key_dtype


def callback_rule(ctx: Context, *operands: Tensor, sharing: int = 1, **params: Any) -> Sequence[Tensor]:
    """Lowers `pure_callback`, `io_callback`, `debug.callback` and `debug.print`."""
    operands = tuple(composed(ctx, key_data, [x])[0] if is_key_dtype(x.dtype) else x for x in operands)
    graph = ctx.graph
    prog = ctx.prog
    # JAX's wrapper of the user's function; for debugging the primitive's eager implementation, which also formats.
    fun = partial(ctx.primitive.impl, **params) if "debug" in ctx.primitive.name else params["callback"]
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        fun = partial(_narrowed, fun)
    if not operands:  # an operand tells the host when to call
        operands = (graph.add_constant(np.ones((), bool), ctx.name),)
        fun = partial(_without_operand, fun)
    results = tuple((tuple(aval.shape), aval.dtype) for aval in ctx.out_avals)
    is_pure = ctx.primitive.name == "pure_callback"
    call = HostCall(ctx.name, fun, len(operands), results, graph.origin, sharing, is_pure)
    for number, tensor in enumerate(operands):
        map_linearly(graph, tensor)
        stream = CallStream(f"{ctx.name}/operand{number}", tensor.shape, tensor.dtype, call=call, number=number)
        prog.add(StreamOut(tensor, stream, graph.origin))
    outs = []
    for number, (shape, dtype) in enumerate(results):
        outs.append(graph.add_variable(shape, dtype, f"{ctx.name}/result{number}"))
        map_linearly(graph, outs[-1])
        stream = CallStream(f"{ctx.name}/result{number}", shape, dtype, call=call, number=number)
        prog.add(StreamIn(stream, outs[-1], graph.origin))
    return outs


_NARROWED = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}


def _narrowed(fun: Any, *operands: Any) -> Sequence[Any]:
    results = [np.asarray(value) for value in fun(*operands)]
    return [value.astype(_NARROWED.get(value.dtype.name, value.dtype), copy=False) for value in results]


def _without_operand(fun: Any, _: Any) -> Sequence[Any]:
    return fun()


def call_once_rule(ctx: Context, *operands: Tensor, jaxpr: ClosedJaxpr, sharing: int) -> Sequence[Tensor]:
    """Lowers a call that groups of replicas make together, the one equation of the jaxpr."""
    (eqn,) = jaxpr.eqns
    name = ctx.name.removesuffix(ctx.primitive.name) + eqn.primitive.name
    return callback_rule(replace(ctx, name=name, equation=eqn), *operands, sharing=sharing, **eqn.params)


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
    """Loads rows of a buffer."""
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
    io_view = ctx.graph.io_view
    overlaps = io_view is not None and io_view.is_mapped(value)
    if not overlaps:
        map_linearly(ctx.graph, value)
    ctx.prog.add(RemoteOut(value, buffer, rows, ctx.graph.origin, overlaps))


def _buffer(ctx: Context, remote: Tensor) -> RemoteBuffer:
    (memory,) = remote.variables()
    return ctx.graph.off_chip[memory]


def _rows_of(ctx: Context, remote: Tensor) -> Tensor | None:
    """Numbers of the rows of its buffer that a tensor views, None for all of them."""
    if remote.is_whole_variable:
        return None
    assert remote.affine is not None, "consecutive rows"
    first = remote.affine.offset // max(1, int(np.prod(remote.shape[1:])))
    rows = ctx.graph.add_constant(np.arange(first, first + remote.shape[0], dtype=np.int32), "rows")
    map_linearly(ctx.graph, rows)
    return rows


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(HOST_CALLS, callback_rule),
    "call_once": call_once_rule,
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
