"""`ipu.Options(byte_cost=…)`: a program that does not fit is planned at higher costs per byte, until it does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax import fit
from ipujax.fit import BYTE_COSTS
from ipujax.lowering_plan.planned_program import planned_program
from ipujax.runtime.graph import Call, distinct
from ipujax.runtime.memory import check_memory

FIRST = BYTE_COSTS[0]
WIDTH = 48
ROWS = 48
LAYERS = 4


def layers(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        h = jnp.tanh(x @ w)
        x = jax.nn.softmax(x + jnp.sin(h @ w) * 2, -1)
    return x


def arguments(seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)]
    return weights, rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


def device(bytes_per_tile: int) -> ipu.IPUModel:
    return ipu.IPUModel(tiles_per_ipu=8, bytes_per_tile=bytes_per_tile, interleaved_offset_bytes=14_000)


def at_cost(bytes_per_tile: int, byte_cost: float, fun: Any = layers) -> ipu.Profile:
    """Return the profile at a cost per byte, whether it fits or not."""
    options = ipu.Options(allow_out_of_memory=True, byte_cost=byte_cost)
    return ipu.jit(fun, device=device(bytes_per_tile), options=options).lower(*arguments()).compile().profile


def fits(profile: ipu.Profile) -> bool:
    return not profile.memory.lacking()


def test_a_proportion_bounds_the_memory_of_an_operation() -> None:
    chip = ipu.IPUModel(tiles_per_ipu=16)
    x, w = jax.ShapeDtypeStruct((512, 512), np.float32), jax.ShapeDtypeStruct((512, 512), np.float32)

    def profile(share: float | None, machine: ipu.IPUModel = chip) -> ipu.Profile:
        options = ipu.Options(available_memory_proportion=share)
        return ipu.jit(jnp.matmul, device=machine, options=options).profile(x, w)

    needed = [profile(share).memory.max_tile_bytes for share in (0, 0.2, 1)]
    assert max(needed[:2]) < needed[2]
    assert profile(0.2).executable.target.available_memory_proportion == 0.2
    assert profile(None).cycles == profile(0.6).cycles  # the machine's own
    of_machine = ipu.IPUModel(tiles_per_ipu=16, available_memory_proportion=0.2)
    assert profile(None, of_machine).cycles == profile(0.2).cycles == profile(0.2, of_machine).cycles
    (bound,) = profile(0.05).unmet_bounds
    assert bound.bound_bytes == int(0.05 * chip.target.bytes_per_tile) < bound.needed_bytes


def test_a_proportion_that_is_set_holds_at_every_cost_per_byte() -> None:
    """Higher costs reduce the machine's own share alone; the whole operation has fewest cycles."""
    chip, x = ipu.IPUModel(tiles_per_ipu=16), jax.ShapeDtypeStruct((512, 512), np.float32)

    def cycles(share: float | None) -> list[int]:
        options = [ipu.Options(available_memory_proportion=share, byte_cost=cost) for cost in (0.5, 2, 16)]
        return [ipu.jit(jnp.matmul, device=chip, options=each).profile(x, x).cycles for each in options]

    assert min(cycles(0.6)[1:]) < min(cycles(None)[1:])
    assert len(set(cycles(0.6))) == 1 < len(set(cycles(None)))


