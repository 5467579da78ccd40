"""Loads and stores in batches: each exchange with streaming memory has a latency, which those next to each other share.

Input: equations with loads and stores. Output: the same equations; loads moved up to the first of their batch, stores
down to the end of it. With I/O tiles these fetch the loads of a batch while one before it computes, so many batches
ahead, and store while the next one does; a batch waits for what the one before it has handed them.
Limits: a batch takes memory for as long as it lasts; its bytes are bounded.
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
        depth: batches of loads that they are ahead of what computes.
        most_bytes: of one value that they move; larger ones go straight to the tiles that compute.
    """

    depth: int
    most_bytes: int


def batched(eqns: Sequence[JaxprEqn], most_bytes: int, io_tiles: IoTiles | None = None) -> list[JaxprEqn]:
    """The equations with loads next to each other, and stores.

    Args:
        eqns: in an order in which they can run.
        most_bytes: of the loads of a batch, and of its stores, if they are several.
        io_tiles: what moves them; None if all tiles do, one after the other.
    """
    batches = [_Batch(most_bytes)]
    for eqn in eqns:
        if batches[-1].is_full or not batches[-1].takes(eqn):
            batches.append(_Batch(most_bytes))
        batches[-1].add(eqn)
    if io_tiles is None:
        return [eqn for batch in batches for eqn in batch.in_order()]
    return _overlapped(batches, io_tiles)


class _Batch:
    """Equations around loads and stores that go together."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.before, self.loads = list[JaxprEqn](), list[JaxprEqn]()
        self.rest, self.stores = list[JaxprEqn](), list[JaxprEqn]()
        self.stored = set[Var]()
        self._loaded_bytes, self._stored_bytes = 0, 0

    @property
    def is_full(self) -> bool:
        """Whether enough waits to be stored."""
        return self._stored_bytes > self._most_bytes

    def takes(self, eqn: JaxprEqn) -> bool:
        """Whether an equation may be one of these: it reads nothing that these store.

        A load is not too much either, and not of what these leave there behind their loads.
        """
        if any(var in self.stored for var in variables_read(eqn)):
            return False
        if eqn.primitive is not remote_load_p:
            return True
        is_made = any(var in variables_read(eqn) for made in self.rest for var in made.outvars)
        return self._loaded_bytes + _bytes(eqn) <= self._most_bytes and not is_made

    def add(self, eqn: JaxprEqn) -> None:
        """Adds the next equation."""
        if eqn.primitive is remote_load_p:
            self.loads.append(eqn)
            self._loaded_bytes += _bytes(eqn)
        elif eqn.primitive in (remote_store_p, remote_put_p):
            self.stores.append(eqn)
            self.stored.update(eqn.outvars, variables_read(eqn)[:-1])
            self._stored_bytes += _bytes(eqn)
        else:
            (self.rest if self.loads else self.before).append(eqn)

    def in_order(self) -> list[JaxprEqn]:
        """All equations."""
        return [*self.before, *self.loads, *self.rest, *self.stores]


def _bytes(eqn: JaxprEqn) -> int:
    return value_bytes(eqn.outvars[0].aval)


def _overlapped(batches: Sequence[_Batch], io_tiles: IoTiles) -> list[JaxprEqn]:
    """The equations of all batches, moved by I/O tiles."""
    put_in = {var: n for n, batch in enumerate(batches) for eqn in (*batch.rest, *batch.stores) for var in eqn.outvars}
    put_in |= {var: n - 1 for n, batch in enumerate(batches) for eqn in batch.before for var in eqn.outvars}
    fetches: list[list[JaxprEqn]] = [[] for _ in batches]
    takes: list[list[JaxprEqn]] = [[] for _ in batches]
    for number, batch in enumerate(batches):
        for load in batch.loads:
            (remote,) = variables_read(load)
            if _bytes(load) > io_tiles.most_bytes:
                takes[number].append(load)
                continue
            arrived = Var(remote.aval)
            fetch = new_equation(remote_fetch_p, [remote], [arrived], load.params, load)
            fetches[max(0, number - io_tiles.depth, put_in.get(remote, -1) + 1)].append(fetch)
            takes[number].append(new_equation(remote_take_p, [arrived], load.outvars, load.params, load))
    done, waiting = list[JaxprEqn](), list[Var]()
    for number, batch in enumerate(batches):
        own = {var for take in takes[number] for var in variables_read(take)}
        done += [*batch.before, *(fetch for fetch in fetches[number] if fetch.outvars[0] in own)]
        done += [*takes[number], *(fetch for fetch in fetches[number] if fetch.outvars[0] not in own), *batch.rest]
        if batch.stores:
            done += [new_equation(remote_wait_p, [var], [], {}, None) for var in waiting]
            waiting = []
        for store in batch.stores:
            if _bytes(store) > io_tiles.most_bytes:
                done.append(store)
                continue
            handed = Var(store.outvars[0].aval)
            done.append(new_equation(remote_hand_p, store.invars[-1:], [handed], {}, store))
            done.append(store.replace(invars=[*store.invars[:-1], handed]))
            waiting.append(handed)
    return [*done, *(new_equation(remote_wait_p, [var], [], {}, None) for var in waiting)]
