"""BERT's pre-training on a pipeline of four IPUs, in half precision: masked words and next sentence, SGD or LAMB.

The table of words is on the first IPU, which has fewer layers for that: the first stage embeds, the last one, on the
same IPU, predicts words by the same table. Each layer is recomputed in the backward pass. The loss is scaled by a
constant, so that small gradients do not vanish in half precision. LAMB computes in single precision; each replica keeps
its part of the moments, in streaming memory.
Source: Devlin et al., "BERT" (2019); You et al., "Large Batch Optimization" (2020); stages and memory of the moments
as in Graphcore's PyTorch example, without its dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.models.bert import BertShape, embedded, ends_init, heads, layer, padding_bias
from ipujax.models.network_layers import Params, block_init, cross_entropy

from .model import Model, Struct, in_single

HALF = jnp.float16
LOSS_SCALE = 128.0
IPUS = 4


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batches.

    Args:
        layers: on each IPU.
        width: features of each word.
        heads: of attention.
        micro_batch: sequences.
        micro_batches: of each replica, a step.
        replicas: of the pipeline.
        length: words of a sequence.
        masked: words of a sequence that are to be predicted.
        vocabulary: different words.
        keeps_layers: the inputs of each layer are saved for the backward pass; else only those of each stage.
    """

    layers: tuple[int, ...]
    width: int
    heads: int
    micro_batch: int
    micro_batches: int
    replicas: int = 1
    length: int = 128
    masked: int = 20
    vocabulary: int = 30_528
    keeps_layers: bool = True


def init(sizes: Sizes, key: jax.Array) -> Params:
    """All parameters."""
    keys = jax.random.split(key, 6 + sum(sizes.layers))
    layers = iter(keys[6:])
    shape = BertShape(sum(sizes.layers), sizes.width, sizes.heads, sizes.vocabulary, sizes.length, sizes.masked)
    return ends_init(list(keys[:6]), shape, HALF) | {
        "layers": [[block_init(next(layers), sizes.width, dtype=HALF) for _ in range(n)] for n in sizes.layers]
    }


def loss(sizes: Sizes, params: Params, batch: Params) -> jax.Array:
    """Scaled sum of the losses of both tasks, of a micro-batch."""
    each = jax.checkpoint(jax.jit(layer, static_argnums=3), static_argnums=3)

    with ipu.stage(0):
        embedding = embedded if sizes.keeps_layers else jax.checkpoint(embedded)
        x = embedding(params, batch["words"], batch["segments"])
        bias = padding_bias(batch["is_word"], HALF)

    def encoder(layers: list[Params], x: jax.Array, bias: jax.Array) -> jax.Array:
        for p in layers:
            x = each(p, x, bias, sizes.heads)
        return x

    for number, layers in enumerate(params["layers"]):
        with ipu.stage(number):
            x = (encoder if sizes.keeps_layers else jax.checkpoint(encoder))(layers, x, bias)
    with ipu.stage(IPUS):
        guesses, follows = heads(params, x, batch["positions"])
        return LOSS_SCALE * (cross_entropy(guesses, batch["guesses"]) + cross_entropy(follows, batch["follows"]))


def lamb(sizes: Sizes, min_elements: int) -> optax.GradientTransformation:
    """LAMB in single precision, of gradients, and for parameters, in half precision; sharded over replicas.

    Args:
        sizes: of the model.
        min_elements: parameters of fewer elements are updated by every replica.
    """
    inside = optax.chain(optax.scale(1 / LOSS_SCALE), optax.lamb(1e-3, weight_decay=0.01))
    return ipu.optim.shard(in_single(inside), replicas=sizes.replicas, min_elements=min_elements, merge_bytes=0)


def parted(state: Any) -> tuple[Any, Any]:
    """The state of an optimiser in two trees: sharded arrays, and all others, each with None for those of the other.

    The moments of vectors are less on a tile than the code that would move them to streaming memory and back.
    """

    def select(is_sharded: bool) -> Any:
        return jax.tree.map(lambda x: x if _is_shard(x) == is_sharded else None, state, is_leaf=_is_shard)

    return select(True), select(False)


def merge_state(sharded: Any, replicated: Any) -> Any:
    """The state that `parted` took apart."""

    def is_end(x: Any) -> bool:
        return x is None or _is_shard(x)

    return jax.tree.map(lambda x, other: other if x is None else x, sharded, replicated, is_leaf=is_end)


