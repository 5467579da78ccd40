"""Wrappers of optimisers: loss scaling for half precision, and optimiser state sharded over replicas."""

from ipujax.optim.loss_scaling import AutomaticLossScaleState as AutomaticLossScaleState
from ipujax.optim.loss_scaling import Optimizer as Optimizer
from ipujax.optim.loss_scaling import StaticLossScaleState as StaticLossScaleState
from ipujax.optim.loss_scaling import automatic_loss_scale as automatic_loss_scale
from ipujax.optim.loss_scaling import loss_scale as loss_scale
from ipujax.optim.loss_scaling import static_loss_scale as static_loss_scale
from ipujax.optim.sharding import MIN_ELEMENTS as MIN_ELEMENTS
from ipujax.optim.sharding import Shard as Shard
from ipujax.optim.sharding import shard as shard
from ipujax.optim.sharding import shard_specs as shard_specs
from ipujax.optim.sharding import unshard as unshard
from ipujax.public import public_names as _public_names

__dir__ = _public_names(globals())
