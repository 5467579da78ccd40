"""GPT-2's training on four IPUs whose stages are found automatically, in half precision, by Adam.

Weights, gradients and activations are half precision; the moments are single precision, in streaming memory. The
table of tokens embeds and predicts; it has 47 rows more than there are tokens, for equal parts in groups of 16. The
loss is scaled by a constant, so that small gradients do not vanish in half precision.

Values that would fill a chip are computed in parts, and recomputed for gradients: logits of all tokens by parts of the
table, which are separate parameters, so that an update takes one part at a time; and the scores of all heads by groups.
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
from ipujax.models.network_layers import Params, attend, block, block_init, layer_norm, norm_init, weights

from .gpt import Sizes
from .model import Model, Struct, in_single

HALF = jnp.float16
LOSS_SCALE = 128.0
IPUS = 4
TABLES = 8  # parts of the table of tokens
GROUPS = 4  # of heads


def init(sizes: Sizes, key: jax.Array) -> Params:
    """All parameters."""
    tokens, places, *blocks = jax.random.split(key, 2 + sizes.layers)
    params = {
        "tokens": jnp.split(weights(tokens, sizes.vocabulary, sizes.width), TABLES),
        "places": weights(places, sizes.length, sizes.width),
        "blocks": [block_init(k, sizes.width) for k in blocks],
        "norm": norm_init(sizes.width),
    }
    return jax.tree.map(lambda x: x.astype(HALF), params)


def embed(tables: Params, ids: jax.Array) -> jax.Array:
    """The rows of a table that is in parts."""
    rows = len(tables[0])
    local_ids = [ids - n * rows for n in range(len(tables))]
    rows_by_part = [table[jnp.clip(at, 0, rows - 1)] for table, at in zip(tables, local_ids, strict=True)]
    return sum(
        jnp.where(((at >= 0) & (at < rows))[..., None], x, 0) for x, at in zip(rows_by_part, local_ids, strict=True)
    )


def cross_entropy(tables: Params, x: jax.Array, ids: jax.Array) -> jax.Array:
    """Mean over all places, in single precision, of a table that is in parts."""

    @jax.checkpoint
    def of_part(x: jax.Array, table: jax.Array, local_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = (x @ table.T).astype(jnp.float32)
        right = jnp.arange(len(table)) == local_ids[..., None]
        return jax.nn.logsumexp(logits, -1), jnp.where(right, logits, 0).sum(-1)

    rows = len(tables[0])
    sums, of_right = zip(*(of_part(x, table, ids - n * rows) for n, table in enumerate(tables)), strict=True)
    return (jax.nn.logsumexp(jnp.stack(sums), 0) - sum(of_right)).mean()


def attend_in_groups(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Result of `attend`, computed for a group of heads after the other."""
    groups = [jnp.moveaxis(x.reshape(*x.shape[:2], GROUPS, -1, x.shape[-1]), 2, 0) for x in (q, k, v)]
    attended = lax.map(jax.checkpoint(lambda group: attend(*group)), groups)
    return jnp.moveaxis(attended, 0, 2).reshape(q.shape)


def loss(sizes: Sizes, params: Params, batch: Params) -> jax.Array:
    """Scaled loss of a micro-batch."""
    x = embed(params["tokens"], batch["tokens"]) + params["places"]
    for p in params["blocks"]:
        x = block(p, x, sizes.heads, attend_in_groups)
    return LOSS_SCALE * cross_entropy(params["tokens"], layer_norm(params["norm"], x), batch["next"])


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
    """GPT-2 medium, micro-batches of one sequence of 1,024 tokens; the compiler chooses the values to compute again.

    Args:
        layers: blocks.
        micro_batches: a step.
    """
    sizes = Sizes(layers, 1024, 16, 1024, 1, 50_304)
    options = {"recompute": "auto", "partials": "float16", "allow_out_of_memory": False}
    return gpt2("gpt2-medium", sizes, micro_batches, options=options)
