"""`ipu.search`: its best plan against all plans compiled, its table, bad input, interrupts and files."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import ipujax as ipu
from ipujax.lowering.pipelining import exchange_bytes
from ipujax.plan_search import estimates, plan_costs, search_run, searching
from ipujax.plan_search.candidate_plans import Candidates, candidates
from ipujax.plan_search.estimates import Estimate, StepCosts
from ipujax.plan_search.search_plan import traced_step
from ipujax.runtime.logs import early_ends
from ipujax.studies.point_costs import PointCost
from tests.ipujax.plan_search.steps import (
    ROWS,
    TILES,
    dense_arguments,
    dense_step,
    half_step,
    scanned_arguments,
    scanned_step,
    scores,
)

DEVICE = ipu.IPUModel(2, tiles_per_ipu=TILES)
AXES = {"micro_batches": (1, 4), "schedule": ("1f1b",), "shards": (1,), "recompute": ("none",)}


def _shapes(arguments: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)


@pytest.fixture(scope="module")
def found() -> ipu.Search:
    return ipu.search(dense_step, *_shapes(dense_arguments()), device=DEVICE, batch_argnums=1, axes=AXES)


def test_best_is_the_fastest_of_all(found: ipu.Search) -> None:
    shapes = _shapes(dense_arguments())
    plans = [row.plan for row in found if row.figures != "none"]
    cycles = {plan: plan.jit(dense_step, **found.settings).lower(*shapes).compile().profile.cycles for plan in plans}
    assert len(plans) >= 4
    assert found.best.cycles == min(cycles.values())
    assert cycles[found.best.plan] == found.best.cycles


def test_best_can_be_called(found: ipu.Search) -> None:
    weights, batch = dense_arguments()
    want, _ = jax.jit(dense_step)(weights, batch)
    got, _ = found.function()(weights, batch)  # takes the memory of the weights
    assert all(abs(a - b).max() < 1e-5 for a, b in zip(got, want, strict=True))


def test_table(found: ipu.Search, tmp_path: Path) -> None:
    text = str(found)
    assert repr(found.best.plan) in text
    assert "fullest tile" in text
    found.to_csv(tmp_path / "plans.csv")
    assert len((tmp_path / "plans.csv").read_text().splitlines()) == len(found) + 1
    assert "ipu.Plan" in found._repr_html_()
    assert found.best.cycles == found.pareto().rows[0]["cycles"]


def test_shardings_of_a_plan_are_short_in_the_text_alone(found: ipu.Search, tmp_path: Path) -> None:
    plan = ipu.Plan(shards=2, specs={f"[0]['layer{n}']": jax.P(None, "model") for n in range(9)}, recompute="auto")
    table = replace(found, rows=(replace(found.rows[0], plan=plan),))
    first, row, note = str(table).splitlines()
    assert row.startswith("ipu.Plan(shards=2, recompute='auto', specs={…})") and len(row) < 120
    assert "specs={…}: in full" in note and "figures" in first
    table.to_csv(tmp_path / "plans.csv")
    assert "layer8" in (tmp_path / "plans.csv").read_text()


def test_arguments_of_the_step_are_needed() -> None:
    with pytest.raises(ipu.IpuError, match="needs the arguments of the step"):
        ipu.search(dense_step, device=DEVICE)


def test_interrupt_returns_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = search_run.compiled_cost, list[Any]()

    def interrupted(job: Any) -> Any:
        calls.append(job)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(job)

    monkeypatch.setattr(search_run, "compiled_cost", interrupted)
    search = ipu.search(dense_step, *_shapes(dense_arguments()), device=DEVICE, batch_argnums=1, axes=AXES)
    assert search.ended == "interrupt"
    assert [row.figures for row in search].count("compiled") == 1
    assert search.best.fits
    assert "interrupted" in str(search)


def test_interrupt_within_estimates_of_more_shards_has_a_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(StepCosts, "_of_shards", interrupted)
    axes = {**AXES, "shards": (1, 2)}
    search = ipu.search(dense_step, *_shapes(dense_arguments()), device=DEVICE, batch_argnums=1, axes=axes)
    assert search.ended == "interrupt"
    assert [row.figures for row in search].count("compiled") == 1
    assert search.best.fits


def test_interrupt_before_the_first_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(searching, "candidates", interrupted)
    search = ipu.search(dense_step, *_shapes(dense_arguments()), device=DEVICE, batch_argnums=1, axes=AXES)
    assert (search.ended, len(search)) == ("interrupt", 0)
    assert "interrupted" in str(search)
    with pytest.raises(ipu.ArgumentError, match="interrupted"):
        _ = search.best


def test_plans_that_do_not_fit_are_planned_again_before_all_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As first planned no plan fits: the few that are compiled by then say which is planned again."""
    are_fitted: list[bool] = []

    def compiled(job: Any) -> PointCost:
        are_fitted.append(job.is_fitted)
        return PointCost(1000, 1 if job.is_fitted else DEVICE.target.bytes_per_tile + 1, job.is_fitted)

    monkeypatch.setattr(search_run, "compiled_cost", compiled)
    costs: Any = SimpleNamespace(target=DEVICE.target, cuts_of_program=lambda plan, estimate: ())
    space: Any = SimpleNamespace(plans=(), impossible={})
    search = search_run.SearchRun(dense_step, (), space, costs, settings={})
    needed_bytes = 2.0 * DEVICE.target.bytes_per_tile
    search.estimates.update((ipu.Plan(data=2**n), Estimate(1000.0, needed_bytes)) for n in range(9))
    search.run(len(search.estimates), None, None)
    assert are_fitted == [False, False, False, False, True]


