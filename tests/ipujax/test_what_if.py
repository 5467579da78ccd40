"""A better machine is never slower: each rate higher, each latency and overhead lower, plans chosen anew.

Planners compare costs that they estimate, so a better machine may get another plan; its cost must not exceed that
of the plan of the machine before. Counts of tiles, workers, IPUs, links and units of an AMP are no rates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.runtime.target import Target

F32 = np.float32
F16 = np.float16
TOLERANCE = 1.01  # plans are compared by estimates

_RATE_UNITS = ("/cycle/tile", "B/s", "Hz", "ratio")
RATES = [item.name for item in dataclasses.fields(Target) if item.metadata.get("unit", "").endswith(_RATE_UNITS)]
RATES.remove("available_memory_proportion")
COSTS = [item.name for item in dataclasses.fields(Target) if item.name.endswith(("_cycles", "_seconds"))]
CHANGES = [(name, factor) for name in RATES for factor in (1.25, 2.0)]
CHANGES += [(name, factor) for name in COSTS for factor in (0.8, 0.5)]


class Program(NamedTuple):
    """A function to compile on so many IPUs, its options for `ipu.jit`, and its arguments."""

    ipus: int
    fun: Callable[..., Any]
    options: dict[str, Any]
    args: tuple[Any, ...]


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gemm(n: int = 256, dtype: Any = F16) -> Program:
    return Program(1, lambda a, b: a @ b, {}, (array(n, n, dtype=dtype), array(n, n, dtype=dtype)))


def trained(loss: Callable[..., Any], batch: Any, weights: Any, ipus: int = 1, gradient: Any = jax.grad) -> Program:
    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda value, slope: value - 0.1 * slope, w, gradient(loss)(w, x))

    return Program(ipus, step, {}, (weights, batch))


def cnn(width: int = 16) -> Program:
    def loss(w: Any, x: Any) -> Any:
        for kernel in w[:-1]:
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims))
        return ((x.mean((1, 2)) @ w[-1]) ** 2).mean()

    weights = [array(3, 3, 4, width), array(3, 3, width, width), array(width, 10)]
    return trained(loss, array(4, 16, 16, 4), weights)


def gpt_block(width: int = 64, length: int = 32, heads: int = 4, batch: int = 2) -> Program:
    def norm(x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)

    def loss(w: Any, x: Any) -> Any:
        split = (batch, length, heads, width // heads)
        q, k, v = ((norm(x) @ w[name]).reshape(split).swapaxes(1, 2) for name in "qkv")
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), q @ k.swapaxes(2, 3), -1e9)
        attended = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)
        x = x + attended @ w["o"]
        return ((x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]) ** 2).mean()

    weights = {name: array(width, width) for name in "qkvo"}
    weights |= {"up": array(width, 4 * width), "down": array(4 * width, width)}
    return trained(loss, array(batch, length, width), weights)


def pipeline(stages: int = 4, micro_batches: int = 8) -> Program:
    def loss(w: Any, x: Any) -> Any:
        for number in range(stages):
            with ipu.stage(number):
                x = jnp.tanh(x @ w[number])
        return (x**2).mean()

    def gradient(fun: Any) -> Any:
        return ipu.pipeline(jax.grad(fun), micro_batches=micro_batches)

    return trained(loss, array(4 * micro_batches, 64), [array(64, 64)] * stages, stages, gradient)


def all_reduce(elements: int = 4096) -> Program:
    options = {"replicas": 8, "in_specs": jax.P("replica")}
    return Program(8, lambda x: lax.psum(x, "replica"), options, (array(8, elements),))


PROGRAMS = {
    "gemm": gemm(),
    "gemm of odd size": gemm(197, F32),
    "all-reduce": all_reduce(),
    "cnn": cnn(),
    "gpt block": gpt_block(),
    "pipeline": pipeline(),
}


def seconds(program: Program, tiles: int, arch: str = "mk2", **changes: Any) -> float:
    device = ipu.IPUModel(program.ipus, arch, tiles_per_ipu=tiles, **changes)
    compiled = ipu.jit(program.fun, device=device, **program.options).lower(*program.args).compile()
    return compiled.profile.cycles / device.target.clock_hz


def changed(name: str, factor: float, arch: str) -> float:
    value = getattr(ipu.IPUModel(1, arch).target, name)
    maximum = next(item.metadata["maximum"] for item in dataclasses.fields(Target) if item.name == name)
    product = value * factor if maximum is None else min(value * factor, maximum)
    return product if isinstance(value, float) else round(product)


def slower(program: Program, tiles: int, arch: str) -> dict[str, float]:
    """Changes of a constant that make a program slower, with the ratio of times."""
    before = seconds(program, tiles, arch)
    ratios = {
        f"{name} x {factor}": seconds(program, tiles, arch, **{name: changed(name, factor, arch)}) / before
        for name, factor in CHANGES
    }
    return {change: ratio for change, ratio in ratios.items() if ratio > TOLERANCE}


@pytest.mark.parametrize(
    ("name", "tiles", "arch"),
    [
        *((name, 16, "mk2") for name in PROGRAMS),
        *((name, tiles, arch) for name in PROGRAMS for tiles, arch in ((64, "mk1"), (1_216, "bow"))),
    ],
)
def test_what_if_a_constant_is_better_then_no_program_is_slower(name, tiles, arch):
    assert slower(PROGRAMS[name], tiles, arch) == {}


@pytest.mark.parametrize("tiles", (16, 64))
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_if_one_worker_then_no_program_is_faster(name, tiles):
    assert seconds(PROGRAMS[name], tiles, worker_contexts=1) >= seconds(PROGRAMS[name], tiles)


def test_what_if_rates_and_costs_are_all_of_the_target():
    """The lists follow the fields of `Target`: a constant that joins them is tried too."""
    assert {"load_bytes_per_cycle", "exchange_bytes_per_cycle", "clock_hz", "ipu_link_bytes_per_second"} < {*RATES}
    assert {"worker_issue_period_cycles", "internal_sync_cycles", "host_latency_seconds"} < {*COSTS}
    assert not {"worker_contexts", "tiles_per_ipu", "conv_units_fp16", "bytes_per_tile"} & {*RATES, *COSTS}
