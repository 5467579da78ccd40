"""Loads and stores in batches: each exchange with streaming memory has a latency, which those next to each other share.

Input: equations with loads and stores. Output: the same equations; loads moved up to the first of their batch, stores
down to the end of it. Limits: a batch takes memory for as long as it lasts; its bytes are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipujax.lowering.jax_compat import JaxprEqn, Var
from ipujax.lowering.jaxpr import value_bytes, variables_read
from ipujax.lowering.offload.primitives import remote_load_p, remote_put_p, remote_store_p

_MOST_BYTES = (
    1 << 20
)  # of the loads, and of the stores, of a batch: 700 bytes of a tile, and 5 times what moves in a latency of 10 us


def batched(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations with loads next to each other, and stores.

    Args:
        eqns: in an order in which they can run.
    """
    done, batch = list[JaxprEqn](), _Batch()
    for eqn in eqns:
        if batch.is_full or (eqn.primitive is remote_load_p and not batch.takes(eqn)):
            done += batch.closed()
            batch = _Batch()
        batch.add(eqn)
    return [*done, *batch.closed()]


class _Batch:
    def __init__(self) -> None:
        self._loads, self._rest, self._stores = list[JaxprEqn](), list[JaxprEqn](), list[JaxprEqn]()
        self._before = list[JaxprEqn]()
        self._num_bytes, self._stored_bytes, self._stored = 0, 0, set[Var]()

    @property
    def is_full(self) -> bool:
        """Whether enough waits to be stored."""
        return self._stored_bytes > _MOST_BYTES

    def takes(self, load: JaxprEqn) -> bool:
        """Whether a load may be one of these: it is not too much, and of nothing that these store."""
        (out,), (remote,) = load.outvars, load.invars
        return self._num_bytes + value_bytes(out.aval) <= _MOST_BYTES and remote not in self._stored

    def add(self, eqn: JaxprEqn) -> None:
        """Adds the next equation."""
        if eqn.primitive is remote_load_p:
            self._loads.append(eqn)
            self._num_bytes += value_bytes(eqn.outvars[0].aval)
        elif eqn.primitive in (remote_store_p, remote_put_p):
            self._stores.append(eqn)
            self._stored.update(eqn.outvars, variables_read(eqn)[:-1])
            self._stored_bytes += value_bytes(eqn.outvars[0].aval)
        else:
            (self._rest if self._loads else self._before).append(eqn)

    def closed(self) -> list[JaxprEqn]:
        """All equations."""
        return [*self._before, *self._loads, *self._rest, *self._stores]
