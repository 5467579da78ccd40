"""Live bytes of a step: fewer the smaller the share, only results with "all", as in PopART with "standard"."""

from __future__ import annotations

from itertools import pairwise

import jax
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.jaxpr import stage_name
from ipujax.lowering.passes import run_passes
from ipujax.lowering.recomputation import Recomputation, recompute
from tests.lowering.recomputation.live_bytes import bytes_across, live_bytes, peak
from tests.lowering.recomputation.test_recompute import SHARES, original_step, recomputed_step
from tests.lowering.recomputation.training_steps import DEPTH, ROWS, WIDTH, X

SMALLER = [
    *("mlp", "residual", "dropout", "metrics", "batch norm", "checkpoint", "products saved", "names saved"),
    *("branches", "custom gradient", "printing", "replicas"),
]


def bytes_at_gradient(jaxpr: ClosedJaxpr) -> int:
    """Live bytes at the beginning of the gradient."""
    first = next(n for n, eqn in enumerate(jaxpr.jaxpr.eqns) if stage_name(eqn).is_backward)
    return bytes_across(jaxpr, first)


def test_counts_live_bytes_of_a_few_equations() -> None:
    """Computed by hand: a = 12 bytes, b = 12, its view, c = 4."""

    def fun(x: jax.Array) -> jax.Array:
        a = jax.numpy.sin(x)
        b = jax.numpy.cos(a).reshape(3, 1)
        c = x.sum()
        return b + c

    jaxpr = jax.make_jaxpr(fun)(np.ones(3, np.float32))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["sin", "cos", "reshape", "reduce_sum", "add"]
    assert live_bytes(jaxpr) == [12, 24, 12, 16, 28] and peak(jaxpr) == 28
    assert [bytes_across(jaxpr, index) for index in range(5)] == [0, 12, 12, 12, 16]


@pytest.mark.parametrize("name", SMALLER)
def test_smaller_shares_have_fewer_live_bytes(name: str) -> None:
    jaxprs = [original_step(name), *(recomputed_step(name, Recomputation("auto", (share,)))[0] for share in SHARES)]
    for num_bytes in (peak, bytes_at_gradient):
        sizes = [num_bytes(jaxpr) for jaxpr in jaxprs]
        assert all(larger >= smaller for larger, smaller in pairwise(sizes)) and sizes[-1] < 0.85 * sizes[0], sizes


@pytest.mark.parametrize("name", ["skips", "second order", "scan"])
def test_never_raises_the_peak_if_nothing_can_be_saved(name: str) -> None:
    for share in SHARES:
        assert peak(recomputed_step(name, Recomputation("auto", (share,)))[0]) == peak(original_step(name))


# Bytes that a policy saves, or results of collectives; the loss is summed over replicas after the gradient.
STORED = {
    "products saved": DEPTH * ROWS * WIDTH * 4,
    "names saved": DEPTH * ROWS * WIDTH * 4,
    "replicas": 6 * WIDTH * 4 + 4,
}


@pytest.mark.parametrize("name", [*SMALLER, "skips", "scan", "nested checkpoint"])
def test_all_stores_results_only(name: str) -> None:
    jaxpr, _ = recomputed_step(name, Recomputation("all"))
    results = set(jaxpr.jaxpr.outvars)
    first = next(n for n, eqn in enumerate(jaxpr.jaxpr.eqns) if stage_name(eqn).is_backward)
    early = {var for eqn in jaxpr.jaxpr.eqns[:first] for var in eqn.outvars} & results
    assert bytes_at_gradient(jaxpr) == sum(var.aval.size * var.aval.dtype.itemsize for var in early) + STORED.get(
        name, 0
    )  # type: ignore[attr-defined]


@jax.custom_vjp
def summed(x: jax.Array) -> jax.Array:
    """Too expensive for JAX's own recomputation, and with a gradient that reads its operand."""
    return lax.cumsum(x)


summed.defvjp(lambda x: (lax.cumsum(x), x), lambda x, g: (g * x,))


def operations(number: int, x: jax.Array) -> jax.Array:
    """Several of them in a row."""
    for _ in range(number):
        x = summed(x)
    return x.sum()


@pytest.mark.parametrize(
    ("number", "recomputed"),
    [
        (7, []),  # K = 1: a checkpoint after each
        (8, [2]),  # K = 2, [0, 2) [2, 3): checkpoints after operations 1 and 3, and all that follow are stored
        (25, [2, 3, 4, 6, 7, 9]),  # K = 4: checkpoints after 1, 5, 8 and 10
        (50, [2, 3, 4, 5, 6, 8, 9, 10, 11, 13, 14, 15, 17, 18, 20]),  # K = 6: after 1, 7, 12, 16, 19 and 21
    ],
)
def test_standard_equals_popart(number: int, recomputed: list[int]) -> None:
    """Source: popart, `willow/src/intervals.cpp`: K = ⌊0.75 (⌊√(2N)⌋ − 1)⌋, of equal positions the first."""
    jaxpr = run_passes(jax.make_jaxpr(jax.value_and_grad(lambda x: operations(number, x)))(X[0]))["dce"]
    recomputed_jaxpr = recompute(jaxpr, Recomputation("standard"))
    original_vars = {var for eqn in jaxpr.jaxpr.eqns for var in eqn.outvars}
    position = {var: n for n, var in enumerate([jaxpr.jaxpr.invars[0], *(eqn.outvars[0] for eqn in jaxpr.jaxpr.eqns)])}
    positions = list[int]()
    for eqn in recomputed_jaxpr.jaxpr.eqns:
        if original_vars.isdisjoint(eqn.outvars):
            assert eqn.primitive.name == "cumsum"
            position[eqn.outvars[0]] = position[eqn.invars[0]] + 1  # type: ignore[index]
            positions.append(position[eqn.outvars[0]])
    assert sorted(positions) == recomputed
