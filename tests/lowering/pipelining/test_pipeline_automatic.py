"""Automatic stages: against all cuts, within memory, with the numbers of plain JAX; refused inputs."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.choice import Choice
from ipujax.lowering.jaxpr.stage_names import named_stages, stage_name
from ipujax.lowering.lower import lower
from ipujax.lowering.pipelining.cuts import _balanced_cuts, name_stages
from ipujax.lowering.pipelining.pipeline_cost import rough_bytes
from ipujax.lowering.pipelining.stage_search import Cuts, StageSearch
from ipujax.runtime.graph import BYTE_COST_CYCLES
from tests.ipujax.pipeline.pipeline_models import MODELS, array, batch, no_stage, parameters
from tests.lowering.helpers import assert_same, lowered, passed, run_engine, run_tiles, small_target
from tests.lowering.pipelining.search_helpers import search_of

WIDTHS = {"even": (8,) * 8, "narrow": (32, 8, 4, 4, 4, 8, 16, 32), "wide": (4, 8, 16, 48, 48, 8, 4, 4)}


def chain(widths: tuple[int, ...]) -> tuple[Any, Any]:
    """Products of unequal sizes, one after the other: nine positions to cut at."""

    def loss(params: list[Any], x: jax.Array) -> jax.Array:
        for w in params:
            x = x @ w
        return jnp.sum(x**2)

    params = [array(a, b, seed=n) for n, (a, b) in enumerate(pairwise(widths))]
    return loss, (params, array(16, widths[0]))


MACHINES = list(product(WIDTHS, ("lockstep", "buffered"), ("gpipe", "1f1b")))


@pytest.mark.parametrize(("shape", "exchange", "schedule"), MACHINES)
def test_search_is_within_two_percent_of_the_best_cut(shape: str, exchange: str, schedule: str) -> None:
    loss, args = chain(WIDTHS[shape])
    target = small_target(4, num_ipus=4, global_exchange=exchange)
    fun = ipu.pipeline(jax.value_and_grad(loss), micro_batches=8, stages=3, schedule=schedule)
    search = search_of(fun, args, target)
    assert len(search.work.forward_cycles) == 10
    costs = [search.excess_and_cycles(cuts) for cuts in combinations(range(1, 10), 2)]
    new_search = search_of(fun, args, target)
    assert new_search.excess_and_cycles(new_search.search())[1] <= 1.02 * min(costs)[1]


def test_finds_a_cut_that_fits_if_one_exists() -> None:
    """The fastest cut needs more memory than there is."""
    loss, args = chain((64, 64, 4, 4, 4, 4, 4, 4, 4, 4))
    fun = ipu.pipeline(jax.value_and_grad(loss), micro_batches=8, stages=2, schedule="gpipe")

    def search_on(num_bytes: int) -> StageSearch:
        """On tiles of which any part is for code."""
        tiles = small_target(4, num_ipus=4, bytes_per_tile=num_bytes, interleaved_offset_bytes=2**20)
        return search_of(fun, args, tiles)

    one_byte = search_on(1)
    needed_bytes = {cut: 1 + one_byte.excess_and_cycles((cut,))[0] for cut in range(1, 10)}
    tight = search_on(int(1.02 * min(needed_bytes.values())))  # for gaps
    assert sum(tight.excess_and_cycles((cut,))[0] == 0 for cut in needed_bytes) < 9
    assert tight.excess_and_cycles(tight.search())[0] == 0


def test_estimates_a_pipeline_whose_operand_is_a_constant() -> None:
    loss, args = chain((8, 8, 8))
    scaled = ipu.pipeline(lambda scale, params, x: loss(params, x) * scale, micro_batches=4, stages=2)
    search = search_of(lambda params, x: scaled(2.0, params, x), args, small_target(4, num_ipus=2))
    assert search.excess_and_cycles((1,))[1] > 0


def test_estimates_the_memory_of_the_entire_program() -> None:
    """Except for host exchange. Operands of products are in groups of columns, which takes less code."""
    loss, args = chain((128,) * 5)
    fun = ipu.pipeline(jax.value_and_grad(loss), micro_batches=8, stages=3)
    too_small = small_target(16, num_ipus=4, bytes_per_tile=2**12, interleaved_offset_bytes=2**20)
    search = search_of(fun, args, too_small)
    cuts = (2, 4)
    estimate, _ = search.excess_and_cycles(cuts, too_small.bytes_per_tile)
    program = lower(search.rewrite(cuts).jaxpr, too_small)
    program_bytes = rough_bytes(program.graph, program.program)
    assert 0.98 * program_bytes <= estimate <= program_bytes


def test_resumes_a_search_from_earlier_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned anew, as for a higher cost per byte, a pipeline is cut at the same positions, or at faster neighbours."""
    loss, args = chain(WIDTHS["wide"])
    fun = ipu.pipeline(jax.value_and_grad(loss), micro_batches=8, stages=3)
    jaxpr = passed(fun, *args)
    target = small_target(4, num_ipus=4)
    estimated = list[Cuts]()
    excess_and_cycles = StageSearch.excess_and_cycles

    def recorded(self: StageSearch, cuts: Cuts, extra_bytes: int = 0) -> tuple[int, int]:
        estimated.append(cuts)
        return excess_and_cycles(self, cuts, extra_bytes)

    first = lower(jaxpr, target)
    monkeypatch.setattr(StageSearch, "excess_and_cycles", recorded)

    def first_with(cuts: tuple[Cuts, ...]) -> Choice:
        return Choice(BYTE_COST_CYCLES, target.bytes_per_tile, cuts=cuts)

    second = lower(jaxpr, target, choice=first_with(first.cuts))
    (cuts,) = first.cuts
    assert second.cuts == first.cuts and 1 < len(set(estimated)) <= 1 + 2 * len(cuts)
    assert lower(jaxpr, target, choice=first_with(((1, 99),))).cuts == first.cuts  # no such position


