"""Small programs of every kind of step: loops, branches, pipelines, replicas, transfers, codelets of a user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.poplar import FLOAT, Input, Output, Vector, Vertex

Struct = jax.ShapeDtypeStruct
BATCH = 16
WIDTH = 16


@dataclass(frozen=True)
class Case:
    """A function with shapes of its arguments, IPUs of its machine, and settings of `ipu.jit`."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    num_ipus: int = 1
    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def compiled(self) -> ipu.Compiled:
        """Compile it for a machine of 16 tiles."""
        device = ipu.IPUModel(self.num_ipus, "mk2", tiles_per_ipu=16, **self.machine)
        return ipu.jit(self.fun, device=device, **self.settings).lower(*self.args).compile()


def loss(weights: Any, x: Any) -> Any:
    with ipu.stage(0):
        h = jnp.tanh(x @ weights["a"])
    with ipu.stage(1):
        h = jax.nn.relu(h @ weights["b"])
        return (h**2).mean()


WEIGHTS = {name: Struct((WIDTH, WIDTH), jnp.float32) for name in "ab"}
X = Struct((BATCH, WIDTH), jnp.float32)


def updated(weights: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def pipelined(weights: Any, x: Any) -> Any:
    value, gradients = ipu.pipeline(jax.value_and_grad(loss), micro_batches=4)(weights, x)
    return updated(weights, gradients), value


def replicated(weights: Any, x: Any) -> Any:
    gradients = jax.lax.pmean(jax.grad(lambda w: (jnp.tanh(x @ w["a"]) @ w["b"]).sum())(weights), "replica")
    return updated(weights, gradients)


def branches(x: Any, which: Any) -> Any:
    y = jax.lax.switch(which, [lambda v: v @ v.T @ v, lambda v: jnp.sort(v, 1), lambda v: jnp.cumsum(v, 0)], x)
    body = lambda c: jax.lax.cond(c[0, 0] > 1, jnp.exp, lambda v: v @ v.T @ v, c)  # noqa: E731
    return jax.lax.while_loop(lambda c: c.sum() < 100, body, y)


def convolved(x: Any, kernel: Any, table: Any, index: Any) -> Any:
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    rows = table[index]
    return y.argmax(-1), table.at[index].add(rows), jax.random.normal(jax.random.key(0), rows.shape) + jnp.sort(rows)


def on_tiles(x: Any) -> Any:
    placed = ipu.tile_put_sharded(x, tuple(range(4)))
    return ipu.tile_map(lambda row: jax.nn.softmax(row @ row.T).sum(0), placed)


class DoubleVertex(Vertex):
    """A codelet whose user says its cycles, on which rates decide."""

    x: Input[Vector[FLOAT]]
    out: Output[Vector[FLOAT]]

    def compute(x):
        return 2 * x

    def cycles(x, target):
        return 100 + 3 * x.size if target.load_bytes_per_cycle < 16 else 50 + x.size * 16 // target.load_bytes_per_cycle


def doubled(x: Any) -> Any:
    return ipu.codelet_call(DoubleVertex, jnp.tanh(x)) + 1


def _half(*shape: int) -> Any:
    return Struct(shape, jnp.float16)


_TRIPS = ipu.Options(trip_counts={"while[0]": 5})
KINDS: dict[str, Case] = {
    "operations": Case(
        convolved,
        (_half(2, 8, 8, 4), _half(3, 3, 4, 16), Struct((40, 8), jnp.float32), Struct((6,), jnp.int32)),
    ),
    "branches": Case(branches, (X, Struct((), jnp.int32)), settings={"options": _TRIPS}),
    "pipeline": Case(pipelined, (WEIGHTS, X), 2),
    "buffered pipeline": Case(pipelined, (WEIGHTS, X), 2, {"global_exchange": "buffered"}),
    "replicas": Case(
        replicated,
        (WEIGHTS, X),
        4,
        settings={"replicas": 4, "in_specs": (P(), P("replica")), "out_specs": P()},
    ),
    "offloaded": Case(
        lambda w, x: (w - x.T @ jnp.tanh(x @ w), x.sum()),
        (Struct((WIDTH, WIDTH), jnp.float32), X),
        settings={"donate_argnums": 0, "offload_argnums": 0},
    ),
    "I/O tiles": Case(
        lambda w, xs: jax.lax.scan(lambda w, x: (w + x.T @ x, x.sum()), w, xs),
        (Struct((WIDTH, WIDTH), jnp.float32), Struct((6, BATCH, WIDTH), jnp.float32)),
        settings={"options": ipu.Options(io_tiles=4, stream_loops=True)},
    ),
    "codelet of a user": Case(doubled, (Struct((32, 8), jnp.float32),)),
    "function on tiles": Case(on_tiles, (Struct((4, 6, 8), jnp.float32),)),
}
