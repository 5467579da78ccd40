"""Updates of parameters whose state lies in streaming memory: on replicas, and of any equation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu

STATE = [jnp.arange(12.0).reshape(4, 3), jnp.ones((4, 3)), jnp.full((4, 3), 2.0)]


def test_an_equation_may_read_nothing() -> None:
    step = ipu.jit(lambda m: m + jnp.arange(12.0).reshape(4, 3), donate_argnums=0, offload_argnums=0)
    np.testing.assert_array_equal(step(jnp.ones((4, 3))), 1 + np.arange(12.0).reshape(4, 3))


def test_updates_on_replicas_go_one_after_the_other() -> None:
    """Sums over replicas have no effect that orders: the state of the next parameter is loaded behind the first's."""

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


# --- tables by rows ---------------------------------------------------------------------------------------------------

TABLE = jnp.asarray(np.random.default_rng(0).integers(-8, 9, (8, 3)) / 4, jnp.float32)
ROWS = jnp.array([0, 1, 1, 3, 2, -1, 4, -9])  # twice the same, from the end, beyond a half of the table, before it


def updated_twice(table: jax.Array, rows: jax.Array) -> Any:
    """Two updates, and reads of each table once the next is made."""
    change = jnp.arange(rows.size, dtype=table.dtype)[:, None] / 2
    second = table.at[rows].add(change)
    third = second.at[rows[::-1]].subtract(change)
    return third, third[rows], second[rows], table[rows]


def in_stages(table: jax.Array, rows: jax.Array) -> Any:
    """A stage updates what another has updated, and reads what was there before."""
    with ipu.stage(0):
        new = table.at[rows].add(1.0)
        read = jnp.tanh(new[rows])
    with ipu.stage(1):
        return new.at[rows[:3]].subtract(read[:3]), table[rows] + new[rows]


def in_phases(table: jax.Array, rows: jax.Array) -> Any:
    """A later phase than the next reads and updates what the first has updated."""
    with ipu.phase(0):
        new = table.at[rows].add(1.0)
        read = jnp.tanh(new[rows])
    with ipu.phase(1):
        read = jnp.tanh(2 * read)
    with ipu.phase(2):
        return new.at[rows[:3]].subtract(read[:3]), new[rows]


def read_in_the_next_phase(table: jax.Array, rows: jax.Array) -> Any:
    """What reads the old table stays in its phase, so all of the table moves."""
    with ipu.phase(0):
        new = table.at[rows].add(1.0)
    with ipu.phase(1):
        return new, table[rows]


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
        (updated_twice, 1, {"options": ipu.Options(io_tiles=2)}, f"fetch take {TWICE} hand put hand put hand put"),
        (in_stages, 2, {}, "rows rows update rows rows rows update"),
        (in_phases, 1, {}, "load rows update rows rows rows update put"),
        (in_phases, 2, {}, "load rows update rows rows put rows update"),
        (read_in_the_next_phase, 1, {}, "load load rows store put"),
    ],
)
def test_updates_and_reads_keep_their_order(fun: Any, num_ipus: int, settings: dict[str, Any], moves: str) -> None:
    device = ipu.IPUModel(num_ipus, tiles_per_ipu=8)
    step = ipu.jit(fun, device=device, donate_argnums=0, offload_argnums=0, **settings)
    assert moves_of(step.lower(TABLE, ROWS)) == moves
    for got, expected in zip(step(jnp.copy(TABLE), ROWS), fun(TABLE, ROWS), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("spec", [P(), P("replica")], ids=["whole", "split"])
def test_updates_one_after_the_other_on_replicas(spec: P, dtype: str) -> None:
    """Each has all of the table, or a part of its own."""
    table = TABLE.astype(dtype)
    parts = [(table, ROWS)] if spec == P() else zip(jnp.split(table, 2), jnp.split(ROWS, 2), strict=True)
    expected = [jnp.concatenate(of_each) for of_each in zip(*(updated_twice(*part) for part in parts), strict=True)]
    specs = {"replicas": 2, "in_specs": spec, "out_specs": spec, "donate_argnums": 0, "offload_argnums": 0}
    step = ipu.jit(updated_twice, device=ipu.IPUModel(2, tiles_per_ipu=4), **specs)
    assert moves_of(step.lower(table, ROWS)) == TWICE
    for got, want in zip(step(jnp.copy(table), ROWS), expected, strict=True):
        np.testing.assert_array_equal(got, want)


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
def test_a_large_table_stays_where_it_is(fun: Any) -> None:
    """Loading all of it takes 3.4 million cycles."""
    table, rows = jax.ShapeDtypeStruct((200_000, 64), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.int32)
    step = ipu.jit(fun, donate_argnums=0, offload_argnums=0)
    assert step.lower(table, rows, rows).compile().profile.cycles < 120_000