@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_jax(name: str) -> None:
    args = parameters(4), jax.random.key(2), batch(8)
    loss = MODELS[name](4, no_stage)
    expected = jax.tree.leaves(ipu.pipeline(jax.value_and_grad(loss), micro_batches=4, rng_argnums=1)(*args))
    fun = ipu.pipeline(jax.value_and_grad(loss), micro_batches=4, rng_argnums=1, stages=3)
    program = lowered(fun, args, small_target(3, num_ipus=4))
    assert program.pipelines[0].plan.num_stages == 3
    assert_same(run_tiles(program, args), expected, 1e-4, 1e-6, name)
    if name == "tied":
        assert_same(run_engine(program, args), expected, 1e-6, 1e-7, name)


def test_chooses_the_number_of_stages() -> None:
    """Work for two is not spread over four, and inference is cut as well."""
    loss, args = chain(WIDTHS["even"])
    fun = ipu.pipeline(loss, micro_batches=8, stages="auto", reduce="stack")
    program = lowered(fun, args, small_target(4, num_ipus=4))
    (run,) = program.pipelines
    assert 2 <= run.plan.num_stages <= 4 and not run.plan.training
    by_number = {}
    for count in (2, 3, 4):
        fun = ipu.pipeline(loss, micro_batches=8, stages=count, reduce="stack")
        search = search_of(fun, args, small_target(4, num_ipus=4))
        by_number[count] = search.excess_and_cycles(search.search())
    assert by_number[run.plan.num_stages][1] <= 1.02 * min(by_number.values())[1]


def test_assigns_gradients_to_the_stage_of_their_parameters() -> None:
    loss, args = chain(WIDTHS["even"])
    fun = ipu.pipeline(jax.value_and_grad(loss), micro_batches=8, stages=3)
    jaxpr = name_stages(search_of(fun, args, small_target(4)).batch, (3, 6)).jaxpr
    assert named_stages(jaxpr.jaxpr) == {0, 1, 2}
    products: dict[bool, list[int]] = {False: [], True: []}
    for eqn in jaxpr.jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            name = stage_name(eqn)
            assert name.stage is not None
            products[name.is_backward].append(name.stage)
    assert products[False] == [0, 0, 0, 1, 1, 1, 2]
    assert sorted(products[True]) == sorted([0] * 5 + [1] * 6 + [2] * 2)  # the first has no gradient of its operand


