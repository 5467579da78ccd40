"""Saved programs: equal numbers and profile after loading; others are refused by name."""

from __future__ import annotations

import json
import pickle
import re
import resource
import signal
import sys
from functools import reduce
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.errors import ArgumentTypeError
from tests.sealed_parts import data, put_together, section, taken_apart

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
    path.write_bytes(content.replace(b'"version":"', b'"version":"9', 1))
    with pytest.raises(ipu.ArgumentError, match=r"another version of ipujax\n(.|\n)*got: version '9"):
        ipu.load(path)
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


class Fields(NamedTuple):
    one: int
    two: int


class Pair(Fields):
    def __new__(cls, *_: int) -> Pair:
        raise AssertionError("a file runs code of a class")


HEADS = {
    "another named tuple": ("in_tree", ["namedtuple", ["os", "stat_result"]]),
    "no named tuple": ("in_tree", ["namedtuple", ["subprocess", "Popen"]]),
    "a module that is not imported": ("in_tree", ["namedtuple", ["this", "Zen"]]),
    "an attribute of a class": ("in_tree", ["namedtuple", [__name__, "Pair.__new__.__globals__"]]),
    "fewer fields": ("in_tree", ["namedtuple", [__name__, "Pair"]]),
}


@pytest.mark.parametrize("name", HEADS)
def test_named_tuples_of_files_run_no_code(tmp_path, name):
    path = tmp_path / "step"
    compiled(jnp.tanh, (X,)).save(path)
    head, sections = taken_apart(path)
    field, (key, names) = HEADS[name]
    head["figures"][field] = {"tuple": [{"tuple": [{key: names, "children": [0]}]}, {"dict": {}}]}
    path.write_bytes(put_together(head, sections))
    with pytest.raises(ipu.ArgumentError, match=r"not imported|other fields|is damaged"):
        ipu.load(path)
    assert "this" not in sys.modules


def forged(**changes):
    return lambda head, sections: (head | {"figures": head["figures"] | changes}, sections)


def with_computation(change):
    def forge(head, sections):
        computation = data(sections["computation"])
        computation["module"] = change(computation["module"])
        return head, sections | {"computation": section(computation)}

    return forge


CALL = "%9 = stablehlo.custom_call @xla_python_cpu_callback() : () -> tensor<f32>\n    %"
FORGED = {
    "leaves": forged(donated=[]),
    "more leaves": forged(in_tree={"tuple": [{"tuple": [0, 1]}, {"dict": {}}]}),
    "a list of arguments": forged(in_tree={"list": [{"tuple": [0]}, {"dict": {}}]}),
    "one argument": forged(in_tree=0),
    "no tree": forged(out_tree={"dict": [0]}),
    "truth": forged(out_tree=True),
    "deep": forged(out_tree=reduce(lambda tree, _: {"list": [tree]}, range(300), 0)),
    "more results": forged(out_tree={"list": [0, 1]}),
    "names": forged(leaf_names=[3]),
    "another module": with_computation(lambda text: text.replace("tanh", "tanhs")),
    "other types": with_computation(lambda text: text.replace("2x4", "4x2")),
    "other arguments": with_computation(lambda text: text.replace("@main(", "@main(%b: tensor<f32>, ", 1)),
    "no main": with_computation(lambda text: text.replace("@main", "@other")),
    "half of it": with_computation(lambda text: text[: len(text) // 2]),
    "nothing": with_computation(lambda text: ""),
    "brackets": with_computation(lambda text: text + "<" * 100_000),
    "a call": with_computation(lambda text: re.sub(r"\n( *)%0 =", "\n    " + CALL[:-6] + r"\n\1%0 =", text, count=1)),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_programs_are_refused(tmp_path, name):
    path = tmp_path / "step"
    compiled(jnp.tanh, (X,)).save(path)
    path.write_bytes(put_together(*FORGED[name](*taken_apart(path))))
    with pytest.raises(ipu.ArgumentError, match="not a saved program, or is damaged"):
        ipu.load(path)


def test_a_damaged_profile_is_refused_when_it_is_read(tmp_path):
    path = tmp_path / "step"
    compiled(jnp.tanh, (X,)).save(path)
    head, sections = taken_apart(path)
    profile = data(sections["profile"])
    profile["run"]["cycles"] = -1
    path.write_bytes(put_together(head, sections | {"profile": section(profile)}))
    loaded = ipu.load(path)
    np.testing.assert_allclose(loaded(X), np.tanh(X), rtol=1e-6)
    with pytest.raises(ipu.IpuError, match=r"of the program (.|\n)*its field run.cycles is damaged"):
        _ = loaded.profile


def test_keys_of_random_numbers(tmp_path):
    def split(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.random.split(key)[1], jax.random.normal(key, (3,))

    key = jax.random.key(7, impl="rbg")
    compiled(split, (key,)).save(tmp_path / "split")
    got, expected = (jax.tree.map(_words, f(key)) for f in (ipu.load(tmp_path / "split"), jax.jit(split)))
    assert all(map(np.array_equal, got, expected))


def _words(x: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def test_local_named_tuples_are_refused_when_they_are_saved(tmp_path):
    class Local(NamedTuple):
        x: jax.Array

    with pytest.raises(ArgumentTypeError, match=r"no file can describe(.|\n)*named tuples of modules"):
        compiled(lambda state: state.x, (Local(X),)).save(tmp_path / "local")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_the_older_program(tmp_path):
    path = tmp_path / "step"
    good, large = (compiled(fun, (X,)) for fun in (jnp.tanh, lambda x: jnp.sort(jnp.sin(x) @ x.T)))
    good.save(path)
    content = path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ipu.ArgumentError, match="cannot be saved to"):
            large.save(path)
        with pytest.raises(ipu.IpuError, match="cannot be written to"):
            large.profile.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == content and [each.name for each in tmp_path.iterdir()] == ["step"]
