"""Attributes that models have in a scope, or when they have run in it: asked for before, they say so.

Input: `keras.Model`, and the names of methods that it has in a scope. Output: attributes of that class which instances
and scopes have in their place, once they do. Reading one raises an `AttributeError`, so that `hasattr` stays false.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ipujax.runtime.errors import ArgumentAttributeError

_RUN = "fit, evaluate or predict in `with strategy.scope():`, not with run_eagerly=True"
_OF_RUNS = {
    "ipu_profile": _RUN,
    "ipu_profiles": _RUN,
    "ipu_outfeed": 'model.set_outfeed_queue_options("all"), and a fit in `with strategy.scope():`',
}


class _Missing:
    """An attribute that models lack."""

    def __init__(self, name: str, expected: str, hint: str) -> None:
        self._name, self._expected, self._hint = name, expected, hint

    def __get__(self, model: Any, owner: type) -> Any:
        if model is None:
            return self
        what = f"{getattr(model, 'name', owner.__name__)} has no {self._name}"
        raise ArgumentAttributeError(what, expected=self._expected, hint=self._hint)


def explain_missing(model_class: type, methods: Iterable[str]) -> None:
    """Has a class say what its instances lack outside of a scope, and before they have run in one.

    Args:
        model_class: `keras.Model`.
        methods: names of the methods that it has in a scope.
    """
    for name in methods:
        setattr(model_class, name, _Missing(name, "a model in the scope of an IPUStrategy", "with strategy.scope(): …"))
    for name, way in _OF_RUNS.items():
        setattr(model_class, name, _Missing(name, "a model that has run on IPUs", way))
