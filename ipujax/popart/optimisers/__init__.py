"""Optimisers of PopART: their values, their state and their updates."""

from ipujax.popart.optimisers.adam import Adam as Adam
from ipujax.popart.optimisers.adaptive import Adaptive as Adaptive
from ipujax.popart.optimisers.base import (
    ClipNormSettings as ClipNormSettings,
    Optimizer as Optimizer,
    clip_by_norm as clip_by_norm,
    is_constant as is_constant,
)
from ipujax.popart.optimisers.optimiser_values import (
    OptimizerValue as OptimizerValue,
    OptimizerValueMap as OptimizerValueMap,
    state_type as state_type,
)
from ipujax.popart.optimisers.sgd import SGD as SGD, ConstSGD as ConstSGD
