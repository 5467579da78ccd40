"""Rows of what lies off chip that a loop reads one by one: each iteration moves its own.

With I/O tiles, these fetch the row of the next iteration while one computes: a row lies on them, and one on the tiles
that compute.
Limits: one iteration ahead, whatever `Options.prefetch_depth` says: a link moves one row after the other.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ipujax.lowering.layout import MemoryOrder, linear_mapping, map_linearly
from ipujax.lowering.popops import advance, new_counter
from ipujax.lowering.rules.base.context import Context
from ipujax.runtime.graph import Copy, Graph, RemoteIn, RemoteOut, Sequence as ProgramSequence, Wait
from ipujax.runtime.tensor import Tensor, element_bytes

_MOST_SHARE = 4  # of the memory of I/O tiles, what a row may take: a quarter


def add_on_io_tiles(ctx: Context, order: MemoryOrder, dtype: Any) -> Tensor:
    """A variable on the tiles that only move data, in the order in which it is kept elsewhere, so in few pieces."""
    io_view = ctx.graph.io_view
    assert io_view is not None, "there are I/O tiles"
    mapping = linear_mapping(io_view, prod(order.shape), dtype)
    return order.of_view(io_view.add_variable(order.variable_shape, dtype, f"{ctx.name}/moved", mapping))


def is_off_chip(ctx: Context, stack: Tensor) -> bool:
    """Whether a stack lies off chip."""
    return not set(ctx.graph.off_chip).isdisjoint(stack.variables())


def store_rows(ctx: Context, body: ProgramSequence, row: Tensor, counter: Tensor, rows: int) -> Tensor:
    """A stack in streaming memory, of which each iteration of a loop stores a row.

    Args:
        ctx: surroundings of the loop.
        body: what runs in an iteration.
        row: what it leaves.
        counter: the number of its row.
        rows: how many there are.
    """
    buffer = ctx.graph.add_off_chip((rows, *row.shape), row.dtype, f"{ctx.name}/rows")
    map_linearly(ctx.graph, row)
    body.add(RemoteOut(row.reshape((1, *row.shape)), buffer, counter.reshape((1,)), ctx.graph.origin))
    return Tensor.of(buffer.memory)


class RowStreams:
    """The rows that one loop reads.

    Args:
        ctx: surroundings of the loop.
        body: what runs in an iteration.
        counter: the row of the iteration.
        start: the first row.
        step: from one row to the next.
    """

    def __init__(self, ctx: Context, body: ProgramSequence, counter: Tensor, start: int, step: int) -> None:
        self._ctx, self._body, self._counter, self._step = ctx, body, counter, step
        self._ahead = new_counter(ctx.graph, start, ctx.prog, ctx.name) if ctx.graph.io_view is not None else None
        self._fetched = list[tuple[Tensor, Tensor]]()  # stacks, and where I/O tiles have a row of each

    def row(self, stack: Tensor, in_groups: bool) -> Tensor:
        """The row of a stack in an iteration.

        Args:
            stack: all of what lies off chip.
            in_groups: whether tiles keep the row with its columns in groups.
        """
        ctx, io_view = self._ctx, self._ctx.graph.io_view
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
            advance(self._ctx.graph, self._ahead, self._step, prog, self._ctx.name)

    def finish(self) -> None:
        """Waits for what has been fetched beyond the end."""
        for _, fetched in self._fetched:
            self._ctx.prog.add(Wait(fetched, self._ctx.graph.origin))

    def _transfer(self, stack: Tensor, row: Tensor, number: Tensor, *, overlaps: bool = False) -> RemoteIn:
        (memory,) = stack.variables()
        buffer, graph = self._ctx.graph.off_chip[memory], self._ctx.graph
        return RemoteIn(buffer, row.reshape((1, *row.shape)), number.reshape((1,)), graph.origin, overlaps)


def _fits(io_view: Graph, row: Tensor) -> bool:
    there = io_view.target.tiles_per_ipu * io_view.target.bytes_per_tile
    return _MOST_SHARE * row.size * element_bytes(row.dtype) <= there
