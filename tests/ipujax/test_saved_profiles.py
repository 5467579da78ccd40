"""Saved profiles with other contents: either they are refused with the field that is wrong, or every view works."""

from __future__ import annotations

import dataclasses
import re
import tracemalloc
import zlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.runtime.errors import ProfileError
from tests.ipujax.saved_mutations import MARKUP, damaged, failures, nested, read, write
from tests.sealed_parts import put_together, taken_apart

SEEDS = {"one IPU": 40, "pipeline": 25, "replicas": 25, "out of memory": 20, "a call": 20, "a host": 20}
MANY = 350  # of each program; more than 2,000 in all


def machine(num_ipus=1):
    return ipu.IPUModel(num_ipus=num_ipus, tiles_per_ipu=8)


def one_ipu():
    run = ipu.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x) @ x, x), device=machine())
    return run.lower(jnp.ones((16, 16))).compile().profile


def pipeline():
    def loss(p, batch):
        with ipu.stage(0):
            hidden = jnp.tanh(batch["x"] @ p["a"])
        with ipu.stage(1):
            return jnp.mean((hidden @ p["b"] - batch["y"]) ** 2)

    def step(p, batch):
        value, grads = ipu.pipeline(jax.value_and_grad(loss), micro_batches=4)(p, batch)
        return jax.tree.map(lambda a, b: a - b, p, grads), value

    p = {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 4))}
    batch = {"x": jnp.ones((16, 8)), "y": jnp.ones((16, 4))}
    return ipu.jit(step, device=machine(2)).lower(p, batch).compile().profile


def replicas():
    specs = {"in_specs": (P("replica"), P()), "out_specs": P()}
    run = ipu.jit(lambda x, w: jax.lax.pmean(jnp.sum(x @ w), "replica"), device=machine(2), replicas=2, **specs)
    return run.lower(jnp.ones((16, 8)), jnp.ones((8, 8))).compile().profile


def out_of_memory():
    run = ipu.jit(lambda x: jnp.sort(x, 0) * 2, device=machine(), options=ipu.Options(allow_out_of_memory=True))
    return run.lower(jax.ShapeDtypeStruct((2048, 1024), jnp.float32)).compile().profile


def doubling():
    run = ipu.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() < 100.0, lambda x: x * 2, x), device=machine())
    return run.lower(jnp.ones((8,))).compile()


