"""Streamed micro-batches: numbers, where they are loaded and stored, time and memory that do not grow, exceptions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.lowering.schedules import SCHEDULES
from ipujax.runtime.graph import RemoteIn, RemoteOut, distinct, joining_streams
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.tensor.roles import INPUTS

WIDTH = 6
ROWS = 2
COUNT = 4
gradients = jax.value_and_grad


def array(*shape: int, seed: int = 0) -> jax.Array:
    return jax.device_put((np.random.default_rng([*shape, seed]).normal(size=shape) / 2).astype(np.float32))


def one_stage(number: int) -> Any:
    del number
    return nullcontext()


def forward(params: Any, x: jax.Array, stage: Any = ipu.stage) -> jax.Array:
    """A dense layer in each stage."""
    for number, w in enumerate(params):
        with stage(number):
            x = jnp.tanh(x @ w)
    return x


def loss(params: Any, batch: Any, stage: Any = ipu.stage) -> jax.Array:
    h = forward(params, batch["x"], stage)
    with stage(len(params) - 1):
        return jnp.mean((h - batch["y"]) ** 2)


def without_stages(params: Any, batch: Any) -> jax.Array:
    return loss(params, batch, one_stage)


def drawn(params: Any, key: jax.Array, batch: Any) -> jax.Array:
    """A loss with a random factor."""
    return loss(params, batch) * jax.random.uniform(key)


def averaged(params: Any, state: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
    """A running mean, and a batch that is the next state."""
    with ipu.stage(0):
        h = batch["x"] @ params[0] + state
    with ipu.stage(1):
        return jnp.mean((h @ params[1] - batch["y"]) ** 2), batch["x"]


def recomputed(params: Any, batch: Any) -> jax.Array:
    with ipu.stage(0):
        h = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w)))(params[0], batch["x"])
    with ipu.stage(1):
        return jnp.mean((h @ params[1] - batch["y"]) ** 2)


def pipelined(fun: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return ipu.pipeline(fun, **{"micro_batches": COUNT, **settings})


def mean_of_replicas(*args: Any) -> Any:
    return jax.lax.pmean(pipelined(gradients(loss))(*args), "replica")


def params(stages: int) -> list[jax.Array]:
    return [array(WIDTH, WIDTH, seed=n) for n in range(stages)]


def batch(count: int = COUNT) -> dict[str, jax.Array]:
    return {name: array(count * ROWS, WIDTH, seed=n) for n, name in enumerate("xy", 9)}


@dataclass(frozen=True)
class Case:
    """A function, its arguments, and the buffers that it loads and stores by micro-batches."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    num_ipus: int = 1
    loaded: int = 2
    stored: int = 0
    io_tiles: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


