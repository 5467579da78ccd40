"""`ipu.sweep`: its rows are those of programs compiled one by one; files, executors, and bad input."""

from __future__ import annotations

import csv
import json
import multiprocessing
import pickle
import resource
import signal
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.runtime.target import program_constants
from ipujax.studies.point_costs import Work, costs_in_process
from ipujax.studies.sweep_file import SweepFile
from ipujax.studies.sweep_table import COSTS, Sweep
from tests.ipujax.studies.swept_functions import ARGS, KILLS, deadly, layer

GRID = {"exchange_bytes_per_cycle": [1.0, 4.0, 8.0], "internal_sync_cycles": [20, 200]}


def profile_on(**changes: Any) -> Any:
    device = ipu.IPUModel(1, "mk2", **{"tiles_per_ipu": 16, **changes})
    return layer.with_options(device=device).profile(*ARGS)


def test_held_rows_are_those_of_the_program_on_each_machine() -> None:
    compiled = layer.lower(*ARGS).compile()
    sweep = ipu.sweep(layer, *ARGS, grid=GRID)
    assert len(sweep) == 6
    for row in sweep:
        changes = {name: row[name] for name in GRID}
        profile = compiled.on(ipu.IPUModel(1, "mk2", tiles_per_ipu=16, **changes)).profile
        assert (row["cycles"], row["seconds"]) == (profile.cycles, profile.seconds)
        assert row["max_tile_bytes"] == profile.memory.max_tile_bytes
        assert row["fits"] and row["plan"] is None and row["error"] is None
    assert [row["exchange_bytes_per_cycle"] for row in sweep] == [1.0, 1.0, 4.0, 4.0, 8.0, 8.0]


def test_plans_that_are_made_again() -> None:
    sweep = ipu.sweep(layer, *ARGS, grid=GRID, plan="again")
    assert [row["cycles"] for row in sweep] == [profile_on(**{n: row[n] for n in GRID}).cycles for row in sweep]
    assert [row["plan"] for row in sweep] == list(range(6))


def test_the_best_plan_is_never_slower() -> None:
    again = ipu.sweep(layer, *ARGS, grid=GRID, plan="again")
    best = ipu.sweep(layer, *ARGS, grid=GRID, plan="best")
    assert all(a["cycles"] <= b["cycles"] for a, b in zip(best, again, strict=True))
    by_exchange = [row["cycles"] for row in best if row["internal_sync_cycles"] == 20]
    assert by_exchange == sorted(by_exchange, reverse=True)


class _Layer:
    @partial(ipu.jit, device=ipu.IPUModel(tiles_per_ipu=16), static_argnums=0, options=ipu.Options(byte_cost=100))
    def product(self, x: Any) -> Any:
        return x @ x


def test_a_method_has_its_settings() -> None:
    method, x = _Layer().product, jnp.ones((32, 32))
    want = _Layer.product.profile(_Layer(), x).cycles
    (row,) = ipu.sweep(method, x, grid=[{}])
    assert row["cycles"] == ipu.sensitivities(method, x).cycles == want
    (present,) = (row for row in ipu.advise(method, x, show=False) if row.change == "as it is")
    assert present.cycles == want


def test_arrays_on_the_host_stay_there() -> None:
    """A transfer from streaming memory belongs to the program; over a mesh see `tests/ipujax/test_shardings.py`."""

    @ipu.jit(device=ipu.IPUModel(tiles_per_ipu=16))
    def fetched(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ jax.device_put(w, jax.memory.Space.Device)).sum()

    x = jnp.ones((64, 64))
    w = jax.device_put(x, jax.memory.Space.Host)
    (row,) = ipu.sweep(fetched, w, x, grid=[{}])
    assert row["cycles"] == fetched.profile(w, x).cycles != fetched.profile(x, x).cycles
    work = Work.of(layer, (w, x))
    assert pickle.loads(work.pickled()).args == work.args


