"""Times of tasks: those of the schedule, in its order, none before its predecessors."""

from __future__ import annotations

from itertools import pairwise, product

import jax
import pytest

import ipujax as ipu
from ipujax.lowering.schedules import SCHEDULES, schedule_plan
from ipujax.pipeline.plan import pipeline_time
from tests.ipujax.pipeline.pipeline_models import MODELS, batch, parameters
from tests.lowering.schedules.schedule_simulator import letters, waits_for

LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}


EXCHANGES = ("lockstep", "buffered")


@pytest.mark.parametrize(("schedule", "exchange"), [*product(SCHEDULES, EXCHANGES)])
def test_tasks_run_in_the_order_of_the_schedule(schedule: str, exchange: str) -> None:
    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=4, global_exchange=exchange)
    fun = ipu.pipeline(jax.value_and_grad(MODELS["mlp"](4)), micro_batches=8, rng_argnums=1, schedule=schedule)
    compiled = ipu.jit(fun, device=device).lower(parameters(4), jax.random.key(0), batch(16)).compile()
    tasks = ipu.pipeline_tasks(compiled)
    plan = schedule_plan(SCHEDULES[schedule], 4, 8)
    actual = {(t.stage, t.micro_batch, LETTERS[t.kind]): t for t in tasks}
    assert len(actual) == len(tasks) == sum(map(len, plan.lists))
    for ipu_of, listed in enumerate(plan.lists):
        own = [t for t in tasks if t.ipu == ipu_of]
        assert [(t.stage, t.micro_batch, LETTERS[t.kind]) for t in own] == [letters(task) for task in listed]
        assert all(a.end <= b.start for a, b in pairwise(own))
    for name, task in actual.items():
        assert task.start < task.end
        assert all(actual[need].end <= task.start for need in waits_for(name, 4, actual))
    cycles, _ = pipeline_time(compiled)
    assert min(t.start for t in tasks) == 0
    assert 0.9 * cycles <= max(t.end for t in tasks) <= cycles


def test_a_function_without_a_pipeline_has_no_tasks() -> None:
    with pytest.raises(ipu.ArgumentError, match="one pipeline with stages"):
        ipu.pipeline_tasks(ipu.jit(lambda x: x + 1).lower(1.0).compile())
