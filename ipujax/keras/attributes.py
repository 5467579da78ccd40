"""Attributes of Keras' classes for a while, and of its objects past its tracking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    """Gives a class a method in place of its own, or one more, and takes it back.

    It is replaced in the class that has it: Keras compares methods of models with those to find what users override.

    Args:
        owner: a class, which may inherit the method.
        name: of the method.
        value: what it is inside.
    """
    having = next((base for base in owner.__mro__ if name in vars(base)), owner)
    own = vars(having).get(name, _MISSING)
    setattr(having, name, value)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(having, name)
        else:
            setattr(having, name, own)


def keep(owner: Any, **values: Any) -> None:
    """Keeps values with a model or a layer that are no part of its state, which Keras would track and save."""
    for name, value in values.items():
        object.__setattr__(owner, name, value)
