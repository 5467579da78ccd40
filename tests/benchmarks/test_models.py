"""The models of `benchmarks/models`: each traces at its full size, and learns or computes at a small one."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax.models.network_layers import attend, cross_entropy

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
from models import COMPARED, LARGE, MODELS, Model, gpt2  # noqa: E402
from models.bert import Sizes, bert, spread  # noqa: E402
from models.transformer import stacked  # noqa: E402

sys.path.remove(BENCHMARKS)


# He et al. for ResNet-50; BERT from Hugging Face's counts (335,141,888 and 109,482,240), less 384 places and with the
# heads of both tasks and 6 more words; the others by hand.
PARAMETERS = {
    "mlp": 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10,
    "vae": 784 * 400 + 400 + 400 * 40 + 40 + 20 * 400 + 400 + 400 * 784 + 784,
    "lstm": 4 * 256 * (64 + 256 + 1) + 256 * 10,
    "gpt-4": 4 * (12 * 256**2 + 13 * 256) + (256 + 128 + 256 + 2) * 256,
    "transformer-scan": 12 * (12 * 256**2 + 13 * 256) + (256 + 128 + 256 + 2) * 256,
    "resnet-50": 25_557_032,
    "bert-large": 335_141_888 + (6 - 384) * 1024 + 1024**2 + 3 * 1024 + 2 * 1025 + 30_528,
    "gpt2-medium": 24 * (12 * 1024**2 + 13 * 1024) + (50_304 + 1024 + 2) * 1024,
    "bert-base": 109_482_240 + (6 - 384) * 768 + 768**2 + 3 * 768 + 2 * 769 + 30_528,
}

_bert = {"width": 8, "heads": 2, "micro_batch": 2, "micro_batches": 2, "length": 6, "masked": 2, "vocabulary": 16}
_gpt = {"width": 8, "heads": 2, "length": 6, "batch": 2, "vocabulary": 16}
SMALL: dict[str, Callable[[], Model]] = {
    "digits-mlp": lambda: MODELS["digits-mlp"](batch=4),
    "digits-cnn": lambda: MODELS["digits-cnn"](batch=4),
    "mlp": lambda: MODELS["mlp"](widths=(6, 8, 10), batch=4),
    "vae": lambda: MODELS["vae"](pixels=6, hidden=8, code=2, batch=4),
    "lstm": lambda: MODELS["lstm"](length=4, units=6, features=3, batch=4),
    "gpt-4": lambda: MODELS["gpt-4"](layers=2, **_gpt),
    "gpt-block": lambda: MODELS["gpt-block"](**_gpt),
    **{
        f"transformer-{way}": lambda way=way: MODELS[f"transformer-{way}"](2, **_gpt) for way in ("loop", "jit", "scan")
    },
    "resnet-20": lambda: MODELS["resnet-20"](blocks=1, width=4, side=8, batch=4),
    "resnet-50": lambda: MODELS["resnet-50"](
        groups=(1, 1), width=4, side=16, classes=4, micro_batch=2, micro_batches=2
    ),
    "hmm": lambda: MODELS["hmm"](states=3, symbols=4, length=5),
    "graphnet": lambda: MODELS["graphnet"](nodes=5, edges=7, width=8),
    "gcn": lambda: MODELS["gcn"](nodes=5, edges=7, widths=(6, 8, 3), labelled=4),
    "bert-large": lambda: bert("small", Sizes((1, 1, 1, 1), **_bert)),
    "bert-base": lambda: bert("small", Sizes((0, 1, 1, 1), **_bert)),
}


def drawn(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Numbers that any batch may have: indices are 0 or 1, all else is from 0 to 1."""
    numbers = np.random.default_rng(0).random(shape.shape)
    return jnp.asarray(numbers.round() if jnp.issubdtype(shape.dtype, jnp.integer) else numbers, shape.dtype)