def over_time(w: Any, x: Any) -> Any:
    """A recurrent network: its loop is over inputs, not over parameters."""
    return jnp.sum(lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros(6), x)[0])


BAD: dict[str, tuple[Any, Any, int, dict[str, Any], str]] = {
    "stages already": (
        lambda p, x: MODELS["mlp"](2)(p, jax.random.key(0), {"x": x, "y": x}),
        (parameters(2), array(16, 6)),
        4,
        {"stages": 2},
        "its function has stages already",
    ),
    "nothing to cut": (over_time, (array(6, 6), array(16, 6)), 4, {"stages": 3}, "too few places for cuts"),
    "one IPU": (
        chain(WIDTHS["even"])[0],
        chain(WIDTHS["even"])[1],
        1,
        {"stages": "auto"},
        "cannot be cut into stages for one IPU",
    ),
    "too few IPUs": (*chain(WIDTHS["even"]), 2, {"stages": 3}, "stage 2 .* has no IPU 2"),
    "too large": (*chain((256, 256, 256, 256)), 2, {"stages": 2}, "no cut into 2 stages fits the memory"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_invalid_cuts(name: str) -> None:
    fun, args, ipus, settings, match = BAD[name]
    target = small_target(2, num_ipus=ipus, **({"bytes_per_tile": 100_000} if name == "too large" else {}))
    pipelined = ipu.pipeline(jax.value_and_grad(fun), micro_batches=8, **settings)
    with pytest.raises(ipu.ArgumentError, match=match):
        lowered(pipelined, args, target)


def test_plain_jax_ignores_stages() -> None:
    loss, args = chain(WIDTHS["even"])
    got = ipu.pipeline(loss, micro_batches=8, stages=3)(*args)
    np.testing.assert_allclose(got, ipu.pipeline(loss, micro_batches=8)(*args), rtol=1e-6)


def test_balanced_cuts_are_ordered_by_their_time_over_all_micro_batches():
    # Stages of 5 and 5 cycles, or of 6 and 2: the slowest stage counts once more for each micro-batch after the first.
    times = np.full((4, 4), np.inf)
    times[0, 1] = times[1, 3] = 5
    times[0, 2] = 6
    times[2, 3] = 2
    fits = [np.ones((4, 4), bool)] * 2
    for micro_batches, expected in ((2, [(2,), (1,)]), (4, [(1,), (2,)])):
        assert _balanced_cuts(times, fits, SimpleNamespace(num_stages=2, micro_batches=micro_batches)) == expected


@pytest.mark.parametrize("seed", range(8))
def test_balanced_cuts_are_those_of_all_cuts(seed):
    random = np.random.default_rng(seed)
    # Few distinct times, as of equal layers, and stages that do not fit.
    elapsed = np.concatenate([[0], np.cumsum(random.integers(1, 4 if seed % 2 else 1000, 9))])
    times = np.where(np.tri(10, dtype=bool), np.inf, elapsed[None, :] - elapsed[:, None] + random.integers(0, 9, 10))
    fits = [random.random((10, 10)) < 0.8 for _ in range(4)]
    micro_batches = int(random.choice([2, 8, 64]))

    def cost(candidate):
        ranges = list(pairwise((0, *candidate, 9)))
        stage_times = [times[a, b] if fits[stage][a, b] else np.inf for stage, (a, b) in enumerate(ranges)]
        return sum(stage_times) + (micro_batches - 1) * max(stage_times)

    least = min(map(cost, combinations(range(1, 9), 3)))
    found = _balanced_cuts(times, fits, SimpleNamespace(num_stages=4, micro_batches=micro_batches))
    assert [cost(candidate) for candidate in found[:1]] == ([least] if np.isfinite(least) else [])
