"""Pipelines with stages: every schedule has the numbers of plain JAX, and to the bit those of the others."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.lowering.schedules import FORWARD, SCHEDULES, Schedule, Task
from ipujax.runtime.errors import ScheduleError
from ipujax.runtime.graph.program import Repeat
from ipujax.runtime.graph.walks import distinct
from ipujax.runtime.tensor.mapping import owners
from tests.ipujax.pipeline.pipeline_models import MODELS, WIDTH, WORDS, array, batch, no_stage, parameters
from tests.lowering.helpers import assert_same, lowered, quick_jit, run_engine, run_tiles, small_target

TILES = 3
COMBINATIONS = [(name, stages, count) for name in MODELS for stages in (2, 3, 4) for count in (1, 4, 7, 16)]


def system(ipus: int = 4) -> ipu.IPUModel:
    return ipu.IPUModel(num_ipus=ipus, tiles_per_ipu=TILES)


def arguments(stages: int, micro_batches: int) -> tuple[Any, ...]:
    return jax.tree.map(jnp.asarray, parameters(stages)), jax.random.key(2), batch(2 * micro_batches)


def gradients(name: str, stages: int, micro_batches: int, schedule: Any = "1f1b", stage: Any = ipu.stage) -> Any:
    loss = MODELS[name](stages, stage)
    return ipu.pipeline(jax.value_and_grad(loss), micro_batches=micro_batches, rng_argnums=1, schedule=schedule)


@cache
def accumulated(name: str, stages: int, micro_batches: int) -> list[Any]:
    """The sums that plain JAX accumulates, without stages."""
    fun = gradients(name, stages, micro_batches, stage=no_stage)
    return jax.tree.leaves(quick_jit(fun)(*arguments(stages, micro_batches)))


def programs(name: str, stages: int, micro_batches: int) -> Any:
    """The program of each schedule that takes these numbers."""
    for schedule in SCHEDULES:
        fun = gradients(name, stages, micro_batches, schedule)
        try:
            SCHEDULES[schedule].check(stages, micro_batches)
        except ScheduleError as refused:
            with pytest.raises(ScheduleError, match=str(refused).split("\n", 1)[0].split(":")[0]):
                lowered(fun, arguments(stages, micro_batches), small_target(TILES, num_ipus=4))
            continue
        yield schedule, lowered(fun, arguments(stages, micro_batches), small_target(TILES, num_ipus=4))


# --- numbers ----------------------------------------------------------------------------------------------------------


def tolerance_between(schedule: str) -> tuple[float, float]:
    """Schedules give the same bits, but for sums over stages of one IPU, which share an accumulator."""
    return (1e-5, 1e-7) if schedule.startswith("looped") else (0, 0)


@pytest.mark.parametrize(("name", "stages", "micro_batches"), COMBINATIONS)
def test_every_schedule_gives_the_same_bits_tile_by_tile(name: str, stages: int, micro_batches: int) -> None:
    """Results are also those of plain JAX, but for the order of sums."""
    args = arguments(stages, micro_batches)
    first = None
    actual = 0
    for schedule, program in programs(name, stages, micro_batches):
        got = run_tiles(program, args)
        assert_same(got, accumulated(name, stages, micro_batches), 1e-4, 1e-6, schedule)
        first = got if first is None else first
        assert_same(got, first, *tolerance_between(schedule), schedule)
        actual += 1
    assert actual >= 3


@pytest.mark.parametrize(
    "schedule",
    SCHEDULES,
)
def test_every_schedule_gives_the_numbers_of_plain_jax(schedule: str) -> None:
    args = arguments(4, 8)
    program = lowered(gradients("mlp", 4, 8, schedule), args, small_target(TILES, num_ipus=4))
    assert_same(run_engine(program, args), accumulated("mlp", 4, 8), 1e-6, 1e-7, schedule)


@pytest.mark.parametrize(("name", "stages", "micro_batches"), COMBINATIONS)
def test_every_schedule_in_the_engine(name: str, stages: int, micro_batches: int) -> None:
    args = arguments(stages, micro_batches)
    for schedule, program in programs(name, stages, micro_batches):
        assert_same(run_engine(program, args), accumulated(name, stages, micro_batches), 1e-6, 1e-7, schedule)


# --- the default ------------------------------------------------------------------------------------------------------


def run_of(fun: Any, *args: Any, num_ipus: int = 4, **changes: Any) -> Any:
    """The schedule's name of the only pipeline of a function, and its cycles."""
    device = ipu.IPUModel(num_ipus=num_ipus, tiles_per_ipu=16, **changes)
    made = ipu.jit(fun, device=device).lower(*args)
    (run,) = made.pipelines
    return run.plan.schedule.name, made.compile().profile.cycles


