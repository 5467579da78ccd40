"""Adam, AdamW, AdaMax and LAMB, with and without bias correction.

Source: the equations in `willow/include/popart/adam.hpp` of github:graphcore/popart; Kingma and Ba 2015; Loshchilov and
Hutter 2019; You et al. 2020. AdaMax divides by its second moment without a root and without bias correction, as PopART
computes it and Kingma and Ba write it; the header's summary has both, the same for all variants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ipujax.popart.enumerations import AdamMode, DataType, WeightDecayMode
from ipujax.popart.optimisers.base import ClipNormSettings, Optimizer, OptimizerValueMap, State, Values, state_type
from ipujax.popart.reserved_names import PREFIXES

FIRST = PREFIXES["reservedAccl1Prefix"]
SECOND = PREFIXES["reservedAccl2Prefix"]
STEP = PREFIXES["reservedStepPrefix"]
_CORRECTED = (AdamMode.Adam, AdamMode.Lamb, AdamMode.AdaMax)
_LAMB = (AdamMode.Lamb, AdamMode.LambNoBias)


class Adam(Optimizer):
    """Adam and its variants.

    Args:
        values: by name: defaultLearningRate, defaultWeightDecay, defaultBeta1, defaultBeta2, defaultEps,
            defaultMaxWeightNorm, lossScaling.
        mode: variant.
        weight_decay_mode: whether weight decay is part of the update or of the gradient.
        accum_type: element type of the accumulator, UNDEFINED for that of the weight.
        accl1_type: element type of the first moment.
        accl2_type: element type of the second moment.
        clip_norm_settings: limits of the norm of gradients.
        scaled_optimizer_state: whether the moments keep the loss scaling; the updates are equal but for rounding.
        debugContext: name in profiles.
    """

    UNSET: ClassVar[Mapping[str, float]] = MappingProxyType(
        {
            "learningRate": 0.1,
            "weightDecay": 0.0,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-6,
            "maxWeightNorm": 10.0,
            "lossScaling": 1.0,
        }
    )

    def __init__(
        self,
        values: Mapping[str, Any],
        mode: AdamMode = AdamMode.Adam,
        weight_decay_mode: WeightDecayMode = WeightDecayMode.Decay,
        accum_type: DataType = DataType.UNDEFINED,
        accl1_type: DataType = DataType.FLOAT,
        accl2_type: DataType = DataType.FLOAT,
        clip_norm_settings: Sequence[ClipNormSettings] = (),
        scaled_optimizer_state: bool = False,
        debugContext: str = "adam",
    ) -> None:
        super().__init__(values, clip_norm_settings, accum_type)
        self.mode = AdamMode(mode)
        self.weightDecayMode = WeightDecayMode(weight_decay_mode)
        self._types = (accl1_type, accl2_type)

    def beta1s(self) -> OptimizerValueMap:
        """Return the decay rates of the first moment."""
        return self._maps["beta1"]

    def beta2s(self) -> OptimizerValueMap:
        """Return the decay rates of the second moment."""
        return self._maps["beta2"]

    def epss(self) -> OptimizerValueMap:
        """Return the terms that keep denominators from zero."""
        return self._maps["eps"]

    def maxWeightNorms(self) -> OptimizerValueMap:
        """Return the largest norms of a weight in LAMB's trust ratio."""
        return self._maps["maxWeightNorm"]

    def structure(self) -> tuple[Any, ...]:
        return *super().structure(), self.mode, self.weightDecayMode

    def initial_state(self, weight: jax.Array, values: Values) -> State:
        first, second = (state_type(kind, weight.dtype) for kind in self._types)
        state = {FIRST: jnp.zeros(weight.shape, first), SECOND: jnp.zeros(weight.shape, second)}
        return {**state, STEP: jnp.zeros((), jnp.float32)} if self.mode in _CORRECTED else state

    def updated(self, gradient: jax.Array, weight: jax.Array, state: State, values: Values) -> tuple[jax.Array, State]:
        # The weight is rounded once, at the end; moments have element types of their own.
        wide = weight.astype(jnp.float32)
        slope = gradient
        if self.weightDecayMode is WeightDecayMode.L2Regularization:
            slope = slope + values["weightDecay"] * wide
        beta1 = values["beta1"]
        beta2 = values["beta2"]
        first = beta1 * state[FIRST] + (1 - beta1) * slope
        if self.mode is AdamMode.AdaMax:
            second = jnp.maximum(beta2 * state[SECOND], jnp.abs(slope))
        else:
            second = beta2 * state[SECOND] + (1 - beta2) * jnp.square(slope)
        next_state = {FIRST: first.astype(state[FIRST].dtype), SECOND: second.astype(state[SECOND].dtype)}
        mean = first
        spread = second
        if STEP in state:
            count = state[STEP] + 1
            next_state[STEP] = count
            # The count is float32: exact up to 2²⁴ updates, and β**count has vanished long before.
            mean = first / (1 - beta1**count)
            # AdaMax's second moment is a maximum, which is not biased towards zero.
            spread = second if self.mode is AdamMode.AdaMax else second / (1 - beta2**count)
        root = spread if self.mode is AdamMode.AdaMax else jnp.sqrt(spread)
        update = mean / (root + values["eps"])
        if self.weightDecayMode is WeightDecayMode.Decay:
            update = update + values["weightDecay"] * wide
        rate = values["learningRate"] * self._trust_ratio(wide, update, values)
        return (wide - rate * update).astype(weight.dtype), next_state

    def _trust_ratio(self, weight: jax.Array, update: jax.Array, values: Values) -> jax.Array | float:
        if self.mode not in _LAMB:
            return 1.0
        weight_norm = jnp.minimum(jnp.linalg.norm(weight.ravel()), values["maxWeightNorm"])
        update_norm = jnp.linalg.norm(update.ravel())
        # A new weight of zeros would never move with a ratio of zero; PopART steps with ratio 1.
        is_zero = (weight_norm == 0) | (update_norm == 0)
        return jnp.where(is_zero, 1.0, weight_norm / jnp.where(update_norm == 0, 1.0, update_norm))
