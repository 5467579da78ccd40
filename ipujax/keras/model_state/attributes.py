"""Attributes beside Keras' own: of its classes in a scope, and of its objects outside of their tracked state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replace_attribute(owner: type, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a class in a scope, and restore the class afterwards.

    Args:
        owner: a class, which defines the attribute, inherits it or lacks it.
        name: name of the attribute.
        value: its value in the scope.
    """
    # Set on the class that defines it: Keras compares methods of models with those to find what users override.
    definer = next((base for base in owner.__mro__ if name in vars(base)), owner)
    original = vars(definer).get(name, _MISSING)
    setattr(definer, name, value)
    try:
        yield
    finally:
        if original is _MISSING:
            delattr(definer, name)
        else:
            setattr(definer, name, original)


def set_untracked(instance: Any, **values: Any) -> None:
    """Set attributes of a model or a layer that are not part of the state that Keras tracks and saves."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)  # past `Layer.__setattr__`, which tracks
