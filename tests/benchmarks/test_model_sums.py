"""Figures of real models add up and are the same in every view: networks on one IPU, pipelines, out of memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from tests.runtime.profile.sums import check_sums

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
import bert_pipeline  # noqa: E402
from doc_images import profile_of  # noqa: E402

sys.path.remove(BENCHMARKS)

Struct = jax.ShapeDtypeStruct


def pipeline(stages: int) -> ipu.Profile:
    """Stages of four layers of 256 each, in half precision, with recomputation."""

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for stage, weights in enumerate(params):
            with ipu.stage(stage):
                for w in weights:
                    x = jax.checkpoint(lambda w, x: x + jax.nn.gelu(x @ w))(w, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, grads = ipu.pipeline(jax.value_and_grad(loss), micro_batches=8, schedule="1f1b")(params, x)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    params = [Struct((4, 256, 256), jnp.float16) for _ in range(stages)]
    return ipu.jit(step, device=ipu.IPUModel(num_ipus=stages)).profile(params, Struct((512, 256), jnp.float16))


def out_of_memory() -> ipu.Profile:
    """A product of more than a chip of 64 tiles holds."""
    options = ipu.Options(allow_out_of_memory=True, progress=False)
    run = ipu.jit(lambda a: jnp.tanh(a @ a) @ a, device=ipu.IPUModel(tiles_per_ipu=64), options=options)
    actual = run.profile(Struct((2048, 2048), jnp.float32))
    assert actual.memory.overflowed_bytes.any()
    return actual


def bert_of_layers(layers: int) -> ipu.Profile:
    """The step of `benchmarks/bert_pipeline.py`."""
    run, args = bert_pipeline.training_step(layers, stages=4, replicas=4, micro_batches=16, schedule="1f1b")
    return run.lower(*args).compile().profile


PROFILES: dict[str, Callable[[], ipu.Profile]] = {
    **{name: partial(profile_of, name) for name in ("digits-cnn", "transformer-loop", "resnet-50", "bert-base")},
    "pipeline of 2 stages": partial(pipeline, 2),
    "pipeline of 4 stages": partial(pipeline, 4),
    "out of memory": out_of_memory,
    "bert_pipeline": partial(bert_of_layers, 8),
}


@pytest.mark.parametrize("name", PROFILES)
def test_figures_of_models_add_up_in_every_view(name: str, tmp_path: Path) -> None:
    profile = PROFILES[name]()
    check_sums(profile, tmp_path)
    profile.save(tmp_path / "saved")
    check_sums(ipu.Profile.load(tmp_path / "saved"), tmp_path)