def test_plans_of_far_too_much_memory_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    tile_bytes = DEVICE.target.bytes_per_tile
    needed_bytes = {ipu.Plan(data=2**n): share * tile_bytes for n, share in enumerate((1.5, 9.0, 1.6, 7.0))}
    # As estimated, and none fits.
    monkeypatch.setattr(search_run, "compiled_cost", lambda job: PointCost(1000, int(needed_bytes[job.plan]), False))
    costs: Any = SimpleNamespace(target=DEVICE.target, cuts_of_program=lambda plan, estimate: ())
    space: Any = SimpleNamespace(plans=(), impossible={})
    search = search_run.SearchRun(dense_step, (), space, costs, settings={})
    search.estimates.update((plan, Estimate(1000.0, float(size))) for plan, size in needed_bytes.items())
    search.run(len(search.estimates), None, None)
    assert [plan.data for plan in search.compiled] == [1, 4]


def test_a_plan_of_far_too_much_memory_is_compiled_after_one_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures of any plan nothing says how much memory is lacking."""
    tile_bytes = DEVICE.target.bytes_per_tile
    errors = {1: "no such program", 2: None, 4: None}
    sizes = {number: share * tile_bytes for number, share in zip(errors, (5.0, 7.0, 9.0), strict=True)}
    monkeypatch.setattr(
        search_run,
        "compiled_cost",
        lambda job: PointCost(None, int(sizes[job.plan.data]), fits=False, error=errors[job.plan.data]),
    )
    costs: Any = SimpleNamespace(target=DEVICE.target, cuts_of_program=lambda plan, estimate: ())
    space: Any = SimpleNamespace(plans=(), impossible={})
    search = search_run.SearchRun(dense_step, (), space, costs, settings={})
    search.estimates.update((ipu.Plan(data=data), Estimate(1000.0, float(size))) for data, size in sizes.items())
    search.run(len(search.estimates), None, None)
    assert [plan.data for plan in search.compiled] == [1, 2]


def test_shards_of_which_no_plan_may_fit_leave_those_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the cycles of plans that exceed the memory are no reason to leave out the only plan that fits."""
    memories = {1: 1.5, 2: 3.0, 4: 0.5}
    plans = {ipu.Plan(shards=shards): Estimate(1000.0 * shards, 0.0) for shards in memories}
    costs: Any = SimpleNamespace(
        target=DEVICE.target,
        least_cycles=lambda plan: plans[plan].cycles,
        estimate=lambda plan: replace(plans[plan], tile_bytes=memories[plan.shards] * DEVICE.target.bytes_per_tile),
        cuts_of_program=lambda plan, estimate: (),
    )
    monkeypatch.setattr(search_run, "compiled_cost", lambda job: PointCost(1000, 1, True))
    search = search_run.SearchRun(dense_step, (), Candidates(tuple(plans)), costs, settings={})
    search.run(1, None, None)
    assert [(plan.shards, cost.fits) for plan, cost in search.compiled.items()] == [(4, True)]


