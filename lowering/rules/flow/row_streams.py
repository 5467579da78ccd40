"""Rows of a stack in streaming memory that a loop reads or writes, one in each iteration.

With I/O tiles, these fetch the row of the next iteration while the current one computes: one row is on the I/O
tiles, one on the tiles that compute.
Limits: one iteration ahead, for any `Options.prefetch_depth`: a link moves one row after the other.
"""

from __future__ import annotations

from ipujax.lowering.host_rows import RowMove, as_row_of, on_io_tiles, store_of_stack, takes_row
from ipujax.lowering.layout import MemoryOrder
from ipujax.lowering.popops import advance, new_counter
from ipujax.lowering.rules.base.context import Context
from ipujax.runtime.graph import Builder, Copy, RemoteIn, Sequence as ProgramSequence, Wait
from ipujax.runtime.tensor import Tensor


def is_off_chip(ctx: Context, stack: Tensor) -> bool:
    """True for a stack in streaming memory."""
    return not set(ctx.graph.off_chip).isdisjoint(stack.variables())


def store_rows(
    ctx: Context, body: ProgramSequence, row: Tensor, counter: Tensor, rows: int, *, on_host: bool
) -> tuple[Tensor, RowMove]:
    """Adds a stack of `rows` off chip, of which `body` stores row `counter` in each iteration."""
    stack, stores = store_of_stack(ctx.graph, ctx.name, row, rows, counter, on_host=on_host)
    for step in (*stores.copies, *stores.transfers):
        body.add(step)
    return stack, stores


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
        row = MemoryOrder.for_argument(stack.shape[1:], in_groups).add_variable(ctx.graph, stack.dtype, ctx.name)
        if not takes_row(ctx.graph, row):
            self._body.add(self._transfer(stack, row, self._counter))
            return row
        fetched = on_io_tiles(ctx.graph, ctx.name, MemoryOrder.for_argument(row.shape, in_groups), row.dtype)
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
        return RemoteIn(buffer, as_row_of(memory, row), number.reshape((1,)), graph.origin, overlaps)
