"""Meshes beside replicas and stages: losses and gradients of one IPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 16)).astype(np.float32)
WEIGHTS = [0.2 * RNG.standard_normal(s).astype(np.float32) for s in ((16, 32), (32, 16), (16, 32), (32, 16))]
SPECS = [P(None, "model"), P("model")] * 2
TWO = ipu.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
FOUR = ipu.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def layers(weights: Any, x: Any) -> Any:
    return jax.nn.relu(x @ weights[0]) @ weights[1]


def loss(weights: Any, x: Any) -> Any:
    return (layers(weights[2:], layers(weights[:2], x)) ** 2).mean()


def sharded(mesh: Any, *, has_stages: bool) -> Callable[..., Any]:
    """The loss with weights and rows over a mesh, in two stages or none."""
    rows = P("data") if "data" in mesh.shape else P()

    def fun(weights: Any, x: Any) -> Any:
        def split(value: Any, spec: P) -> Any:
            return lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

        def stage(number: int) -> Any:
            return ipu.stage(number) if has_stages else nullcontext()

        first = list(map(split, weights, SPECS))
        with stage(0):
            h = layers(first[:2], split(x, rows))
        with stage(1):
            return (layers(first[2:], h) ** 2).mean()

    return fun


def mapped(mesh: Any, *, has_stages: bool) -> Callable[..., Any]:
    """The step, written by hand with `jax.shard_map`."""

    def part(x: Any, w: Any, v: Any) -> Any:
        return lax.psum(layers((w, v), x), "model")

    block = jax.shard_map(part, mesh=mesh, in_specs=(P(), *SPECS[:2]), out_specs=P())

    def fun(weights: Any, x: Any) -> Any:
        with ipu.stage(0) if has_stages else nullcontext():
            h = block(x, *weights[:2])
        with ipu.stage(1) if has_stages else nullcontext():
            return (block(h, *weights[2:]) ** 2).mean()

    return fun


def compiled(fun: Any, num_ipus: int, *, is_pipeline: bool = False, **settings: Any) -> ipu.Compiled:
    grads = jax.value_and_grad(fun)
    run = ipu.pipeline(grads, micro_batches=4) if is_pipeline else grads

    def step(weights: Any, x: Any) -> Any:
        results = run(weights, x)
        return lax.pmean(results, "replica") if "replicas" in settings else results

    device = ipu.IPUModel(num_ipus=num_ipus, tiles_per_ipu=16)
    return ipu.jit(step, device=device, **settings).lower(WEIGHTS, X).compile()


def check(program: ipu.Compiled, num_devices: int) -> None:
    assert program.profile.replicas == num_devices
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6),
        program(WEIGHTS, X),
        jax.value_and_grad(loss)(WEIGHTS, X),
    )


REPLICAS = {"replicas": 2, "in_specs": (P(), P("replica")), "out_specs": P()}


@pytest.mark.parametrize("make", [sharded, mapped])
def test_a_mesh_in_each_replica(make: Any) -> None:
    check(compiled(make(TWO, has_stages=False), 4, **REPLICAS), 4)


@pytest.mark.parametrize("make", [sharded, mapped])
def test_a_mesh_in_each_stage(make: Any) -> None:
    check(compiled(make(FOUR, has_stages=True), 8, is_pipeline=True), 4)


def test_a_mesh_in_each_stage_of_each_replica() -> None:
    check(compiled(sharded(TWO, has_stages=True), 8, is_pipeline=True, **REPLICAS), 4)


def test_sums_over_micro_batches_are_taken_once() -> None:
    program = compiled(sharded(FOUR, has_stages=True), 8, is_pipeline=True)
    moves = program.partitioning.notes.moves
    gradients = [move for move in moves if move.step.axes == ("data",) and move.num_bytes > 4]
    assert [(move.step.kind, move.primitive) for move in gradients] == [("all_reduce", "ipu_staged_pipeline")] * 4


def test_arguments_may_be_split() -> None:
    inputs = [NamedSharding(FOUR, spec) for spec in SPECS], NamedSharding(FOUR, P("data"))
    check(compiled(sharded(FOUR, has_stages=True), 8, is_pipeline=True, in_shardings=inputs), 4)
