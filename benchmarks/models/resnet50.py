"""ResNet-50 v1.5 in half precision on one Bow: micro-batches of 8, gradients of 4 accumulated, SGD with momentum.

Images of 224 × 224, batch normalisation with statistics in single precision, each residual block recomputed in the
backward pass. The loss is scaled by a constant, so that small gradients do not vanish in half precision.
Source: He et al., "Deep Residual Learning for Image Recognition" (2016); "v1.5" has the stride in the 3 × 3 kernel.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.models.network_layers import cross_entropy
from ipujax.models.resnet import ResnetShape, resnet

from .model import Model, Struct

HALF = jnp.float16
LOSS_SCALE = 128.0
Tree = dict[str, Any]


def resnet50(
    groups: tuple[int, ...] = (3, 4, 6, 3),
    width: int = 64,
    side: int = 224,
    classes: int = 1000,
    micro_batch: int = 8,
    micro_batches: int = 4,
    replicas: int = 1,
) -> Model:
    """The training step of one batch of all micro-batches; running statistics are part of its state.

    Args:
        groups: residual blocks of each group.
        width: channels inside the blocks of the first group, doubled in each next one.
        side: of the images.
        classes: of images.
        micro_batch: images a micro-batch.
        micro_batches: whose gradients make an update, of each replica.
        replicas: IPUs that share the batch, and sum gradients over all of them.
    """
    optimizer = optax.sgd(0.1 / LOSS_SCALE, momentum=0.9)
    network = resnet("resnet-50", ResnetShape(groups, True, width, side, classes), HALF, recompute=True)

    def init(key: jax.Array) -> Any:
        params, stats = network.init(key)
        return params, stats, optimizer.init(params)

    def loss(params: Tree, stats: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        logits, stats = network.apply(params, stats, batch["images"], True)
        return LOSS_SCALE * cross_entropy(logits, batch["labels"]), stats

    def step(params: Tree, stats: Tree, opt_state: Any, batch: Tree) -> Any:
        grad_fn = jax.value_and_grad(loss, has_aux=True)
        accumulated = ipu.pipeline(grad_fn, micro_batches=micro_batches, carry={1: (0, 1)})
        (value, stats), grads = accumulated(params, stats, batch)
        if replicas > 1:
            value, stats, grads = lax.pmean((value, stats, grads), "replica")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state, value / LOSS_SCALE

    rows = micro_batch * micro_batches * replicas
    batch = {"images": Struct((rows, side, side, 3), HALF), "labels": Struct((rows,), np.int32)}
    specs: dict[str, Any] = {}
    if replicas > 1:
        specs = {"replicas": replicas, "in_specs": (P(), P(), P(), P("replica")), "out_specs": P()}
    return Model("resnet-50", step, init, (batch,), num_ipus=replicas, arch="bow", jit=specs)
