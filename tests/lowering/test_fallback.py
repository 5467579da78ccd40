"""Primitives without a rule: the same numbers as plain JAX, on one tile, named in the graph."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.rules import RULES
from ipujax.runtime.vertices import NO_TILE
from tests.lowering.helpers import check, lowered, small_target
from tests.lowering.op_case import OpCase
from tests.lowering.op_rows_fallback import fallback_rows

A = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)


@pytest.mark.parametrize("case", fallback_rows(), ids=lambda case: case.primitive)
def test_all_of_them(case: OpCase) -> None:
    arguments = case.arguments()
    assert case.primitive in set(lowered(case.fun, arguments, small_target(7)).graph.fallbacks.values())
    check(case.fun, *arguments, tiles=(7,), rtol=case.rtol, atol=case.atol)


def test_several_results_of_several_dtypes() -> None:
    check(lambda a: lax.linalg.lu(a), A, rtol=1e-5, tiles=(1, 7))


def test_complex_numbers() -> None:
    check(lambda a: jnp.fft.fft(a.reshape(-1)[:24]), A, rtol=1e-5, atol=1e-5)


def test_parameters_that_hold_a_jaxpr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "reduce")

    def fun(a: jax.Array) -> jax.Array:
        return lax.reduce(a, np.float32(0), lambda x, y: x * 0.5 + y, (1,))

    check(fun, A, rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 5, 1)])
def test_sizes(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "erf_inv", raising=False)
    check(lambda a: lax.erf_inv(a), np.full(shape, 0.3, np.float32), tiles=(1, 4), rtol=1e-6)


def test_operand_without_elements_and_result_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "reduce_sum", raising=False)
    check(lambda a: a.sum(0), np.zeros((0, 3), np.float32), tiles=(1, 4))


def test_named_logged_once_and_spread(caplog: pytest.LogCaptureFixture) -> None:
    def fun(a: jax.Array) -> list[jax.Array]:
        return [jnp.fft.fft(a[n]) for n in range(4)]

    with caplog.at_level(logging.INFO, "ipujax"):
        program = lowered(fun, (A,), small_target(16))
    assert sorted(program.graph.fallbacks.values()) == ["fft"] * 4
    assert [record.getMessage().split()[0] for record in caplog.records if "fft" in record.getMessage()] == ["fft"]
    groups = [program.graph.groups[compute_set] for compute_set in program.graph.fallbacks]
    tiles = {int(group.tile.max()) for (group,) in groups}
    assert len(tiles) == 4 and NO_TILE not in tiles


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random_split", "random_bits", "random_fold_in"):
        monkeypatch.delitem(RULES, name, raising=False)
    check(
        lambda k: jax.random.bits(jax.random.fold_in(jax.random.split(k)[1], 3), (3, 2)), jax.random.key(4), tiles=(4,)
    )