class _Busy:
    """An executor that must not be asked."""

    def submit(self, *job: Any) -> Any:
        raise AssertionError("compiled again")


def test_file_is_read_again(tmp_path: Path, found: ipu.Search) -> None:
    shapes = _shapes(dense_arguments())
    settings: Any = {"device": DEVICE, "batch_argnums": 1, "axes": AXES, "path": tmp_path / "plans"}
    with ThreadPoolExecutor(1) as executor:
        first = ipu.search(dense_step, *shapes, executor=executor, **settings)
    again = ipu.search(dense_step, *shapes, executor=_Busy(), **settings)
    assert again.best == first.best == found.best
    with pytest.raises(ipu.ArgumentError, match="not a file of this"):
        ipu.search(scanned_step, *_shapes(scanned_arguments()), **{**settings, "batch_argnums": 2})


@pytest.mark.parametrize(
    ("axes", "match"),
    [
        ({"stage": (1, 2)}, "no axis 'stage'"),
        ({"stages": ()}, "no candidates"),
        ({"stages": (0,)}, "no number of parts"),
        ({"schedule": ("1f1",)}, "no value '1f1'"),
        ({"micro_batches": (3,)}, f"{ROWS} rows do not divide into 3"),
        ({"data": (64,)}, r"needs 64 IPUs[^±]*num_ipus=64"),
        ({"stages": (2,), "micro_batches": (1,)}, r"one IPU at work[^±]*micro_batches of 2"),
        ({"offload": (0,)}, "no tuple of arguments"),
        ({"offload": ((2,),)}, "offload of ipu.search"),
        ({"offload": ((1,),)}, "names the batch"),
        ([("stages", (1,))], "must be a dictionary"),
    ],
)
def test_axes_that_cannot_be(axes: Any, match: str) -> None:
    with pytest.raises(ipu.ArgumentError, match=match):
        ipu.search(dense_step, *_shapes(dense_arguments()), device=DEVICE, batch_argnums=1, axes=axes)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch_argnums": 2}, "batch_argnums of ipu.search"),
        ({"batch_argnums": -3}, "batch_argnums of ipu.search"),
        ({"donate_argnums": 2}, "donate_argnums of ipu.search"),
        ({"seconds": -1}, "seconds of ipu.search"),
        ({"seconds": float("nan")}, "seconds of ipu.search"),
        ({"seconds": "60"}, "seconds of ipu.search"),
        ({"seconds": True}, "seconds of ipu.search"),
        ({"compiled": 0}, "compiled"),
        ({"compiled": 1.5}, "compiled"),
        ({"options": {}}, "ipu.Options"),
        ({"executor": 3}, "submit"),
    ],
)
def test_settings_that_cannot_be(settings: Any, match: str) -> None:
    with pytest.raises(ipu.ArgumentError, match=match):
        ipu.search(dense_step, *_shapes(dense_arguments()), **{"device": DEVICE, "batch_argnums": 1, **settings})


ONE_PLAN = {"micro_batches": (1,), "data": (1,), "shards": (1,), "stages": (1,)}


def _of_jitted(**settings: Any) -> ipu.Search:
    jitted = ipu.jit(dense_step, device=DEVICE, **settings)
    return ipu.search(jitted, *_shapes(dense_arguments()), batch_argnums=1, axes=ONE_PLAN, compiled=1)


def test_settings_of_the_step_are_those_of_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    estimated_options = list[ipu.Options]()
    make_lowering = estimates.Lowering

    def lowering(*args: Any, options: ipu.Options, **kwargs: Any) -> Any:
        estimated_options.append(options)
        return make_lowering(*args, options=options, **kwargs)

    monkeypatch.setattr(estimates, "Lowering", lowering)
    options = ipu.Options(byte_cost=16, recompute="all", available_memory_proportion=0.05)
    search = _of_jitted(options=options, donate_argnums=())
    function = search.function()
    assert set(estimated_options) == {function.options} == {options}
    assert function.donate_argnums == ()
    assert [row.plan.recompute for row in search.rows] == ["all"]
    assert _of_jitted().function().donate_argnums == (0,)  # the weights come back
    jitted = ipu.jit(dense_step, options=ipu.Options(label="mine"), donate_argnums=1)
    planned = ipu.Plan().jit(jitted, batch_argnums=1, device=DEVICE)
    assert (planned.options.label, planned.donate_argnums) == ("mine", (1,))