def test_a_proportion_of_0_lowers_all_kinds_of_operations() -> None:
    def fun(x: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.cumsum(jax.nn.softmax(x[rows]), 1).at[rows].add(1.0)

    x, rows = np.ones((64, 96), np.float32), np.arange(64) % 7
    options = ipu.Options(available_memory_proportion=0)
    got = ipu.jit(fun, device=ipu.IPUModel(tiles_per_ipu=4), options=options)(x, rows)
    np.testing.assert_allclose(got, fun(x, rows), rtol=1e-5)


@cache
def climb() -> tuple[int, float]:
    """The memory of a tile in which the layers fit at a higher cost per byte only, and the lowest such cost."""
    first_bytes = at_cost(600_000, FIRST).memory.max_tile_bytes
    for byte_cost in BYTE_COSTS[1:]:
        if (num_bytes := at_cost(600_000, byte_cost).memory.max_tile_bytes) < first_bytes:
            return num_bytes, byte_cost
    raise AssertionError("choose other layers: no cost per byte changes anything")


def fitting(**options: Any) -> Any:
    return ipu.jit(layers, device=device(climb()[0]), options=ipu.Options(**options))


def test_the_byte_cost_climbs_until_the_program_fits() -> None:
    bytes_per_tile, byte_cost = climb()
    lowered = fitting().lower(*arguments())
    compiled = lowered.compile()
    profile = compiled.profile
    first = at_cost(bytes_per_tile, FIRST)
    same = at_cost(bytes_per_tile, byte_cost)
    assert fits(profile) and profile.byte_cost == byte_cost
    assert profile.byte_costs == BYTE_COSTS[: BYTE_COSTS.index(byte_cost) + 1]
    assert profile.cycles == same.cycles and profile.memory.tile_bytes.tolist() == same.memory.tile_bytes.tolist()
    assert profile.byte_cost_added_cycles == profile.cycles - first.cycles != 0
    origin, *others = profile.attempts
    assert [each.byte_cost for each in profile.attempts] == list(profile.byte_costs)
    assert [each.is_used for each in profile.attempts] == [each.fits for each in profile.attempts]
    assert (origin.cycles, origin.fits) == (first.cycles, False)
    assert origin.live_bytes == int(first.memory.least_bytes.max()) > bytes_per_tile
    assert (others[-1].cycles, others[-1].live_bytes) == (same.cycles, int(same.memory.least_bytes.max()))
    for each in (origin, others[-1]):
        assert str(each) in profile.summary()
    assert lowered.graph.byte_cost_cycles == FIRST and compiled.lowered.graph.byte_cost_cycles == byte_cost
    assert "attempts" in compiled.timings


def test_logs_the_share_of_time_of_other_attempts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "ipujax.fit"):
        compiled = fitting().lower(*arguments()).compile()
    number = len(compiled.profile.byte_costs)
    output = re.search(r"attempt (\d) of (\d) is used; the others took (\d+)% of ([\d.]+) s", caplog.text)
    assert output is not None and output[1] == output[2] == str(number) and 0 < int(output[3]) < 100
    assert f"attempt {number} at {compiled.profile.byte_cost:g} cycles per byte fits" in caplog.text


def test_the_numbers_are_those_of_plain_jax() -> None:
    args = arguments()
    expected = jax.jit(layers)(*args)
    np.testing.assert_allclose(fitting()(*args), expected, rtol=1e-4)
    np.testing.assert_array_equal(fitting()(*args), fitting().lower(*args).compile()(*args))
    outs, profile = fitting().lower(*args).compile().profile_call(*args)
    np.testing.assert_allclose(outs, expected, rtol=1e-4)
    assert profile.byte_cost == climb()[1]