def compiled(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A function compiled in little time."""
    return jax.jit(fun).lower(*args).compile({"xla_backend_optimization_level": 0})


def run(model: Model, steps: int) -> tuple[Any, list[float]]:
    """The outputs of the last of some steps on one batch, and the last output of each."""
    key = jax.random.key(0)
    state = compiled(model.init, key)(key)
    batch = jax.tree.map(drawn, model.batch)
    step = compiled(model.step, *state, *batch)
    values = []
    for _ in range(steps):
        outputs = step(*state, *batch)
        values.append(float(outputs[-1]))
        state = outputs[: len(state)] if model.donate else state
    return outputs, values


def test_every_model_has_a_small_version() -> None:
    assert SMALL.keys() == MODELS.keys() and COMPARED.keys() <= MODELS.keys() and PARAMETERS.keys() <= {*MODELS, *LARGE}


TRACED = [*MODELS, "gpt2-medium"]


@pytest.mark.parametrize("name", TRACED)
def test_each_step_traces_and_gives_its_state_back(name: str) -> None:
    model = {**MODELS, **LARGE}[name]()
    axes = [("replica", model.jit["replicas"])] if "replicas" in model.jit else []
    jaxpr, outputs = jax.make_jaxpr(model.step, axis_env=axes, return_shape=True)(*model.args)
    assert jaxpr.eqns and outputs[-1].shape == () and outputs[-1].dtype == np.float32
    donated = tuple(model.args[n] for n in model.donate_argnums)
    assert outputs[: len(donated)] == donated and (len(outputs) == len(donated) + 1 or not model.donate)
    if name in PARAMETERS:
        assert sum(leaf.size for leaf in jax.tree.leaves(model.state[0])) == PARAMETERS[name]


TRAINED = [name for name in SMALL if name != "hmm"]


@pytest.mark.parametrize("name", TRAINED)
def test_small_models_learn(name: str) -> None:
    outputs, losses = run(SMALL[name](), 4)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.inexact))


def test_the_transformer_is_the_same_as_a_loop_and_as_a_scan() -> None:
    key = jax.random.key(0)
    losses = []
    params, _ = compiled(SMALL["transformer-loop"]().init, key)(key)
    for way in ("loop", "scan"):
        model = SMALL[f"transformer-{way}"]()
        inputs = {**params, "blocks": stacked(params["blocks"])} if way == "scan" else params
        opt_state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), model.state[1])
        args = (inputs, opt_state, *jax.tree.map(drawn, model.batch))
        losses.append(compiled(lambda *args, model=model: model.step(*args)[-1], *args)(*args))
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_the_filter_is_the_sum_over_all_paths() -> None:
    model = SMALL["hmm"]()
    (filtered, evidence), _ = run(model, 1)
    key = jax.random.key(0)
    (params,) = compiled(model.init, key)(key)
    recorded = np.asarray(drawn(model.batch[0]))
    start, transition, emission = (np.exp(np.asarray(params[name])) for name in ("start", "transition", "emission"))
    last = np.zeros(len(start))
    for path in itertools.product(range(len(start)), repeat=len(recorded)):
        moves = np.prod([transition[a, b] for a, b in itertools.pairwise(path)])
        last[path[-1]] += (
            start[path[0]] * moves * np.prod([emission[s, h] for s, h in zip(recorded, path, strict=True)])
        )
    np.testing.assert_allclose(evidence, np.log(last.sum()), rtol=1e-5)
    np.testing.assert_allclose(np.exp(filtered[-1]), last / last.sum(), rtol=1e-5)


def test_layers_of_each_ipu() -> None:
    assert spread(24, 3) == (3, 7, 7, 7) and spread(12, 0) == (0, 4, 4, 4) and spread(12, 1) == (1, 4, 4, 3)


def test_gpt2_in_parts_is_gpt2() -> None:
    """A table and heads in parts give the look-ups, the loss and the attention of the whole."""
    keys = jax.random.split(jax.random.key(0), 6)
    table = jax.random.normal(keys[0], (32, 6))
    x = jax.random.normal(keys[1], (2, 5, 6))
    ids = jax.random.randint(keys[2], (2, 5), 0, 32)
    parts = jnp.split(table, 4)
    np.testing.assert_array_equal(gpt2.embed(parts, ids), table[ids])

    def whole(table: jax.Array, x: jax.Array) -> jax.Array:
        return cross_entropy(x @ table.T, ids)

    def in_parts(table: jax.Array, x: jax.Array) -> jax.Array:
        return gpt2.cross_entropy(jnp.split(table, 4), x, ids)

    for got, want in zip(*(jax.value_and_grad(fun, (0, 1))(table, x) for fun in (in_parts, whole)), strict=True):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
    q, k, v = (jax.random.normal(key, (2, 5, 8, 3)) for key in keys[3:])
    np.testing.assert_allclose(gpt2.attend_in_groups(q, k, v), attend(q, k, v), rtol=1e-5, atol=1e-6)
