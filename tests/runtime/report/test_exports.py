"""Files for other tools: planes for XProf, flame graphs for speedscope, tables as CSV."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu


def loss(ws: Any, x: Any) -> Any:
    for number, w in enumerate(ws):
        with ipu.stage(number):
            x = jnp.tanh(x @ w)
    return (x**2).mean()


@pytest.fixture(scope="module")
def profile() -> ipu.Profile:
    shape = jax.ShapeDtypeStruct((16, 16), np.float32)
    step = ipu.pipeline(jax.value_and_grad(loss), micro_batches=4)
    return ipu.jit(step, device=ipu.IPUModel(2, tiles_per_ipu=4)).profile([shape] * 2, shape)


NANOSECOND_CYCLES = 2  # at least: the reader cuts durations to whole nanoseconds


def cycles_of_lines(data: bytes, clock_hz: float) -> dict[tuple[str, str], dict[str, list[float]]]:
    """The cycles of the events of each name, by plane and line."""
    lines = {}
    for plane in jax.profiler.ProfileData.from_serialized_xspace(data).planes:
        for line in plane.lines:
            events: dict[str, list[float]] = defaultdict(list)
            for event in line.events:
                events[event.name].append(event.duration_ns * 1e-9 * clock_hz)
            lines[str(plane.name), str(line.name)] = events
    return lines


def test_planes_have_the_cycles_of_phases_and_operations(profile: ipu.Profile, tmp_path: Path) -> None:
    profile.to_xspace(tmp_path)
    (path,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    lines = cycles_of_lines(path.read_bytes(), profile.target.clock_hz)
    for ipu_number, phases in enumerate(profile.ipu_phase_cycles):
        plane = f"/device:TPU:{ipu_number}"
        for phase, cycles in phases.items():
            if phase != "idle":  # idle at the end is no event
                events = lines[plane, phase.replace("_", " ")].get(phase.replace("_", " "), [])
                assert sum(events) == pytest.approx(cycles, abs=NANOSECOND_CYCLES * max(1, len(events)))
        (run,) = next(iter(lines[plane, "XLA Modules"].values()))
        assert run == pytest.approx(profile.cycles, abs=NANOSECOND_CYCLES)
    expected: dict[str, int] = defaultdict(int)
    actual: dict[str, list[float]] = defaultdict(list)
    for row in profile.step_costs:
        expected[row.name] += row.cycles
    for (_, line), events_of in lines.items():
        for name, events in events_of.items():
            actual[name] += events if line == "XLA Ops" else []
    for name, cycles in expected.items():
        assert sum(actual[name]) == pytest.approx(cycles, abs=NANOSECOND_CYCLES * max(1, len(actual[name])))


def test_planes_join_the_last_run_of_a_trace(profile: ipu.Profile, tmp_path: Path) -> None:
    for name in ("2026_01_01", "2026_02_01"):
        (tmp_path / "plugins" / "profile" / name).mkdir(parents=True)
    profile.to_xspace(tmp_path)
    (path,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert path.parent.name == "2026_02_01"


def test_flame_graphs(profile: ipu.Profile, tmp_path: Path) -> None:
    profile.to_speedscope(tmp_path / "flames.json")
    data = json.loads((tmp_path / "flames.json").read_text(encoding="utf-8"))
    cycles, num_bytes = data["profiles"]
    assert sum(cycles["weights"]) == cycles["endValue"] == sum(row.cycles for row in profile.step_costs)
    assert sum(num_bytes["weights"]) == sum(row.peak_bytes for row in profile.step_costs)
    frames = data["shared"]["frames"]
    leaves = {frames[stack[-1]]["name"] for stack in cycles["samples"]}
    assert leaves == {row.name for row in profile.step_costs if row.cycles}
    assert all(0 <= frame < len(frames) for stack in cycles["samples"] for frame in stack)


def test_tables(profile: ipu.Profile, tmp_path: Path) -> None:
    profile.to_csv(tmp_path)
    with open(tmp_path / "causes.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], int(row["cycles"])) for row in rows] == [(row.name, row.cycles) for row in profile.causes]
    with open(tmp_path / "operations.csv", newline="", encoding="utf-8") as file:
        operations = list(csv.DictReader(file))
    assert sum(int(row["cycles"]) for row in operations) == sum(row.cycles for row in profile.step_costs)
    assert {"stages.csv", "layers.csv", "lines.csv"} <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "fallbacks.csv").exists()  # a table without rows is no file


def test_places_that_cannot_be_written(profile: ipu.Profile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ipu.ProfileError, match="cannot be"):
        profile.to_xspace(tmp_path / "file")
    with pytest.raises(ipu.ProfileError, match="cannot be written"):
        profile.to_csv(tmp_path / "missing")
    for impossible in ("a\0b", tmp_path / ("x" * 300)):
        for write in (profile.to_xspace, profile.to_chakra, profile.to_csv):
            with pytest.raises(ipu.ProfileError, match="cannot be"):
                write(impossible)
    with pytest.raises(ipu.ArgumentError, match="needs a path"):
        profile.to_speedscope(3)  # type: ignore[arg-type]


def test_a_loop_whose_trip_count_is_data(tmp_path: Path) -> None:
    def grow(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x * 2, x)

    unknown = ipu.jit(grow, device=ipu.IPUModel(tiles_per_ipu=4)).profile(jnp.ones(4))
    for write in (unknown.to_xspace, unknown.to_csv, lambda folder: unknown.to_speedscope(folder / "x.json")):
        with pytest.raises(ipu.ProfileError, match="trip count"):
            write(tmp_path)
    assert not list(tmp_path.rglob("*"))
