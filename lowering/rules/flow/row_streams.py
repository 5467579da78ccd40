"""Rows of a stack in streaming memory that a loop reads or writes, one in each iteration.

With I/O tiles, these fetch the row of the next iteration while the current one computes: one row is on the I/O
tiles, one on the tiles that compute.
Limits: one iteration ahead, for any `Options.prefetch_depth`: a link moves one row after the other.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ipujax.lowering.layout import MemoryOrder, linear_mapping, map_linearly
from ipujax.lowering.popops import advance, new_counter
from ipujax.lowering.rules.base.context import Context
from ipujax.runtime.graph import Builder, Copy, Graph, RemoteIn, RemoteOut, Sequence as ProgramSequence, Wait
from ipujax.runtime.tensor import Tensor, element_bytes

_MOST_SHARE = 4  # a row may take a quarter of the memory of I/O tiles


def add_on_io_tiles(ctx: Context, order: MemoryOrder, dtype: Any) -> Tensor:
    """Adds a variable on I/O tiles in the memory order of its other copy, so that it moves in few pieces."""
    io_view = ctx.graph.io_view
    assert io_view is not None, "there are I/O tiles"
    mapping = linear_mapping(io_view, prod(order.shape), dtype)
    return order.of_view(io_view.add_variable(order.variable_shape, dtype, f"{ctx.name}/moved", mapping))


def is_off_chip(ctx: Context, stack: Tensor) -> bool:
    """True for a stack in streaming memory."""
    return not set(ctx.graph.off_chip).isdisjoint(stack.variables())


def store_rows(ctx: Context, body: ProgramSequence, row: Tensor, counter: Tensor, rows: int) -> Tensor:
    """Adds a stack of `rows` in streaming memory, of which `body` stores row `counter` in each iteration."""
    buffer = ctx.graph.add_off_chip((rows, *row.shape), row.dtype, f"{ctx.name}/rows")
    map_linearly(ctx.graph, row)
    body.add(RemoteOut(row.reshape((1, *row.shape)), buffer, counter.reshape((1,)), ctx.graph.origin))
    return Tensor.of(buffer.memory)


class RowStreams:
    """Rows of stacks that one loop reads: row `counter` in each iteration, from `start` on in steps of `step`."""

    def __init__(self, ctx: Context, body: ProgramSequence, counter: Tensor, start: int, step: int) -> None:
        self._ctx = ctx
        self._body = body
        self._counter = counter
        self._step = step
        self._ahead = new_counter(ctx.builder, start) if ctx.graph.io_view is not None else None
        self._fetched: list[tuple[Tensor, Tensor]] = []  # (stack, its row on I/O tiles)

    def row(self, stack: Tensor, in_groups: bool) -> Tensor:
        """The iteration's row of a stack in streaming memory, with its columns in groups or not."""
        ctx = self._ctx
        io_view = ctx.graph.io_view
        row = MemoryOrder.for_argument(stack.shape[1:], in_groups).add_variable(ctx.graph, stack.dtype, ctx.name)
        if io_view is None or not _fits(io_view, row):
            self._body.add(self._transfer(stack, row, self._counter))
            return row
        fetched = add_on_io_tiles(ctx, MemoryOrder.for_argument(row.shape, in_groups), row.dtype)
        self._fetched.append((stack, fetched))
        self._body.add(Copy(fetched, row, f"{ctx.name}/row", ctx.graph.origin))
        return row

    def fetch_ahead(self) -> None:
        """Fetches the first rows before the loop, and the next ones in it, behind the copies of `row`."""
        if self._ahead is None or not self._fetched:
            return
        for prog in (self._ctx.prog, self._body):
            for stack, fetched in self._fetched:
                prog.add(self._transfer(stack, fetched, self._ahead, overlaps=True))
            advance(Builder(self._ctx.graph, prog, self._ctx.name), self._ahead, self._step)

    def finish(self) -> None:
        """Waits for the rows fetched beyond the end."""
        for _, fetched in self._fetched:
            self._ctx.prog.add(Wait(fetched, self._ctx.graph.origin))

    def _transfer(self, stack: Tensor, row: Tensor, number: Tensor, *, overlaps: bool = False) -> RemoteIn:
        (memory,) = stack.variables()
        graph = self._ctx.graph
        buffer = graph.off_chip[memory]
        return RemoteIn(buffer, row.reshape((1, *row.shape)), number.reshape((1,)), graph.origin, overlaps)


def _fits(io_view: Graph, row: Tensor) -> bool:
    io_bytes = io_view.target.tiles_per_ipu * io_view.target.bytes_per_tile
    return _MOST_SHARE * row.size * element_bytes(row.dtype) <= io_bytes
