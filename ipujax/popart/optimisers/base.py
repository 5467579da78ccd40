"""`Optimizer`, base of PopART's optimisers.

A session asks it for three things: the values as numbers (`hyperparameters`), the state of a weight (`initial_state`),
and the update (`updated`), a pure function of gradient, weight, state and values.

Before, `ClipNormSettings` scales gradients so that their norm, over some or all weights, is not above a limit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.popart.enumerations import DataType
from ipujax.popart.exceptions import popart_exception, unknown_name
from ipujax.popart.optimisers.optimiser_values import OptimizerValue, OptimizerValueMap, value_maps


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
