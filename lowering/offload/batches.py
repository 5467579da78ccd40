"""Loads and stores in batches: each exchange with streaming memory has a latency, which consecutive ones share.

Input: equations with loads and stores. Output: the same equations; loads are moved up to the first of their batch,
stores down to its end. With I/O tiles these fetch the loads of a batch while an earlier one computes, and store while
the next one does; a batch waits until the previous one has handed its values to them.
Limits: a batch occupies memory until it ends; its bytes are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ipujax.lowering.jax_compat import JaxprEqn, Var, new_equation
from ipujax.lowering.jaxpr import value_bytes, variables_read
from ipujax.lowering.offload.primitives import (
    remote_fetch_p,
    remote_hand_p,
    remote_load_p,
    remote_put_p,
    remote_store_p,
    remote_take_p,
    remote_wait_p,
)


@dataclass(frozen=True, slots=True)
class IoTiles:
    """Tiles that only move data.

    Args:
        depth: batches of loads that they are ahead of the tiles that compute.
        max_value_bytes: bytes of a value that they move at most; larger ones go straight to the tiles that compute.
    """

    depth: int
    max_value_bytes: int


def batch_transfers(eqns: Sequence[JaxprEqn], max_batch_bytes: int, io_tiles: IoTiles | None = None) -> list[JaxprEqn]:
    """The equations in batches of loads and stores; with `io_tiles`, moved by these."""
    batches = [_Batch(max_batch_bytes)]
    for eqn in eqns:
        if batches[-1].is_full or not batches[-1].takes(eqn):
            batches.append(_Batch(max_batch_bytes))
        batches[-1].add(eqn)
    if io_tiles is None:
        return [eqn for batch in batches for eqn in batch.in_order()]
    return _overlapped(batches, io_tiles)


class _Batch:
    """Equations around loads and stores that go together."""

    def __init__(self, max_batch_bytes: int) -> None:
        self._max_batch_bytes = max_batch_bytes
        self.early: list[JaxprEqn] = []
        self.loads: list[JaxprEqn] = []
        self.other: list[JaxprEqn] = []
        self.stores: list[JaxprEqn] = []
        self.stored = set[Var]()
        self._loaded_bytes = 0
        self._stored_bytes = 0

    @property
    def is_full(self) -> bool:
        """True if the stores of the batch exceed its bytes."""
        return self._stored_bytes > self._max_batch_bytes

    def takes(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation may join: it reads nothing that the batch stores."""
        # A load must fit too, and not be of a value that the batch leaves in streaming memory after its loads.
        if any(var in self.stored for var in variables_read(eqn)):
            return False
        if eqn.primitive is not remote_load_p:
            return True
        is_of_batch = any(var in variables_read(eqn) for other_eqn in self.other for var in other_eqn.outvars)
        return self._loaded_bytes + _bytes(eqn) <= self._max_batch_bytes and not is_of_batch

    def add(self, eqn: JaxprEqn) -> None:
        """Adds the next equation."""
        if eqn.primitive is remote_load_p:
            self.loads.append(eqn)
            self._loaded_bytes += _bytes(eqn)
        elif eqn.primitive in (remote_store_p, remote_put_p):
            self.stores.append(eqn)
            # The buffer before and after the store; the last operand is the value.
            self.stored.update(eqn.outvars, variables_read(eqn)[:-1])
            self._stored_bytes += _bytes(eqn)
        else:
            (self.other if self.loads else self.early).append(eqn)

    def in_order(self) -> list[JaxprEqn]:
        """All equations."""
        return [*self.early, *self.loads, *self.other, *self.stores]


def _bytes(eqn: JaxprEqn) -> int:
    return value_bytes(eqn.outvars[0].aval)


def _overlapped(batches: Sequence[_Batch], io_tiles: IoTiles) -> list[JaxprEqn]:
    """The equations of all batches, moved by I/O tiles."""
    batch_of_value = {
        var: n for n, batch in enumerate(batches) for eqn in (*batch.other, *batch.stores) for var in eqn.outvars
    }
    # Early equations of a batch run before its fetches, so these may already be of their results.
    batch_of_value |= {var: n - 1 for n, batch in enumerate(batches) for eqn in batch.early for var in eqn.outvars}
    fetches_of_batch: list[list[JaxprEqn]] = [[] for _ in batches]
    takes_of_batch: list[list[JaxprEqn]] = [[] for _ in batches]
    for number, batch in enumerate(batches):
        for load in batch.loads:
            (remote,) = variables_read(load)
            if _bytes(load) > io_tiles.max_value_bytes:
                takes_of_batch[number].append(load)
                continue
            fetched = Var(remote.aval)
            fetch = new_equation(remote_fetch_p, [remote], [fetched], load.params, load)
            fetches_of_batch[max(0, number - io_tiles.depth, batch_of_value.get(remote, -1) + 1)].append(fetch)
            takes_of_batch[number].append(new_equation(remote_take_p, [fetched], load.outvars, load.params, load))
    eqns: list[JaxprEqn] = []
    pending: list[Var] = []
    for batch, fetches, takes in zip(batches, fetches_of_batch, takes_of_batch, strict=True):
        # Fetches that this batch takes come first; those for later batches may overlap with it.
        taken_vars = {var for take in takes for var in variables_read(take)}
        ahead = [fetch for fetch in fetches if fetch.outvars[0] not in taken_vars]
        eqns += [*batch.early, *(fetch for fetch in fetches if fetch not in ahead), *takes, *ahead, *batch.other]
        if batch.stores:
            stores, handed = _handed_over(batch.stores, io_tiles)
            eqns += [*_waits(pending), *stores]
            pending = handed
    return [*eqns, *_waits(pending)]


def _handed_over(stores: Sequence[JaxprEqn], io_tiles: IoTiles) -> tuple[list[JaxprEqn], list[Var]]:
    """Stores of values that I/O tiles hold, after these were handed to them; and the values that they hold."""
    eqns: list[JaxprEqn] = []
    handed: list[Var] = []
    for store in stores:
        if _bytes(store) > io_tiles.max_value_bytes:
            eqns.append(store)
            continue
        buffer = Var(store.outvars[0].aval)
        eqns.append(new_equation(remote_hand_p, store.invars[-1:], [buffer], {}, store))
        eqns.append(store.replace(invars=[*store.invars[:-1], buffer]))
        handed.append(buffer)
    return eqns, handed


def _waits(handed: Sequence[Var]) -> list[JaxprEqn]:
    return [new_equation(remote_wait_p, [var], [], {}, None) for var in handed]
