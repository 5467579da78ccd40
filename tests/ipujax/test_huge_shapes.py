"""Programs of shapes that no IPU holds are compiled from shapes alone, in seconds that hardly depend on the shapes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import ipujax as ipu

Struct = jax.ShapeDtypeStruct
F32 = jnp.float32
I32 = jnp.int32
OPTIONS = ipu.Options(allow_out_of_memory=True, progress=False)


def cpu_seconds(fun: Callable[..., Any], *args: Any, device: ipu.IPUModel | None = None, **jit: Any) -> float:
    """Processor seconds from a function to its profile."""
    start = time.process_time()
    profile = ipu.jit(fun, device=device or ipu.IPUModel(), options=OPTIONS, **jit).lower(*args).compile().profile
    assert profile.cycles > 0
    return time.process_time() - start


def convolution(x: Any, kernel: Any) -> Any:
    return lax.conv(x, kernel, (2, 2), "SAME")


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def steps(x: Any) -> Any:
    return lax.scan(lambda c, row: (jnp.tanh(c * row), c), jnp.zeros(x.shape[1:]), x)


IMAGES = Struct((1000, 3, 10**4, 10**4), F32)
KERNEL = Struct((64, 3, 7, 7), F32)
LONG = Struct((10**9,), F32)
TOKENS = Struct((1, 10**6, 8, 64), F32)
# Twice the processor seconds that are wanted of each, for machines that are slower or busy.
HUGE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
    "convolution": (convolution, (IMAGES, KERNEL), 20),
    "gradients of a convolution": (
        jax.grad(lambda x, k: (convolution(x, k) ** 2).sum(), (0, 1)),
        (IMAGES, KERNEL),
        40,
    ),
    "sort": (jnp.sort, (LONG,), 40),
    "gather": (lambda t, i: t[i], (Struct((10**8,), F32), Struct((10**8,), I32)), 40),
    "update": (lambda t, i: t.at[i].add(1), (Struct((10**8,), F32), Struct((10**8,), I32)), 40),
    "scan": (steps, (Struct((10**6, 256), F32),), 40),
    "gradient of a scan": (jax.grad(lambda x: steps(x)[1].sum()), (Struct((10**6, 256), F32),), 40),
    "running sum": (jnp.cumsum, (LONG,), 40),
    "attention": (attention, (TOKENS, TOKENS, TOKENS), 40),
    "gradient of attention": (jax.grad(lambda q, k, v: attention(q, k, v).sum()), (TOKENS, TOKENS, TOKENS), 40),
    "product": (jnp.matmul, (Struct((10**5, 10**5), F32), Struct((10**5, 10**5), F32)), 40),
    "rearrangement": (
        lambda x, y: x.T.reshape(y.shape) * y,
        (Struct((10**5, 9000), F32), Struct((3 * 10**4, 3 * 10**4), F32)),
        40,
    ),
    "decomposition": (jnp.linalg.cholesky, (Struct((10**5, 10**5), F32),), 40),
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_operands(name: str) -> None:
    fun, args, most_seconds = HUGE[name]
    assert cpu_seconds(fun, *args) < most_seconds


def pipeline_seconds(stages: int, micro_batches: int, **settings: Any) -> float:
    """Processor seconds of a pipeline with one layer a stage."""

    def loss(params: Any, x: Any) -> Any:
        for number in range(stages):
            with ipu.stage(number):
                x = jnp.tanh(x @ params[number])
        return jnp.mean(x**2)

    run = ipu.pipeline(jax.value_and_grad(loss), micro_batches=micro_batches, **settings)
    params = [Struct((512, 512), F32)] * stages
    rows = Struct((16 * micro_batches, 512), F32)
    return cpu_seconds(run, params, rows, device=ipu.IPUModel(num_ipus=stages))


@pytest.mark.parametrize("schedule", ["1f1b", "grouped", "zb-h1"])
def test_pipelines_of_many_stages(schedule: str) -> None:
    assert pipeline_seconds(64, 128, schedule=schedule) < 20
