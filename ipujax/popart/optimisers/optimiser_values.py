"""Values of optimisers: each a number and whether it is constant, for all weights or for one.

A value that is not constant may change between steps; it is an argument of the compiled step, so nothing is compiled
again. Constant ones are arguments too, and checked here for changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ipujax.popart.enumerations import DataType
from ipujax.popart.exceptions import popart_exception, unknown_name
from ipujax.popart.tensor_info import DTYPES


def state_type(kind: DataType, weight_type: np.dtype[Any]) -> np.dtype[Any]:
    """Return the element type of a part of the state.

    Args:
        kind: as a program gives it; UNDEFINED for that of the weight.
        weight_type: element type of the weight.
    """
    return weight_type if kind == DataType.UNDEFINED else DTYPES[DataType(kind).name]


@dataclass(frozen=True, slots=True)
class OptimizerValue:
    """A value of an optimiser.

    Args:
        value: number.
        is_constant: whether it may not change.
    """

    value: float
    is_constant: bool = True

    def val(self) -> float:
        """Return the number."""
        return self.value

    def isConst(self) -> bool:
        """Return whether it is constant."""
        return self.is_constant


@dataclass(frozen=True, slots=True)
class OptimizerValueMap:
    """A value for all weights, and others for some.

    Args:
        default: for all weights.
        specific: by name of the weight.
    """

    default: OptimizerValue
    specific: Mapping[str, OptimizerValue] = field(default_factory=dict)

    def getDefault(self) -> OptimizerValue:
        """Return the value for all weights."""
        return self.default

    def get(self, weight: str) -> OptimizerValue:
        """Return the value for a weight."""
        return self.specific.get(weight, self.default)


def as_value(name: str, setting: Any) -> OptimizerValue:
    """Return a value of an optimiser.

    Args:
        name: of the value, for the message.
        setting: a pair of a number and whether it is constant; a number alone is constant; or a value.

    Raises:
        popart_exception: something else.
    """
    if isinstance(setting, OptimizerValue):
        return setting
    pair = tuple(setting) if isinstance(setting, tuple | list) else (setting, True)
    if len(pair) != 2 or isinstance(pair[0], bool):
        raise popart_exception(
            f"{name} must be a value of an optimiser", expected="(number, isConst)", got=repr(setting)
        )
    try:
        return OptimizerValue(float(pair[0]), bool(pair[1]))
    except (OverflowError, TypeError, ValueError) as error:
        expected = "(number, isConst)"
        raise popart_exception(
            f"{name} must be a value of an optimiser", expected=expected, got=repr(setting)
        ) from error


def value_maps(
    who: str, settings: Mapping[str, Any], unset: Mapping[str, float], specific: Mapping[str, Mapping[str, Any]]
) -> dict[str, OptimizerValueMap]:
    """Return the values of an optimiser by their short names, as "learningRate".

    Args:
        who: name of the optimiser, for messages.
        settings: values for all weights by PopART's names, as "defaultLearningRate" or "lossScaling".
        unset: numbers of those that are not given, by short name.
        specific: values by weight and short name.

    Raises:
        popart_exception: an unknown name, with the nearest; a number out of range.
    """
    short_names = {default_name(name): name for name in unset}
    for key in settings:
        if key not in short_names:
            raise unknown_name(f"{who} has a value", key, short_names)
    defaults = {
        name: as_value(key, settings[key]) if key in settings else OptimizerValue(unset[name])
        for key, name in short_names.items()
    }
    maps = {
        name: OptimizerValueMap(
            default,
            {weight: as_value(name, values[name]) for weight, values in specific.items() if name in values},
        )
        for name, default in defaults.items()
    }
    for name, values in maps.items():
        for value in (values.default, *values.specific.values()):
            _check_range(who, name, value.value)
    return maps


def _check_range(who: str, name: str, number: float) -> None:
    """Refuse a number that PopART refuses, or that float32 does not hold."""
    is_inside = number > 0 if name in _POSITIVE else number >= 0
    if not is_inside or number > float(np.finfo(np.float32).max):
        expected = f"{'more than' if name in _POSITIVE else 'at least'} 0, in float32"
        raise popart_exception(f"{name} of {who} is out of range", expected=expected, got=number)


# Values that divide. Source: `runValueChecks` of PopART's optimisers, `willow/src/optimizer.cpp` and beside it.
_POSITIVE = ("eps", "lossScaling", "velocityScaling")
# Values that PopART has one of, not one for each weight.
GLOBAL_VALUES = ("lossScaling", "nesterov")


def default_name(name: str) -> str:
    """Return PopART's name of the value for all weights: "defaultLearningRate" for "learningRate".

    Args:
        name: short name.
    """
    return name if name in GLOBAL_VALUES else f"default{name[0].upper()}{name[1:]}"