def test_decorators_of_the_step_belong_to_it() -> None:
    @functools.wraps(dense_step)
    def doubled(weights: Any, batch: Any) -> Any:
        return jax.tree.map(lambda x: 2 * x, dense_step(weights, batch))

    search = ipu.search(ipu.jit(doubled, device=DEVICE), *_shapes(dense_arguments()), batch_argnums=1, axes=ONE_PLAN)
    _, value = search.function()(*dense_arguments())
    np.testing.assert_allclose(value, 2 * dense_step(*dense_arguments())[1], rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"replicas": 2},
        {"in_shardings": NamedSharding(ipu.make_mesh((2,), ("x",)), jax.P())},
        {"out_shardings": NamedSharding(ipu.make_mesh((2,), ("x",)), jax.P())},
        {"static_argnums": 1},
        {"static_argnames": "batch"},
        {"offload_argnums": 0},
        {"compiler_options": {"xla_cpu_enable_fast_math": True}},
    ],
)
def test_settings_of_the_step_that_no_plan_keeps_are_refused(settings: Any) -> None:
    match = rf"ipu\.search does not keep {next(iter(settings))} of ipu\.jit"
    with pytest.raises(ipu.ArgumentError, match=match):
        _of_jitted(**settings)
    with pytest.raises(ipu.ArgumentError, match=r"ipu\.Plan\.jit does not keep"):
        ipu.Plan().jit(ipu.jit(dense_step, device=DEVICE, **settings), batch_argnums=1, device=DEVICE)


def test_axes_may_be_iterators(found: ipu.Search) -> None:
    axes = {name: iter(values) for name, values in AXES.items()}
    search = ipu.search(dense_step, *_shapes(dense_arguments()), device=DEVICE, batch_argnums=1, axes=axes, seconds=0)
    assert {replace(row.plan, cuts=()) for row in search} <= {replace(row.plan, cuts=()) for row in found}


def test_arguments_may_be_numbers() -> None:
    def scaled_step(weights: Any, batch: Any, factor: Any) -> Any:
        weights, value = dense_step(weights, batch)
        return jax.tree.map(lambda w: w * factor, weights), value

    axes = {"data": (1,), "shards": (1,), "stages": (1,), "micro_batches": (1,)}
    search = ipu.search(scaled_step, *_shapes(dense_arguments()), 0.5, device=DEVICE, batch_argnums=1, axes=axes)
    assert search.best.fits


def test_machine_smaller_than_the_weights_names_one_that_is_not() -> None:
    device = ipu.IPUModel(1, tiles_per_ipu=4, bytes_per_tile=512)
    with pytest.raises(ipu.ArgumentError, match="exceed the memory of the machine") as info:
        ipu.search(dense_step, *_shapes(dense_arguments()), device=device, batch_argnums=1)
    assert "num_ipus=2" in str(info.value)


def test_no_plan_that_fits_shows_the_closest() -> None:
    device = ipu.IPUModel(2, tiles_per_ipu=TILES, bytes_per_tile=4000)
    search = ipu.search(dense_step, *_shapes(dense_arguments()), device=device, batch_argnums=1, axes=AXES, compiled=2)
    with pytest.raises(ipu.ArgumentError, match="no plan that was compiled fits") as info:
        _ = search.best
    assert "more" in str(info.value)


