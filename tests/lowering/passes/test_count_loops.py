"""Pass `count_loops`: scans of the trip counts that loops have when they run, and loops that stay loops."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jax_compat import check_jaxpr, jaxpr_as_fun
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.passes.count_loops import count_loops, iterations
from ipujax.lowering.passes.inline import inline

X = np.linspace(-1, 1, 6, dtype=np.float32)
COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "ne", "eq")}
MOST = 300  # more iterations than a counter of 8 bits has values: the loop never ends


def halved(c: Any) -> Any:
    return jnp.sin(c) * 0.5


def loop(condition: Callable[[Any], Any], step: Callable[[Any], Any], *initial: Any) -> Callable[[Any], Any]:
    """A loop over a counter and further carries that no iteration changes; `condition` and `step` read all of them."""

    def body(state: Any) -> Any:
        *counters, x = state
        return (step(counters), *counters[1:], halved(x) + counters[0])

    return lambda x: lax.while_loop(lambda state: condition(state[:-1]), body, (*initial, x))


COUNTED: dict[str, tuple[Callable[[Any], Any], int]] = {
    "<": (loop(lambda c: c[0] < 5, lambda c: c[0] + 1, 0), 5),
    "<=": (loop(lambda c: c[0] <= 5, lambda c: c[0] + 2, 0), 3),
    "!=": (loop(lambda c: c[0] != 6, lambda c: c[0] + 3, 0), 2),
    "down": (loop(lambda c: c[0] > 0, lambda c: c[0] - 2, 5), 3),
    "down to": (loop(lambda c: c[0] >= 0, lambda c: c[0] - 1, 5), 6),
    "mirrored": (loop(lambda c: lax.gt(5, c[0]), lambda c: 1 + c[0], 0), 5),
    "negated": (loop(lambda c: ~(c[0] >= 5), lambda c: c[0] + 1, 0), 5),
    "until equal": (loop(lambda c: jnp.logical_not(c[0] == 5), lambda c: c[0] + 1, 0), 5),
    "while equal": (loop(lambda c: c[0] == 5, lambda c: c[0] + 1, 5), 1),
    "no iteration": (loop(lambda c: c[0] < 5, lambda c: c[0] + 1, 5), 0),
    "bound in a carry": (loop(lambda c: c[0] < c[1], lambda c: c[0] + 1, 0, 5), 5),
    "bound of an array": (loop(lambda c: c[0] < jnp.asarray(5), lambda c: c[0] + jnp.int32(1), 0), 5),
    "bound and step in carries": (loop(lambda c: c[0] < c[1] - 1, lambda c: c[0] + 2 * c[2], 0, 6, 1), 3),
    "two additions": (loop(lambda c: c[0] + 1 < 5, lambda c: (c[0] + 3) - 2, 0), 4),
    "int8": (loop(lambda c: c[0] < jnp.int32(5), lambda c: c[0] + jnp.int8(1), np.int8(0)), 5),
    "uint8 down": (loop(lambda c: c[0] > 0, lambda c: c[0] - jnp.uint8(1), np.uint8(5)), 5),
    "largest": (loop(lambda c: c[0] < 127, lambda c: c[0] + jnp.int8(1), np.int8(124)), 3),
}
DATA: dict[str, Callable[[Any], Any]] = {
    "two comparisons": lambda x: lax.while_loop(
        lambda c: (c[0] < 5) & (c[1].sum() < 9), lambda c: (c[0] + 1, halved(c[1])), (0, x)
    ),
    "bound": lambda x: loop(lambda c: c[0] < c[1], lambda c: c[0] + 1, 0, x.argmax())(x),
    "step": lambda x: loop(lambda c: c[0] < 5, lambda c: c[0] + c[1], 0, 1 + x.argmin())(x),
    "start": lambda x: loop(lambda c: c[0] < 5, lambda c: c[0] + 1, x.argmin())(x),
    "product": loop(lambda c: c[0] < 50, lambda c: c[0] * 3, 1),
    "changing bound": lambda x: lax.while_loop(
        lambda c: c[0] < c[1], lambda c: (c[0] + 2, c[1] + 1, halved(c[2])), (0, 5, x)
    ),
    "wraps around": loop(lambda c: c[0] != 4, lambda c: c[0] + jnp.uint8(1), np.uint8(250)),
    "wraps beyond the bound": loop(lambda c: c[0] < 120, lambda c: c[0] + jnp.int8(100), np.int8(0)),
    "float": loop(lambda c: c[0] < 2, lambda c: c[0] + 0.5, 0.0),
    "batch": lambda x: jax.vmap(lambda n: loop(lambda c: c[0] < c[1], lambda c: c[0] + 1, 0, n)(x))(jnp.arange(3)),
}


def counted(fun: Callable[..., Any], *args: Any) -> Any:
    """The jaxpr after the pass, which is well formed and computes the same."""
    before = inline(jax.make_jaxpr(fun)(*args))
    jaxpr = count_loops(before)
    check_jaxpr(jaxpr.jaxpr)
    for actual, expected in zip(jaxpr_as_fun(jaxpr)(*args), jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    return jaxpr


def lengths(jaxpr: Any) -> list[int | None]:
    """Trip count of each loop, None where it is data."""
    loops = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name in ("scan", "while")]
    return [eqn.params.get("length") for eqn in loops]


@pytest.mark.parametrize("name", COUNTED)
def test_a_counted_loop_is_a_scan(name: str) -> None:
    fun, count = COUNTED[name]
    assert lengths(counted(fun, X)) == [count]


@pytest.mark.parametrize("name", DATA)
def test_a_loop_of_data_stays(name: str) -> None:
    assert lengths(counted(DATA[name], X)) == [None]


def test_iterations_are_those_that_run() -> None:
    for name, compare in COMPARISONS.items():
        for start in range(-4, 5):
            for end in range(-4, 5):
                for step in range(-3, 4):
                    counter = start
                    count = 0
                    while compare(counter, end) and count < MOST:
                        counter += step
                        count += 1
                    expected = count if count < MOST else None
                    assert iterations(start, end, step, name) == expected, (start, name, end, step)


def test_a_counter_that_wraps_around_is_not_counted_wrong() -> None:
    rng = np.random.default_rng(0)
    num_counted = 0
    for _ in range(60):
        start, end, step = rng.integers(-128, 128, 3).astype(np.int8)
        name = str(rng.choice(list(COMPARISONS)))

        def fun(start: Any = start, end: Any = end, step: Any = step, compare: Any = COMPARISONS[name]) -> Any:
            return lax.while_loop(lambda i: compare(i, end), lambda i: i + step, start)

        (length,) = lengths(count_loops(inline(jax.make_jaxpr(fun)())))
        counter = int(start)
        count = 0
        while COMPARISONS[name](counter, int(end)) and count < MOST:
            counter = (counter + int(step) + 128) % 256 - 128
            count += 1
        assert length in (None, count), (start, name, end, step)
        num_counted += length is not None
    assert num_counted > 20


def test_known_values_reach_loops_inside() -> None:
    bound = jnp.asarray(3)

    def inner(x: Any, n: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, halved(c[1])), (0, x))[1]

    assert lengths(counted(lambda x: lax.scan(lambda c, _: (inner(c, bound), None), x, None, length=4), X)) == [4, 3]
    assert lengths(counted(lambda x: lax.fori_loop(0, 4, lambda i, c: inner(c, i), x), X)) == [4, None]
    branches = lambda x: lax.cond(x[0] > 0, lambda c: inner(c, bound), lambda c: c, x)  # noqa: E731
    assert lengths(counted(branches, X)) == [3]
    until = lambda x: lax.while_loop(lambda c: c.sum() > 9, lambda c: inner(c, bound), x)  # noqa: E731
    assert lengths(counted(until, X)) == [None, 3]


def test_effects_of_a_condition_stay() -> None:
    def fun(x: Any) -> Any:
        def condition(state: Any) -> Any:
            jax.debug.callback(lambda i: None, state[0])
            return state[0] < 3

        return lax.while_loop(condition, lambda c: (c[0] + 1, halved(c[1])), (0, x))

    assert lengths(counted(fun, X)) == [None]


def test_a_program_without_counted_loops_stays_the_same_object() -> None:
    for fun in (lambda x: lax.fori_loop(0, 3, lambda i, c: c + i, x), DATA["float"]):
        jaxpr = inline(jax.make_jaxpr(fun)(X))
        assert count_loops(jaxpr) is jaxpr


def in_two_stages(loop: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def model(x: Any) -> Any:
        with ipu.stage(0):
            h = loop(x)
        with ipu.stage(1):
            return loop(2 * h).sum()

    return ipu.pipeline(model, micro_batches=3)


@pytest.mark.parametrize("placed", [lambda loop: loop, in_two_stages])
def test_a_counted_loop_costs_as_a_fori_loop(placed: Callable[[Any], Any]) -> None:
    def cycles(fun: Callable[[Any], Any]) -> int:
        return ipu.jit(placed(fun), device=ipu.IPUModel(num_ipus=num_ipus, tiles_per_ipu=4)).profile(X).cycles

    num_ipus = 2 if placed is in_two_stages else 1
    counted_loop = loop(lambda c: c[0] < 7, lambda c: c[0] + 1, 0)
    fori = cycles(lambda x: lax.fori_loop(0, 7, lambda i, c: halved(c) + i, x))
    assert cycles(lambda x: counted_loop(x)[-1]) == fori