@pytest.mark.parametrize(("exchange", "expected"), [("lockstep", "grouped"), ("buffered", "1f1b")])
def test_the_default_schedule_suits_the_machine(exchange: str, expected: str) -> None:
    # Stages are looked for on two IPUs only: among more of them that takes far longer.
    for stages, stage, settings in ((4, ipu.stage, {}), (2, no_stage, {"stages": 2})):
        args = arguments(stages, 8)
        loss = jax.value_and_grad(MODELS["mlp"](stages, stage))
        cycles = {}
        for schedule in (None, "1f1b", "grouped"):
            fun = ipu.pipeline(loss, micro_batches=8, rng_argnums=1, schedule=schedule, **settings)
            name, cycles[schedule] = run_of(fun, *args, num_ipus=stages, global_exchange=exchange)
            assert name == (schedule or expected)
        assert cycles[None] == cycles[expected]


@pytest.mark.parametrize(("micro_batches", "expected"), [(6, "1f1b"), (7, "grouped")])
def test_the_default_schedule_takes_any_number_of_micro_batches(micro_batches: int, expected: str) -> None:
    """Grouped needs 2 · 4 − 1 of them to train four stages."""
    fun = gradients("mlp", 4, micro_batches, None)
    assert run_of(fun, *arguments(4, micro_batches))[0] == expected


def test_inference_by_default_takes_any_number_too() -> None:
    for count, expected in ((3, "1f1b"), (4, "grouped")):
        fun = ipu.pipeline(MODELS["mlp"](4), micro_batches=count, rng_argnums=1)
        assert run_of(fun, *arguments(4, count))[0] == expected


def test_the_default_schedule_saves_time_where_compute_counts() -> None:
    def loss(params: Any, x: Any) -> Any:
        for number in range(4):
            with ipu.stage(number):
                x = jnp.tanh(x @ params[number])
                if number == 3:
                    return jnp.mean(x * x)

    args = [jax.ShapeDtypeStruct((128, 128), "float32")] * 4, jax.ShapeDtypeStruct((64 * 8, 128), "float32")
    cycles = {
        schedule: run_of(
            ipu.pipeline(jax.value_and_grad(loss), micro_batches=8, schedule=schedule), *args, host_latency_seconds=0
        )[1]
        for schedule in (None, "1f1b")
    }
    assert cycles[None] < 0.95 * cycles["1f1b"]


