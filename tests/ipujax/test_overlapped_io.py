"""Overlapped I/O, `Options(io_tiles=, prefetch_depth=)`: numbers, time by closed forms, memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.graph import Copy, RemoteBuffer, RemoteIn, Repeat, Sequence, distinct, joining_streams
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.tensor import Tensor, Variable

TILES = 12
IO = 4
BATCHES = 8
ROWS = 16
WIDTH = 32


def array(*shape: int, seed: int = 0) -> jax.Array:
    return jax.device_put((np.random.default_rng(seed).normal(size=shape) / 4).astype(np.float32))


def epoch(w: jax.Array, batches: jax.Array) -> Any:
    """A step of training for each batch."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(w)
        return w - 0.1 * grad, value

    return jax.lax.scan(step, w, batches)


def backwards(w: jax.Array, batches: jax.Array) -> Any:
    return jax.lax.scan(lambda w, x: (w + x.T @ x, x.sum()), w, batches, reverse=True)


def layers(ws: jax.Array, x: jax.Array) -> Any:
    """Rows of a stack of weights, forward and for the gradient."""

    def loss(ws: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    return jax.value_and_grad(loss)(ws)


def update(w: jax.Array, m: jax.Array, x: jax.Array) -> Any:
    m = 0.9 * m + jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
    return w - 0.1 * m, m, (x @ w).sum(0)


W = array(WIDTH, WIDTH)
XS = array(BATCHES, ROWS, WIDTH, seed=1)
X = array(ROWS, WIDTH, seed=2)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "epoch": (epoch, (W, XS)),
    "backwards": (backwards, (W, XS)),
    "layers": (layers, (array(4, WIDTH, WIDTH), X)),
    "update": (update, (W, jax.device_put(np.zeros((WIDTH, WIDTH), np.float32)), X)),
    "no loads": (lambda: jnp.arange(64.0).reshape(8, 8) * 2, ()),
}


def lowered(name: str, io_tiles: int = IO, depth: int = 1, **settings: Any) -> ipu.Lowered:
    fun, args = CASES[name]
    changes = settings.pop("changes", {})
    options = ipu.Options(io_tiles=io_tiles, prefetch_depth=depth)
    return ipu.jit(fun, device=ipu.IPUModel(tiles_per_ipu=TILES, **changes), options=options, **settings).lower(*args)


@pytest.mark.parametrize(("name", "offloads"), [*product(CASES, (False, True))])
def test_numbers_are_those_of_plain_jax(name: str, offloads: bool) -> None:
    fun, args = CASES[name]
    settings = {"offload_argnums": 0, "donate_argnums": 0} if offloads and args else {}
    got = lowered(name, depth=2, **settings).compile()(*jax.tree.map(jnp.copy, args))
    want = jax.jit(fun)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("name", ["epoch", "update"])
def test_the_interpreter_agrees(name: str) -> None:
    fun, args = CASES[name]
    done = lowered(name)
    program = done.compile().lowered.planned.lowered
    leaves = jax.tree.leaves(args)
    outs = interpret(done.graph, done.program, dict(zip(program.inputs, leaves, strict=True)))
    want = jax.tree.leaves(jax.jit(fun)(*args))
    for stream, expected in zip(program.outputs, want, strict=True):
        np.testing.assert_allclose(outs[stream], expected, rtol=1e-4, atol=1e-5)


def test_a_loop_takes_as_long_as_the_slower_of_both() -> None:
    """With ever faster links, from transfers that take longer than computing to such that are hidden."""
    for rate in (1e8, 1e9, 1e11):
        profile = lowered("epoch", changes={"streaming_bytes_per_second": rate, "host_bytes_per_second": rate})
        figures = profile.compile().profile
        (loop,) = (step for step in figures.timeline.steps if isinstance(step.program, Repeat))
        target = figures.target
        seconds = target.host_latency_seconds + ROWS * WIDTH * 4 / rate
        row_cycles = int(np.ceil(seconds * target.clock_hz))
        per_iteration = (loop.ends[0] - loop.starts[0]) / BATCHES
        busy = sum(figures.timeline.work[0]) / BATCHES
        assert max(row_cycles, 0.5 * busy) <= per_iteration * 1.01
        assert per_iteration <= 1.25 * max(row_cycles, busy)
        assert figures.overlapped_cycles >= BATCHES * row_cycles


