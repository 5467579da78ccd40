"""Wrappers of optimisers: loss scaling for half precision, and optimiser state sharded over replicas."""

from ipujax.optim.loss_scaling import (
    AutomaticLossScaleState as AutomaticLossScaleState,
    Optimizer as Optimizer,
    StaticLossScaleState as StaticLossScaleState,
    automatic_loss_scale as automatic_loss_scale,
    loss_scale as loss_scale,
    static_loss_scale as static_loss_scale,
)
from ipujax.optim.sharding import (
    MIN_ELEMENTS as MIN_ELEMENTS,
    Shard as Shard,
    shard as shard,
    shard_specs as shard_specs,
    unshard as unshard,
)
from ipujax.public import public_names as _public_names

__dir__ = _public_names(globals())
