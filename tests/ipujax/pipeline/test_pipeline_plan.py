"""`ipu.pipeline_plan`: its rows against compiling each way by itself, closed forms of the bubble, refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.schedules import SCHEDULES
from tests.ipujax.pipeline.pipeline_models import MODELS, WIDTH, array, batch, no_stage, parameters

DEVICE = ipu.IPUModel(num_ipus=4, tiles_per_ipu=4)
# Micro-batches come from the host, which closed forms do not know.
FREE_HOST = ipu.IPUModel(num_ipus=4, tiles_per_ipu=4, host_latency_seconds=0, host_bytes_per_second=1e30)
FUN = jax.value_and_grad(MODELS["mlp"](4))
ARGS = parameters(4), jax.random.key(0), batch(32)


def test_rows_equal_the_cost_of_each_pipeline_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ipu.pipeline_plan(
        FUN, *ARGS, micro_batches=(8, 3), schedules=("gpipe", "interleaved"), device=DEVICE, rng_argnums=1
    )
    printed = capsys.readouterr().out
    assert printed == f"{plan}\n"
    assert [(row.schedule, row.micro_batches) for row in plan] == [
        ("gpipe", 8),
        ("interleaved", 8),
        ("gpipe", 3),
        ("interleaved", 3),
    ]
    for row in plan:
        if row.micro_batches == 3:
            assert row.refused is not None and not row.fits and row.refused in printed
            continue
        fun = ipu.pipeline(FUN, micro_batches=8, schedule=row.schedule, rng_argnums=1)
        profile = ipu.jit(fun, device=DEVICE).lower(*ARGS).compile().profile
        assert (row.cycles, row.worst_tile_bytes) == (profile.cycles, profile.memory.max_tile_bytes)
        assert row.fits and row.stages == 4 and 0 < row.pipeline_cycles < row.cycles
        assert f"{row.cycles:,}" in printed
    assert plan.best() is min(list(plan)[:2], key=lambda row: row.cycles)


def equal_stages(params: Any, x: jax.Array) -> jax.Array:
    """Stages that take equally long, all but the copies between them."""
    for number in range(4):
        with ipu.stage(number):
            for _ in range(40):
                x = jnp.tanh(x @ params[f"w{number}"])
    return jnp.sum(x)


def test_the_bubble_is_that_of_the_closed_form() -> None:
    """Forward tasks alone: 3 of 8 + 3 slots of 4 equal stages are empty."""
    params = {f"w{n}": array(WIDTH, WIDTH, seed=n) for n in range(4)}
    plan = ipu.pipeline_plan(
        equal_stages, params, array(16, WIDTH), micro_batches=8, schedules="gpipe", device=FREE_HOST, show=False
    )
    (row,) = plan
    # Stages are equal in what they compute; what each receives differs, and weighs more since fewer steps compute.
    np.testing.assert_allclose(row.bubble_share, 3 / 11, atol=0.05)


def test_every_schedule_is_compared_when_none_is_named() -> None:
    plan = ipu.pipeline_plan(FUN, *ARGS, micro_batches=8, device=DEVICE, show=False, rng_argnums=1)
    assert [row.schedule for row in plan] == list(SCHEDULES)
    by_name = {row.schedule: row for row in plan}
    assert by_name["sequential"].cycles == max(r.cycles for r in plan if r.schedule != "looped-1f1b")
    assert by_name["1f1b"].worst_tile_bytes < by_name["gpipe"].worst_tile_bytes


def test_options_and_device_of_a_function_of_jit_are_those_of_the_plan() -> None:
    options = ipu.Options(io_tiles=1)
    settings: dict[str, Any] = {"micro_batches": 8, "schedules": "gpipe", "show": False, "rng_argnums": 1}
    (row,) = ipu.pipeline_plan(ipu.jit(FUN, device=DEVICE, options=options), *ARGS, **settings)
    fun = ipu.pipeline(FUN, micro_batches=8, schedule="gpipe", rng_argnums=1)
    assert row.cycles == ipu.jit(fun, device=DEVICE, options=options).profile(*ARGS).cycles
    with pytest.raises(ipu.ArgumentError, match=r"ipu\.pipeline_plan does not keep donate_argnums"):
        ipu.pipeline_plan(ipu.jit(FUN, donate_argnums=0), *ARGS, **settings)


def test_numbers_of_stages_are_compared() -> None:
    loss = MODELS["mlp"](4, no_stage)
    plan = ipu.pipeline_plan(
        loss, *ARGS, micro_batches=8, schedules="1f1b", stages=(2, 4), device=DEVICE, show=False, rng_argnums=1
    )
    assert [row.stages for row in plan] == [2, 4]
    for row in plan:
        fun = ipu.pipeline(loss, micro_batches=8, rng_argnums=1, stages=row.stages, schedule="1f1b")
        assert row.cycles == ipu.jit(fun, device=DEVICE).lower(*ARGS).compile().profile.cycles


def test_rows_name_pipelines_that_do_not_fit() -> None:
    small = ipu.IPUModel(num_ipus=4, tiles_per_ipu=4, bytes_per_tile=11_000)
    plan = ipu.pipeline_plan(FUN, *ARGS, micro_batches=8, schedules="gpipe", device=small, show=False, rng_argnums=1)
    assert "does not fit" in str(plan) and not next(iter(plan)).fits
    with pytest.raises(ipu.ArgumentError, match="no setting of this pipeline fits"):
        plan.best()


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no stages": (lambda x: x.sum(), {"schedules": "1f1b"}, "compares pipelines with stages"),
    "no such schedule": (equal_stages, {"schedules": "1f2b"}, "no pipeline schedule is called '1f2b'"),
    "a CPU": (equal_stages, {"device": ipu.CPU()}, "compares cycles"),
    "uneven micro-batches": (
        equal_stages,
        {"micro_batches": 3},
        r"no pipeline can be run: .* cannot be split into 3[\s\S]*try: a whole batch of a multiple of 3",
    ),
    "too few IPUs": (equal_stages, {"device": ipu.IPUModel()}, r"has no IPU 1[\s\S]*try: num_ipus="),
    "several reasons": (
        equal_stages,
        {"micro_batches": (3, 8), "device": ipu.IPUModel(), "schedules": "1f1b"},
        r"none of these pipelines[\s\S]*split into 3 [\s\S]*try: [\s\S]*multiple of 3[\s\S]*or: num_ipus=",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_comparisons_that_make_no_sense_are_refused(name: str) -> None:
    fun, settings, match = BAD[name]
    args = (
        (array(16, WIDTH),)
        if name == "no stages"
        else ({f"w{n}": array(WIDTH, WIDTH) for n in range(4)}, array(16, WIDTH))
    )
    with pytest.raises(ipu.ArgumentError, match=match):
        ipu.pipeline_plan(fun, *args, **{"micro_batches": 8, "device": DEVICE, **settings})
