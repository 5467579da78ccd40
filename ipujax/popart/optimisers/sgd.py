"""Stochastic gradient descent, with momentum, dampening, weight decay, velocity scaling and Nesterov's momentum.

Source: the equations in `willow/include/popart/sgd.hpp` of github:graphcore/popart. `Combined` and `Separate` store
accumulator and velocity as one tensor or two; the updates are equal, so one form computes both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ipujax.popart.enumerations import DataType, SGDAccumulatorAndMomentum
from ipujax.popart.optimisers.base import (
    ClipNormSettings,
    Optimizer,
    OptimizerValueMap,
    State,
    Values,
    is_constant,
    state_type,
)
from ipujax.popart.reserved_names import PREFIXES

VELOCITY = PREFIXES["reservedAcclPrefix"]


class SGD(Optimizer):
    """Stochastic gradient descent.

    With gradient g, weight w, velocity v, and values momentum mm, dampening dm, weight decay wd, velocity scaling vs::

        v = mm·v + vs·(1 − dm)·(g + wd·w)
        w = w − lr/vs·v                              without Nesterov's momentum
        w = w − lr/vs·(vs·(g + wd·w) + mm·v)         with it

    Args:
        pyd: values by name: defaultLearningRate, defaultWeightDecay, defaultMomentum, defaultDampening,
            defaultVelocityScaling, nesterov, lossScaling.
        clip_norm_settings: limits of the norm of gradients.
        accumulatorAndMomentum: how PopART stores the velocity; the numbers are equal.
        accumType: element type of the accumulator, UNDEFINED for that of the weight.
        accl1Type: element type of the velocity, UNDEFINED for that of the weight.
        debugContext: name in profiles.
    """

    UNSET: ClassVar[Mapping[str, float]] = MappingProxyType(
        {
            "learningRate": 0.1,
            "weightDecay": 0.0,
            "momentum": 0.0,
            "dampening": 0.0,
            "velocityScaling": 1.0,
            "nesterov": 0.0,
            "lossScaling": 1.0,
        }
    )

    def __init__(
        self,
        pyd: Mapping[str, Any],
        clip_norm_settings: Sequence[ClipNormSettings] = (),
        accumulatorAndMomentum: SGDAccumulatorAndMomentum = SGDAccumulatorAndMomentum.Combined,
        accumType: DataType = DataType.UNDEFINED,
        accl1Type: DataType = DataType.UNDEFINED,
        debugContext: str = "sgd",
    ) -> None:
        super().__init__(pyd, clip_norm_settings, accumType)
        self.accumulatorAndMomentum = accumulatorAndMomentum
        self._velocity_type = accl1Type

    def momentums(self) -> OptimizerValueMap:
        """Return the momentums."""
        return self._maps["momentum"]

    def dampenings(self) -> OptimizerValueMap:
        """Return the dampenings."""
        return self._maps["dampening"]

    def velocityScalings(self) -> OptimizerValueMap:
        """Return the velocity scalings."""
        return self._maps["velocityScaling"]

    def nesterov(self) -> OptimizerValueMap:
        """Return whether the momentum is Nesterov's, 0 or 1."""
        return self._maps["nesterov"]

    def has_velocity(self) -> bool:
        """Return whether there is a momentum, or may be one later."""
        # A momentum that is zero today may be set between steps: the state's structure must not change then.
        momenta = self._maps["momentum"]
        values = [momenta.default, *momenta.specific.values()]
        return any(value.value != 0 or not value.is_constant for value in values)

    def structure(self) -> tuple[Any, ...]:
        return *super().structure(), self.has_velocity()

    def initial_state(self, weight: jax.Array, values: Values) -> State:
        dtype = state_type(self._velocity_type, weight.dtype)
        return {VELOCITY: jnp.zeros(weight.shape, dtype)} if self.has_velocity() else {}

    def updated(self, gradient: jax.Array, weight: jax.Array, state: State, values: Values) -> tuple[jax.Array, State]:
        # Updates are float32 whatever the weight is: in float16, small steps would be rounded away.
        wide = weight.astype(jnp.float32)
        decay = values["weightDecay"]
        decayed = gradient if is_constant(decay, 0) else gradient + decay * wide
        # PopART folds the velocity scaling into the velocity, so the learning rate is divided by it.
        rate = values["learningRate"] / values["velocityScaling"]
        added = values["velocityScaling"] * (1 - values["dampening"]) * decayed
        if VELOCITY not in state:
            return (wide - rate * added).astype(weight.dtype), state
        momentum = values["momentum"]
        velocity = momentum * state[VELOCITY] + added
        nesterov = values["velocityScaling"] * decayed + momentum * velocity
        step = jnp.where(values["nesterov"] != 0, nesterov, velocity)
        return (wide - rate * step).astype(weight.dtype), {VELOCITY: velocity.astype(state[VELOCITY].dtype)}


class ConstSGD(SGD):
    """Stochastic gradient descent with constant values and without momentum.

    Args:
        learning_rate: step size.
        weight_decay: factor of the weights in the gradient.
        loss_scaling: factor of the loss in the backward part.
        clip_norm_settings: limits of the norm of gradients.
    """

    def __init__(
        self,
        learning_rate: float,
        weight_decay: float = 0.0,
        loss_scaling: float = 1.0,
        clip_norm_settings: Sequence[ClipNormSettings] = (),
    ) -> None:
        values = {
            "defaultLearningRate": (learning_rate, True),
            "defaultWeightDecay": (weight_decay, True),
            "lossScaling": (loss_scaling, True),
        }
        super().__init__(values, clip_norm_settings)

    def structure(self) -> tuple[Any, ...]:
        return "SGD", *super().structure()[1:]