def test_plans_that_cannot_be_compiled_are_below_those_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ipu.IPUModel(2, tiles_per_ipu=TILES, bytes_per_tile=4000)
    compiled = search_run.compiled_cost
    numbers = count()

    def first_fails(job: Any) -> Any:
        cost = compiled(job)
        return cost if next(numbers) else replace(cost, cycles=None, max_tile_bytes=None, error="no")

    monkeypatch.setattr(search_run, "compiled_cost", first_fails)
    rows = ipu.search(
        dense_step, *_shapes(dense_arguments()), device=device, batch_argnums=1, axes=AXES, compiled=2
    ).rows
    is_known = [row.max_tile_bytes is not None for row in rows]
    assert "no" in [row.left_out for row in rows]
    assert is_known == sorted(is_known, reverse=True)


@pytest.mark.parametrize("checks", [0, 1, 30, 100, 200])
def test_seconds_end_a_search_in_the_middle_of_a_plan(
    monkeypatch: pytest.MonkeyPatch, found: ipu.Search, checks: int
) -> None:
    clock = count()
    # A second passes at each look at the clock: before steps and after equations, for instance.
    time = SimpleNamespace(monotonic=clock.__next__, time=lambda: 0.0)
    for module in (early_ends, search_run, searching, plan_costs):
        monkeypatch.setattr(module, "time", time)
    shapes = _shapes(dense_arguments())
    search = ipu.search(dense_step, *shapes, device=DEVICE, batch_argnums=1, axes=AXES, seconds=checks)
    assert search.ended == "seconds"
    # At the end there is no more to do than the table.
    assert next(clock) <= checks + 10
    plans = {replace(row.plan, cuts=()) for row in search}
    assert not plans or plans == {replace(row.plan, cuts=()) for row in found}
    assert "seconds" in str(search)
    if not any(row.figures == "compiled" for row in search):
        with pytest.raises(ipu.ArgumentError, match="seconds"):
            _ = search.best


def test_seconds_that_suffice_change_nothing(found: ipu.Search) -> None:
    search = ipu.search(dense_step, *_shapes(dense_arguments()), device=DEVICE, batch_argnums=1, axes=AXES, seconds=1e6)
    assert (search.ended, search.rows) == ("all", found.rows)


def test_seconds_end_a_job_of_an_executor() -> None:
    search = {"batch_argnums": (1,), "device": DEVICE, "donate_argnums": (), "options": ipu.Options()}
    job = plan_costs.PlanJob(dense_step, _shapes(dense_arguments()), ipu.Plan(data=2), search, deadline=0.0)
    assert plan_costs.compiled_cost(job) is None


def test_no_estimate_is_below_the_least_cycles_of_its_plan() -> None:
    traced = traced_step(scanned_step, _shapes(scanned_arguments()))
    is_batch = traced.is_of((2,))
    costs = StepCosts(traced, is_batch, DEVICE.target)
    plans = [ipu.Plan(stages=stages, micro_batches=count) for stages in (1, 2) for count in (4, 8)]
    for plan in [*plans, ipu.Plan(data=2)]:
        assert 0 < costs.least_cycles(plan) <= costs.estimate(plan).cycles


@pytest.mark.parametrize(
    ("rows", "axes"),
    [
        (9, {"micro_batches": (1,)}),
        (9, {"micro_batches": (3, 9)}),
        (8, {"micro_batches": (2, 4)}),
        (7, {"micro_batches": (1, 7)}),
        (2, {"micro_batches": (1, 2)}),
    ],
)
def test_batches_of_few_divisors_have_estimates(rows: int, axes: Any) -> None:
    weights, batch = _shapes(dense_arguments())
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
    axes = {**axes, "data": (1,), "shards": (1,), "stages": (1,)}
    search = ipu.search(dense_step, weights, batch, device=DEVICE, batch_argnums=1, axes=axes, compiled=1)
    assert {row.plan.micro_batches for row in search if row.cycles} == set(axes["micro_batches"])