def test_constants_of_programs_have_programs_of_their_own() -> None:
    grid = {"tiles_per_ipu": [8, 16], "clock_hz": [1e9, 2e9], "sync_pattern": ["full", "single_pipeline"]}
    sweep = ipu.sweep(layer, *ARGS, grid=grid)
    for row in sweep:
        profile = profile_on(tiles_per_ipu=row["tiles_per_ipu"])
        assert row["max_tile_bytes"] == profile.memory.max_tile_bytes
        assert row["cycles"] != profile.cycles  # host transfers take other cycles at another clock
    assert {"tiles_per_ipu", "worker_contexts"} <= set(program_constants())


def test_lists_of_changes_and_architectures() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"arch": "bow"},
        {"arch": "bow", "num_ipus": 2},
        {"host_latency_seconds": 1e-3},
    ]
    sweep = ipu.sweep(layer, *ARGS, grid=changes)
    bow = layer.with_options(device=ipu.IPUModel(1, "bow", tiles_per_ipu=16)).profile(*ARGS)
    assert sweep[0]["cycles"] == profile_on().cycles
    assert sweep[1]["cycles"] == bow.cycles and sweep[1]["seconds"] == bow.seconds
    assert sweep[3]["cycles"] > sweep[0]["cycles"]
    assert sweep.columns[:3] == ("arch", "num_ipus", "host_latency_seconds")


def test_machines_that_are_too_small() -> None:
    sweep = ipu.sweep(layer, *ARGS, grid={"bytes_per_tile": [2**12, 2**20]})
    assert [row["fits"] for row in sweep] == [False, True]
    assert sweep[0]["cycles"] == sweep[1]["cycles"]
    again = ipu.sweep(layer, *ARGS, grid={"bytes_per_tile": [2**12, 2**20]}, plan="again")
    assert again[0]["cycles"] is None and "largest on that tile" in again[0]["error"]
    assert again[0]["max_tile_bytes"] > 2**12 and not again[0]["fits"]
    with_least = layer.with_options(options=ipu.Options(allow_out_of_memory=True))
    device = ipu.IPUModel(1, "mk2", tiles_per_ipu=16, bytes_per_tile=2**12)
    first = with_least.with_options(device=device).profile(*ARGS).memory.max_tile_bytes
    assert again[0]["max_tile_bytes"] <= first  # that of the first plan, or of one that takes less
    lines = str(again).splitlines()  # a line for each machine: details of errors are in rows and files
    assert len(lines) == 3 and "TileMemoryError: out of memory" in lines[1] and max(map(len, lines)) < 200
    best = ipu.sweep(layer, *ARGS, grid={"bytes_per_tile": [2**12, 2**20]}, plan="best")
    assert (best[0]["fits"], best[0]["plan"], best[1]["plan"]) == (False, 1, 1)


