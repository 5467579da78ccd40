"""AdaGrad, RMSProp, centred RMSProp and AdaDelta.

Source: the equations in `willow/include/popart/adaptive.hpp` of github:graphcore/popart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ipujax.popart.enumerations import AdaptiveMode, DataType, WeightDecayMode
from ipujax.popart.optimisers.base import ClipNormSettings, Optimizer, OptimizerValueMap, State, Values, state_type
from ipujax.popart.reserved_names import PREFIXES

FIRST = PREFIXES["reservedAccl1Prefix"]
SECOND = PREFIXES["reservedAccl2Prefix"]
THIRD = PREFIXES["reservedAccl3Prefix"]
_HAS_SECOND = (AdaptiveMode.CenteredRMSProp, AdaptiveMode.AdaDelta)
_HAS_TF_VARIANT = (AdaptiveMode.RMSProp, AdaptiveMode.CenteredRMSProp)


class Adaptive(Optimizer):
    """Optimisers that divide by a mean of squared gradients.

    Args:
        values: by name: defaultLearningRate, defaultWeightDecay, defaultAlpha, defaultMomentum, defaultEps,
            lossScaling.
        mode: variant.
        weight_decay_mode: whether weight decay is part of the update or of the gradient.
        accum_type: element type of the accumulator, UNDEFINED for that of the weight.
        accl1_type: element type of the mean of squares.
        accl2_type: element type of the mean of gradients, or of squared updates.
        accl3_type: element type of the momentum, UNDEFINED for that of the weight.
        rmsprop_tf_variant: RMSProp as TensorFlow has it: the mean of squares begins with ones, the small term is under
            the root, the learning rate in the momentum.
        debugContext: name in profiles.
        clip_norm_settings: limits of the norm of gradients.
    """

    UNSET: ClassVar[Mapping[str, float]] = MappingProxyType(
        {
            "learningRate": 0.01,
            "weightDecay": 0.0,
            "alpha": 0.99,
            "momentum": 0.0,
            "eps": 1e-6,
            "lossScaling": 1.0,
        }
    )

    def __init__(
        self,
        values: Mapping[str, Any],
        mode: AdaptiveMode = AdaptiveMode.RMSProp,
        weight_decay_mode: WeightDecayMode = WeightDecayMode.Decay,
        accum_type: DataType = DataType.UNDEFINED,
        accl1_type: DataType = DataType.FLOAT,
        accl2_type: DataType = DataType.FLOAT,
        accl3_type: DataType = DataType.UNDEFINED,
        rmsprop_tf_variant: bool = False,
        debugContext: str = "adaptive",
        clip_norm_settings: Sequence[ClipNormSettings] = (),
    ) -> None:
        super().__init__(values, clip_norm_settings, accum_type)
        self.mode = AdaptiveMode(mode)
        self.weightDecayMode = WeightDecayMode(weight_decay_mode)
        self._types = (accl1_type, accl2_type, accl3_type)
        self._is_tf = bool(rmsprop_tf_variant) and self.mode in _HAS_TF_VARIANT

    def alphas(self) -> OptimizerValueMap:
        """Return the decay rates of the means."""
        return self._maps["alpha"]

    def momentums(self) -> OptimizerValueMap:
        """Return the momentums."""
        return self._maps["momentum"]

    def epss(self) -> OptimizerValueMap:
        """Return the terms that keep denominators from zero."""
        return self._maps["eps"]

    def has_momentum(self) -> bool:
        """Return whether there is a momentum, or may be one later."""
        momenta = self._maps["momentum"]
        return any(v.value != 0 or not v.is_constant for v in [momenta.default, *momenta.specific.values()])

    def structure(self) -> tuple[Any, ...]:
        return *super().structure(), self.mode, self.weightDecayMode, self._is_tf, self.has_momentum()

    def initial_state(self, weight: jax.Array, values: Values) -> State:
        first, second, third = (state_type(kind, weight.dtype) for kind in self._types)
        # TensorFlow's RMSProp begins with ones: its first steps are shorter.
        state = {FIRST: jnp.full(weight.shape, float(self._is_tf), first)}
        if self.mode in _HAS_SECOND:
            state[SECOND] = jnp.zeros(weight.shape, second)
        if self.has_momentum():
            state[THIRD] = jnp.zeros(weight.shape, third)
        return state

    def updated(self, gradient: jax.Array, weight: jax.Array, state: State, values: Values) -> tuple[jax.Array, State]:
        wide = weight.astype(jnp.float32)
        slope = gradient
        if self.weightDecayMode is WeightDecayMode.L2Regularization:
            slope = slope + values["weightDecay"] * wide
        update, means = self._update(slope, state, values)
        rate = values["learningRate"]
        next_state = {name: mean.astype(state[name].dtype) for name, mean in means.items()}
        if THIRD in state:
            # TensorFlow's RMSProp has the learning rate in the momentum, unless the momentum is zero.
            is_rated = self._is_tf & (values["momentum"] != 0)
            update = values["momentum"] * state[THIRD] + jnp.where(is_rated, rate, 1.0) * update
            rate = jnp.where(is_rated, 1.0, rate)
            next_state[THIRD] = update.astype(state[THIRD].dtype)
        step = rate * update
        if self.weightDecayMode is WeightDecayMode.Decay:
            step = step + rate * values["weightDecay"] * wide
        return (wide - step).astype(weight.dtype), next_state

    def _update(self, slope: jax.Array, state: State, values: Values) -> tuple[jax.Array, State]:
        """Return the update of a gradient before learning rate and momentum, and the means of the next step."""
        alpha = values["alpha"]
        eps = values["eps"]
        square = jnp.square(slope)
        # AdaGrad adds squares without decay, so its steps shrink for good.
        is_sum = self.mode is AdaptiveMode.AdaGrad
        first = state[FIRST] + square if is_sum else alpha * state[FIRST] + (1 - alpha) * square
        if self.mode is AdaptiveMode.AdaDelta:
            update = slope * jnp.sqrt(state[SECOND] + eps) / jnp.sqrt(first + eps)
            return update, {FIRST: first, SECOND: alpha * state[SECOND] + (1 - alpha) * jnp.square(update)}
        means = {FIRST: first}
        variance = first
        if self.mode is AdaptiveMode.CenteredRMSProp:
            means[SECOND] = alpha * state[SECOND] + (1 - alpha) * slope
            # Where means are rounded, as in float16, the difference may be negative.
            variance = jnp.maximum(first - jnp.square(means[SECOND]), 0)
        # TensorFlow adds eps inside the root, PyTorch outside: the difference is large for small variances.
        root = jnp.sqrt(variance + eps) if self._is_tf else jnp.sqrt(variance) + eps
        return slope / root, means
