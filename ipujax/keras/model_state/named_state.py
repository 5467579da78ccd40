"""A model's state by the paths of its variables, which profiles and errors show.

Input: a state as Keras' JAX trainer has it, lists of values. Output: the same values by kind and path, in that order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

# Kinds of variables by kind of function, in the order of the lists of Keras' JAX trainer.
_KINDS = {
    "train": ("trainable", "other", "optimizer", "metrics"),
    "test": ("trainable", "other", "metrics"),
    "predict": ("trainable", "other"),
}
Named = OrderedDict[str, OrderedDict[str, Any]]  # ordered for JAX too, which sorts the names of a dict


class StateNames:
    """Paths of a model's variables, and conversion of its state between lists and names.

    Args:
        model: a Keras model that is built, and compiled.
        kind: "train", "test" or "predict".
    """

    def __init__(self, model: Any, kind: str) -> None:
        self.variables = _variables(model, kind)
        self._paths = {name: _unique_paths(variables) for name, variables in self.variables.items()}

    @property
    def sizes(self) -> list[int]:
        """Number of variables of each kind."""
        return [len(variables) for variables in self.variables.values()]

    def named(self, state: Sequence[Any]) -> Named:
        """Return lists of values by kind and path."""
        pairs = zip(self._paths.items(), state, strict=True)
        return OrderedDict((kind, OrderedDict(zip(paths, values, strict=True))) for (kind, paths), values in pairs)

    def listed(self, named: Named) -> tuple[list[Any], ...]:
        """Return the lists of values of a named state: the inverse of `named`."""
        return tuple([named[kind][path] for path in paths] for kind, paths in self._paths.items())


def _variables(model: Any, kind: str) -> dict[str, list[Any]]:
    # Functions, as a model that was not compiled has no optimizer to ask.
    variables_of_kind = {
        "trainable": lambda: model.trainable_variables,
        "other": lambda: model.non_trainable_variables,
        "optimizer": lambda: model.optimizer.variables,
        "metrics": lambda: model.metrics_variables,
    }
    return {name: list(variables_of_kind[name]()) for name in _KINDS[kind]}


def _unique_paths(variables: Sequence[Any]) -> list[str]:
    """Return the path of each variable, with a number behind repeated ones: Keras lets layers share a name."""
    uses = Counter[str]()
    paths = []
    for variable in variables:
        path = str(variable.path)
        paths.append(f"{path} {uses[path] + 1}" if uses[path] else path)
        uses[path] += 1
    return paths