@pytest.fixture
def climbs_to_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program is said to fit from a cost of 4 on."""
    monkeypatch.setattr(fit, "fits", lambda report: report.occupancy.graph.byte_cost_cycles >= 4)


@pytest.mark.usefixtures("climbs_to_four")
def test_an_exception_of_a_callback_comes_back() -> None:
    """Of the program that is run, not of the one at the first cost per byte."""

    def refuse(x: np.ndarray) -> None:
        raise KeyError("mine")

    def calling(x: jax.Array) -> jax.Array:
        jax.debug.callback(refuse, x[0, 0])
        return x * 2

    fun = ipu.jit(calling, device=device(600_000))
    x = arguments()[1]
    for run in (fun, fun.lower(x).compile()):
        with pytest.raises(KeyError, match="mine"):
            run(x)


@pytest.mark.usefixtures("climbs_to_four")
def test_donated_state_of_replicas() -> None:
    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x + jax.lax.pmean(y, "replica").sum(0), (y**2).sum()[None]

    machine = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)
    settings = {"in_specs": (P(), P("replica")), "out_specs": (P(), P("replica")), "donate_argnums": 0}
    fun = ipu.jit(step, device=machine, replicas=2, **settings)  # type: ignore[call-overload]
    x = jnp.arange(3.0)
    y = jnp.arange(12.0).reshape(4, 3)
    assert fun.lower(x, y).compile().profile.byte_costs == BYTE_COSTS[:4]
    new, squares = fun(x, y)
    np.testing.assert_allclose(new, jnp.arange(3.0) + y.sum(0) / 2)
    np.testing.assert_allclose(squares, (y**2).reshape(2, -1).sum(1))
    assert x.is_deleted()


@pytest.mark.usefixtures("climbs_to_four")
def test_pipelines_are_those_of_the_program_that_runs() -> None:
    def model(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        with ipu.stage(0):
            x = jnp.tanh(x @ weights[0])
        with ipu.stage(1):
            return (x @ weights[1]).var()

    machine = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)
    (weights, x) = arguments()
    piped = ipu.pipeline(jax.value_and_grad(model), micro_batches=4)
    compiled = ipu.jit(piped, device=machine).lower(weights[:2], x).compile()
    assert compiled.profile.byte_cost == 4
    (run,) = compiled.pipelines
    assert set(run.tasks) <= {n.function for n in distinct(compiled.executable.program) if isinstance(n, Call)}
    expected = jax.jit(piped)(weights[:2], x)
    for got, want in zip(jax.tree.leaves(compiled(weights[:2], x)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_two_compilations_are_the_same() -> None:
    ipu.clear_caches()
    first = fitting().lower(*arguments()).compile().profile
    ipu.clear_caches()
    second = fitting().lower(*arguments()).compile().profile
    graphs = first.graph(), second.graph()
    for graph in graphs:
        del graph["optimizationInfo"]  # seconds
    assert graphs[0] == graphs[1] and first.execution() == second.execution()


def test_a_fixed_byte_cost_stays() -> None:
    with pytest.raises(ipu.TileMemoryError) as error:
        fitting(byte_cost=FIRST).lower(*arguments()).compile()
    assert set(re.findall(r"([\d.]+) cycles? per byte", str(error.value))) == {f"{FIRST:g}"}
    profile = fitting(byte_cost=climb()[1]).lower(*arguments()).compile().profile
    assert profile.byte_costs == (climb()[1],) and profile.byte_cost_added_cycles == 0
    assert "Plans that were tried" not in profile.summary() and not profile.attempts


def test_nothing_climbs_where_nothing_has_to_fit() -> None:
    profile = fitting(allow_out_of_memory=True).lower(*arguments()).compile().profile
    assert profile.byte_costs == (FIRST,) and not fits(profile)
    roomy = ipu.jit(layers, device=device(600_000)).lower(*arguments()).compile().profile
    assert roomy.byte_costs == (FIRST,) and roomy.byte_cost_added_cycles == 0


def test_refuses_a_program_that_fits_at_no_byte_cost() -> None:
    bytes_per_tile = 10_000
    lowered = ipu.jit(layers, device=device(bytes_per_tile)).lower(*arguments())
    with pytest.raises(ipu.TileMemoryError) as error:
        lowered.compile()
    reports = []
    for byte_cost, tile_bytes in fit.ATTEMPTS:
        planned = planned_program(lowered.plan, replace(lowered.choice, byte_cost=byte_cost, tile_bytes=tile_bytes))
        reports.append(fit.compile(planned.graph, planned.program, check=lambda report: None).memory)
    sizes = [report.max_tile_bytes for report in reports]
    best = sizes.index(min(sizes))
    memory = reports[best]
    code = int(memory.code_bytes[memory.worst_tile])
    text = str(error.value)
    assert f"worst on tile {memory.worst_tile}, by {min(sizes) - bytes_per_tile:,} bytes" in text
    assert f"data and code on that tile: {min(sizes) - code:,} and {code:,} bytes" in text
    listed = text.split("  plans that were tried, gaps not counted:\n")[1].split("  at: ")[0].splitlines()
    byte_cost, tile_bytes = fit.ATTEMPTS[best]
    shown = f"{byte_cost:g} cycles per byte, planned for tiles of {tile_bytes // 1024} KiB (does not fit, as shown)"
    assert [line for line in listed if "as shown" in line] == [line for line in listed if line.endswith(shown)] != []
    first = f"{reports[0].least_bytes.max():,} B  0.5 cycles per byte, planned for tiles of 624 KiB (does not fit)"
    assert sum(line.endswith(first) for line in listed) == 1
    assert listed[-1].split() == ["and", f"{len(fit.ATTEMPTS) - len(listed) + 2}", "others"]


def test_refuses_a_program_that_is_far_too_large_after_two_attempts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="ipujax.fit"), pytest.raises(ipu.TileMemoryError):
        ipu.jit(layers, device=device(3_000)).lower(*arguments()).compile()
    attempts = [record.getMessage() for record in caplog.records if "does not fit, the" in record.getMessage()]
    assert len(attempts) == 2 and "at 16 cycles per byte" in attempts[1] and "tiles of 39 KiB" in attempts[1]


def test_packs_as_few_attempts_as_possible_to_find_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []

    class Report:
        def __init__(self, least: int, size: int) -> None:
            self.least_bytes = np.array([0, least])
            self.size = size

        @property
        def max_tile_bytes(self) -> int:
            packed.append(int(self.least_bytes.max()))
            return self.size

    for sizes, smallest, looked_at in (
        ([(13, 13), (10, 12), (11, 11), (14, 15)], 2, [10, 11]),
        ([(9, 12), (8, 12), (12, 12)], 0, [8, 9, 12]),
        ([(5, 5)], 0, [5]),
    ):
        packed.clear()
        assert fit._smallest([Report(*each) for each in sizes]) == smallest  # type: ignore[misc]
        assert packed == looked_at


def test_the_error_takes_less_time_than_the_compilation() -> None:
    shapes = [jax.ShapeDtypeStruct((512, 512), np.float32)] * 6, jax.ShapeDtypeStruct((256, 512), np.float32)
    small = ipu.IPUModel(bytes_per_tile=20_000, interleaved_offset_bytes=10_000)
    gradient = jax.grad(lambda weights, x: layers(weights, x).var())
    start = process_time()
    lowered = ipu.jit(gradient, device=small, options=ipu.Options(allow_out_of_memory=True)).lower(*shapes)
    memory = lowered.compile().memory_analysis()
    compiled = process_time()
    with pytest.raises(ipu.TileMemoryError):
        check_memory(memory)
    assert process_time() - compiled < compiled - start


@pytest.mark.usefixtures("climbs_to_four")
def test_an_unknown_trip_count_leaves_the_cost_unknown(tmp_path: Path) -> None:
    def until(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 1e3, lambda x: x * 2, jnp.abs(x))

    x = arguments()[1]
    compiled = ipu.jit(until, device=device(600_000)).lower(x).compile()
    compiled.profile.save(tmp_path / "saved")
    for profile in (compiled.profile, compiled.profile_call(x)[1], ipu.Profile.load(tmp_path / "saved")):
        assert profile.byte_cost == 4 and "addedCycles" not in profile.graph()["byteCost"]
        with pytest.raises(ipu.ProfileError, match="cost per byte adds depend on trip counts"):
            print(profile.byte_cost_added_cycles)
        assert [each.cycles for each in profile.attempts] == [None] * len(profile.attempts)
        assert re.search(r"unknown +[\d,]+ B  4 cycles per byte", profile.summary())


def test_a_saved_profile_and_a_comparison_know_it(tmp_path: Path) -> None:
    before = at_cost(*climb(), layers)
    after = fitting().lower(*arguments()).compile().profile
    after.save(tmp_path / "after")
    loaded = ipu.Profile.load(tmp_path / "after")
    assert loaded.attempts == after.attempts and any(each.is_used for each in loaded.attempts)
    assert loaded.byte_costs == after.byte_costs and loaded.byte_cost == after.byte_cost
    assert loaded.byte_cost_added_cycles == after.byte_cost_added_cycles and loaded.summary() == after.summary()
    tried = {"tried": list(after.byte_costs), "addedCycles": after.byte_cost_added_cycles}
    assert loaded.graph()["byteCost"] == tried
    assert ipu.compare(before, loaded).totals["byte_cost"] == (climb()[1], climb()[1])
    first = at_cost(climb()[0], FIRST)
    assert "byte_cost:" in str(ipu.compare(first, loaded)) and not ipu.compare(before, loaded).changes


def test_cached_plans_depend_on_the_byte_cost() -> None:
    def convolved(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        image = weights[0].reshape(1, 1, WIDTH, WIDTH)
        kernel = weights[1][:3, :6].reshape(2, 1, 3, 3)
        return jax.lax.conv(image, kernel, (1, 1), "SAME").sum(1) @ weights[2] + x[:, weights[3].argmax(0)].mean()

    def figures(byte_cost: float) -> tuple[int, list[int]]:
        actual = at_cost(600_000, byte_cost, convolved)
        return actual.cycles, actual.memory.tile_bytes.tolist()

    byte_costs = (0.0, FIRST, 1e4)
    fresh = []
    for byte_cost in byte_costs:
        ipu.clear_caches()
        fresh.append(figures(byte_cost))
    assert fresh[0] != fresh[2] and fresh == [figures(byte_cost) for byte_cost in byte_costs]


def test_a_higher_byte_cost_reaches_every_planner() -> None:
    """Functions, layouts and products: their code never grows with the cost per byte."""
    code = [int(at_cost(600_000, byte_cost).memory.code_bytes.max()) for byte_cost in (0, FIRST, 1e6)]
    assert code == sorted(code, reverse=True) and code[0] > code[-1]
