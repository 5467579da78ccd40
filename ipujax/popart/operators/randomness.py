"""Keys of random operators: the session's seed and step, folded with the name of the node."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_KEY: ContextVar[jax.Array | None] = ContextVar("ipujax_popart_key", default=None)


def node_key(name: str) -> jax.Array | None:
    """Return the key of a node; None in inference, where random masks are left out.

    Args:
        name: of the node, unique in its graph.
    """
    key = _KEY.get()
    return None if key is None else jax.random.fold_in(key, zlib.crc32(name.encode()))


@contextmanager
def seeded(key: jax.Array | None) -> Iterator[None]:
    """Evaluate graphs inside with a key.

    Args:
        key: of one micro-batch; None in inference.
    """
    token = _KEY.set(key)
    try:
        yield
    finally:
        _KEY.reset(token)