def test_training_follows_plain_jax() -> None:
    """Twenty steps with an optimiser whose state lies with its parameters, on donated arguments."""
    optimizer = optax.adam(1e-2)

    def step(stage: Any) -> Any:
        def run(params: Any, state: Any, key: Any, rows: Any) -> Any:
            value, grads = gradients("dropout", 3, 4, stage=stage)(params, key, rows)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return run

    params, _, rows = arguments(3, 4)
    ours = ipu.jit(step(ipu.stage), device=system(), donate_argnums=(0, 1))
    reference = jax.jit(step(no_stage))
    got, expected = ((jax.tree.map(jnp.array, params), optimizer.init(params)) for _ in range(2))
    for number in range(20):
        key = jax.random.key(number)
        *got, loss = ours(*got, key, rows)
        *expected, expected_loss = reference(*expected, key, rows)
        np.testing.assert_allclose(loss, expected_loss, 1e-5)
    program = ours.lower(*got, key, rows)
    places = {v.name: set((owners(m) // TILES).tolist()) for v, m in program.graph.mappings.items()}
    for number in range(3):
        assert places[f"params['w{number}']"] == places[f"state[0].mu['w{number}']"] == {number}


def compare(fun: Any, *args: Any, rtol: float = 1e-6) -> Any:
    """Runs a function of a `stage` in engine and tile interpreter, against plain JAX; returns the program."""
    expected = jax.tree.leaves(quick_jit(fun(no_stage))(*args))
    program = lowered(fun(ipu.stage), args, small_target(TILES, num_ipus=4))
    assert_same(run_engine(program, args), expected, rtol, 1e-7, "engine")
    assert_same(run_tiles(program, args), expected, 1e-4, 1e-6, "interpreter")
    return program


def two_layers(params: Any, x: jax.Array, stage: Any) -> jax.Array:
    with stage(0):
        h = jnp.tanh(x @ params["w0"])
    with stage(1):
        return h @ params["w1"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_inference_stacks_results(schedule: str) -> None:
    def fun(stage: Any) -> Any:
        settings = {} if stage is no_stage else {"schedule": schedule}
        return ipu.pipeline(lambda p, x: two_layers(p, x, stage), micro_batches=4, reduce="stack", **settings)

    compare(fun, parameters(2), array(8, WIDTH))


def test_every_reduction_of_auxiliary_results() -> None:
    def fun(stage: Any) -> Any:
        def loss(params: Any, x: jax.Array) -> Any:
            h = two_layers(params, x, stage)
            return jnp.mean(h**2), {
                "rows": h[0],
                "largest": jnp.max(h),
                "hits": jnp.sum(h > 0),
                "x": x,
                "one": jnp.float32(1),
            }

        kinds = {"rows": "stack", "largest": "last", "hits": "sum", "x": "last", "one": "mean"}
        with_grad = jax.value_and_grad(loss, has_aux=True)
        return ipu.pipeline(with_grad, micro_batches=4, reduce=(("running_mean", kinds), "running_mean"))

    compare(fun, parameters(2), array(8, WIDTH))


def test_half_precision_accumulates_in_float32() -> None:
    def fun(stage: Any) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(two_layers(params, x, stage).astype(jnp.float32) ** 2)

        return ipu.pipeline(jax.grad(loss), micro_batches=4, reduce="sum", accumulate_dtype=jnp.float32)

    half = jax.tree.map(lambda x: x.astype(np.float16), (parameters(2), array(8, WIDTH)))
    expected = quick_jit(fun(no_stage))(*half)
    got = ipu.jit(fun(ipu.stage), device=system())(*half)
    for name in ("w0", "w1"):
        assert got[name].dtype == jnp.float32
        np.testing.assert_allclose(got[name], expected[name], rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("holder", [0, 1])
def test_state_is_handed_on_in_its_stage(holder: int) -> None:
    def fun(stage: Any) -> Any:
        def loss(params: Any, state: Any, x: jax.Array) -> Any:
            with stage(0):
                h = jnp.tanh(x @ params["w0"])
                if holder == 0:
                    state = jax.tree.map(lambda s, new: 0.9 * s + 0.1 * new, state, {"mean": h.mean(0), "n": h.sum()})
                    h = h - state["mean"]
            with stage(1):
                h = h @ params["w1"]
                if holder == 1:
                    h = h * state["mean"]
                    state = jax.tree.map(lambda s, new: 0.9 * s + 0.1 * new, state, {"mean": h.mean(0), "n": h.sum()})
            return jnp.mean(h**2), state

        return ipu.pipeline(jax.value_and_grad(loss, has_aux=True), micro_batches=4, carry={1: (0, 1)})

    state = {"mean": np.ones(WIDTH, np.float32), "n": np.float32(0.5)}
    compare(fun, parameters(2), state, array(8, WIDTH))


def test_frozen_stages_and_closed_over_parameters() -> None:
    def fun(stage: Any) -> Any:
        def step(params: Any, x: jax.Array) -> Any:
            frozen = {"w0": 2 * params["w0"]}
            loss = lambda w1, x: jnp.mean(two_layers(frozen | {"w1": w1}, x, stage) ** 2)  # noqa: E731
            return ipu.pipeline(jax.value_and_grad(loss), micro_batches=4)(params["w1"], x)

        return step

    compare(fun, parameters(2), array(8, WIDTH))


def test_values_that_skip_stages() -> None:
    """A residual connection over three stages, and a mask that all of them use."""

    def fun(stage: Any) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            mask = x > 0
            first = x
            for number in range(4):
                with stage(number):
                    x = jnp.tanh(x @ params[f"w{number}"]) * mask
            return jnp.sum((x + first) ** 2)

        return ipu.pipeline(jax.value_and_grad(loss), micro_batches=8)

    compare(fun, parameters(4), array(16, WIDTH))


def test_several_stages_on_an_ipu() -> None:
    def fun(stage: Any) -> Any:
        settings = {} if stage is no_stage else {"device_mapping": [0, 1, 1, 0]}
        loss = MODELS["mlp"](4, stage)
        return ipu.pipeline(jax.value_and_grad(loss), micro_batches=4, rng_argnums=1, **settings)

    program = compare(fun, *arguments(4, 4))
    used = {tile // TILES for m in program.graph.mappings.values() for tile in owners(m).tolist()}
    assert used == {0, 1}


@pytest.mark.parametrize(("mapping", "accumulators"), [([0, 1, 0], 1), ([0, 1, 2], 2)])
def test_stages_on_one_ipu_add_to_one_accumulator(mapping: list[int], accumulators: int) -> None:
    """The table of `tied` has gradients in its first and in its last stage."""

    def fun(stage: Any) -> Any:
        settings = {} if stage is no_stage else {"device_mapping": mapping}
        return ipu.pipeline(
            jax.value_and_grad(MODELS["tied"](3, stage)), micro_batches=4, rng_argnums=1, reduce="sum", **settings
        )

    program = compare(fun, *arguments(3, 4))
    sizes = [np.prod(v.shape) for v in program.graph.variables if v.name.endswith("/sum")]
    assert sizes.count(WORDS * WIDTH) == accumulators


def test_prints_come_in_the_order_of_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = two_layers(params, x, ipu.stage)
        jax.debug.print("{}", x[0, 0], ordered=True)
        return jnp.sum(h)

    x = np.arange(8 * WIDTH, dtype=np.float32).reshape(8, WIDTH)
    ipu.jit(ipu.pipeline(loss, micro_batches=4), device=system())(parameters(2), x)
    jax.effects_barrier()
    assert capsys.readouterr().out.split() == ["0.0", "12.0", "24.0", "36.0"]


def test_replicas_of_a_pipeline() -> None:
    """Two replicas of two stages on four IPUs, each with half of the batch."""

    def step(params: Any, key: Any, rows: Any) -> Any:
        return lax.pmean(gradients("mlp", 2, 4)(params, key, rows), "replica")

    run = ipu.jit(step, device=system(), replicas=2, in_specs=(P(), P(), P("replica")), out_specs=P())
    params, key, _ = arguments(2, 4)
    rows = batch(16)
    expected = jax.value_and_grad(MODELS["mlp"](2, no_stage))(params, key, rows)
    for a, b in zip(jax.tree.leaves(run(params, key, rows)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# --- schedules of one's own, and what is refused ----------------------------------------------------------------------


class LastFirst(Schedule):
    """As sequential, for inference."""

    def tasks(self, num_stages: int, micro_batches: int) -> Any:
        return [[Task(stage, j, FORWARD) for j in range(micro_batches)] for stage in range(num_stages)]


def test_a_schedule_of_ones_own() -> None:
    def fun(stage: Any) -> Any:
        settings = {} if stage is no_stage else {"schedule": LastFirst()}
        return ipu.pipeline(lambda p, x: two_layers(p, x, stage), micro_batches=4, reduce="stack", **settings)

    program = compare(fun, parameters(2), array(8, WIDTH))
    assert not any(isinstance(node, Repeat) and node.count > 4 for node in distinct(program.program))


def in_a_loop(params: Any, key: Any, rows: Any) -> Any:
    def body(total: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return total + gradients("mlp", 2, 4)(params, key, rows)[0], None

    return lax.scan(body, jnp.float32(0), None, 3)[0]


def in_a_branch(params: Any, key: Any, rows: Any) -> Any:
    value = gradients("mlp", 2, 4)
    return lax.cond(jax.random.bernoulli(key), lambda: value(params, key, rows)[0], lambda: jnp.float32(0))


BAD: dict[str, tuple[Any, int, int, str]] = {
    "too few micro-batches": (lambda: gradients("mlp", 4, 4, "grouped"), 4, 4, "needs at least 7 micro-batches"),
    "no multiple": (lambda: gradients("mlp", 4, 6, "interleaved"), 4, 6, "multiple of 4 micro-batches"),
    "too few IPUs": (lambda: gradients("mlp", 4, 4), 2, 4, "stage 2 of ipu.pipeline.loss. has no IPU 2\n.*\n.*4 IPUs"),
    "mapping too short": (
        lambda: ipu.pipeline(MODELS["mlp"](3), micro_batches=4, rng_argnums=1, device_mapping=[0, 1]),
        4,
        4,
        "device_mapping .* does not fit its stages\n.*\n.*3 stages",
    ),
    "IPU beyond": (
        lambda: ipu.pipeline(MODELS["mlp"](2), micro_batches=4, rng_argnums=1, device_mapping=[0, 7]),
        4,
        4,
        "stage 1 .* has no IPU 7",
    ),
    "in a loop": (lambda: in_a_loop, 4, 4, r"a pipeline with stages is inside a scan[\s\S]*one iteration of the loop"),
    "in a branch": (
        lambda: in_a_branch,
        4,
        4,
        r"is inside a cond[\s\S]*apart from what is around",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_pipelines_that_cannot_run_are_refused(name: str) -> None:
    make, ipus, count, match = BAD[name]
    with pytest.raises(ipu.ArgumentError, match=match):
        ipu.jit(make(), device=system(ipus))(*arguments(4, count))


@pytest.mark.parametrize("settings", [{"schedule": "grouped"}, {"schedule": "looped-1f1b", "stages": 3}], ids=str)
def test_refusals_of_a_schedule_name_the_line_of_the_pipeline(settings: Any) -> None:
    def training_step(params: Any, rows: Any) -> Any:
        gradients = jax.grad(lambda p, x: jnp.sum(two_layers(p, x, stage)))
        return ipu.pipeline(gradients, micro_batches=2, **settings)(params, rows)

    stage = no_stage if "stages" in settings else ipu.stage
    with pytest.raises(ipu.ArgumentError, match=r"at: test_pipeline_schedules.py:\d+ \(training_step\)"):
        ipu.jit(training_step, device=system(2))(parameters(2), array(8, WIDTH))
