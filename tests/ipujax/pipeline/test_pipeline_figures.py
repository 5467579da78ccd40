"""Profiles of stages and tasks: all cycles, the tasks of the schedule, the bubble, slow stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.schedules import SCHEDULES
from ipujax.pipeline.plan import pipeline_time
from ipujax.runtime.files.figure_records import data_of
from ipujax.runtime.profile import TRACE_PHASES, slices
from ipujax.runtime.profile.stage_figures import ideal_share
from ipujax.runtime.report import Profile
from ipujax.runtime.timeline import Walk
from ipujax.runtime.timeline.task_spans import task_spans
from ipujax.runtime.views.part_views import bubble_sentence
from tests.ipujax.pipeline.pipeline_models import MODELS, array, batch, parameters

EXCHANGES = ("lockstep", "buffered")
CASES = [*product(SCHEDULES, EXCHANGES)]


def profile_of(schedule: str, exchange: str, stages: int = 4, micro_batches: int = 8, **settings: Any) -> Profile:
    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=4, global_exchange=exchange)
    loss = jax.value_and_grad(MODELS["mlp"](stages))
    fun = ipu.pipeline(loss, micro_batches=micro_batches, rng_argnums=1, schedule=schedule, **settings)
    args = parameters(stages), jax.random.key(0), batch(2 * micro_batches)
    return ipu.jit(fun, device=device).lower(*args).compile().profile


def check(profile: Profile) -> None:
    """Stages have all cycles of their IPUs; waits are idle time between the first and the last task."""
    cycles = profile.cycles
    trace = profile.tasks
    for used in {row.ipu for row in profile.stages}:
        own = [row for row in profile.stages if row.ipu == used]
        assert sum(sum(row.phases.values()) for row in own) == cycles
        assert sum(row.phases["idle"] for row in own) == profile.ipu_phase_cycles[used]["idle"]
        assert all(row.fill_cycles + row.steady_cycles + row.drain_cycles <= row.phases["idle"] for row in own)
        assert min(value for row in own for value in row.phases.values()) >= 0
        mine = trace.ipu == used
        assert (trace.start[mine][1:] >= trace.end[mine][:-1]).all()
    assert (trace.busy <= trace.end - trace.start).all() and (trace.waited >= 0).all()
    writer, reader = trace.links(between_ipus=False).T
    assert (trace.end[writer] <= trace.start[reader]).all() and len(writer)


@pytest.mark.parametrize(("schedule", "exchange"), CASES)
def test_stages_have_all_cycles_and_wait_when_the_trace_is_idle(schedule: str, exchange: str) -> None:
    profile = profile_of(schedule, exchange)
    check(profile)
    (pipeline,) = profile.pipelines
    trace = profile.tasks
    tasks = {(stage, kind) for stage, kind in trace.pipelines[0].tasks}
    assert len(trace) == 8 * len(tasks) and pipeline.is_traced
    start = int(trace.pipeline_start[0])
    end = int(trace.pipeline_end[0])
    cut = slices(profile.execution_trace)
    idle = TRACE_PHASES.index("idle")
    assert not profile.execution_trace.is_folded.any()
    overlap = np.minimum(cut.start + cut.cycles, end) - np.maximum(cut.start, start)
    used = sorted({row.ipu for row in profile.stages})
    is_idle = (cut.phase == idle) & (overlap > 0) & np.isin(cut.ipu, used)
    waits = sum(row.fill_cycles + row.steady_cycles + row.drain_cycles for row in profile.stages)
    # The trace of an IPU ends with its last step, which may be before the end of the pipeline.
    done = [int((cut.start + cut.cycles)[cut.ipu == ipu].max()) for ipu in used]
    assert waits == int(overlap[is_idle].sum()) + sum(max(0, end - cycle) for cycle in done)
    assert pipeline.bubble_cycles >= waits // len(used)
    assert pipeline.cycles == end - start


def closed_form(schedule: str, p: int, m: int) -> float:
    """The bubble of equal stages as a share, where it does not depend on the cycles of tasks."""
    chunks = 2 if schedule == "looped-1f1b" else 1
    devices = p // chunks
    return (devices - 1) / (chunks * m + devices - 1)


# Their bubbles depend on the cycles of tasks.
UNEVEN = ("sequential", "zb-h1", "dualpipev", "chimera")


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in UNEVEN])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8)])
def test_the_ideal_is_the_closed_form(schedule: str, stages: int, micro_batches: int) -> None:
    (pipeline,) = profile_of(schedule, "buffered", stages, micro_batches).pipelines
    assert pipeline.ideal_share == pytest.approx(closed_form(schedule, stages, micro_batches))
    assert (pipeline.schedule, pipeline.num_stages) == (SCHEDULES[schedule].name, stages)


def test_the_ideal_of_zb_h1_and_of_one_task_at_a_time() -> None:
    """(p − 1)(T_F + T_B − T_W) idle cycles, where T_W is at most T_F and T_B; and (p − 1)/p of the time."""
    trace = profile_of("zb-h1", "buffered").tasks
    forward = 30
    split = 20
    weight = 10
    times = np.array([forward, split + weight, split, weight])[trace.kind]
    bubble = 3 * (forward + split - weight)
    work = 8 * (forward + split + weight)
    assert ideal_share(replace(trace, busy=times), 0) == pytest.approx(bubble / (bubble + work))
    assert profile_of("sequential", "lockstep").pipelines[0].ideal_share == pytest.approx(0.75)


@pytest.mark.parametrize("micro_batches", [8, 16])
@pytest.mark.filterwarnings("ignore:loss uses 2 of the 4 IPUs")
def test_stages_that_share_an_ipu_are_parts_of_its_work(micro_batches: int) -> None:
    """Stages 0 and 2 are halves of IPU 0: IPU 1 waits for half a task before its first, and after its last."""
    (pipeline,) = profile_of("grouped", "buffered", 3, micro_batches, device_mapping=(0, 1, 0)).pipelines
    assert (pipeline.num_stages, pipeline.num_ipus) == (3, 2)
    assert pipeline.ideal_share == pytest.approx(0.5 / (micro_batches + 0.5))
    assert pipeline.ideal_share < pipeline.bubble_share and "with IPUs of equal work and" in bubble_sentence(pipeline)


@pytest.mark.parametrize(("schedule", "exchange"), CASES)
def test_tasks_and_bubble_are_those_of_the_pipeline_alone(schedule: str, exchange: str) -> None:
    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=4, global_exchange=exchange)
    fun = ipu.pipeline(jax.value_and_grad(MODELS["mlp"](4)), micro_batches=8, rng_argnums=1, schedule=schedule)
    compiled = ipu.jit(fun, device=device).lower(parameters(4), jax.random.key(0), batch(16)).compile()
    trace = compiled.profile.tasks
    (pipeline,) = compiled.profile.pipelines
    cycles, bubble_share = pipeline_time(compiled)
    # In a program IPUs reach the pipeline at different times, and one may load a micro-batch while another begins.
    assert pipeline.cycles == cycles and pipeline.bubble_share == pytest.approx(bubble_share, abs=1e-3)
    names = ("forward", "backward", "backward_input", "backward_weight")
    start = trace.start - trace.pipeline_start[0]
    columns = (trace.stage, trace.kind, trace.micro_batch)
    keys = zip(*(column.tolist() for column in columns), strict=True)
    actual = {
        (stage, names[kind], micro_batch): (int(start[n]), int(trace.end[n] - trace.start[n]))
        for n, (stage, kind, micro_batch) in enumerate(keys)
    }
    assert len(actual) == len(trace)
    for task in ipu.pipeline_tasks(compiled):
        assert actual[task.stage, task.kind, task.micro_batch] == (task.start, task.end - task.start)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_stages_that_share_an_ipu_share_its_cycles(exchange: str) -> None:
    profile = profile_of("1f1b", exchange, device_mapping=[0, 1, 1, 0])
    check(profile)
    assert [row.ipu for row in profile.stages] == [0, 1, 1, 0]


def slow_stage(slow: int, exchange: str, replicas: int = 1) -> Profile:
    """Three stages of one product, and one of six."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for stage in range(4):
            with ipu.stage(stage):
                for _ in range(6 if stage == slow else 1):
                    x = jnp.tanh(x @ w[stage])
        return jnp.mean(x**2)

    fun = ipu.pipeline(jax.value_and_grad(loss), micro_batches=8, schedule="1f1b")
    device = ipu.IPUModel(num_ipus=4 * replicas, tiles_per_ipu=4, global_exchange=exchange)
    specs = {"replicas": replicas} if replicas > 1 else {}
    return ipu.jit(fun, device=device, **specs).lower(array(4, 16, 16), array(32, 16)).compile().profile


