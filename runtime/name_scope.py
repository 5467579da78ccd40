"""A name scope of JAX as a value.

Input: its name. Output: a context, as `jax.named_scope(name)`, that can be entered again, nested in itself, copied and
pickled. JAX's own is used once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType

import jax


class NameScope(ContextDecorator):
    """Context in which JAX adds a name to the stack of names of each equation.

    Args:
        name: the name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        scope = jax.named_scope(self._name)
        scope.__enter__()
        self._entered.append(scope)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)

    def __reduce__(self) -> tuple[type[NameScope], tuple[str]]:
        return NameScope, (self._name,)