def test_tables(tmp_path: Path) -> None:
    sweep = ipu.sweep(
        layer, *ARGS, grid={"exchange_bytes_per_cycle": [1.0, 2.0, 4.0], "internal_sync_cycles": [20, 90]}
    )
    front = sweep.pareto("cycles", "exchange_bytes_per_cycle")
    assert [row["exchange_bytes_per_cycle"] for row in front] == [4.0, 2.0, 1.0]
    assert {row["internal_sync_cycles"] for row in front} == {20}
    for row in sweep:
        beaten = any(
            other["cycles"] <= row["cycles"] and other["exchange_bytes_per_cycle"] <= row["exchange_bytes_per_cycle"]
            for other in sweep
            if other is not row
        )
        assert beaten == (row not in front.rows)
    sweep.to_csv(tmp_path / "sweep.csv")
    with open(tmp_path / "sweep.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["cycles"]) for row in rows] == [row["cycles"] for row in sweep]
    sweep.plot("exchange_bytes_per_cycle", path=tmp_path / "sweep.html")
    assert "no other is better" in (tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert f"{sweep[0]['cycles']:,}" in str(sweep) and f"{sweep[0]['cycles']:,}" in sweep._repr_html_()
    assert json.loads(json.dumps(sweep.rows)) == list(sweep.rows) == list(pickle.loads(pickle.dumps(sweep)).rows)
    assert len(sweep[1:3]) == 2
    with pytest.raises(ipu.ArgumentError, match="needs columns"):
        sweep.pareto()
    with pytest.raises(ipu.ArgumentError, match="no column 'cycle'"):
        sweep.pareto("cycle", "seconds")
    with pytest.raises(ipu.ArgumentError, match="no number"):
        sweep.pareto("error", "seconds")


def test_executors() -> None:
    expected = ipu.sweep(layer, *ARGS, grid=GRID, plan="again")
    with ThreadPoolExecutor(2) as threads:
        assert ipu.sweep(layer, *ARGS, grid=GRID, plan="again", executor=threads) == expected
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        held = ipu.sweep("tests.ipujax.studies.swept_functions:layer", *ARGS, grid=GRID, executor=processes)
    assert held == ipu.sweep(layer, *ARGS, grid=GRID)


def test_a_worker_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"internal_sync_cycles": [20, 90]}
    expected = ipu.sweep(deadly, *ARGS, grid=grid, plan="again")
    monkeypatch.setenv(KILLS, str(tmp_path / "mark"))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        assert ipu.sweep(deadly, *ARGS, grid=grid, plan="again", executor=processes) == expected
    assert (tmp_path / "mark").exists()
    monkeypatch.setenv(KILLS, "always")
    refused = pytest.raises(ipu.ArgumentError, match=r"(?s)died twice: \{'internal_sync_cycles': 20\}.*__main__")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes, refused:
        ipu.sweep(deadly, *ARGS, grid=grid, plan="again", executor=processes)


def test_a_function_that_workers_cannot_import() -> None:
    """As that of a notebook, which pickle finds here, and no other process does."""
    work = Work.of(layer, ARGS).pickled().replace(b"swept_functions", b"other_functions")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        future = processes.submit(costs_in_process, work, layer.lower(*ARGS).compile().executable.target, [])
        with pytest.raises(
            ipu.ArgumentError, match=r"(?s)cannot import the function.*other_functions.*module:function"
        ):
            future.result()


def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    expected = ipu.sweep(layer, *ARGS, grid=GRID, plan="again")
    assert ipu.sweep(layer, *ARGS, grid=GRID, plan="again", path=path) == expected
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:17])  # killed while it wrote the third job
    assert ipu.sweep(layer, *ARGS, grid=GRID, plan="again", path=path) == expected
    assert path.read_bytes() == content
    # What is in the file is not computed again.
    path.write_bytes(content.replace(str(expected[1]["cycles"]).encode(), b"1"))
    assert ipu.sweep(layer, *ARGS, grid=GRID, plan="again", path=path)[1]["cycles"] == 1


def test_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    ipu.sweep(layer, *ARGS, grid=GRID, path=path)
    with pytest.raises(ipu.ArgumentError, match="another sweep: of another function"):
        ipu.sweep(layer, *ARGS, grid={"internal_sync_cycles": [1]}, path=path)
    with pytest.raises(ipu.ArgumentError, match="another sweep"):
        ipu.sweep(layer, *ARGS, grid=GRID, plan="again", path=path)
    donating = ipu.jit(layer.__wrapped__, device=layer.device, donate_argnames="x")
    with pytest.raises(ipu.ArgumentError, match="another sweep: of another function"):
        ipu.sweep(donating, *ARGS, grid=GRID, path=path)
    (tmp_path / "text").write_text("a,b\n1,2\n")
    for content in ("a,b\n1,2\n", "no end of line", "[1]\n"):
        (tmp_path / "text").write_text(content)
        with pytest.raises(ipu.ArgumentError, match="is not a file of this sweep"):
            ipu.sweep(layer, *ARGS, grid=GRID, path=tmp_path / "text")
        assert (tmp_path / "text").read_text() == content
    with pytest.raises(ipu.ArgumentError, match="cannot open"):
        ipu.sweep(layer, *ARGS, grid=GRID, path=tmp_path / "none" / "sweep.jsonl")


