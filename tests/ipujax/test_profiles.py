"""Profiles of functions under `ipu.jit`: every way to look at them, and loops as they ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu

DEVICE = ipu.IPUModel(num_ipus=1, arch="mk2", tiles_per_ipu=8)


@ipu.jit(device=DEVICE)
def halve(x: jax.Array) -> jax.Array:
    def small(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1, lambda x: small(x) * x / 2, x)


def compute_names(profile: Any) -> list[str]:
    """The names of the compute sets that ran, in order."""
    programs = profile.graph()["programs"]
    trace = (programs[number] for number in profile.execution()["programTrace"])
    return [entry["name"] for entry in trace if entry["type"] == "OnTileExecute"]


def test_the_trace_has_every_iteration_that_ran() -> None:
    x = np.linspace(1, 9, 16, dtype=np.float32)
    expected = x
    count = 0
    while np.abs(expected).max() > 1:
        expected = np.sin(expected) * expected / 2
        count = count + 1
    out, profile = halve.lower(x).compile().profile_call(x)
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    names = compute_names(profile)
    assert count > 1 and sum(name.split("/")[-1] == "sin+mul+div" for name in names) == count
    assert profile.execution()["programTraceLength"] == len(profile.execution()["programTrace"])


def test_all_of_a_profile_is_one_file(tmp_path: Path) -> None:
    _, profile = halve.lower(np.ones(4, np.float32)).compile().profile_call(np.full(4, 3, np.float32))
    profile.to_json(tmp_path / "profile.json", pretty=True)
    data = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))
    assert data == {"graphProfile": profile.graph(), "executionProfile": profile.execution()}
    assert data["executionProfile"]["simulation"]["cycles"] == profile.cycles


def test_profiles_are_saved_and_compared(tmp_path: Path) -> None:
    """A matrix multiplication on a whole chip takes kilobytes, and a profile of half partials differs."""
    shapes = jax.ShapeDtypeStruct((256, 512), "float16"), jax.ShapeDtypeStruct((512, 256), "float16")
    profiles = []
    for name in ("float32", "float16"):
        compiled = ipu.jit(lambda a, b: a @ b, options=ipu.Options(partials=name)).lower(*shapes).compile()
        compiled.profile.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size < 100_000
        profiles.append(ipu.Profile.load(tmp_path / name))
        assert profiles[-1].summary() == compiled.profile.summary()
    actual = ipu.compare(*profiles)
    assert isinstance(actual, ipu.Comparison) and actual.totals["cycles"] == tuple(p.cycles for p in profiles)
    assert any(change.name.endswith("cast") and change.after.cycles == 0 for change in actual.changes)
    assert all("test_profiles.py" in str(c.origin) for c in actual.changes)


def test_the_text_shows_steps_and_storage_when_asked() -> None:
    compiled = ipu.jit(lambda x, y: (x @ y).sum(), device=DEVICE).lower(np.ones((8, 8)), np.ones((8, 8))).compile()
    text = compiled.profile.summary(show_execution_steps=True, show_var_storage=True, colours=True)
    plain = compiled.profile.summary()
    for heading in ("Steps:", "Variable storage liveness, all tiles:"):
        assert heading in text and heading not in plain
    assert "\x1b[" in text and "\x1b[" not in plain
    assert plain.index("Memory:") < plain.index("Execution:") < plain.index("Most expensive lines:")


def test_rounds_of_replicas_have_their_place_in_the_reports() -> None:
    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=4)
    split = jax.sharding.PartitionSpec("replica")
    gather = ipu.jit(
        lambda x: jax.lax.all_gather(x, "replica"), device=device, replicas=4, in_specs=split, out_specs=split
    )
    profile = gather.lower(np.ones(256, np.float32)).compile().profile
    programs = profile.graph()["programs"]
    (ring,) = (p for p in programs if p["type"] == "Repeat")
    sends = [n for n, p in enumerate(programs) if p["type"] == "GlobalExchange"]
    assert ring["count"] == 3 and [programs[n]["name"] for n in sends] == ["all_gather/gather/send"]
    assert any(sends[0] in programs[n].get("children", sends) for n in ring["children"])
    assert profile.execution()["programTrace"].count(sends[0]) == 3
    assert "Global exchange:" in profile.summary(show_execution_steps=True)


def test_names_that_do_not_print_are_escaped():
    def fun(x):
        with jax.named_scope("a\nb\x1b[31mRED"):
            return jnp.tanh(x).sum()

    profile = (
        ipu.jit(fun, device=ipu.IPUModel(tiles_per_ipu=4))
        .lower(jax.ShapeDtypeStruct((8,), "float32"))
        .compile()
        .profile
    )
    for text in (
        profile.summary(),
        str(ipu.compare(profile, profile)),
        *(name for one in profile.operations() for name in one.names),
    ):
        assert "\x1b" not in text
    assert "a\\nb\\x1b[31mRED/" in profile.summary()


THREADS = {
    "one element": (jnp.tanh, (1,), 1 / 6),
    "six vectors": (lambda x: x + 1, (12,), 1),
    "seven vectors": (lambda x: x * 2, (14,), 7 / 12),
    "many elements": (jnp.tanh, (40_000,), 1),
    "one row in order": (jnp.cumsum, (100,), 1 / 6),
    "a product": (lambda x: x @ x, (64, 64), 1),
}


@pytest.mark.parametrize("name", THREADS)
def test_thread_balance_is_that_of_the_workers_loads(name: str) -> None:
    fun, shape, expected = THREADS[name]
    x = jax.ShapeDtypeStruct(shape, "float32")
    profile = ipu.jit(fun, device=ipu.IPUModel(tiles_per_ipu=1)).lower(x).compile().profile
    balances = [step["threadBalance"] for step in profile.execution()["simulation"]["steps"] if "threadBalance" in step]
    assert balances == [pytest.approx(expected, abs=0.01)]
    assert f"Thread balance: {round(100 * balances[0])}% of worker" in " ".join(profile.summary().split())
    assert sum(cycles for _, cycles in profile.vertex_type_cycles.values()) == profile.total_worker_cycles


def test_a_profile_knows_the_seconds_of_every_step_of_compilation(tmp_path) -> None:
    compiled = ipu.jit(jnp.tanh, device=ipu.IPUModel(tiles_per_ipu=4)).lower(jnp.ones(8)).compile()
    seconds = {f"{name}Seconds": value for name, value in compiled.timings.items()}
    assert {"traceSeconds", "fuseSeconds", "lowerSeconds", "verifySeconds"} <= set(seconds)
    assert compiled.profile.optimization_info == seconds
    compiled.profile.save(tmp_path / "saved")
    assert ipu.Profile.load(tmp_path / "saved").optimization_info == seconds
