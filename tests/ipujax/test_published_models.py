"""Published networks: parameters against published counts, numbers against optax, flax and NumPy, steps that learn."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipujax as ipu
from ipujax import models
from ipujax.models import conformer, llama, network_layers, vision_transformer
from ipujax.models.network_layers import batch_norm, norm_init
from ipujax.models.u_net import UNetShape

PUBLISHED = models.PUBLISHED
# Of the heads of both tasks of pre-training, which the published counts leave out; the pooler is among them.
BERT_HEADS = {"bert-base": 768, "bert-large": 1024}
GPT3 = [name for name in PUBLISHED if name.startswith("gpt-")]
CONFORMER_DECODERS = {"conformer-s": 320, "conformer-m": 640, "conformer-l": 640}  # units of the LSTM, table 1
EXACT = [name for name in PUBLISHED if name not in {*GPT3, *BERT_HEADS, *CONFORMER_DECODERS, "u-net"}]
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 2, "width": 16, "heads": 2, "vocabulary": 20, "length": 8},
    "llama-3-8b": {
        **{"layers": 2, "width": 16, "heads": 4, "key_heads": 2},
        **{"hidden": 24, "vocabulary": 20, "length": 8},
    },
    "bert-base": {"layers": 2, "width": 16, "heads": 2, "vocabulary": 20, "length": 8, "masked": 2},
    "vit-b16": {"layers": 2, "width": 16, "heads": 2, "patch": 4, "side": 8, "classes": 5},
    "conformer-s": {
        **{"layers": 2, "width": 16, "heads": 2, "kernel": 4, "frames": 32},
        **{"bands": 8, "vocabulary": 6, "tokens": 3},
    },
    "resnet-18": {"groups": (1, 1), "width": 8, "side": 16, "classes": 5},
    "resnet-50": {"groups": (1, 1), "width": 8, "side": 16, "classes": 5},
    "u-net": {"channels": (4, 8), "side": 20},
}


def drawn(shape: jax.ShapeDtypeStruct, seed: int = 0) -> jax.Array:
    """Numbers that any batch may have: indices are 0 or 1, all else is from 0 to 1."""
    numbers = np.random.default_rng(seed).random(shape.shape)
    return jnp.asarray(numbers if jnp.issubdtype(shape.dtype, jnp.inexact) else numbers.round(), shape.dtype)


def compiled(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A function compiled in little time."""
    return jax.jit(fun).lower(*args).compile({"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert models.network(name).num_parameters() == PUBLISHED[name].parameters


@pytest.mark.parametrize("name", GPT3)
def test_parameters_of_gpt_3_are_its_rounded_ones(name: str) -> None:
    assert models.network(name).num_parameters() == pytest.approx(PUBLISHED[name].parameters, rel=0.02)


@pytest.mark.parametrize("name, d", BERT_HEADS.items())
def test_parameters_of_bert_are_the_published_ones_and_heads(name: str, d: int) -> None:
    heads = d * d + d + 2 * d + 2 * (d + 1) + 30_522  # transform, its norm, next sentence, bias of words
    assert models.network(name).num_parameters() == PUBLISHED[name].parameters + heads


@pytest.mark.parametrize("name, units", CONFORMER_DECODERS.items())
def test_parameters_of_conformers_are_the_published_ones_without_their_decoder(name: str, units: int) -> None:
    """The decoder of a transducer: embedding and one LSTM layer, and a joint layer of both encodings to the tokens."""
    tokens = 1024
    decoder = tokens * units + 4 * units * (2 * units + 2)
    joint = (PUBLISHED[name].shape.width + units) * units
    total = models.network(name).num_parameters() + decoder + joint
    assert total == pytest.approx(PUBLISHED[name].parameters, rel=0.05)


def test_the_u_net_has_23_convolutions() -> None:
    """By hand: pairs of 3 × 3 downwards and upwards, 2 × 2 upwards, 1 × 1 at the end; it labels 388 × 388 pixels."""
    down = [(1, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512), (512, 1024)]
    pairs = [*down, (1024, 1024), (1024, 512), (512, 512), (512, 256), (256, 256), (256, 128), (128, 128)]
    pairs += [(128, 64), (64, 64)]
    ups = [(1024, 512), (512, 256), (256, 128), (128, 64)]
    assert len(pairs) + len(ups) + 1 == 23
    count = sum(9 * n * m + m for n, m in pairs) + sum(4 * n * m + m for n, m in ups) + 64 * 2 + 2
    assert models.network("u-net").num_parameters() == count
    assert UNetShape((64, 128, 256, 512, 1024)).label_side() == 388


def small_weights(shapes: Any) -> Any:
    """Values for parameters; drawn here, as compiling `init` takes longer than the rest of a test."""
    leaves, tree = jax.tree.flatten(shapes)
    return tree.unflatten([(drawn(leaf, n) - 0.5) * 0.4 for n, leaf in enumerate(leaves)])


@pytest.mark.parametrize("name", SMALL)
def test_small_steps_learn_and_infer(name: str) -> None:
    network = models.network(name, **SMALL[name])
    work = models.training(network, 4, models.sgd(0.05, momentum=0.0), micro_batches=2)
    params, opt_state, *rest = work.args
    statistics = [jax.tree.map(drawn, part) for part in rest[:-1]]
    state = [small_weights(params), opt_state, *statistics]
    batch = jax.tree.map(drawn, rest[-1])
    step = compiled(work.fun, *state, batch)
    losses = []
    for _ in range(4):
        *state, loss = step(*state, batch)
        losses.append(float(loss))
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, list(work.args[:-1]))
    inferred = models.inference(network, 4)
    outputs = jax.eval_shape(inferred.fun, *inferred.args)
    assert all(leaf.shape[0] == 4 and leaf.dtype == jnp.float16 for leaf in jax.tree.leaves(outputs))


@pytest.mark.parametrize("name", ["resnet-18", "conformer-s"])
def test_inference_uses_running_statistics(name: str) -> None:
    """Each example of a batch gets the outputs that it gets alone."""
    network = models.network(name, dtype="float32", **SMALL[name])
    params, statistics, inputs = models.inference(network, 2).args
    state = small_weights(params), jax.tree.map(drawn, statistics)
    images = jax.tree.map(drawn, inputs)
    both, first = (
        compiled(models.inference(network, 2).fun, *state, batch)(*state, batch) for batch in (images, images[:1])
    )
    np.testing.assert_allclose(both[:1], first, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "ours, theirs", [(models.adam(0.1), optax.adam(0.1)), (models.sgd(0.1), optax.sgd(0.1, momentum=0.9))]
)
def test_optimisers_are_those_of_optax(ours: models.Optimizer, theirs: optax.GradientTransformation) -> None:
    params = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}
    state, want, their_state = ours.init(params), params, theirs.init(params)
    for seed in range(3):
        grads = jax.tree.map(lambda x, seed=seed: drawn(x, seed) - 0.5, params)
        params, state = ours.update(grads, state, params)
        updates, their_state = theirs.update(grads, their_state)
        want = optax.apply_updates(want, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, want)


