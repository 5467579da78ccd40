"""What operators of ai.graphcore share: the decorator that registers them, keys, the number of replicas.

A key of a random operator is the session's seed and step, folded with the name of the node. The number of replicas that
a graph is evaluated for is a context.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from ipujax.onnx import register
from ipujax.onnx.front_end import key_in_iteration

# Key of a micro-batch, and whether operators draw dropout masks with it.
_KEY: ContextVar[tuple[jax.Array | None, bool]] = ContextVar("ipujax_popart_key", default=(None, False))


def node_key(name: str, is_mask: bool = False) -> jax.Array | None:
    """Return the key of a node; None outside of a step.

    Args:
        name: of the node, unique in its graph.
        is_mask: whether it is for a dropout mask: then None in inference, where masks are left out.
    """
    key, has_masks = _KEY.get()
    if key is None or (is_mask and not has_masks):
        return None
    return key_in_iteration(jax.random.fold_in(key, zlib.crc32(name.encode())))


@contextmanager
def seeded(key: jax.Array | None, has_masks: bool) -> Iterator[None]:
    """Evaluate graphs inside with a key.

    Args:
        key: of one micro-batch; None without random operators.
        has_masks: whether operators draw dropout masks, as in training.
    """
    token = _KEY.set((key, has_masks))
    try:
        yield
    finally:
        _KEY.reset(token)


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


DOMAIN = "ai.graphcore"


def graphcore(op_type: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as an operator of ai.graphcore.

    Args:
        op_type: type of its nodes.
    """
    return register(DOMAIN, op_type)