def _is_shard(x: Any) -> bool:
    return isinstance(x, ipu.optim.Shard)


def bert(name: str, sizes: Sizes, optimizer: optax.GradientTransformation | None = None, **rest: Any) -> Model:
    """The training step of all replicas.

    Args:
        name: of the model.
        sizes: of the model and its batches.
        optimizer: an optimiser sharded over replicas, with the shards in streaming memory; plain SGD when None.
        rest: further fields of `Model`.
    """
    chosen = optimizer or optax.sgd(1e-3 / LOSS_SCALE)

    def start(key: jax.Array) -> tuple[Params, Any, Any]:
        params = init(sizes, key)
        return params, *parted(chosen.init(params))

    def step(params: Params, sharded: Any, replicated: Any, batch: Params) -> Any:
        grad_fn = jax.value_and_grad(lambda params, batch: loss(sizes, params, batch))
        mapping = [*range(IPUS), 0]
        result = ipu.pipeline(grad_fn, micro_batches=sizes.micro_batches, device_mapping=mapping)(params, batch)
        if optimizer is not None:
            value = lax.pmean(result[0], "replica")
            grads = result[1]
        else:
            value, grads = lax.pmean(result, "replica") if sizes.replicas > 1 else result
        updates, opt_state = chosen.update(grads, merge_state(sharded, replicated), params)
        return optax.apply_updates(params, updates), *parted(opt_state), value / LOSS_SCALE

    rows = sizes.replicas * sizes.micro_batches * sizes.micro_batch
    words = Struct((rows, sizes.length), np.int32)
    masked = Struct((rows, sizes.masked), np.int32)
    batch = {"words": words, "segments": words, "is_word": Struct(words.shape, np.bool_), "positions": masked}
    batch |= {"guesses": masked, "follows": Struct((rows,), np.int32)}
    jit: dict[str, Any] = {}
    if sizes.replicas > 1:
        specs = P(), ipu.optim.shard_specs(jax.eval_shape(start, jax.random.key(0))[1]), P()
        jit = {"replicas": sizes.replicas, "in_specs": (*specs, P("replica")), "out_specs": (*specs, P())}
    if optimizer is not None:
        jit["offload_argnums"] = 1
    return Model(name, step, start, (batch,), num_ipus=IPUS * sizes.replicas, arch="bow", jit=jit, **rest)


def spread(layers: int, first: int) -> tuple[int, ...]:
    """Layers of each IPU: so many on the first, the others evenly on the rest."""
    rest = layers - first
    return (first, *((rest + IPUS - 2 - n) // (IPUS - 1) for n in range(IPUS - 1)))


def bert_large(layers: int = 24, micro_batches: int = 16) -> Model:
    """BERT-Large on 4 Bow IPUs, micro-batches of 8: 3, 7, 7 and 7 layers.

    Args:
        layers: of all IPUs, an eighth of them on the first.
        micro_batches: a step.
    """
    return bert("bert-large", Sizes(spread(layers, layers // 8), 1024, 16, 8, micro_batches))


def bert_base(layers: int = 12, micro_batches: int = 16) -> Model:
    """BERT-Base, phase 1, on a Bow Pod16 as published: 4 replicas of 4 IPUs with 0, 4, 4 and 4 layers, half partials.

    Micro-batches of 32. The difference of steps of 24 and of 16 micro-batches is the cost of micro-batches without
    optimiser and ramps.

    Args:
        layers: of all IPUs, none on the first.
        micro_batches: of each replica, a step.
    """
    sizes = Sizes(spread(layers, 0), 768, 12, 32, micro_batches, replicas=4)
    return bert("bert-base", sizes, options={"partials": "float16"})


def bert_large_lamb(layers: int = 24, micro_batches: int = 16) -> Model:
    """BERT-Large, phase 1, as it was trained: 4 replicas of 4 Bow IPUs, LAMB, 8 sequences a micro-batch.

    Args:
        layers: of all IPUs, an eighth of them on the first.
        micro_batches: of each replica, a step.
    """
    sizes = Sizes(spread(layers, layers // 8), 1024, 16, 8, micro_batches, replicas=4, keeps_layers=False)
    return bert("bert-large-lamb", sizes, lamb(sizes, 8192), options={"byte_cost": 8.0})
