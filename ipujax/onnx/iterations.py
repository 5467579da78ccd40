"""Iterations of the loops around a node: operators that draw numbers draw others in each of them.

Input: the numbers of the iterations, a context while a subgraph is evaluated. Output: keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

# A context, not an argument: operators deep in a subgraph need it, and graphs may be evaluated in threads.
_NUMBERS: ContextVar[tuple[Any, ...]] = ContextVar("ipujax_onnx_iterations", default=())


@contextmanager
def in_iteration(number: Any) -> Iterator[None]:
    """Evaluate a subgraph in the iteration of a loop."""
    token = _NUMBERS.set((*_NUMBERS.get(), number))
    try:
        yield
    finally:
        _NUMBERS.reset(token)


def key_in_iteration(key: jax.Array) -> jax.Array:
    """Return the key of an operator in this iteration of the loops around it."""
    for number in _NUMBERS.get():
        key = jax.random.fold_in(key, number)
    return key