@pytest.mark.parametrize("write", [Sweep.to_csv, lambda sweep, path: sweep.plot("tiles", path=path)])
def test_tables_are_written_whole_or_not_at_all(write: Any, tmp_path: Path) -> None:
    """An older file is as it was where the disk is full; numbers are no paths, though systems have files of numbers."""
    sweep = Sweep(tuple(dict.fromkeys(COSTS, 1) | {"tiles": number, "fits": True} for number in range(2)))
    path = tmp_path / "table"
    path.write_text("older")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, most[1]))
    try:
        with pytest.raises(ipu.ArgumentError, match="cannot write"):
            write(sweep, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "older"
    for other in (1, None, 2.5, b"table"):
        with pytest.raises(ipu.ArgumentError, match="needs a path"):
            write(sweep, other)
    with pytest.raises(ipu.ArgumentError, match="cannot write"):
        write(sweep, "a\0b")


COST = {"cycles": 1, "max_tile_bytes": 1, "fits": True, "error": None}
CORRUPT: dict[str, dict[str, Any]] = {
    "no job": {"x": 1},
    "no costs": {"job": 0, "costs": None},
    "costs of no point": {"job": 0, "costs": []},
    "a job that the sweep has not": {"job": 7, "costs": [COST]},
    "other fields": {"job": 0, "costs": [{"cycles": 1}]},
    "no number": {"job": 0, "costs": [COST | {"cycles": "1"}]},
    "a negative number": {"job": 0, "costs": [COST | {"cycles": -1}]},
}


@pytest.mark.parametrize("case", CORRUPT)
def test_files_with_other_rows(case: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    ipu.sweep(layer, *ARGS, grid=GRID, path=path)
    head = path.read_text().splitlines()[0]
    path.write_text(f"{head}\n{json.dumps(CORRUPT[case])}\n")
    with pytest.raises(ipu.ArgumentError, match="is not a file of this sweep"):
        ipu.sweep(layer, *ARGS, grid=GRID, path=path)


def test_a_device_is_no_file() -> None:
    with pytest.raises(ipu.ArgumentError, match="cannot open '/dev/full'"):
        ipu.sweep(layer, *ARGS, grid=GRID, path="/dev/full")


def test_a_full_disk(tmp_path: Path) -> None:
    """The limit of a file's size stands for it; the same sweep goes on after what is there."""
    path = tmp_path / "sweep.jsonl"
    expected = ipu.sweep(layer, *ARGS, grid=GRID, plan="again", path=path)
    most, content = resource.getrlimit(resource.RLIMIT_FSIZE), path.read_bytes()
    path.unlink()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2, most[1]))
    try:
        with pytest.raises(ipu.ArgumentError, match=r"(?s)cannot write.*the same call goes on"):
            ipu.sweep(layer, *ARGS, grid=GRID, plan="again", path=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, handler)
    assert ipu.sweep(layer, *ARGS, grid=GRID, plan="again", path=path) == expected
    assert path.read_bytes() == content


def test_two_sweeps_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    file = SweepFile(path, "digest")
    with pytest.raises(ipu.ArgumentError, match="another sweep is writing"):
        ipu.sweep(layer, *ARGS, grid=GRID, path=path)
    file.close()


@pytest.mark.parametrize("grid", [{}, [], {"clock_hz": []}, None, 3, "clock_hz"])
def test_empty_grids(grid: Any) -> None:
    with pytest.raises(ipu.ArgumentError, match="no points"):
        ipu.sweep(layer, *ARGS, grid=grid)


