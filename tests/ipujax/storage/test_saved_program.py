"""Saved programs: equal numbers and profile after loading; others are refused by name."""

from __future__ import annotations

import json
import pickle
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu

DEVICE = ipu.IPUModel(tiles_per_ipu=16)
X = jnp.arange(8, dtype=jnp.float32).reshape(2, 4)


class State(NamedTuple):
    count: jax.Array
    weights: dict[str, jax.Array]


STATE = State(jnp.int32(1), {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)})


def step(state: State, x: jax.Array) -> tuple[State, list[jax.Array]]:
    y = jnp.tanh(x @ state.weights["w"] + state.weights["b"])
    return State(state.count + 1, jax.tree.map(lambda w: w - y.mean(), state.weights)), [y]


def compiled(fun=step, args=(STATE, X), **settings):
    return ipu.jit(fun, device=DEVICE, **settings).lower(*args).compile()


@pytest.mark.parametrize("exact", [False, True])
def test_loaded_program_is_the_saved_one(tmp_path, exact):
    program = compiled(options=ipu.Options(exact_splits=exact), donate_argnums=0)
    program.save(tmp_path / "step")
    loaded = ipu.load(tmp_path / "step")
    copies = [jax.tree.map(jnp.copy, STATE) for _ in range(2)]
    expected = program(copies[0], X)
    got = loaded(copies[1], X)
    assert jax.tree.structure(expected) == jax.tree.structure(got)
    assert all(map(np.array_equal, jax.tree.leaves(expected), jax.tree.leaves(got)))
    assert copies[1].weights["w"].is_deleted()
    assert loaded.profile.summary() == program.profile.summary()
    with pytest.raises(ipu.ArgumentError, match="compiled for another shape or dtype of its argument x"):
        loaded(STATE, X[:1])


def test_callbacks_are_refused_by_name(tmp_path):
    def calls(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(ipu.ArgumentError, match="calls cannot be saved: pure_callback"):
        compiled(calls, (X,)).save(tmp_path / "calls")
    assert not list(tmp_path.iterdir())


def test_other_versions_and_damage_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "step"
    compiled().save(path)
    content = path.read_bytes()
    versions = json.loads(content.partition(b"\n")[0])["figures"]["versions"]
    for name in ("jax", "ipujax", "machine"):
        monkeypatch.setattr("ipujax.storage.saved_program.installed_versions", lambda n=name: versions | {n: "0.0"})
        with pytest.raises(ipu.ArgumentError, match=f"was saved with another {name}"):
            ipu.load(path)
    monkeypatch.undo()
    for damaged in (b"", content[:-1], content.replace(b"step", b"stop", 1)):
        path.write_bytes(damaged)
        with pytest.raises(ipu.ArgumentError, match="not a saved program, or is damaged"):
            ipu.load(path)
    with pytest.raises(ipu.ArgumentError, match="cannot be read"):
        ipu.load(tmp_path / "none")
    with pytest.raises(ipu.ArgumentError, match="needs a path"):
        ipu.load(3)  # type: ignore[arg-type]


def test_pickle_names_save():
    with pytest.raises(ipu.IpuError, match=r"compiled\.save\(path\)"):
        pickle.dumps(compiled(jnp.sin, (X,)))


def test_jax_export_takes_the_function():
    """`jax.export.export` of an `ipu.jit` function is that of `jax.jit`."""
    exported = jax.export.export(ipu.jit(step, device=DEVICE))(STATE, X)
    expected = jax.jit(step)(STATE, X)
    got = jax.export.deserialize(jax.export.export(ipu.jit(jnp.tanh, device=DEVICE))(X).serialize()).call(X)
    np.testing.assert_array_equal(got, jnp.tanh(X))
    assert all(map(np.allclose, jax.tree.leaves(exported.call(STATE, X)), jax.tree.leaves(expected)))