def test_attention_is_that_of_flax() -> None:
    p = network_layers.block_init(jax.random.key(0), 8)
    x = jax.random.normal(jax.random.key(1), (2, 5, 8))
    q, k, v = jnp.moveaxis(p["qkv"]["w"].reshape(8, 2, 3, 4), 2, 0)  # those of a head are side by side
    theirs = nn.MultiHeadDotProductAttention(num_heads=2)
    no_bias = jnp.zeros((2, 4))
    variables = {
        **{name: {"kernel": w, "bias": no_bias} for name, w in (("query", q), ("key", k), ("value", v))},
        "out": {"kernel": p["out"]["w"].reshape(2, 4, 8), "bias": p["out"]["b"]},
    }
    for attend, mask in (
        (network_layers.attend, nn.make_causal_mask(x[..., 0])),
        (network_layers.attend_all, None),
    ):
        want = theirs.apply({"params": variables}, x, mask=mask)
        np.testing.assert_allclose(network_layers.attention(p, x, 2, attend), want, rtol=1e-4, atol=1e-5)


def test_batch_normalisation_is_that_of_flax() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 3, 3, 5)) * 2 + 1
    p = norm_init(5) | {"bias": jnp.arange(5.0)}
    stats = {"mean": jnp.zeros(5), "variance": jnp.ones(5)}
    theirs = nn.BatchNorm(use_running_average=False, momentum=0.9)
    variables = {"params": p, "batch_stats": {"mean": stats["mean"], "var": stats["variance"]}}
    want, new = theirs.apply(variables, x, mutable=["batch_stats"])
    got, running = batch_norm(p, stats, x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(running["variance"], new["batch_stats"]["var"], rtol=1e-4)
    frozen, same = batch_norm(p, stats, x, is_training=False)
    np.testing.assert_allclose(frozen, x / np.sqrt(1 + 1e-5) + p["bias"], rtol=1e-5, atol=1e-6)
    assert same is stats


def test_llama_attention_is_that_of_the_formulas() -> None:
    """In NumPy, one query at a time: complex rotations of feature i and i + half, a key head for two query heads."""
    shape = llama.LlamaShape(layers=1, width=16, heads=4, key_heads=2, hidden=8, length=5, rotary_base=100.0)
    p = llama.layer_init(jax.random.key(0), shape, jnp.float32)
    x = np.asarray(jax.random.normal(jax.random.key(1), (1, 5, 16)))
    turns = np.exp(1j * np.arange(5)[:, None] * 100.0 ** (-np.arange(2) / 2))

    def heads(name: str, count: int, rotates: bool) -> np.ndarray:
        y = (x[0] @ np.asarray(p[name]["w"])).reshape(5, count, 4)
        if not rotates:
            return y
        pairs = (y[..., :2] + 1j * y[..., 2:]) * turns[:, None]
        return np.concatenate([pairs.real, pairs.imag], -1)

    q, k, v = heads("q", 4, True), heads("k", 2, True), heads("v", 2, False)
    want = np.zeros((5, 4, 4))
    for head in range(4):
        for n in range(5):
            scores = np.exp(k[: n + 1, head // 2] @ q[n, head] / 2)
            want[n, head] = scores / scores.sum() @ v[: n + 1, head // 2]
    want = want.reshape(5, 16) @ np.asarray(p["out"]["w"])
    np.testing.assert_allclose(llama.attention(p, jnp.asarray(x), shape)[0], want, rtol=1e-4, atol=1e-5)


def test_scores_by_distance_become_scores_by_key() -> None:
    scores = np.random.default_rng(0).random((1, 2, 4, 7)).astype(np.float32)
    got = np.asarray(conformer.shifted(jnp.asarray(scores)))
    for q in range(4):
        for k in range(4):
            np.testing.assert_array_equal(got[:, :, q, k], scores[:, :, q, 3 - (q - k)])
    angles = np.arange(3, -4, -1)[:, None] * 10_000.0 ** -np.array([0, 0.5])
    want = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(7, 4)
    np.testing.assert_allclose(conformer.distances(4, 4), want, atol=1e-6)


def test_patches_are_a_strided_convolution() -> None:
    images = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    w = jax.random.normal(jax.random.key(1), (4 * 4 * 3, 5))
    kernel = w.reshape(4, 4, 3, 5)
    want = jax.lax.conv_general_dilated(images, kernel, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    got = vision_transformer.patches(images, 4) @ w
    np.testing.assert_allclose(got, want.reshape(2, 4, 5), rtol=1e-4, atol=1e-5)


def test_a_small_step_compiles_in_stages() -> None:
    network = models.network("gpt2", layers=4, width=16, heads=2, vocabulary=32, length=8)
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=16)
    work = models.training(network, 8, micro_batches=4, stages=2, schedule="1f1b")
    step = ipu.jit(work.fun, device=device, donate_argnums=work.donate_argnums)
    profile = step.profile(*work.args)
    assert profile.cycles > 0 and prod(work.args[-1]["inputs"].shape) == 8 * 8


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: models.network("gpt-6.7"), "try: 'gpt-6.7b'"),
        (lambda: models.network("gpt2", layer=3), "try: 'layers'"),
        (lambda: models.network("gpt2", dtype="int32"), "floating-point"),
        (lambda: models.network("gpt2", dtype="float17"), "float17"),
        (lambda: models.training(models.network("gpt2"), 6, micro_batches=4), "batch=8"),
        (lambda: models.training(models.network("gpt2"), 0), "batch=1"),
        (lambda: models.inference(models.network("gpt2"), -2), "batch=1"),
    ],
)
def test_bad_input_names_the_nearest_that_works(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(ipu.ArgumentError, match=match):
        call()
