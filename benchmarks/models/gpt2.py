"""GPT-2's training on four IPUs whose stages are found automatically, in half precision, by Adam.

Weights, gradients and activations are half precision; the moments are single precision, in streaming memory. The
table of tokens embeds and predicts; it has 47 rows more than there are tokens, for whole groups of 64. What is
predicted for all tokens of a sequence would fill a chip: the loss goes through them in parts, which its gradient
computes again. It is scaled by a constant, so that small gradients do not vanish in half precision.
Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), without dropout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import ipujax as ipu

from .gpt import Sizes, block, block_init
from .layers import Params, cross_entropy, layer_norm, norm_init, weights
from .model import Model, Struct, in_single

HALF, LOSS_SCALE, IPUS = jnp.float16, 128.0, 4
PARTS = 8  # of a sequence, for the loss


def init(sizes: Sizes, key: jax.Array) -> Params:
    """All parameters."""
    tokens, places, *blocks = jax.random.split(key, 2 + sizes.layers)
    params = {
        "tokens": weights(tokens, sizes.vocabulary, sizes.width),
        "places": weights(places, sizes.length, sizes.width),
        "blocks": [block_init(k, sizes.width) for k in blocks],
        "norm": norm_init(sizes.width),
    }
    return jax.tree.map(lambda x: x.astype(HALF), params)


def loss(sizes: Sizes, params: Params, batch: Params) -> jax.Array:
    """Scaled loss of a micro-batch."""
    x = params["tokens"][batch["tokens"]] + params["places"]
    for p in params["blocks"]:
        x = block(p, x, sizes.heads)

    @jax.checkpoint
    def of_part(x: jax.Array, following: jax.Array) -> jax.Array:
        return cross_entropy(x @ params["tokens"].T, following)

    parts = [jnp.reshape(y, (PARTS, -1, *y.shape[2:])) for y in (layer_norm(params["norm"], x), batch["next"])]
    return LOSS_SCALE * lax.map(lambda part: of_part(*part), tuple(parts)).mean()


def gpt2(name: str, sizes: Sizes, micro_batches: int, **rest: Any) -> Model:
    """The training step.

    Args:
        name: of the model.
        sizes: of the model and its micro-batches.
        micro_batches: a step.
        rest: further fields of `Model`.
    """
    optimizer = in_single(optax.chain(optax.scale(1 / LOSS_SCALE), optax.adamw(1e-3)))

    def start(key: jax.Array) -> tuple[Params, Any]:
        params = init(sizes, key)
        return params, optimizer.init(params)

    def step(params: Params, opt_state: Any, batch: Params) -> Any:
        grad_fn = jax.value_and_grad(lambda params, batch: loss(sizes, params, batch))
        value, grads = ipu.pipeline(grad_fn, micro_batches=micro_batches, stages=IPUS)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value / LOSS_SCALE

    tokens = Struct((micro_batches * sizes.batch, sizes.length), np.int32)
    jit = {"offload_argnums": 1}
    return Model(name, step, start, ({"tokens": tokens, "next": tokens},), num_ipus=IPUS, arch="bow", jit=jit, **rest)


def gpt2_medium(layers: int = 24, micro_batches: int = 8) -> Model:
    """GPT-2 medium, micro-batches of one sequence of 1,024 tokens; the compiler says what is computed again.

    Args:
        layers: blocks.
        micro_batches: a step.
    """
    sizes = Sizes(layers, 1024, 16, 1024, 1, 50_304)
    options = {"recompute": "auto", "allow_out_of_memory": False}
    return gpt2("gpt2-medium", sizes, micro_batches, options=options)
