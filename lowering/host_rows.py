"""Rows off chip that tiles read or write one at a time: micro-batches, or rows of a stack in a loop.

    load    before each use a transfer from the buffer; with I/O tiles a copy of the row that they have fetched, then
            their fetch of the next row, which overlaps the use
    store   after each use a transfer to the buffer; with I/O tiles a copy to them, then their transfer, which overlaps
            what follows

Input: a buffer off chip, the variable of a row, and its number. Output: a `RowMove`, the parts of a program.
Limits: one row ahead, for any `Options.prefetch_depth`: a link moves one row after the other. A row that takes more
than a quarter of the memory of the I/O tiles goes straight to the tiles that compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np

from ipujax.lowering.layout import MemoryOrder, linear_mapping, map_linearly, memory_order
from ipujax.runtime.graph import Copy, Graph, Program, RemoteBuffer, RemoteIn, RemoteOut, Wait
from ipujax.runtime.tensor import Tensor, Variable, element_bytes, on_one_tile

Task = TypeVar("Task")
_MOST_SHARE = 4  # assumed: a row may take a quarter of the memory of I/O tiles


@dataclass(frozen=True, slots=True, eq=False)
class RowMove:
    """Parts of a program that move a row in each iteration.

    Args:
        row: the row on the tiles that compute.
        first: fetch of the first row, before all iterations.
        copies: copies between these tiles and I/O tiles, in each iteration.
        transfers: transfers from or to the buffer, after the copies.
        last: wait for the transfers that are under way after all iterations.
    """

    row: Tensor
    first: tuple[Program, ...] = ()
    copies: tuple[Program, ...] = ()
    transfers: tuple[Program, ...] = ()
    last: tuple[Program, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TaskMoves(Generic[Task]):
    """Rows that go with the tasks of a schedule: loaded before a task, or stored after it.

    Transfers of several tasks that start together follow each other, so that they are one host exchange.
    """

    loads: dict[Task, list[RowMove]] = field(default_factory=dict)
    stores: dict[Task, list[RowMove]] = field(default_factory=dict)

    def first(self) -> list[Program]:
        """Steps before all tasks."""
        return [step for move in self._all() for step in move.first]

    def last(self) -> list[Program]:
        """Steps after all tasks."""
        return [step for move in self._all() for step in move.last]

    def before(self, tasks: Iterable[Task]) -> list[Program]:
        """Steps before tasks that start together."""
        return _copies_then_transfers([move for task in tasks for move in self.loads.get(task, ())])

    def after(self, tasks: Iterable[Task]) -> list[Program]:
        """Steps after tasks that have started together."""
        return _copies_then_transfers([move for task in tasks for move in self.stores.get(task, ())])

    def _all(self) -> Iterator[RowMove]:
        for moves in (*self.loads.values(), *self.stores.values()):
            yield from moves


def _copies_then_transfers(moves: Sequence[RowMove]) -> list[Program]:
    copies = [step for move in moves for step in move.copies]
    return [*copies, *(step for move in moves for step in move.transfers)]


def load_of_batch(
    graph: Graph, name: str, batch: Tensor, in_groups: bool, number: Tensor, ahead: Callable[[], Tensor]
) -> RowMove:
    """Steps that load a micro-batch from streaming memory in each iteration of a loop, with I/O tiles one ahead.

    The caller adds them to the loop, and before and after it.

    Args:
        graph: the graph, or the view of one IPU.
        name: debug name.
        batch: all micro-batches along the first dimension, a view of a buffer off chip in which each is a row.
        in_groups: whether the columns of a micro-batch are stored in groups, as products read them.
        number: number of the iteration's micro-batch, int32[].
        ahead: counter of the micro-batch after that, int32[]; called with I/O tiles only.
    """
    (memory,) = batch.variables()
    buffer = graph.off_chip[memory]
    shape = (batch.shape[0] // memory.shape[0], *batch.shape[1:])
    row = MemoryOrder.for_argument(shape, in_groups).add_variable(graph, batch.dtype, name)
    graph.note_role(row, graph.role_of(batch))
    if not takes_row(graph, row):  # I/O tiles are missing, or too small
        return RowMove(row, transfers=(RemoteIn(buffer, as_row_of(memory, row), _one(number), graph.origin),))
    # I/O tiles fetch the first micro-batch before the loop, and in each iteration the next one while others compute.
    fetched = on_io_tiles(graph, name, memory_order(row) or MemoryOrder.own(row.shape), row.dtype)
    start = graph.add_constant(np.zeros(1, np.int32), "first row", on_one_tile(1, 0))
    rows = as_row_of(memory, fetched)
    first, following = (RemoteIn(buffer, rows, at, graph.origin, overlaps=True) for at in (start, _one(ahead())))
    copy = Copy(fetched, row, f"{name}/row", graph.origin)
    return RowMove(row, first=(first,), copies=(copy,), transfers=(following,), last=(Wait(fetched, graph.origin),))


def store_of_stack(
    graph: Graph, name: str, row: Tensor, rows: int, number: Tensor, *, on_host: bool
) -> tuple[Tensor, RowMove]:
    """Adds a stack off chip; returns it, [rows, …], and the steps that store a row in each iteration of a loop.

    Args:
        graph: the graph, or the view of one IPU.
        name: debug name.
        row: the row on the tiles that compute.
        rows: number of rows of the stack.
        number: number of the iteration's row, int32[].
        on_host: whether the stack is in the host's memory, see `RemoteBuffer`.
    """
    map_linearly(graph, row)
    buffer = graph.add_off_chip((rows, *row.shape), row.dtype, f"{name}/rows", on_host=on_host)
    return Tensor.of(buffer.memory), _move_to_buffer(graph, name, row, buffer, number)


def _move_to_buffer(graph: Graph, name: str, row: Tensor, buffer: RemoteBuffer, number: Tensor) -> RowMove:
    if not takes_row(graph, row):
        return RowMove(row, transfers=(RemoteOut(_one(row), buffer, _one(number), graph.origin),))
    handed = on_io_tiles(graph, name, memory_order(row) or MemoryOrder.own(row.shape), row.dtype)
    copy = Copy(row, handed, f"{name}/row", graph.origin)
    transfer = RemoteOut(_one(handed), buffer, _one(number), graph.origin, overlaps=True)
    return RowMove(row, copies=(copy,), transfers=(transfer,), last=(Wait(handed, graph.origin),))


def on_io_tiles(graph: Graph, name: str, order: MemoryOrder, dtype: Any) -> Tensor:
    """Adds a variable on I/O tiles in the memory order of its other copy, so that it moves in few pieces."""
    io_view = graph.io_view
    assert io_view is not None, "there are I/O tiles"
    mapping = linear_mapping(io_view, prod(order.shape), dtype)
    return order.of_view(io_view.add_variable(order.variable_shape, dtype, f"{name}/moved", mapping))


def takes_row(graph: Graph, row: Tensor) -> bool:
    """True if there are I/O tiles that have room for a row."""
    if graph.io_view is None:
        return False
    target = graph.io_view.target
    return _MOST_SHARE * row.size * element_bytes(row.dtype) <= target.tiles_per_ipu * target.bytes_per_tile


def as_row_of(memory: Variable, row: Tensor) -> Tensor:
    """A row in the shape that it has in a buffer, which may be that of another view."""
    return row.reshape((1, *memory.shape[1:]))


def _one(row: Tensor) -> Tensor:
    """A row as an array of one row."""
    return row.reshape((1, *row.shape))
