"""Attributes of models that have run in a scope: read before a run, they raise an error that says so.

Input: `keras.Model`. Output: attributes of that class, which those of a model that has run hide. Reading one raises an
`AttributeError`, so that `hasattr` stays false.
"""

from __future__ import annotations

from typing import Any

from ipujax.front_end import ArgumentAttributeError

_RUN = "fit, evaluate or predict in `with strategy.scope():`, not with run_eagerly=True"
# Remedy by attribute.
_REMEDIES = {
    "ipu_profile": _RUN,
    "ipu_profiles": _RUN,
    "ipu_outfeed": 'model.set_outfeed_queue_options("all"), and a fit in `with strategy.scope():`',
}


class _Missing:
    """An attribute that models lack until they have run."""

    # Without `__set__`, so that an entry of the instance's `__dict__` hides it.

    def __init__(self, name: str, remedy: str) -> None:
        self._name = name
        self._remedy = remedy

    def __get__(self, model: Any, owner: type) -> Any:
        if model is None:
            return self
        problem = f"{getattr(model, 'name', owner.__name__)} has no {self._name}"
        raise ArgumentAttributeError(problem, expected="a model that has run on IPUs", hint=self._remedy)


def explain_missing(model_class: type) -> None:
    """Set the attributes that explain themselves on a class.

    Args:
        model_class: `keras.Model`.
    """
    for name, remedy in _REMEDIES.items():
        setattr(model_class, name, _Missing(name, remedy))