@pytest.mark.parametrize("step", [dense_step, scanned_step], ids=lambda step: step.__name__)
def test_estimates_know_the_code_and_buffers_of_exchanges(step: Any) -> None:
    args = _shapes(dense_arguments() if step is dense_step else scanned_arguments())
    batch = len(args) - 1
    traced = traced_step(step, args)
    costs = StepCosts(traced, traced.is_of((batch,)), DEVICE.target)
    plan = ipu.Plan(stages=2, micro_batches=4)
    plan = replace(plan, cuts=costs.estimate(plan).cuts)
    work = costs.of_plan(plan).work
    bounds = np.array([0, *plan.cuts, len(work.forward_cycles)])
    memory = plan.jit(step, batch_argnums=batch, device=DEVICE).lower(*args).compile().profile.memory
    used = memory.by_category["internalExchangeCode"] + memory.by_category["message"]
    for stage, bytes_of_tiles in enumerate(used.reshape(2, -1)):
        # The program has copies to other stages, and the update, beside.
        assert 0.5 < exchange_bytes(work, bounds)[stage, stage + 1] / bytes_of_tiles.max() < 1.5


def test_cuts_are_of_the_segments_that_the_plan_has() -> None:
    """A loss in parts is fewer operations than the one whose costs its estimate may have."""
    args = _shapes(scanned_arguments())
    traced = traced_step(scanned_step, args)
    costs = StepCosts(traced, traced.is_of((2,)), DEVICE.target)
    plan = ipu.Plan(stages=2, micro_batches=4, serial=2)
    num_segments = costs.estimate(plan).num_segments
    late = replace(costs.estimate(plan), cuts=(num_segments - 1,))
    (cut,) = costs.cuts_of_program(plan, late)
    assert cut < num_segments - 1
    step = replace(plan, cuts=(cut,)).jit(scanned_step, batch_argnums=2, device=DEVICE)
    assert step.lower(*args).compile().profile.cycles
    with pytest.raises(ipu.ArgumentError, match="are not those of this function"):
        replace(plan, cuts=late.cuts).jit(scanned_step, batch_argnums=2, device=DEVICE).lower(*args)


def test_cuts_that_cannot_be_are_left_to_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise ipu.ArgumentError("no such micro-batch")

    traced = traced_step(dense_step, _shapes(dense_arguments()))
    costs = StepCosts(traced, traced.is_of((1,)), DEVICE.target)
    many = estimates.Estimate(1.0, 1.0, tuple(range(1, 100)), num_segments=200)  # more stages than segments
    assert costs.cuts_of_program(ipu.Plan(stages=100, micro_batches=4), many) == many.cuts
    monkeypatch.setattr(estimates, "split_of", refused)
    assert costs.cuts_of_program(ipu.Plan(stages=100, micro_batches=8), many) == many.cuts


@pytest.mark.parametrize(("step", "share"), [(dense_step, 1), (half_step, 2), (scores, 0)])
def test_estimates_know_the_type_of_accumulators(step: Any, share: float) -> None:
    weights, (x, y) = _shapes(dense_arguments())
    args = weights, (x if step is scores else (x, y))
    if step is half_step:
        args = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, np.float16), args)
    traced = traced_step(step, args)
    costs = StepCosts(traced, traced.is_of((1,)), DEVICE.target)
    assert costs.of_plan(ipu.Plan(micro_batches=4)).work.accumulator_share == pytest.approx(share, abs=0.01)


def test_shards_that_nothing_divides_by_are_left_out() -> None:
    axes = {"shards": (1, 3), "data": (1,), "stages": (1,), "micro_batches": (2, 4)}
    device = ipu.IPUModel(4, tiles_per_ipu=TILES)
    search = ipu.search(dense_step, *_shapes(dense_arguments()), device=device, batch_argnums=1, axes=axes, compiled=1)
    assert search.best.plan.shards == 1
    assert all("divisible by 3" in row.left_out for row in search if row.plan.shards == 3)
    assert {row.plan.shards for row in search} == {1, 3}


def test_split_of_parameters_has_fewest_bytes_between_ipus_where_two_ipus_are_too_few() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            layer = jax.checkpoint(lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None))
            return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    params = {"up": jnp.zeros((8, 64, 256)), "down": jnp.zeros((8, 256, 64))}
    traced = traced_step(step, (params, jnp.zeros((64, 32, 64))))
    target = ipu.IPUModel(8, tiles_per_ipu=4).target
    plans = candidates(traced, traced.is_of((1,)), target, {"shards": (2,)}, (0,)).plans
    specs = {"[0]['down']": jax.P(None, "model"), "[0]['up']": jax.P(None, None, "model")}
    assert [plan.specs for plan in plans] == [specs] * len(plans)
