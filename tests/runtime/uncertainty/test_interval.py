"""Intervals of cycles against closed forms of programs whose phases are known, and how sources cover cycles."""

from __future__ import annotations

from collections.abc import Callable
from math import hypot
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.compile import compile
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.target import PRESETS, perturbed_constants
from ipujax.runtime.uncertainty import SPREADS, Spread, Uncertainty, spreads
from tests.runtime.profile.profile_helpers import looping

TILES = 64


def machine(num_ipus: int = 1, **changes: Any) -> ipu.IPUModel:
    return ipu.IPUModel(num_ipus, "mk2", tiles_per_ipu=TILES, **changes)


def profile(fun: Callable[..., Any], *args: Any, num_ipus: int = 1, **settings: Any) -> ipu.Profile:
    device = settings.pop("device", None) or machine(num_ipus)
    return ipu.jit(fun, device=device, **settings).profile(*args)


def array(*shape: int, dtype: Any = np.float16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def by_name(figures: ipu.Profile) -> dict[str, Uncertainty]:
    return {each.name: each for each in figures.interval.uncertainties}


def product(a: Any, b: Any) -> Any:
    return a @ b


@pytest.fixture(scope="module")
def of_product() -> ipu.Profile:
    return profile(product, array(128, 256), array(256, 192))


@pytest.mark.parametrize("name", SPREADS)
def test_spreads_have_sources_and_hold_the_model(name):
    spread: Spread = SPREADS[name]
    kind, _, text = spread.source.partition(": ")
    assert kind in ("published", "measured", "derived", "assumed") and len(text) > 40
    assert 0 <= spread.low <= 1 <= spread.high and (spread.low < spread.high) != bool(spread.piece_cycles)


@pytest.mark.parametrize("name", PRESETS)
def test_every_guess_of_a_preset_has_an_interval(name):
    target = PRESETS[name]
    numbers = {item: source for item, source in target.sources.items() if isinstance(getattr(target, item), float)}
    assert {source.kind for source in numbers.values()} >= {"published", "assumed"}
    for item, source in numbers.items():
        assert source.low < source.high or source.kind not in ("assumed", "fitted"), item


def test_ends_of_phases_are_those_of_their_spreads(of_product):
    phases = of_product.phase_cycles
    parts = by_name(of_product)
    steps = len(of_product.executable.steps)  # each rounds
    exchange, host = SPREADS[spreads.EXCHANGE], SPREADS[spreads.HOST]
    assert parts[spreads.EXCHANGE].low == pytest.approx((1 - exchange.low) * phases["exchange"], abs=steps)
    assert parts[spreads.EXCHANGE].high == pytest.approx((exchange.high - 1) * phases["exchange"], abs=steps)
    assert parts[spreads.HOST].high == pytest.approx((host.high - 1) * phases["host_exchange"], abs=steps)
    assert parts[spreads.HOST].low == 0
    compute = sum(parts[name].low / (1 - SPREADS[name].low) for name in _OF_COMPUTE if name in parts)
    assert compute == pytest.approx(phases["compute"], rel=1e-3, abs=20 * steps)


_OF_COMPUTE = (spreads.PRODUCT, spreads.VECTOR, spreads.COMPILED, spreads.REARRANGEMENT)


def test_ends_of_constants_are_those_of_their_intervals(of_product):
    target = of_product.target
    syncs = of_product.phase_cycles["sync"] // target.internal_sync_cycles
    parts = by_name(of_product)
    assert (parts["internal_sync_cycles"].low, parts["internal_sync_cycles"].high) == (syncs * (126 - 64), 0)
    # One host exchange in and one out: a tenth of their latency, or ten times it.
    latency = 2 * target.host_latency_seconds * target.clock_hz
    assert parts["host_latency_seconds"].low == pytest.approx(0.9 * latency, rel=1e-2)
    assert parts["host_latency_seconds"].high == pytest.approx(9 * latency, rel=1e-2)


def test_errors_add_up_as_independent_ones(of_product):
    interval = of_product.interval
    assert interval.cycles == of_product.cycles and of_product.cycles in interval
    assert interval.cycles - interval.low == pytest.approx(hypot(*(x.low for x in interval.uncertainties)), abs=1)
    assert interval.high - interval.cycles == pytest.approx(hypot(*(x.high for x in interval.uncertainties)), abs=1)
    assert interval.high + 1 not in interval and interval.low - 1 not in interval


def test_a_constant_of_the_user_is_exact():
    changed = profile(product, array(128, 256), array(256, 192), device=machine(host_latency_seconds=1e-6))
    assert "host_latency_seconds" not in by_name(changed) and "host_bytes_per_second" in by_name(changed)


def test_an_operation_without_a_price_leaves_the_upper_end_open():
    def call(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((64,), np.float32), x) + 1

    interval = profile(call, array(64, dtype=np.float32)).interval
    assert interval.high is None and 0 < interval.low < interval.cycles and 10 * interval.cycles in interval


def test_a_slow_path_is_one_sided():
    odd = profile(lambda x: jax.nn.softmax(x, axis=-1) @ jnp.ones((197, 64), x.dtype), array(4, 197, 197))
    assert odd.slow_paths
    part = by_name(odd)[spreads.SLOW_PATHS]
    cause = next(row for row in odd.causes if row.name == "slow paths of odd rows")
    assert (part.low, part.high) == (cause.alone_cycles, 0)


def test_pieces_between_ipus_are_one_sided():
    def staged(x: Any, w: Any) -> Any:
        with ipu.stage(0):
            y = x @ w
        with ipu.stage(1):
            return y @ w

    figures = profile(staged, array(64, 64), array(64, 64), num_ipus=2)
    parts = by_name(figures)
    assert parts[spreads.PIECES].low == 0 and parts[spreads.PIECES].high % SPREADS[spreads.PIECES].piece_cycles == 0
    assert parts[spreads.BETWEEN_IPUS].high > 0 and figures.interval.cycles == figures.cycles


def test_the_interval_of_a_recorded_run_is_of_that_run():
    graph, program, loop, decide = looping()
    executable = compile(graph, program)
    short, long = (Profile(executable, {loop: [n], decide: [1] * n}) for n in (3, 30))
    for figures in (short, long):
        assert figures.interval.cycles == figures.cycles
    assert long.cycles - long.interval.low > short.cycles - short.interval.low > 0


def test_shares_of_sources_add_up(of_product):
    coverage = of_product.coverage
    assert sum(coverage.values()) == pytest.approx(1) and list(coverage.values()) == sorted(coverage.values())[::-1]
    assert set(coverage) <= {"published", "derived", "measured", "assumed", "fitted"}


def test_cycles_rest_on_constants_of_the_user_where_all_are():
    target = PRESETS["mk2"]
    names = set(perturbed_constants(target)) - {"ipu_link_efficiency"}  # at most 1, and of no effect on one IPU
    changed = machine(**{name: 2 * getattr(target, name) for name in names})
    assert profile(product, array(64, 64), array(64, 64), device=changed).coverage == pytest.approx({"user": 1})


def test_a_cycle_of_two_constants_is_divided_by_elasticity():
    # A host exchange of few bytes is its latency times the clock: half of its cycles rest on either.
    figures = profile(lambda x: x, array(1))
    assert figures.phase_cycles["host_exchange"] == figures.cycles
    coverage = figures.coverage
    assert coverage["assumed"] == pytest.approx(0.5, abs=1e-3) and coverage["measured"] == pytest.approx(0.5, abs=1e-3)


def test_no_steps_are_certain():
    figures = profile(lambda: None)
    assert (figures.interval.low, figures.interval.high, figures.coverage) == (0, 0, {})
