"""A model's state by the names of its variables, which profiles and errors show.

Input: a state as Keras' JAX trainer has it, lists of values. Output: the same values by kind and path, in that order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

# Kinds of variables by kind of function, in Keras' order.
_KINDS = {
    "train": ("trainable", "other", "optimizer", "metrics"),
    "test": ("trainable", "other", "metrics"),
    "predict": ("trainable", "other"),
}
Named = OrderedDict[str, OrderedDict[str, Any]]  # ordered for JAX too, which sorts the names of a dict


class StateNames:
    """The names of a model's variables.

    Args:
        model: a Keras model that is built, and compiled.
        kind: "train", "test" or "predict".
    """

    def __init__(self, model: Any, kind: str) -> None:
        self.variables = _variables(model, kind)
        self._paths = {name: _paths(own) for name, own in self.variables.items()}

    @property
    def sizes(self) -> list[int]:
        """How many variables there are of each kind."""
        return [len(own) for own in self.variables.values()]

    def named(self, state: Sequence[Any]) -> Named:
        """Lists of values by their names."""
        pairs = zip(self._paths.items(), state, strict=True)
        return OrderedDict((kind, OrderedDict(zip(paths, values, strict=True))) for (kind, paths), values in pairs)

    def listed(self, named: Named) -> tuple[list[Any], ...]:
        """What `named` was made from."""
        return tuple([named[kind][path] for path in paths] for kind, paths in self._paths.items())


def _variables(model: Any, kind: str) -> dict[str, list[Any]]:
    """The variables of each kind, in order."""
    of = {
        "trainable": lambda: model.trainable_variables,
        "other": lambda: model.non_trainable_variables,
        "optimizer": lambda: model.optimizer.variables,
        "metrics": lambda: model.metrics_variables,
    }
    return {name: list(of[name]()) for name in _KINDS[kind]}


def _paths(variables: Sequence[Any]) -> list[str]:
    """The path of each variable, with a number behind one that others have before it."""
    seen, paths = Counter[str](), []
    for variable in variables:
        path = str(variable.path)
        paths.append(f"{path} {seen[path] + 1}" if seen[path] else path)
        seen[path] += 1
    return paths