def test_points_may_come_one_by_one() -> None:
    points = [{"clock_hz": 1e9}, {"clock_hz": 2e9}]
    assert ipu.sweep(layer, *ARGS, grid=(each for each in points)) == ipu.sweep(layer, *ARGS, grid=points)  # type: ignore[arg-type]


# Beyond them cycles would overflow, and were negative, or a figure was left out without a word.
EXTREME = [
    ("clock_hz", 1e308),
    ("clock_hz", 5e-324),
    ("exchange_bytes_per_cycle", 5e-324),
    ("host_latency_seconds", 1e12),
    ("host_bytes_per_second", 5e-324),
    ("internal_sync_cycles", 10**400),
]


@pytest.mark.parametrize(("name", "value"), EXTREME)
def test_extreme_constants(name: str, value: float) -> None:
    with pytest.raises(ipu.TargetError, match=f"{name} cannot be"):
        ipu.sweep(layer, *ARGS, grid={name: [value]})


def test_bad_grids() -> None:
    with pytest.raises(ipu.TargetError, match=r"(?s)unknown constant: 'exchange_bytes'.*'exchange_bytes_per_cycle'"):
        ipu.sweep(layer, *ARGS, grid={"exchange_bytes": [4]})
    with pytest.raises(ipu.TargetError, match="sources"):
        ipu.sweep(layer, *ARGS, grid={"sources": [{}]})
    with pytest.raises(ipu.ArgumentError, match="has no values for clock_hz"):
        ipu.sweep(layer, *ARGS, grid={"clock_hz": 4})  # type: ignore[dict-item]
    with pytest.raises(ipu.ArgumentError, match="no dict of changes"):
        ipu.sweep(layer, *ARGS, grid=[3])  # type: ignore[list-item]
    with pytest.raises(ipu.TargetError, match="no preset is called 'mk9'"):
        ipu.sweep(layer, *ARGS, grid=[{"arch": "mk9"}])
    with pytest.raises(ipu.TargetError, match="no system has 3 IPUs"):
        ipu.sweep(layer, *ARGS, grid=[{"num_ipus": 3}])
    with pytest.raises(ipu.TargetError, match="cannot be -1"):
        ipu.sweep(layer, *ARGS, grid={"clock_hz": [1e9, -1]})
    with pytest.raises(ipu.ArgumentError, match=r"(?s)cannot be 'hold'.*'held'"):
        ipu.sweep(layer, *ARGS, grid=GRID, plan="hold")  # type: ignore[arg-type]


def test_bad_functions() -> None:
    with pytest.raises(TypeError, match="missing"):
        ipu.sweep(layer, ARGS[0], grid=GRID)
    local = ipu.jit(lambda w, x: jnp.sum(x @ w))
    with ThreadPoolExecutor(1) as threads, pytest.raises(ipu.ArgumentError, match=r"(?s)cannot be pickled.*module"):
        ipu.sweep(local, *ARGS, grid=GRID, executor=threads)
    for no_executor in (4, ThreadPoolExecutor):
        with pytest.raises(ipu.ArgumentError, match="no method submit"):
            ipu.sweep(layer, *ARGS, grid=GRID, executor=no_executor)
    with ThreadPoolExecutor(1) as threads:
        pass
    with pytest.raises(ipu.ArgumentError, match="takes no job"):
        ipu.sweep(layer, *ARGS, grid=GRID, executor=threads)
    for study in (ipu.sensitivities, partial(ipu.sweep, grid=GRID)):
        with pytest.raises(ipu.ArgumentError, match="needs a function"):
            study(None, *ARGS)
    with pytest.raises(ipu.ArgumentError, match="finds no function at 'tests:none'"):
        ipu.sweep("tests:none", *ARGS, grid=GRID)
    with pytest.raises(ipu.ArgumentError, match="costs machines"):
        ipu.sweep(layer.with_options(device=ipu.CPU()), *ARGS, grid=GRID)
