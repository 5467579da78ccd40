"""`ipu.phase` on several IPUs with I/O tiles: numbers on all executors, time by bounds, memory of both, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.lowering_plan import planned_program
from ipujax.runtime.graph import Execute, RemoteIn, RemoteOut
from ipujax.runtime.interpreter.interpreter import interpret

TILES = 6
IO = 2
WIDTH = 16
ADAM = optax.adam(1e-2)

Function = Callable[..., Any]


def array(*shape: int, seed: int = 0) -> jax.Array:
    return jax.device_put((np.random.default_rng([*shape, seed]).normal(size=shape) / 4).astype(np.float32))


# --- functions --------------------------------------------------------------------------------------------------------


def layers(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    for number, w in enumerate(ws):
        with ipu.phase(number):
            x = jnp.tanh(x @ w)
    return x


def read_later(ws: list[jax.Array], x: jax.Array) -> Any:
    """Results are read two and three phases later, by the same and by the other IPU, and are results of the program."""
    kept: list[jax.Array] = []
    for number, w in enumerate(ws):
        with ipu.phase(number):
            x = jnp.tanh(x @ w) + sum(kept[max(0, number - 3) : max(0, number - 1)])
            kept.append(x)
    return x, kept[0], kept[2]


def read_by_the_other(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """Results are read three phases later."""
    kept: list[jax.Array] = []
    for number, w in enumerate(ws):
        with ipu.phase(number):
            x = jnp.tanh(x @ w) + (kept[number - 3] if number >= 3 else 0)
            kept.append(x)
    return x


def loops(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    for number, w in enumerate(ws):
        with ipu.phase(number):
            x = lax.scan(lambda x, _, w=w: (jnp.tanh(x @ w), None), x, length=3)[0]
    return x


def stacks(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """A loop over layers in each phase, whose rows stream."""
    for number, stack in enumerate(ws):
        with ipu.phase(number):
            x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]
    return x


def branches(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    for number, w in enumerate(ws):
        with ipu.phase(number):
            x = lax.cond(x.sum() > 0, lambda x, w=w: jnp.tanh(x @ w), lambda x: x - 1, x)
    return x


def tied(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """The last phase uses the weights of the first, on another IPU."""
    with ipu.phase(0):
        x = jnp.tanh(x @ ws[0])
    with ipu.phase(1):
        x = jnp.tanh(x @ ws[1])
    with ipu.phase(2):
        x = jnp.tanh(x @ ws[2])
    with ipu.phase(3):
        return x @ ws[0].T


def looked_up(params: tuple[jax.Array, list[jax.Array]], rows: jax.Array) -> jax.Array:
    table, ws = params
    with ipu.phase(0):
        x = table[rows]
    for number, w in enumerate(ws):
        with ipu.phase(number + 1):
            x = jnp.tanh(x @ w)
    return x


def trained(forward: Function, optimizer: optax.GradientTransformation) -> Function:
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return sum(jnp.mean(value**2) for value in jax.tree.leaves(forward(params, x)))  # type: ignore[return-value]

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


WS = [array(WIDTH, WIDTH, seed=n) for n in range(5)]
STACKS = [array(3, WIDTH, WIDTH, seed=n) for n in range(3)]
TABLE = array(40, WIDTH)
X = array(8, WIDTH)
IDS = jax.device_put(np.arange(0, 24, 3, np.int32))
FORWARD: dict[str, tuple[Function, Any, jax.Array]] = {
    "layers": (layers, WS, X),
    "read later": (read_later, WS, X),
    "read by the other": (read_by_the_other, WS, X),
    "loops": (loops, WS, X),
    "stacks": (stacks, STACKS, X),
    "branches": (branches, WS[:3], X),
    "tied": (tied, WS[:3], X),
    "looked up": (looked_up, (TABLE, WS[:3]), IDS),
}


@dataclass(frozen=True)
class Machine:
    """IPUs, prefetch depth, recomputation and offloading of a training step."""

    num_ipus: int
    depth: int = 1
    recompute: str = "none"
    offloads: bool = False


MACHINES = [Machine(2), Machine(2, 2, "all", True), Machine(4, 3, "none", True), Machine(4, 1, "standard")]


def lowered(fun: Function, args: tuple[Any, ...], machine: Machine, donated: tuple[int, ...] = ()) -> ipu.Lowered:
    options = ipu.Options(io_tiles=IO, prefetch_depth=machine.depth, recompute=machine.recompute)
    settings = {"donate_argnums": donated, "offload_argnums": donated if machine.offloads else ()}
    device = ipu.IPUModel(machine.num_ipus, tiles_per_ipu=TILES)
    return ipu.jit(fun, device=device, options=options, **settings).lower(*args)


def check_numbers(fun: Function, args: tuple[Any, ...], done: ipu.Lowered) -> ipu.Compiled:
    """The interpreter and the engine have the numbers of plain JAX; returns the compiled program."""
    expected = jax.tree.leaves(jax.jit(fun)(*args))
    compiled = done.compile()
    program = compiled.lowered.planned.lowered
    streams = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
    interpreted = interpret(done.graph, done.program, streams)
    computed = jax.tree.leaves(compiled(*jax.tree.map(jnp.copy, args)))
    for stream, got, want in zip(program.outputs, computed, expected, strict=True):
        np.testing.assert_allclose(interpreted[stream], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    return compiled


def check_tiles(done: ipu.Lowered, profile: ipu.Profile, num_ipus: int) -> None:
    """I/O tiles of each IPU that works hold values, and have no vertices."""
    held = profile.memory.by_category["variable"].reshape(-1, TILES)
    used = {int(tile) // TILES for groups in done.graph.groups.values() for group in groups for tile in group.tile.flat}
    assert len(used) >= min(num_ipus, 2)
    assert (held[sorted(used), TILES - IO :].max(1) > 0).all()
    assert (
        max(int((group.tile % TILES).max()) for groups in done.graph.groups.values() for group in groups) < TILES - IO
    )
    assert profile.overlapped_cycles > 0


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ipus", [2, 4])
@pytest.mark.parametrize("name", FORWARD)
def test_inference_has_the_numbers_of_plain_jax(name: str, num_ipus: int) -> None:
    fun, params, x = FORWARD[name]
    done = lowered(fun, (params, x), Machine(num_ipus))
    check_tiles(done, check_numbers(fun, (params, x), done).profile, num_ipus)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("name", FORWARD)
def test_training_has_the_numbers_of_plain_jax(name: str, machine: Machine) -> None:
    forward, params, x = FORWARD[name]
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)) if machine.depth > 1 else ADAM
    fun = trained(forward, optimizer)
    args = (params, optimizer.init(params), x)
    done = lowered(fun, args, machine, (0, 1))
    check_tiles(done, check_numbers(fun, args, done).profile, machine.num_ipus)


def test_replicas_of_two_ipus_have_the_numbers_of_one_batch() -> None:
    def step(ws: list[jax.Array], state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(lambda ws: jnp.mean(layers(ws, x) ** 2))(ws)
        value, grads = lax.pmean((value, grads), "replica")
        updates, state = ADAM.update(grads, state, ws)
        return optax.apply_updates(ws, updates), state, value

    def plain(ws: list[jax.Array], state: Any, x: jax.Array) -> Any:
        return trained(layers, ADAM)(ws, state, x)

    args = (WS, ADAM.init(WS), array(16, WIDTH))
    specs = {"replicas": 2, "in_specs": (P(), P(), P("replica")), "out_specs": P(), "donate_argnums": (0, 1)}
    options = ipu.Options(io_tiles=IO)
    done = ipu.jit(step, device=ipu.IPUModel(4, tiles_per_ipu=TILES), options=options, **specs).lower(*args).compile()
    assert done.profile.overlapped_cycles > 0
    got = done(*jax.tree.map(jnp.copy, args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, plain(*args))


# --- time -------------------------------------------------------------------------------------------------------------


def profiled(fun: Function, num_ipus: int, io_tiles: int, depth: int = 1, **changes: Any) -> ipu.Profile:
    """Eight layers of 256 × 256 on IPUs of 64 tiles, whose links have no latency."""
    ws = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    args = (ws, x) if fun is layers else (ws, jax.eval_shape(ADAM.init, ws), x)
    device = ipu.IPUModel(num_ipus, tiles_per_ipu=64, host_latency_seconds=0, **changes)
    options = ipu.Options(io_tiles=io_tiles, prefetch_depth=depth)
    donated = () if fun is layers else (0, 1)
    return ipu.jit(fun, device=device, options=options, donate_argnums=donated).profile(*args)


def rates(bytes_per_second: float) -> dict[str, float]:
    return {"streaming_bytes_per_second": bytes_per_second, "host_bytes_per_second": bytes_per_second}


@pytest.mark.parametrize("fun", [layers, trained(layers, ADAM)], ids=["inference", "training"])
def test_slow_links_are_always_busy(fun: Function) -> None:
    """Each of two IPUs moves half of the bytes, at the same time; without I/O tiles it does not while it computes."""
    value_cycles = ceil(256 * 256 * 4 / 2e9 * ipu.IPUModel().target.clock_hz)
    one, two = (profiled(fun, num_ipus, 8, **rates(2e9)) for num_ipus in (1, 2))
    without = profiled(fun, 2, 0, **rates(2e9))
    assert one.overlapped_cycles <= one.cycles <= 1.1 * one.overlapped_cycles
    # The first and the last value are moved by one IPU alone.
    assert two.overlapped_cycles <= two.cycles <= 1.2 * two.overlapped_cycles + 2 * value_cycles
    assert two.cycles < 0.7 * one.cycles
    assert two.cycles < 0.95 * without.cycles


def test_fast_links_are_hidden() -> None:
    """All that is left is computing on the other tiles, one phase after the other."""
    two = profiled(layers, 2, 8, **rates(1e11))
    one = profiled(layers, 1, 8, **rates(1e14))
    assert two.cycles - two.phase_cycles["global_exchange"] < 1.05 * one.cycles


@pytest.mark.parametrize("num_ipus", [1, 2, 4])
def test_a_deeper_prefetch_takes_hardly_longer(num_ipus: int) -> None:
    """Stores wait for loads that are further ahead."""
    cycles = [profiled(trained(layers, ADAM), num_ipus, 4, depth, **rates(4e9)).cycles for depth in (1, 2, 3)]
    assert cycles[1] <= 1.03 * cycles[0] and cycles[2] <= 1.03 * cycles[1]


def test_an_ipu_loads_its_next_phase_while_it_computes() -> None:
    steps = profiled(layers, 2, 8, **rates(2e9)).timeline.steps
    for ipu_number in (0, 1):
        spans = [
            (type(step.program), start, end)
            for step in steps
            for k, start, end in zip(step.ipus, step.starts, step.ends, strict=True)
            if k == ipu_number
        ]
        loads = [(start, end) for kind, start, end in spans if kind is RemoteIn]
        computing = [(start, end) for kind, start, end in spans if kind is Execute]
        assert any(a < end and start < b for start, end in loads for a, b in computing)


def test_a_load_waits_for_the_store_of_another_ipu() -> None:
    """A result of phase n on one IPU is stored by its I/O tiles before those of the other load it for phase n + 3."""
    args = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 6, jax.ShapeDtypeStruct((2048, 256), jnp.float32)
    device = ipu.IPUModel(2, tiles_per_ipu=64, **rates(1e9))
    profile = ipu.jit(read_by_the_other, device=device, options=ipu.Options(io_tiles=32)).profile(*args)
    stored: dict[Any, tuple[int, int]] = {}
    pairs = 0
    for step in profile.timeline.steps:
        if isinstance(step.program, RemoteOut):
            stored[step.program.buffer] = step.ipus[0], step.ends[0]
        if isinstance(step.program, RemoteIn) and step.program.buffer in stored:
            storing_ipu, end = stored[step.program.buffer]
            assert step.starts[0] >= end
            pairs += step.ipus[0] != storing_ipu
    assert pairs > 0


# --- memory and refusals ----------------------------------------------------------------------------------------------


def test_io_tiles_hold_no_more_of_more_phases() -> None:
    def held(count: int) -> np.ndarray:
        ws = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * count
        x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
        device = ipu.IPUModel(2, tiles_per_ipu=16)
        args = (ws, jax.eval_shape(ADAM.init, ws), x)
        step = ipu.jit(trained(layers, ADAM), device=device, options=ipu.Options(io_tiles=2), donate_argnums=(0, 1))
        variables = step.profile(*args).memory.by_category["variable"]
        return variables.reshape(2, 16)[:, 14:].max(1)

    few, many = held(12), held(24)
    assert (many <= few).all()
    assert (many <= ipu.IPUModel().target.bytes_per_tile / 2).all()  # a quarter for loads, a quarter for stores


@pytest.mark.parametrize("num_ipus", [1, 2, 4])
def test_phases_that_load_more_than_io_tiles_hold(num_ipus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two of three layers of a phase: the third is taken a phase earlier, and stores wait for each other."""
    tile_bytes = 4608
    monkeypatch.setattr(planned_program, "TILE_BYTES", (tile_bytes,))

    def forward(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for number, w in enumerate(ws):
            with ipu.phase(number // 3):
                x = jnp.tanh(x @ w)
        return x

    ws = [array(WIDTH, WIDTH, seed=n) for n in range(12)]
    fun = trained(forward, ADAM)
    args = (ws, ADAM.init(ws), X)
    done = lowered(fun, args, Machine(num_ipus), (0, 1))
    profile = check_numbers(fun, args, done).profile
    variables = profile.memory.by_category["variable"].reshape(-1, TILES)[:, TILES - IO :]
    assert 1000 < variables.max() <= tile_bytes


@pytest.mark.parametrize("num_ipus", [1, 2])
def test_too_few_io_tiles_are_refused(num_ipus: int) -> None:
    ws = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((8, 512), jnp.float32)

    def with_tiles(count: int) -> ipu.Profile:
        device = ipu.IPUModel(num_ipus, tiles_per_ipu=32)
        return ipu.jit(layers, device=device, options=ipu.Options(io_tiles=count)).profile(ws, x)

    needed = -(-4 * 512 * 512 * 4 // 638_976)
    words = rf"{needed - 1} I/O tiles are too few(.|\n)*1,048,576 bytes: {needed} I/O tiles of 638,976(.|\n)*"
    with pytest.raises(ipu.ArgumentError, match=words + f"io_tiles={needed}"):
        with_tiles(needed - 1)
    assert with_tiles(needed).overlapped_cycles > 0
