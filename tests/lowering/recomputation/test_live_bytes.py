"""What a step holds while it runs: less the smaller the share, nothing with "all", as PopART has it with "standard"."""

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
from tests.lowering.recomputation.test_recompute import SHARES, after, before
from tests.lowering.recomputation.training_steps import DEPTH, ROWS, WIDTH, X
from tests.marks import slow_but

SMALLER = [
    *("mlp", "residual", "dropout", "metrics", "batch norm", "checkpoint", "products saved", "names saved"),
    *("branches", "custom gradient", "printing", "replicas"),
]


def across(jaxpr: ClosedJaxpr) -> int:
    """Bytes that are held when the gradient begins."""
    first = next(n for n, eqn in enumerate(jaxpr.jaxpr.eqns) if stage_name(eqn).is_backward)
    return bytes_across(jaxpr, first)


def test_live_bytes_of_a_few_equations() -> None:
    """By hand: a = 12 bytes, b = 12, its view, c = 4."""

    def fun(x: jax.Array) -> jax.Array:
        a = jax.numpy.sin(x)
        b = jax.numpy.cos(a).reshape(3, 1)
        c = x.sum()
        return b + c

    jaxpr = jax.make_jaxpr(fun)(np.ones(3, np.float32))
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["sin", "cos", "reshape", "reduce_sum", "add"]
    assert live_bytes(jaxpr) == [12, 24, 12, 16, 28] and peak(jaxpr) == 28
    assert [bytes_across(jaxpr, place) for place in range(5)] == [0, 12, 12, 12, 16]


@pytest.mark.parametrize("name", slow_but({*SMALLER} - {"residual", "dropout"}, SMALLER))
def test_the_smaller_the_share_the_less_is_held(name: str) -> None:
    jaxprs = [before(name), *(after(name, Recomputation("auto", (share,)))[0] for share in SHARES)]
    for held in (peak, across):
        sizes = [held(jaxpr) for jaxpr in jaxprs]
        assert all(many >= few for many, few in pairwise(sizes)) and sizes[-1] < 0.85 * sizes[0], sizes


@pytest.mark.parametrize("name", ["skips", "second order", "scan"])
def test_where_nothing_can_be_saved_nothing_more_is_held(name: str) -> None:
    for share in SHARES:
        assert peak(after(name, Recomputation("auto", (share,)))[0]) == peak(before(name))


# Bytes that a policy saves, or that all replicas have computed together; the loss is summed over them behind.
KEPT = {
    "products saved": DEPTH * ROWS * WIDTH * 4,
    "names saved": DEPTH * ROWS * WIDTH * 4,
    "replicas": 6 * WIDTH * 4 + 4,
}


@pytest.mark.parametrize("name", [*SMALLER, "skips", "scan", "nested checkpoint"])
def test_all_keeps_nothing_but_results(name: str) -> None:
    jaxpr, _ = after(name, Recomputation("all"))
    results = set(jaxpr.jaxpr.outvars)
    first = next(n for n, eqn in enumerate(jaxpr.jaxpr.eqns) if stage_name(eqn).is_backward)
    early = {var for eqn in jaxpr.jaxpr.eqns[:first] for var in eqn.outvars} & results
    assert across(jaxpr) == sum(var.aval.size * var.aval.dtype.itemsize for var in early) + KEPT.get(name, 0)  # type: ignore[attr-defined]


@jax.custom_vjp
def summed(x: jax.Array) -> jax.Array:
    """Too dear for a gradient to repeat of its own, and said to need what it reads."""
    return lax.cumsum(x)


summed.defvjp(lambda x: (lax.cumsum(x), x), lambda x, g: (g * x,))


def operations(number: int, x: jax.Array) -> jax.Array:
    """Several of them in a row."""
    for _ in range(number):
        x = summed(x)
    return x.sum()


@pytest.mark.parametrize(
    ("number", "again"),
    [
        (7, []),  # K = 1: a checkpoint behind each
        (8, [2]),  # K = 2, [0, 2) [2, 3): checkpoints behind operations 1 and 3, and all that follow are kept
        (25, [2, 3, 4, 6, 7, 9]),  # K = 4: checkpoints behind 1, 5, 8 and 10
        (50, [2, 3, 4, 5, 6, 8, 9, 10, 11, 13, 14, 15, 17, 18, 20]),  # K = 6: behind 1, 7, 12, 16, 19 and 21
    ],
)
def test_standard_is_that_of_popart(number: int, again: list[int]) -> None:
    """Source: popart, `willow/src/intervals.cpp`: K = ⌊0.75 (⌊√(2N)⌋ − 1)⌋, of equal places the first."""
    jaxpr = run_passes(jax.make_jaxpr(jax.value_and_grad(lambda x: operations(number, x)))(X[0]))["dce"]
    new = recompute(jaxpr, Recomputation("standard"))
    old = {var for eqn in jaxpr.jaxpr.eqns for var in eqn.outvars}
    place = {var: n for n, var in enumerate([jaxpr.jaxpr.invars[0], *(eqn.outvars[0] for eqn in jaxpr.jaxpr.eqns)])}
    found = list[int]()
    for eqn in new.jaxpr.eqns:
        if old.isdisjoint(eqn.outvars):
            assert eqn.primitive.name == "cumsum"
            place[eqn.outvars[0]] = place[eqn.invars[0]] + 1  # type: ignore[index]
            found.append(place[eqn.outvars[0]])
    assert sorted(found) == again
