"""Attributes that models have when they have run in a scope: asked for before, they say so.

Input: `keras.Model`. Output: attributes of that class, in whose place a model has its own once it has run. Reading one
raises an `AttributeError`, so that `hasattr` stays false.
"""

from __future__ import annotations

from typing import Any

from ipujax.runtime.errors import ArgumentAttributeError

_RUN = "fit, evaluate or predict in `with strategy.scope():`, not with run_eagerly=True"
_OF_RUNS = {
    "ipu_profile": _RUN,
    "ipu_profiles": _RUN,
    "ipu_outfeed": 'model.set_outfeed_queue_options("all"), and a fit in `with strategy.scope():`',
}


class _Missing:
    """An attribute that models lack until they have run."""

    def __init__(self, name: str, way: str) -> None:
        self._name, self._way = name, way

    def __get__(self, model: Any, owner: type) -> Any:
        if model is None:
            return self
        what = f"{getattr(model, 'name', owner.__name__)} has no {self._name}"
        raise ArgumentAttributeError(what, expected="a model that has run on IPUs", hint=self._way)


def explain_missing(model_class: type) -> None:
    """Has a class say what its instances lack before they have run in a scope.

    Args:
        model_class: `keras.Model`.
    """
    for name, way in _OF_RUNS.items():
        setattr(model_class, name, _Missing(name, way))
