"""Optimisers of PopART: their values, their state and their updates."""

from ipujax.popart.optimisers.adam import Adam as Adam
from ipujax.popart.optimisers.adaptive import Adaptive as Adaptive
from ipujax.popart.optimisers.base import (
    ClipNormSettings as ClipNormSettings,
    Optimizer as Optimizer,
    OptimizerValue as OptimizerValue,
    OptimizerValueMap as OptimizerValueMap,
    clip_by_norm as clip_by_norm,
    is_constant as is_constant,
    state_type as state_type,
)
from ipujax.popart.optimisers.sgd import SGD as SGD, ConstSGD as ConstSGD
