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

from .layers import conv_norm, conv_norm_init, cross_entropy, dense, dense_init
from .model import Model, Struct

HALF = jnp.float16
LOSS_SCALE = 128.0
EXPANSION = 4
Tree = dict[str, Any]


def block_init(key: jax.Array, inputs: int, width: int, is_first: bool) -> tuple[Tree, Tree]:
    """Parameters and running statistics of `block`; the first block of a group has a convolution as shortcut."""
    sizes = [(1, inputs, width), (3, width, width), (1, width, EXPANSION * width)]
    names = ["reduce", "middle", "expand"]
    if is_first:
        sizes = [*sizes, (1, inputs, EXPANSION * width)]
        names = [*names, "shortcut"]
    keys = jax.random.split(key, len(sizes))
    parts = {n: conv_norm_init(k, *size, dtype=HALF) for n, k, size in zip(names, keys, sizes, strict=True)}
    return {name: p for name, (p, _) in parts.items()}, {name: s for name, (_, s) in parts.items()}


def block(stride: int, p: Tree, stats: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
    """A bottleneck of three convolutions beside a shortcut."""
    new = {}
    short = x
    if "shortcut" in p:
        short, new["shortcut"] = conv_norm(p["shortcut"], stats["shortcut"], x, stride)
    x, new["reduce"] = conv_norm(p["reduce"], stats["reduce"], x)
    x, new["middle"] = conv_norm(p["middle"], stats["middle"], jax.nn.relu(x), stride)
    x, new["expand"] = conv_norm(p["expand"], stats["expand"], jax.nn.relu(x))
    return jax.nn.relu(x + short), new


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
    # Of each block: the channels inside, whether it is the first of its group, and its stride.
    plan = [
        (width * 2**group, n == 0, 2 if group and n == 0 else 1)
        for group, count in enumerate(groups)
        for n in range(count)
    ]

    def init(key: jax.Array) -> Any:
        stem, head, *keys = jax.random.split(key, 2 + len(plan))
        first, first_stats = conv_norm_init(stem, 7, 3, width, HALF)
        params: list[Tree] = []
        stats: list[Tree] = []
        channels = width
        for k, (inner, is_first, _) in zip(keys, plan, strict=True):
            p, s = block_init(k, channels, inner, is_first)
            params = [*params, p]
            stats = [*stats, s]
            channels = EXPANSION * inner
        all_params = {"stem": first, "blocks": params, "head": dense_init(head, channels, classes, HALF)}
        return all_params, {"stem": first_stats, "blocks": stats}, optimizer.init(all_params)

    def loss(params: Tree, stats: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        x, stem = conv_norm(params["stem"], stats["stem"], batch["images"], 2)
        x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        new = []
        for (_, _, stride), p, old in zip(plan, params["blocks"], stats["blocks"], strict=True):
            x, now = jax.checkpoint(block, static_argnums=0)(stride, p, old, x)
            new.append(now)
        value = cross_entropy(dense(params["head"], x.mean((1, 2))), batch["labels"])
        return LOSS_SCALE * value, {"stem": stem, "blocks": new}

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
