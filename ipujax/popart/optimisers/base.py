"""`Optimizer`, base of PopART's optimisers, and the values that they have.

A value is a number and whether it is constant, for all weights or for one. One that is not constant may change between
steps; it is an argument of the compiled step, so nothing is compiled again. Constant ones are arguments too, and
checked here for changes.

A session asks an optimiser for three things: the values as numbers (`hyperparameters`), the state of a weight
(`initial_state`), and the update (`updated`), a pure function of gradient, weight, state and values.

Before, `ClipNormSettings` scales gradients so that their norm, over some or all weights, is not above a limit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
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


class ClipNormSettings:
    """Weights whose gradients are clipped together by their norm.

    Args:
        weightIds: names of the weights.
        maxNorm: largest norm.

    Raises:
        popart_exception: no positive norm.
    """

    def __init__(self, weightIds: Sequence[str], maxNorm: float) -> None:
        if not maxNorm > 0:
            raise popart_exception("maxNorm must be a positive number", expected="more than 0", got=maxNorm)
        self.weightIds: list[str] | None = list(weightIds)
        self.maxNorm = float(maxNorm)

    @staticmethod
    def clipWeights(weightIds: Sequence[str], maxNorm: float) -> ClipNormSettings:
        """Return settings for some weights."""
        return ClipNormSettings(weightIds, maxNorm)

    @staticmethod
    def clipAllWeights(maxNorm: float) -> ClipNormSettings:
        """Return settings for all weights."""
        settings = ClipNormSettings([], maxNorm)
        # None stands for all weights: their names are not known yet.
        settings.weightIds = None
        return settings

    def names(self, weights: Sequence[str]) -> list[str]:
        """Return the names of the weights, of all where none are named.

        Args:
            weights: names of all weights.
        """
        return list(weights) if self.weightIds is None else self.weightIds


def clip_by_norm(gradients: Mapping[str, jax.Array], settings: Sequence[ClipNormSettings]) -> dict[str, jax.Array]:
    """Return gradients of which no group has a norm above its limit.

    Args:
        gradients: by name of the weight, without loss scaling, float32.
        settings: groups; a weight in several is clipped by each in turn.
    """
    clipped = dict(gradients)
    for group in settings:
        names = group.names(list(gradients))
        squares = [jnp.sum(jnp.square(clipped[name])) for name in names]
        norm = jnp.sqrt(jnp.sum(jnp.stack(squares)))
        # PopART divides by the larger of norm and limit, so that a norm of zero divides by the limit.
        scale = group.maxNorm / jnp.maximum(norm, group.maxNorm)
        for name in names:
            clipped[name] = clipped[name] * scale
    return clipped


State = dict[str, jax.Array]  # parts of the state of one weight, by the prefix of their tensors' names
Values = Mapping[str, Any]  # values of one weight by short name


class Optimizer(ABC):
    """An optimiser.

    Args:
        values: pairs of a number and whether it is constant, by PopART's names, as `{"defaultLearningRate": (0.1,
            False)}`.
        clip_norm_settings: limits of the norm of gradients.
        accum_type: element type in which gradients of micro-batches are summed, UNDEFINED for that of the weight.

    Raises:
        popart_exception: an unknown value, with the nearest.
    """

    # Short name of each value → its number where none is given.
    UNSET: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def __init__(
        self,
        values: Mapping[str, Any],
        clip_norm_settings: Sequence[ClipNormSettings] = (),
        accum_type: DataType = DataType.UNDEFINED,
    ) -> None:
        self._given = dict(values)
        self._specific: dict[str, dict[str, Any]] = {}
        self.clipNormSettings = tuple(clip_norm_settings)
        self.accum_type = accum_type
        self._maps = value_maps(type(self).__name__, self._given, self.UNSET, {})

    def insertSpecific(self, weight: str, values: Mapping[str, Any]) -> None:
        """Set values for one weight.

        Args:
            weight: its name.
            values: pairs by short name, as `{"learningRate": (0.2, False)}`.

        Raises:
            popart_exception: an unknown value, with the nearest.
        """
        names = [name for name in self.UNSET if name != "lossScaling"]  # the loss has one scale
        for name in values:
            if name not in names:
                raise unknown_name(f"{type(self).__name__} has a value of a weight", name, names)
        self._specific[weight] = {**self._specific.get(weight, {}), **values}
        self._maps = value_maps(type(self).__name__, self._given, self.UNSET, self._specific)

    def getLossScalingVal(self) -> float:
        """Return the factor of the loss in the backward part."""
        return self._maps["lossScaling"].default.value

    def learningRates(self) -> OptimizerValueMap:
        """Return the learning rates."""
        return self._maps["learningRate"]

    def weightDecays(self) -> OptimizerValueMap:
        """Return the weight decays."""
        return self._maps["weightDecay"]

    @property
    def specific_weights(self) -> list[str]:
        """Names of the weights with values of their own."""
        return list(self._specific)

    def hyperparameters(self, weights: Sequence[str]) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
        """Return the values of each weight that has some of its own, as float32 scalars by short name.

        Those of all others have the name "".

        Args:
            weights: names of all weights.
        """
        return {
            weight: {name: np.asarray(values.get(weight).value, np.float32) for name, values in self._maps.items()}
            for weight in self._named(weights)
        }

    def constants(self, weights: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the values that never change, by weight as `hyperparameters` has them: they are part of the step.

        Args:
            weights: names of all weights.
        """
        return {
            weight: {name: m.get(weight).value for name, m in self._maps.items() if m.get(weight).is_constant}
            for weight in self._named(weights)
        }

    def _named(self, weights: Sequence[str]) -> list[str]:
        # The name "" is that of the default values; no tensor of ONNX has it.
        return ["", *(weight for weight in weights if weight in self._specific)]

    def structure(self) -> tuple[Any, ...]:
        """Return the parts that the compiled step depends on: the kind of optimiser, its clipping and accumulator."""
        clips = tuple((tuple(c.weightIds or ()), c.weightIds is None, c.maxNorm) for c in self.clipNormSettings)
        return type(self).__name__, clips, self.accum_type

    def check_successor(self, other: Optimizer) -> None:
        """Refuse an optimiser that a session cannot go on with.

        Args:
            other: values for the next steps.

        Raises:
            popart_exception: another kind, or a constant value that changes.
        """
        # A change of structure would need another compiled step, which `updateOptimizerFromHost` promises not to
        # make.
        if self.structure() != other.structure():
            message = "a session cannot change to an optimiser of another kind"
            raise popart_exception(message, expected=self.structure(), got=other.structure())
        for name, values in self._maps.items():
            weights = {*values.specific, *other._maps[name].specific}
            pairs = [(values.default, other._maps[name].default)]
            pairs += [(values.get(weight), other._maps[name].get(weight)) for weight in weights]
            for before, after in pairs:
                _check_constant(name, before, after)

    @abstractmethod
    def initial_state(self, weight: jax.Array, values: Values) -> State:
        """Return the state of a weight before the first update.

        Args:
            weight: its value.
            values: of the optimiser.
        """

    @abstractmethod
    def updated(self, gradient: jax.Array, weight: jax.Array, state: State, values: Values) -> tuple[jax.Array, State]:
        """Return weight and state after an update.

        Args:
            gradient: without loss scaling, reduced over micro-batches and replicas, float32.
            weight: before the update.
            state: before the update.
            values: of the optimiser.
        """


def is_constant(value: Any, number: float) -> bool:
    """Return whether a value is a constant of the step and a certain number, so that a product can be left out.

    Args:
        value: a number, or one that changes, as an array.
        number: the number.
    """
    return isinstance(value, float) and value == number


def _check_constant(name: str, before: OptimizerValue, after: OptimizerValue) -> None:
    if before.is_constant and after.is_constant and before.value != after.value:
        hint = f"({after.value:g}, False) from the start"
        raise popart_exception(f"{name} is constant", expected=before.value, got=after.value, hint=hint)
    if before.is_constant and not after.is_constant:
        message = f"{name} is constant, and the new optimiser says that it is not"
        raise popart_exception(message, expected=(before.value, True), got=(after.value, False))
