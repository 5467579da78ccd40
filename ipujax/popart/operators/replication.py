"""Number of replicas that a graph is evaluated for, as a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

REPLICA_AXIS = "replica"  # that of `ipu.jit`
# A context variable, not an argument: operators deep in a graph need it, and sessions may run in threads.
_REPLICAS: ContextVar[int] = ContextVar("ipujax_popart_replicas", default=1)


def has_replicas() -> bool:
    """Return whether there is an axis of replicas."""
    return _REPLICAS.get() > 1


@contextmanager
def of_replicas(count: int) -> Iterator[None]:
    """Evaluate graphs inside for a number of replicas."""
    token = _REPLICAS.set(count)
    try:
        yield
    finally:
        _REPLICAS.reset(token)