def test_transfers_that_overlap_are_no_phase_and_no_host_exchange() -> None:
    alone = lowered("epoch", io_tiles=0).compile().profile
    together = lowered("epoch").compile().profile
    assert alone.phase_cycles["host_exchange"] > 0 and alone.overlapped_cycles == 0
    assert together.phase_cycles["host_exchange"] == 0 < together.overlapped_cycles
    assert sum(together.phase_cycles.values()) == together.cycles
    assert "I/O tiles meanwhile" in together.summary()


def test_one_batch_at_a_time_is_on_the_chip() -> None:
    """A row on I/O tiles and one on the others, where a program without them has all."""
    done = lowered("epoch")
    sizes = {v.size for v in done.graph.variables if v.size % (ROWS * WIDTH) == 0 and "argument" in str(v.origin)}
    assert BATCHES * ROWS * WIDTH not in sizes
    loads = [node for node in distinct(done.program) if isinstance(node, RemoteIn)]
    first_io = TILES - IO
    for load in loads:
        tiles = np.concatenate([done.graph.mappings[v].tiles for v in load.destination.variables()])
        assert load.overlaps and tiles.min() >= first_io
    copies = [node for node in distinct(done.program) if isinstance(node, Copy)]
    buffers = {v for load in loads for v in load.destination.variables()}
    assert sum(bool(buffers & set(copy.source.variables())) for copy in copies) == len(buffers)


def test_a_transfer_joins_those_of_its_kind_alone() -> None:
    """I/O tiles begin an exchange of their own behind one of all tiles."""
    buffer = RemoteBuffer.of("held", np.dtype(np.float32), 4)
    rows = Tensor.of(Variable((1, 4), np.dtype(np.float32), "rows"))
    plain = RemoteIn(buffer, rows)
    other = RemoteIn(buffer, rows)
    apart = RemoteIn(buffer, rows, overlaps=True)
    assert joining_streams(Sequence(plain, other, apart)) == {other: plain}


def test_vertices_stay_off_the_io_tiles() -> None:
    done = lowered("epoch")
    tiles = [group.tile for groups in done.graph.groups.values() for group in groups]
    assert max(int(tile.max()) for tile in tiles) < TILES - IO


def test_a_deeper_prefetch_takes_more_memory_of_io_tiles() -> None:
    def many(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    ws = [array(512, 512, seed=n) for n in range(4)]
    held = []
    for depth in (1, 2):
        options = ipu.Options(io_tiles=16, prefetch_depth=depth)
        device = ipu.IPUModel(tiles_per_ipu=48)
        done = ipu.jit(many, device=device, options=options, offload_argnums=0).lower(ws, array(4, 512)).compile()
        held.append(int(done.profile.memory.by_category["variable"][-16:].max()))
    assert held[1] >= 1.4 * held[0] > 0


@pytest.mark.parametrize(
    ("name", "value"), [("io_tiles", -1), ("io_tiles", 1.5), ("prefetch_depth", 0), ("io_tiles", True)]
)
def test_refuses_non_numbers(name: str, value: Any) -> None:
    with pytest.raises(ipu.ArgumentError, match=f"Options.{name}"):
        ipu.Options(**{name: value})


@pytest.mark.parametrize("io_tiles", [TILES, TILES + 1])
def test_io_tiles_leave_some_that_compute(io_tiles: int) -> None:
    with pytest.raises(ipu.ArgumentError, match=r"leaves (.|\n)*no tiles that compute(.|\n)*fewer than the 12 tiles"):
        lowered("epoch", io_tiles=io_tiles)
