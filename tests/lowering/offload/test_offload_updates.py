"""Updates of parameters with state in streaming memory: on replicas, and of any equation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu

TWELVE = np.arange(12, dtype=np.float32).reshape(4, 3)
STATE = [*map(jax.device_put, (TWELVE, np.ones_like(TWELVE), np.full_like(TWELVE, 2)))]


def test_updates_with_an_equation_without_operands() -> None:
    step = ipu.jit(lambda m: m + jnp.arange(12.0).reshape(4, 3), donate_argnums=0, offload_argnums=0)
    np.testing.assert_array_equal(step(jnp.ones((4, 3))), 1 + np.arange(12.0).reshape(4, 3))


def test_updates_parameters_on_replicas_in_sequence() -> None:
    """Sums over replicas have no ordering effect: the state of the next parameter is loaded after the first's."""

    def step(state: Any, grads: Any) -> Any:
        scaled = [0.5 * g[0] for g in grads]
        return [0.9 * m + lax.pmax(2 * jnp.sin(m) + g, "replica") for m, g in zip(state, scaled, strict=True)]

    grads = [jnp.stack([x, 2 * x]) for x in STATE]
    specs = {"replicas": 2, "in_specs": (P(), P("replica")), "out_specs": P()}
    fun = ipu.jit(step, device=ipu.IPUModel(2, tiles_per_ipu=4), donate_argnums=0, offload_argnums=0, **specs)
    text = fun.lower(STATE, grads).as_text(after="offload")
    moves = [line.split("= ")[1].split("[")[0].split()[0] for line in text.splitlines() if "= remote_" in line]
    assert sorted(moves) == ["remote_load"] * 3 + ["remote_store"] * 3
    plain = ipu.jit(step, device=ipu.CPU(), **specs)(STATE, grads)
    for got, expected in zip(jax.tree.leaves(fun([*map(jnp.copy, STATE)], grads)), plain, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


TABLE = jax.device_put((np.random.default_rng(0).integers(-8, 9, (8, 3)) / 4).astype(np.float32))
# A duplicate, from the end, beyond a half of the table, before it.
ROWS = jax.device_put(np.array([0, 1, 1, 3, 2, -1, 4, -9]))


def updated_twice(table: jax.Array, rows: jax.Array) -> Any:
    """Two updates, and reads of each table after the next is computed."""
    change = jnp.arange(rows.size, dtype=table.dtype)[:, None] / 2
    second = table.at[rows].add(change)
    third = second.at[rows[::-1]].subtract(change)
    return third, third[rows], second[rows], table[rows]


def in_stages(table: jax.Array, rows: jax.Array) -> Any:
    """A stage updates results of another's update, and reads the old values."""
    with ipu.stage(0):
        updated = table.at[rows].add(1.0)
        activations = jnp.tanh(updated[rows])
    with ipu.stage(1):
        return updated.at[rows[:3]].subtract(activations[:3]), table[rows] + updated[rows]


def in_phases(table: jax.Array, rows: jax.Array) -> Any:
    """A phase after the next reads and updates results of the first phase's update."""
    with ipu.phase(0):
        updated = table.at[rows].add(1.0)
        activations = jnp.tanh(updated[rows])
    with ipu.phase(1):
        activations = jnp.tanh(2 * activations)
    with ipu.phase(2):
        return updated.at[rows[:3]].subtract(activations[:3]), updated[rows]


def read_in_the_next_phase(table: jax.Array, rows: jax.Array) -> Any:
    """Reads of the old table stay in their phase, so the entire table moves."""
    with ipu.phase(0):
        updated = table.at[rows].add(1.0)
    with ipu.phase(1):
        return updated, table[rows]


def moves_of(lowered: Any) -> str:
    text = lowered.as_text(after="offload")
    return " ".join(
        line.split("= remote_")[1].split("[")[0].split()[0] for line in text.splitlines() if "= remote_" in line
    )


TWICE = "rows rows update rows rows update rows"


@pytest.mark.parametrize(
    ("fun", "num_ipus", "settings", "moves"),
    [
        (updated_twice, 1, {}, TWICE),
        (updated_twice, 1, {"options": ipu.Options(io_tiles=2)}, f"fetch take {TWICE} hand hand hand put put put"),
        (in_stages, 2, {}, "rows rows update rows rows rows update"),
        (in_phases, 1, {}, "load rows update rows rows rows update put"),
        (in_phases, 2, {}, "load rows update rows rows rows update put"),
        (read_in_the_next_phase, 1, {}, "load load rows store put"),
    ],
)
def test_preserves_the_order_of_updates_and_reads(
    fun: Any, num_ipus: int, settings: dict[str, Any], moves: str
) -> None:
    device = ipu.IPUModel(num_ipus, tiles_per_ipu=8)
    step = ipu.jit(fun, device=device, donate_argnums=0, offload_argnums=0, **settings)
    assert moves_of(step.lower(TABLE, ROWS)) == moves
    for got, expected in zip(step(jnp.copy(TABLE), ROWS), fun(TABLE, ROWS), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("spec", [P(), P("replica")], ids=["whole", "split"])
def test_updates_tables_in_sequence_on_replicas(spec: P, dtype: str) -> None:
    """Each has the entire table, or a part."""
    table = TABLE.astype(dtype)
    parts = [(table, ROWS)] if spec == P() else zip(jnp.split(table, 2), jnp.split(ROWS, 2), strict=True)
    expected = [jnp.concatenate(of_each) for of_each in zip(*(updated_twice(*part) for part in parts), strict=True)]
    specs = {"replicas": 2, "in_specs": spec, "out_specs": spec, "donate_argnums": 0, "offload_argnums": 0}
    step = ipu.jit(updated_twice, device=ipu.IPUModel(2, tiles_per_ipu=4), **specs)
    assert moves_of(step.lower(table, ROWS)) == TWICE
    for got, expected_value in zip(step(jnp.copy(table), ROWS), expected, strict=True):
        np.testing.assert_array_equal(got, expected_value)


@pytest.mark.parametrize(
    "fun",
    [
        lambda t, i, n: (t.at[i].add(1.0), t[n].sum()),
        lambda t, i, n: t.at[i].add(1.0).at[n].add(2.0),
        lambda t, i, n: t.at[i].subtract(1.0),
        lambda t, i, n: (t, t[i[0]]),
        lambda t, i, n: (t, jax.vmap(lambda k: t[k])(i)),
        lambda t, i, n: (lambda new: (new, new[n]))(t.at[i].set(0.0)),
        lambda t, i, n: jax.lax.dynamic_update_slice_in_dim(t, t[i], n[0], 0),
    ],
    ids=["old rows", "twice", "subtract", "one", "vmap", "new rows", "slice"],
)
def test_never_loads_a_large_table(fun: Any) -> None:
    """Loading all of it takes 3.4 million cycles."""
    table = jax.ShapeDtypeStruct((200_000, 64), jnp.float32)
    rows = jax.ShapeDtypeStruct((256,), jnp.int32)
    step = ipu.jit(fun, donate_argnums=0, offload_argnums=0)
    assert step.lower(table, rows, rows).compile().profile.cycles < 120_000


def test_updates_the_smallest_parameter_first() -> None:
    """So that the gradients of small ones are dropped before the state of the largest is loaded."""

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["a"]) @ p["b"]))(params)
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
        return jax.tree.map(lambda p, m: p - m, params, state), state

    params = {"a": np.ones((6, 5), np.float32), "b": np.ones((5, 2), np.float32)}
    function = ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=8), donate_argnums=(0, 1), offload_argnums=1)
    text = function.lower(params, params, np.ones((3, 6), np.float32)).as_text(after="offload")
    loads = [line for line in text.splitlines() if "= remote_load" in line]
    assert ["f32[5,2]" in line for line in loads] == [True, False], loads