stacked = pipelined(forward, reduce="stack")
X = batch()["x"]
REPLICAS = {"replicas": 2, "in_specs": (P(), P("replica")), "out_specs": P()}
CASES = {
    **{
        f"schedule {name}": Case(pipelined(gradients(loss), micro_batches=8, schedule=name), (params(4), batch(8)), 4)
        for name in SCHEDULES
        if name != "looped-1f1b"
    },
    "schedule looped-1f1b": Case(pipelined(gradients(loss), schedule="looped-1f1b"), (params(4), batch()), 2),
    "accumulation": Case(pipelined(gradients(without_stages)), (params(2), batch())),
    "accumulation, I/O tiles": Case(pipelined(gradients(without_stages)), (params(2), batch()), 1, io_tiles=2),
    "stages, I/O tiles": Case(pipelined(gradients(loss)), (params(2), batch()), 2, io_tiles=2),
    "several arguments": Case(
        pipelined(gradients(lambda p, x, y: loss(p, {"x": x, "y": y})), batch_argnums=(1, 2)),
        (params(2), batch()["x"], batch()["y"]),
        2,
    ),
    "keys": Case(pipelined(gradients(drawn), rng_argnums=1), (params(2), jax.random.key(1), batch()), 2),
    "state that is a batch": Case(
        pipelined(averaged, carry={1: (1,)}, reduce=("mean", "last")), (params(2), array(ROWS, WIDTH), batch()), 2
    ),
    "recomputation": Case(pipelined(gradients(recomputed)), (params(2), batch()), 2),
    "stages on one IPU": Case(
        pipelined(gradients(loss), schedule="1f1b", device_mapping=[0, 1, 1, 0]), (params(4), batch()), 2
    ),
    "searched stages": Case(pipelined(gradients(without_stages), stages=2), (params(4), batch()), 2),
    "in a jit": Case(jax.jit(pipelined(gradients(loss))), (params(2), batch()), 2),
    "donated": Case(stacked, (params(2), X), 2, 1, 1, settings={"donate_argnums": 1}),
    "donated for a result": Case(
        lambda p, x: stacked(p, x).reshape(x.shape), (params(2), X), 2, 1, 1, settings={"donate_argnums": 1}
    ),
    "offloaded": Case(pipelined(gradients(loss)), (params(2), batch()), 2, settings={"offload_argnums": 1}),
    "offloaded weights": Case(pipelined(gradients(loss)), (params(2), batch()), 2, settings={"offload_argnums": 0}),
    "replicas": Case(mean_of_replicas, (params(2), batch(8)), 4, settings=REPLICAS),
    "results of replicas": Case(
        stacked, (params(2), array(16, WIDTH)), 4, 1, 1, settings={**REPLICAS, "out_specs": P(None, "replica")}
    ),
    "results": Case(lambda p, x: stacked(p, x).reshape(-1, WIDTH), (params(3), X), 4, 1, 1),
    "results, I/O tiles": Case(stacked, (params(3), X), 4, 1, 1, io_tiles=2),
    "results of one stage": Case(
        pipelined(lambda p, x: forward(p, x, one_stage), reduce="stack"), (params(2), X), 1, 1, 1
    ),
    "results that are read": Case(lambda p, x: stacked(p, x) * 2, (params(2), X), 2, 1),
    "results that are batches": Case(
        pipelined(lambda p, x: (forward(p, x), x), reduce=("stack", "last")), (params(2), X), 2, 1, 1
    ),
    "scalars": Case(pipelined(lambda p, b: loss(p, b), reduce="stack"), (params(2), batch()), 2),
    "computed inside": Case(
        lambda p, b: pipelined(gradients(loss))(p, jax.tree.map(lambda x: x * 2, b)), (params(2), batch()), 2, 0
    ),
    "read elsewhere": Case(lambda p, b: (pipelined(gradients(loss))(p, b), b["x"].sum()), (params(2), batch()), 2, 1),
    "two counts": Case(
        lambda p, b: [pipelined(gradients(loss), micro_batches=n)(p, b) for n in (2, 4)], (params(2), batch()), 2, 0
    ),
    "closed over": Case(lambda p: pipelined(gradients(loss))(p, batch()), (params(2),), 2, 0),
}


def lowered(case: Case, **options: Any) -> ipu.Lowered:
    device = ipu.IPUModel(case.num_ipus, tiles_per_ipu=6)
    settings = {"options": ipu.Options(io_tiles=case.io_tiles, **options), **case.settings}
    return ipu.jit(case.fun, device=device, **settings).lower(*case.args)


def plain(case: Case) -> list[Any]:
    replicas = {name: value for name, value in case.settings.items() if name in REPLICAS}
    fun = ipu.jit(case.fun, device=ipu.CPU(), **replicas) if replicas else jax.jit(case.fun)
    return jax.tree.leaves(fun(*case.args))