PROGRAMS = {
    "one IPU": one_ipu,
    "pipeline": pipeline,
    "replicas": replicas,
    "out of memory": out_of_memory,
    "a call": lambda: doubling().profile_call(jnp.ones((8,)))[1],
    "a host": lambda: one_ipu().with_host(ipu.HostData(8, 2.0, 0.5, is_ahead=True), 4),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    known = {}

    def of(name):
        if name not in known:
            known[name] = folder / f"{name}.profile"
            PROGRAMS[name]().save(known[name])
        return known[name]

    return of


def fails(saved, seeds, tmp_path):
    """Failures with damaged profiles of a program, and the number that is refused."""
    data = read(saved)
    original = ipu.Profile.load(saved)
    path = tmp_path / "damaged.profile"
    wrong = []
    refused = 0
    for seed in seeds:
        label, changed = damaged(data, seed)
        try:
            write(path, changed, saved)
        except RecursionError:  # of the writer: no such file
            continue
        loads, actual = failures(path, tmp_path, original, set())
        refused += not loads
        wrong += [f"{label}: {failure}" for failure in actual]
    return wrong, refused


@pytest.mark.parametrize("name", SEEDS)
def test_damaged_profiles_are_refused_or_shown(name, saved, tmp_path):
    wrong, refused = fails(saved(name), range(SEEDS[name]), tmp_path)
    assert not wrong
    assert refused > SEEDS[name] // 2


@pytest.mark.parametrize("name", SEEDS)
def test_many_damaged_profiles_are_refused_or_shown(name, saved, tmp_path):
    assert fails(saved(name), range(1_000, 1_000 + MANY), tmp_path)[0] == []


@pytest.mark.parametrize("name", SEEDS)
def test_profiles_that_are_not_damaged_are_shown(name, saved, tmp_path):
    path = saved(name)
    assert failures(path, tmp_path, ipu.Profile.load(path), set()) == (True, [])


def set_at(data, path, value):
    *way, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in way:
        data = data[key]
    if value is None:
        del data[last]
    else:
        data[last] = value


FIELDS = {
    "an index": (
        "run.execution_trace.name.0",
        99,
        r"run.execution_trace.name\[0\] is damaged(.|\n)*an index below .*run.execution_trace.names",
    ),
    "a short list": ("run.execution_trace.names", ["x"], r"run.execution_trace.name\[\d+\](.|\n)*index below 1"),
    "a longer list": (
        "memory.contents.tiles.0",
        8,
        r"memory.contents.tiles\[0\](.|\n)*below 8, for the tiles of target",
    ),
    "tiles": (
        "memory.shared_bytes",
        "0",
        r"memory.shared_bytes (.|\n)*8 elements, as the tiles of target(.|\n)*: 1",
    ),
    "no runs": ("memory.shared_bytes", "0*8 ", r"memory.shared_bytes (.|\n)*runs of numbers, such as 7 0\*1471"),
    "a run of nothing": ("memory.shared_bytes", "0*8 1*0", r"memory.shared_bytes (.|\n)*runs of numbers"),
    "too many tiles": ("memory.shared_bytes", "0*999999999 0*999999999", r"memory.shared_bytes (.|\n)*8 elements"),
    "a cause": ("run.causes.0.name", "x", r"run.causes\[0\].name is damaged(.|\n)*one of (.|\n)*computation"),
    "a machine": ("target.sync_pattern", "none at all", r"target.sync_pattern (.|\n)*one of single_pipeline"),
    "too large": ("target.bytes_per_tile", 1 << 53, r"target.bytes_per_tile (.|\n)*to 9,007,199,254,740,991"),
    "a dtype": ("target.native_dtypes", ["float33"], r"target is damaged(.|\n)*native_dtypes cannot be"),
    "missing": ("graph.vertexTypes.names", None, r"graph.vertexTypes.names (.|\n)*got: nothing: it is missing"),
    "missing of a run": ("run.execution_trace", None, r"run.execution_trace (.|\n)*it is missing"),
    "unknown": ("run.tile_cycles.other", 1, r"run.tile_cycles.other (.|\n)*a field that this ipujax knows"),
    "half a character": ("memory.breakdown.step", "\ud800", r"memory.breakdown.step (.|\n)*UTF-8"),
    "phases": ("run.ipu_phase_cycles.0.sync", 1, r"run.ipu_phase_cycles (.|\n)*add up to run.cycles"),
    "spans": ("run.execution_trace.start.0", 10**9, r"run.execution_trace.work (.|\n)*inside their spans"),
    "a circle": ("graph.programs.0.children", [0], r"graph.programs (.|\n)*none inside itself"),
    "replicas": ("replicas", 10**9, r"replicas (.|\n)*a machine can have"),
    "half of what belongs together": (
        "graph.memory.liveness.programs.liveBytes",
        1,
        r"graph.memory.liveness.programs.liveVariables (.|\n)*missing",
    ),
    "deep": (
        "graph.memory.liveness.variables",
        nested([], 400),
        r"graph.memory.liveness.variables\[0\] (.|\n)*an object",
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_errors_name_the_file_and_the_field(name, saved, tmp_path):
    field, value, match = FIELDS[name]
    data = read(saved("one IPU"))
    path = tmp_path / "damaged.profile"
    set_at(data, field, value)
    write(path, data, saved("one IPU"))
    with pytest.raises(ProfileError, match=rf"{re.escape(str(path))}' is not a profile: its field {match}"):
        ipu.Profile.load(path)


def test_trees_without_end_are_refused(saved, tmp_path):
    data = read(saved("one IPU"))
    path = tmp_path / "damaged.profile"
    tree = data["run"]["program_costs"]
    for _ in range(190):
        tree = ["Sequence", "", "", 1, 1, [tree]]
    data["run"]["program_costs"] = tree
    write(path, data, saved("one IPU"))
    with pytest.raises(ProfileError, match=r"run.program_costs is damaged(.|\n)*nodes at most 160 deep"):
        ipu.Profile.load(path)


def test_trees_as_deep_as_may_be_are_shown(saved, tmp_path):
    source = saved("one IPU")
    path = tmp_path / "deep.profile"
    data = read(source)
    tree = data["run"]["program_costs"]
    live = data["graph"]["memory"]["liveness"]["programs"]
    for _ in range(155):
        tree = ["Sequence", "", "", tree[3], 1, [tree]]
        live = {"type": "Sequence", "programs": [], "children": [live]}
    data["run"]["program_costs"] = tree
    data["graph"]["memory"]["liveness"]["programs"] = live
    write(path, data, saved("one IPU"))
    assert failures(path, tmp_path, ipu.Profile.load(source), set()) == (True, [])


def test_markup_in_names_is_shown_as_text(saved, tmp_path):
    data = read(saved("one IPU"))
    path = tmp_path / "markup.profile"
    data["run"]["execution_trace"]["names"] = [MARKUP for _ in data["run"]["execution_trace"]["names"]]
    for row in data["run"]["step_costs"]:
        row["name"] = MARKUP
    write(path, data, saved("one IPU"))
    ipu.Profile.load(path).to_html(tmp_path / "page.html")
    assert "<b onclick" not in (tmp_path / "page.html").read_text(encoding="utf-8")


BOMBS = {
    "bytes": lambda: b"a" * (64 << 20),
    "a text": lambda: b'"' + b"a" * (17 << 20) + b'"',
    "lists": lambda: b"[" + b"[]," * (2 << 20) + b"0]",
    "objects": lambda: b"[" + b'{"a":1},' * (1 << 20) + b"0]",
    "numbers": lambda: b"[" + b"257," * (4 << 20) + b"0]",
    "deep": lambda: b"[" * 100_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_refuses_a_file_that_takes_too_much_memory(name, saved, tmp_path):
    head, _ = taken_apart(saved("one IPU"))
    path = tmp_path / "bomb"
    path.write_bytes(put_together(head, {"profile": zlib.compress(BOMBS[name](), 9)}))
    tracemalloc.start()
    try:
        with pytest.raises(ProfileError, match=r"is damaged: (its .* bytes decompress|it would take|it is JSON)"):
            ipu.Profile.load(path)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_profile_that_could_not_be_loaded_is_not_saved(saved, tmp_path):
    profile = ipu.Profile.load(saved("one IPU"))
    path = tmp_path / "none"
    broken = profile.with_host(dataclasses.replace(ipu.HostData(8, 2.0, 0.5), prepared_seconds=float("nan")))
    with pytest.raises(ProfileError, match=r"cannot be saved: (.|\n)*host.*preparedSeconds(.|\n)*got: nan"):
        broken.save(path)
    with pytest.raises(ProfileError, match=r"executionProfile\.hostData.preparedSeconds is not a finite number"):
        broken.to_json(path)
    assert not path.exists()


TEXTS = {
    "digits": b'{"target":' + b"9" * 5_000 + b"}",
    "a name twice": b'{"target":1,"target":2}',
    "NaN": b'{"target":NaN}',
    "an endless number": b'{"target":1e999}',
    "no UTF-8": b'{"target":"\xff"}',
    "two values": b"{}{}",
    "nothing": b"",
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_no_json_of_a_file(name, saved, tmp_path):
    head, _ = taken_apart(saved("one IPU"))
    path = tmp_path / "text"
    path.write_bytes(put_together(head, {"profile": zlib.compress(TEXTS[name])}))
    with pytest.raises(ProfileError, match="is damaged: it is not valid JSON"):
        ipu.Profile.load(path)