@pytest.mark.parametrize(("slow", "exchange", "replicas"), [(2, "buffered", 1), (1, "lockstep", 1), (0, "buffered", 2)])
def test_a_slow_stage_is_named_and_the_others_wait_for_it(slow: int, exchange: str, replicas: int) -> None:
    profile = slow_stage(slow, exchange, replicas)
    check(profile)
    (pipeline,) = profile.pipelines
    assert pipeline.slowest_stage == slow
    assert pipeline.bubble_share > 2 * pipeline.ideal_share
    others = [row for row in profile.stages if row.stage != slow]
    if exchange == "lockstep":
        assert {row.waits_for for row in others} == {slow}
    else:
        assert {row.waits_for for row in others if abs(row.stage - slow) == 1} == {slow}


def slow_micro_batch(slow: int, exchange: str = "lockstep") -> Profile:
    """Two stages, of which the second has a loop that runs as long as its micro-batch says."""

    def model(w: jax.Array, x: jax.Array) -> jax.Array:
        with ipu.stage(0):
            h = jnp.tanh(x @ w[0])
        with ipu.stage(1):
            times = jnp.max(x).astype(jnp.int32)
            _, h = jax.lax.while_loop(lambda s: s[0] < times, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w[1])), (0, h))
            return jnp.sum(h)

    x = np.full((8, 1, 8), 2, np.float32)
    x[slow] = 20
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4, global_exchange=exchange)
    fun = ipu.jit(ipu.pipeline(model, micro_batches=8, schedule="1f1b"), device=device)
    args = array(2, 8, 8), x.reshape(8, 8)
    _, profile = fun.lower(*args).compile().profile_call(*args)
    return profile