def assert_equal(got: list[Any], want: list[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_streamed_numbers_are_those_of_plain_jax(name: str) -> None:
    case = CASES[name]
    made = lowered(case)
    moves = [
        node for node in distinct(made.program) if isinstance(node, RemoteIn | RemoteOut) and node.offset is not None
    ]
    loaded, stored = ({move.buffer for move in moves if isinstance(move, kind)} for kind in (RemoteIn, RemoteOut))
    assert (len(loaded), len(stored)) == (case.loaded, case.stored)
    want = plain(case)

    def run(inputs: Any) -> Any:
        return interpret(made.graph, made.program, inputs, seed=3)

    assert_equal(list(made.planned.lowered.evaluate(jax.tree.leaves(case.args), run)), want)
    literal = lowered(case, exact_splits=True).compile()
    assert_equal(jax.tree.leaves(literal(*jax.tree.map(jnp.copy, case.args))), want)


def shapes(stages: int, count: int, rows: int = 16, width: int = 64) -> tuple[Any, Any]:
    weights = [jax.ShapeDtypeStruct((width, width), "float32")] * stages
    return weights, {name: jax.ShapeDtypeStruct((count * rows, width), "float32") for name in "xy"}


def profile_of(fun: Any, count: int, stages: int, io_tiles: int = 0, **changes: Any) -> ipu.Profile:
    device = ipu.IPUModel(stages, tiles_per_ipu=16, **changes)
    weights, inputs = shapes(stages, count)
    inputs = inputs["x"] if fun is inference else inputs
    return ipu.jit(fun(count), device=device, options=ipu.Options(io_tiles=io_tiles)).profile(weights, inputs)


def training(count: int, **settings: Any) -> Callable[..., Any]:
    return pipelined(gradients(loss), micro_batches=count, **settings)


def accumulation(count: int) -> Callable[..., Any]:
    return pipelined(gradients(without_stages), micro_batches=count)


def inference(count: int) -> Callable[..., Any]:
    return pipelined(forward, micro_batches=count, reduce="stack")


def computed(count: int) -> Callable[..., Any]:
    return lambda weights, inputs: training(count)(weights, jax.tree.map(lambda x: x + 1, inputs))


FLAT = {"training": (training, 4), "accumulation": (accumulation, 1), "inference": (inference, 2)}


@pytest.mark.parametrize("io_tiles", [0, 4])
@pytest.mark.parametrize("name", FLAT)
def test_streamed_micro_batches_take_as_long_and_no_more_memory_in_a_large_batch(name: str, io_tiles: int) -> None:
    fun, stages = FLAT[name]
    actual = {count: profile_of(fun, count, stages, io_tiles) for count in (8, 16, 512, 1024)}
    cycles = {count: (actual[count].cycles - actual[count // 2].cycles) / (count // 2) for count in (16, 1024)}
    assert cycles[1024] <= 1.05 * cycles[16]
    assert actual[1024].memory.max_tile_bytes == actual[16].memory.max_tile_bytes


def test_a_batch_that_is_not_streamed_is_spread_over_the_tiles() -> None:
    """A slice costs the same in a batch of any size."""
    actual = {count: profile_of(computed, count, 2) for count in (8, 16, 128, 256)}
    cycles = {count: (actual[count].cycles - actual[count // 2].cycles) / (count // 2) for count in (16, 256)}
    assert cycles[256] <= 1.05 * cycles[16]
    assert actual[256].memory.tile_bytes[:32].min() > 0.9 * actual[256].memory.max_tile_bytes


def test_streamed_transfers_take_the_time_of_the_machine_model() -> None:
    """One latency a micro-batch for both arguments of a stage, and the bytes of both over the link of the IPU."""
    fast, slow = (profile_of(accumulation, 16, 1, host_latency_seconds=seconds) for seconds in (0, 1e-5))
    target = slow.target
    transfer = 2 * ceil(16 * 64 * 4 / target.host_bytes_per_second * target.clock_hz)
    assert 16 * transfer <= fast.phase_cycles["host_exchange"]
    assert slow.cycles - fast.cycles >= 16 * 1e-5 * target.clock_hz
    assert slow.phase_cycles["host_exchange"] - fast.phase_cycles["host_exchange"] <= 19 * 1e-5 * target.clock_hz


def test_io_tiles_hide_streamed_transfers() -> None:
    without, hidden = (profile_of(accumulation, 16, 1, io_tiles) for io_tiles in (0, 4))
    assert hidden.cycles < 0.8 * without.cycles
    # The fetch of the first micro-batch, and weights.
    assert hidden.phase_cycles["host_exchange"] < without.phase_cycles["host_exchange"] / 4
    assert hidden.overlapped_cycles >= 16 * 1e-5 * hidden.target.clock_hz


def test_streamed_labels_go_straight_to_the_last_stage() -> None:
    device = ipu.IPUModel(4, tiles_per_ipu=16)
    made = ipu.jit(training(8), device=device).lower(*shapes(4, 8))
    loads = [node for node in distinct(made.program) if isinstance(node, RemoteIn)]
    tiles = {node.buffer.name: made.graph.mappings[node.destination.variables()[0]].tiles // 16 for node in loads}
    assert {name: set(ipus.tolist()) for name, ipus in tiles.items()} == {"batch['x']": {0}, "batch['y']": {3}}
    assert {made.graph.notes.roles[node.destination.variables()[0]] for node in loads} == {INPUTS}
    joined = ipu.jit(training(8, schedule="gpipe"), device=device).lower(*shapes(4, 8)).program
    assert joining_streams(joined)


def test_streamed_transfers_are_host_exchange_of_the_stages_that_read() -> None:
    profile = profile_of(training, 16, 4)
    host = {row.stage: row.phases["host"] for row in profile.stages}
    assert host[0] > 4 * host[1] and host[3] > 4 * host[2]
    # Parameters are loaded and stored outside of the pipeline.
    assert sum(host.values()) < sum(phases["host_exchange"] for phases in profile.ipu_phase_cycles)
