"""Bytes at the peak of programs of all kinds: rows add up on the fullest and on the mean tile, and have lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from benchmarks.models.digits import digits
from benchmarks.models.gpt import gpt
from benchmarks.models.lstm import lstm
from benchmarks.models.mlp import mlp
from benchmarks.models.model import Model
from ipujax import poplar
from ipujax.poplar.program import Execute, PrintTensor, Sequence
from ipujax.runtime.memory import LIVE
from tests.runtime.memory.test_memory_breakdown import assert_exact

Struct = jax.ShapeDtypeStruct
X = Struct((16, 32), jnp.float32)
WS = [Struct((32, 32), jnp.float32)] * 4
ADAM = optax.adam(1e-3)


def loss(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def in_stages(ws: Any, x: Any) -> Any:
    for number, w in enumerate(ws):
        with ipu.stage(number // 2):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def in_phases(ws: Any, x: Any) -> Any:
    for number, w in enumerate(ws):
        with ipu.phase(number):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def update(ws: Any, x: Any, of: Callable[..., Any] = loss) -> Any:
    value, gradients = jax.value_and_grad(of)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), value


def of_model(model: Model) -> ipu.Profile:
    device = model.device(tiles_per_ipu=64)
    options = ipu.Options(allow_out_of_memory=True, **model.options)
    fun = ipu.jit(model.step, device=device, donate_argnums=model.donate_argnums, options=options)
    return fun.profile(*model.args)


def scanned(**options: Any) -> ipu.Profile:
    fun = ipu.jit(lambda ws, xs: lax.scan(update, ws, xs), device=device(), options=ipu.Options(**options))
    return fun.profile(WS, Struct((12, 16, 32), jnp.float32))


def device(num_ipus: int = 1, **changes: Any) -> ipu.IPUModel:
    return ipu.IPUModel(num_ipus, **{"tiles_per_ipu": 16, **changes})


def pipelined() -> ipu.Profile:
    def step(ws: Any, x: Any) -> Any:
        value, gradients = ipu.pipeline(jax.value_and_grad(in_stages), micro_batches=4)(ws, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), value

    return ipu.jit(step, device=device(2), donate_argnums=0).profile(WS, X)


def replicated() -> ipu.Profile:
    def step(ws: Any, x: Any) -> Any:
        gradients = lax.pmean(jax.grad(loss)(ws, x), "replica")
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients)

    specs = {"in_specs": (P(), P("replica")), "out_specs": P()}
    return ipu.jit(step, device=device(2), replicas=2, donate_argnums=0, **specs).profile(WS, X)


def offloaded() -> ipu.Profile:
    def step(ws: Any, state: Any, x: Any) -> Any:
        updates, state = ADAM.update(jax.grad(loss)(ws, x), state)
        return optax.apply_updates(ws, updates), state

    state = jax.eval_shape(ADAM.init, WS)
    return ipu.jit(step, device=device(), donate_argnums=(0, 1), offload_argnums=1).profile(WS, state, X)


def attempted() -> ipu.Profile:
    """A program whose first plan does not fit."""
    large = ipu.jit(update, device=device(1), donate_argnums=0).profile(WS, X).memory
    for share in (0.99, 0.98, 0.97, 0.95, 0.9):
        try:
            small = device(bytes_per_tile=int(share * large.max_tile_bytes), interleaved_offset_bytes=10_000)
            profile = ipu.jit(update, device=small, donate_argnums=0).profile(WS, X)
        except ipu.TileMemoryError:
            break
        if profile.attempts:
            return profile
    raise AssertionError("choose another program: its first plan is the smallest")


class SumVertex(poplar.Vertex):
    """Sums its operand."""

    in_: poplar.Input[poplar.Vector[poplar.FLOAT]]
    out: poplar.Output[poplar.FLOAT]

    @staticmethod
    def compute(in_: Any) -> Any:
        return jnp.sum(in_)


def by_hand() -> ipu.Profile:
    graph = poplar.Graph(poplar.IPUModel().create_device().get_target())
    x = graph.add_constant(poplar.FLOAT, [40], list(range(40)), "x")
    sums = graph.add_variable(poplar.FLOAT, [40], "sums")
    graph.set_tile_mapping(x, 0)
    compute_set = graph.add_compute_set("suffix sums")
    for i in range(40):
        vertex = graph.add_vertex(compute_set, SumVertex, {"in": x[i:], "out": sums[i]})
        graph.set_tile_mapping(vertex, i)
        graph.set_tile_mapping(sums[i], i)
    return poplar.Engine(graph, Sequence(Execute(compute_set), PrintTensor("sums", sums))).profile


PROGRAMS: dict[str, Callable[[], ipu.Profile]] = {
    "mlp": lambda: of_model(mlp((60, 50, 40, 10), batch=16)),
    "convolutions": lambda: of_model(digits("cnn", batch=4)),
    "gpt block": lambda: of_model(gpt(1, width=64, heads=2, length=16, batch=2, vocabulary=64)),
    "lstm": lambda: of_model(lstm(length=6, units=32, features=16, batch=4)),
    "scan": scanned,
    "streamed scan": lambda: scanned(stream_loops=True),
    "recomputed": lambda: scanned(recompute="all"),
    "i/o tiles": lambda: ipu.jit(update, device=device(), options=ipu.Options(io_tiles=4)).profile(WS, X),
    "pipeline": pipelined,
    "replicas": replicated,
    "offload": offloaded,
    "phases": lambda: ipu.jit(lambda ws, x: update(ws, x, in_phases), device=device(2)).profile(WS, X),
    "fallback": lambda: ipu.jit(lambda x: jnp.linalg.qr(x.T @ x)[0] + jnp.sort(x.T @ x), device=device()).profile(X),
    "attempts": attempted,
    "poplar": by_hand,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_add_up_and_have_lines(name: str, tmp_path: Path) -> None:
    profile = PROGRAMS[name]()
    assert_exact(profile.memory)
    for row in profile.memory.breakdown.rows:
        if row.category in (*LIVE, "constant"):
            assert row.line.startswith("argument ") or ".py:" in row.line, row
        else:
            assert not row.line, row
    profile.save(tmp_path / "saved")
    loaded = ipu.Profile.load(tmp_path / "saved")
    assert loaded.memory.breakdown.rows == profile.memory.breakdown.rows
    assert float(loaded.memory.mean_tile_bytes) == np.mean(profile.memory.tile_bytes)
    assert loaded.summary(show_memory_breakdown=True) == profile.summary(show_memory_breakdown=True)
    assert profile.attempts == loaded.attempts
