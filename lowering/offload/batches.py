"""Loads and stores in batches: each exchange with streaming memory has a latency, which consecutive ones share.

Input: equations with loads and stores. Output: the same equations; loads are moved up to the first of their batch,
stores down to its end. With I/O tiles these fetch the loads of a batch while earlier ones of its IPU compute, and store
while the next one does, which waits before it hands over values of its own.
Limits: a batch occupies memory until it ends; its bytes are bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from ipujax.lowering.jax_compat import JaxprEqn, Var, new_equation
from ipujax.lowering.jaxpr import value_bytes, variables_read
from ipujax.lowering.offload.io_tiles import IoTiles, moved_bytes
from ipujax.lowering.offload.primitives import (
    remote_fetch_p,
    remote_hand_p,
    remote_load_p,
    remote_put_p,
    remote_store_p,
    remote_take_p,
    remote_wait_p,
)


def batch_transfers(eqns: Iterable[JaxprEqn], max_batch_bytes: int) -> list[JaxprEqn]:
    """The equations in an order in which loads are together, and stores, so that they share a latency."""
    return [eqn for batch in in_batches(eqns, max_batch_bytes) for eqn in batch.in_order()]


def in_batches(eqns: Iterable[JaxprEqn], max_batch_bytes: int, ipu: int = 0, step: int | None = None) -> list[Batch]:
    """Divides equations of an IPU into batches: equations whose loads run together at the begin, and stores at the end.

    Moves that follow each other share the latency of streaming memory. `step` is that of their phase, None without
    phases; a batch loads, and stores, about `max_batch_bytes`.
    """
    batches = [Batch(max_batch_bytes, ipu, step)]
    for eqn in eqns:
        if not batches[-1].can_add(eqn):
            batches.append(Batch(max_batch_bytes, ipu, step))
        batches[-1].add(eqn)
    return batches


class Batch:
    """Equations of an IPU around loads and stores that go together.

    A batch runs in this order: `early`, the equations before its first load; all loads; `between`, the other equations
    after it; all stores. Loads have at most `max_batch_bytes` unless there is a single one. The store with which stores
    exceed these bytes is the last equation.

    Args:
        max_batch_bytes: most bytes of all loads, and of all stores.
        ipu: whose equations these are.
        step: their step of phases, None without phases.
    """

    def __init__(self, max_batch_bytes: int, ipu: int, step: int | None) -> None:
        """Begins an empty batch of a step of phases; lists are in the order in which it runs."""
        self.ipu = ipu
        self.step = step
        self._max_batch_bytes = max_batch_bytes
        self.early: list[JaxprEqn] = []  # equations before the first load
        self.loads: list[JaxprEqn] = []
        self.between: list[JaxprEqn] = []  # equations after the first load
        self.stores: list[JaxprEqn] = []
        self._stored = set[Var]()  # buffers that the batch stores to: each before the store, and after it
        self._loaded_bytes = 0
        self._stored_bytes = 0

    def can_add(self, eqn: JaxprEqn) -> bool:
        """True if the next equation may join, in the order in which the batch runs."""
        # The last store may exceed the limit, as its value is on the tiles anyway; a load may not: it needs memory.
        is_full = self._stored_bytes > self._max_batch_bytes
        # Stores run last, so nothing in the batch can read what they store.
        if is_full or any(var in self._stored for var in variables_read(eqn)):
            return False
        if eqn.primitive is not remote_load_p:
            return True
        # Loads run before `between`, so they cannot load its results, such as a slice of a value on the host.
        is_defined_between = any(var in variables_read(eqn) for other in self.between for var in other.outvars)
        return self._loaded_bytes + moved_bytes(eqn) <= self._max_batch_bytes and not is_defined_between

    def add(self, eqn: JaxprEqn) -> None:
        """Adds the next equation: to the loads, to the stores, or to the equations before or between them."""
        if eqn.primitive is remote_load_p:
            self.loads.append(eqn)
            self._loaded_bytes += moved_bytes(eqn)
        elif eqn.primitive in (remote_store_p, remote_put_p):
            self.stores.append(eqn)
            # The buffer before and after the store; the last operand is the value.
            self._stored.update(eqn.outvars, variables_read(eqn)[:-1])
            self._stored_bytes += moved_bytes(eqn)
        else:
            (self.between if self.loads else self.early).append(eqn)

    def in_order(self) -> list[JaxprEqn]:
        """All equations, in the order in which they run."""
        return [*self.early, *self.loads, *self.between, *self.stores]


def overlapped(batches: Sequence[Batch], io_tiles: IoTiles) -> list[JaxprEqn]:
    """The equations of all batches in order, with values moved by I/O tiles beside the computation of earlier batches.

    A load is a fetch to I/O tiles, some batches ahead, and a take from there; a store is handed to them, and waited for
    as late as their room allows.
    """
    eqns: list[JaxprEqn] = []
    unfinished: dict[int, list[JaxprEqn]] = {}  # by IPU, waits for stores, the oldest first
    for batch, moves in zip(batches, _moves_of_batches(batches, io_tiles), strict=True):
        # Fetches that this batch takes come first; those for later batches may overlap with it.
        taken_vars = {var for take in moves.takes for var in variables_read(take)}
        own_fetches = [fetch for fetch in moves.fetches if fetch.outvars[0] in taken_vars]
        ahead = [fetch for fetch in moves.fetches if fetch.outvars[0] not in taken_vars]
        eqns += [*batch.early, *own_fetches, *moves.takes, *ahead, *batch.between]
        eqns += _with_stores_by_io_tiles(batch.stores, io_tiles, unfinished.setdefault(batch.ipu, []))
    return [*eqns, *chain.from_iterable(unfinished.values())]


class _BatchMoves(NamedTuple):
    """Moves that run at the loads of a batch.

    Args:
        fetches: fetches to I/O tiles, of values of this batch or of later ones.
        takes: takes of the values of this batch, or loads of those that I/O tiles do not move.
    """

    fetches: list[JaxprEqn]
    takes: list[JaxprEqn]


@dataclass(frozen=True, slots=True)
class _TakenBatch:
    """A batch of an IPU whose values have been taken from I/O tiles, which frees their memory.

    Args:
        number: its number among the batches of all IPUs.
        step: its step, None without phases.
        steps_so_far: steps of the IPU up to there, its own included; without phases each batch counts as one.
        bytes_so_far: bytes of all values that were taken on the IPU up to there, its own included.
    """

    number: int
    step: int | None
    steps_so_far: int
    bytes_so_far: int

    def may_precede_fetches_of(self, later: _TakenBatch, io_tiles: IoTiles) -> bool:
        """True if the values of a later batch may be fetched as soon as those of this one are taken."""
        has_room = later.bytes_so_far - self.bytes_so_far <= io_tiles.room_bytes
        return has_room and later.steps_so_far - self.steps_so_far <= io_tiles.depth


_BEFORE_ALL = _TakenBatch(number=0, step=None, steps_so_far=0, bytes_so_far=0)


def _take_batch(number: int, batch: Batch, previous: _TakenBatch, num_bytes: int) -> _TakenBatch:
    """The batch after another of its IPU, which takes `num_bytes` from I/O tiles."""
    begins_step = batch.step is None or batch.step != previous.step
    return _TakenBatch(
        number, batch.step, previous.steps_so_far + begins_step, bytes_so_far=previous.bytes_so_far + num_bytes
    )


def _moves_of_batches(batches: Sequence[Batch], io_tiles: IoTiles) -> list[_BatchMoves]:
    """The loads of each batch, divided between I/O tiles, which fetch values ahead, and tiles that compute, which take.

    A value is fetched as many batches before the one that takes it as I/O tiles have room and depth for, but after it
    is defined.
    """
    # The number of the batch in which a value is defined; its fetch is in the next one at the earliest.
    batch_of_value = {
        var: n for n, batch in enumerate(batches) for eqn in (*batch.between, *batch.stores) for var in eqn.outvars
    }
    # Early equations of a batch run before its fetches, so these may already be of their results.
    batch_of_value |= {var: n - 1 for n, batch in enumerate(batches) for eqn in batch.early for var in eqn.outvars}
    moves = [_BatchMoves([], []) for _ in batches]
    earlier_of_ipu: dict[int, deque[_TakenBatch]] = {}  # by IPU, the batches after which later values may be fetched
    for number, batch in enumerate(batches):
        fetched_loads = [load for load in batch.loads if io_tiles.moves(load)]
        moves[number].takes.extend(load for load in batch.loads if not io_tiles.moves(load))
        earlier = earlier_of_ipu.setdefault(batch.ipu, deque([_BEFORE_ALL]))
        batch_moves = _take_batch(number, batch, earlier[-1], sum(map(moved_bytes, fetched_loads)))
        # One too early for this batch is too early for all later ones: steps and bytes so far only rise.
        while earlier and not earlier[0].may_precede_fetches_of(batch_moves, io_tiles):
            earlier.popleft()
        earliest = earlier[0].number if earlier else number
        earlier.append(batch_moves)
        for load in fetched_loads:
            (remote,) = variables_read(load)
            buffer = Var(remote.aval)
            fetch = new_equation(remote_fetch_p, [remote], [buffer], load.params, load)
            moves[max(earliest, batch_of_value.get(remote, -1) + 1)].fetches.append(fetch)
            moves[number].takes.append(new_equation(remote_take_p, [buffer], load.outvars, load.params, load))
    return moves


def _with_stores_by_io_tiles(
    stores: Sequence[JaxprEqn], io_tiles: IoTiles, unfinished: list[JaxprEqn]
) -> list[JaxprEqn]:
    """Equations of stores: direct ones, and those by I/O tiles, whose buffers the values are handed to before.

    Values are handed over and stored together while the I/O tiles have room, at least one at a time.

    Args:
        stores: stores of one batch; the last operand of each is its value, of the type of its result.
        io_tiles: tiles that move them.
        unfinished: waits for earlier stores of the IPU, whose memory is live until then; updated: waits that must end
            for want of room are returned, those for the stores are added.
    """
    io_stores = [store for store in stores if io_tiles.moves(store)]
    eqns = [store for store in stores if not io_tiles.moves(store)]
    while io_stores:
        total_bytes = accumulate(map(moved_bytes, io_stores))
        together = io_stores[: max(1, sum(total <= io_tiles.room_bytes for total in total_bytes))]
        io_stores = io_stores[len(together) :]
        room_bytes = io_tiles.room_bytes - sum(map(moved_bytes, together))
        while unfinished and sum(value_bytes(wait.invars[0].aval) for wait in unfinished) > room_bytes:
            eqns.append(unfinished.pop(0))
        buffers = [Var(store.outvars[0].aval) for store in together]
        pairs = list(zip(together, buffers, strict=True))
        eqns += [new_equation(remote_hand_p, store.invars[-1:], [buffer], {}, store) for store, buffer in pairs]
        eqns += [store.replace(invars=[*store.invars[:-1], buffer]) for store, buffer in pairs]
        unfinished += [new_equation(remote_wait_p, [buffer], [], {}, store) for store, buffer in pairs]
    return eqns