@pytest.mark.parametrize(("slow", "exchange"), [(5, "lockstep"), (3, "buffered")])
def test_a_micro_batch_whose_loop_runs_longer_is_named(slow: int, exchange: str) -> None:
    profile = slow_micro_batch(slow, exchange)
    check(profile)
    first, second = profile.stages
    assert (second.slow_micro_batch, second.slow_kind) == (slow, "forward") and second.slow_ratio > 3
    assert first.slow_micro_batch == -1


def test_recomputed_work_is_counted_separately() -> None:
    assert all(row.phases["recomputed"] == 0 for row in profile_of("1f1b", "buffered").stages)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for stage in range(2):
            with ipu.stage(stage):
                x = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))(w[stage], x)
        return jnp.mean(x**2)

    fun = ipu.pipeline(jax.value_and_grad(loss), micro_batches=4, schedule="1f1b")
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)
    profile = ipu.jit(fun, device=device).lower(array(2, 16, 16), array(16, 16)).compile().profile
    check(profile)
    assert all(
        0.3 * row.phases["forward"] < row.phases["recomputed"] <= 1.2 * row.phases["forward"] for row in profile.stages
    )


def test_too_many_tasks_are_counted_alone() -> None:
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)
    fun = ipu.pipeline(jax.value_and_grad(MODELS["mlp"](2)), micro_batches=40, rng_argnums=1, schedule="1f1b")
    executable = ipu.jit(fun, device=device).lower(parameters(2), jax.random.key(0), batch(80)).compile().executable
    one_by_one = executable.task_spans_of(None)
    counted = task_spans(Walk.of(executable.program, executable.steps, 2, executable.slots), max_tasks=100)
    assert counted.is_counted and not len(counted.rows) and len(one_by_one.rows) == 160
    for a, b in zip(counted.totals, one_by_one.totals, strict=True):
        assert (a.calls, a.leaves) == (b.calls, b.leaves) and (a.work == b.work).all()


def test_a_program_without_stages_has_no_tasks() -> None:
    profile = ipu.jit(lambda x: x + 1).lower(1.0).compile().profile
    assert len(profile.tasks) == 0 and profile.stages == () and profile.pipelines == ()


def test_a_saved_profile_has_the_same_stages(tmp_path: Path) -> None:
    profile = profile_of("looped-1f1b", "buffered")
    profile.save(tmp_path / "p.ipuprofile")
    loaded = Profile.load(tmp_path / "p.ipuprofile")
    assert loaded.stages == profile.stages and loaded.pipelines == profile.pipelines
    assert data_of(loaded.tasks) == data_of(profile.tasks)
    assert loaded.tasks.label(0) == profile.tasks.label(0) == "stage 0, forward, micro-batch 0"
