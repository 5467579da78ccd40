"""The pass `outline`: what is one run and what is not, and that numbers stay to the bit, in any program.

Code is dear here, so that all that is worth finding is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jaxpr import EquationNumbers, stage_name
from ipujax.lowering.outlining.dataflow import Dataflow
from ipujax.lowering.source_info import name_stack
from tests.lowering.helpers import price_bytes, share_all
from tests.lowering.outlining.outline_helpers import LENGTH, RNG, WIDTH, calls, count, normal, outlined


@pytest.fixture(autouse=True)
def dear_code(monkeypatch: pytest.MonkeyPatch) -> None:
    price_bytes(monkeypatch, 8)


# --- what is one run --------------------------------------------------------------------------------------------------

X, W, V = normal(LENGTH, WIDTH), normal(WIDTH, WIDTH), normal(WIDTH, WIDTH)


def part(w: jax.Array, x: jax.Array, scale: float = 2.0) -> jax.Array:
    return jnp.tanh(jnp.sin(jnp.tanh(x @ w) @ w) * scale) + x


def noisy(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda _: None, x[0, 0])
    return x


def in_scan(w: jax.Array, x: jax.Array) -> Any:
    return lax.scan(lambda c, _: (part(w, part(w, c)), c.sum()), x, None, length=3)


def nested_scans(w: jax.Array, x: jax.Array) -> Any:
    for _ in range(3):
        x = part(w, lax.scan(lambda c, _: (part(w, part(w, c)), None), x, None, length=3)[0])
    return x


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[int]]] = {
    "same weight": (lambda w, x: part(w, part(w, part(w, x))), (W, X), [3]),
    "other weights": (lambda w, v, x: part(w, part(v, part(w, x))), (W, V, X), [3]),
    "apart": (lambda w, x: part(w, jnp.cumsum(part(w, jnp.sort(part(w, x))), 0)), (W, X), [3]),
    "once": (part, (W, X), []),
    "up to another literal": (lambda w, x: part(w, part(w, x), 3.0), (W, X), [2]),
    "another shape": (lambda w, x: (part(w, x), part(w, x[:4])), (W, X), []),
    "another dtype": (lambda w, x: (part(w, x), part(w.astype(np.float16), x.astype(np.float16))), (W, X), []),
    "effects between": (lambda w, x: part(w, noisy(part(w, noisy(x)))), (W, X), [2]),
    "in a loop": (in_scan, (W, X), [2]),
    "with loops inside": (nested_scans, (W, X), [3, 2]),
    "results of one alone": (lambda w, x: (y := part(w, x), part(w, y)[0], y.sum()), (W, X), [2]),
    "views of what it makes": (lambda w, x: (part(w, x).T, part(w, 2 * x).T[::-1]), (W, X), [2]),
    "little work": (lambda x, y: (x * 2 + y, y * 2 + x), (X, X), []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_outlined(name: str) -> None:
    fun, args, expected = CASES[name]
    assert count(fun, *args) == expected


def test_one_value_twice_is_not_two_values() -> None:
    """What is one value in a run is one in its equals."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sin(jnp.tanh(jnp.exp(a) @ b) @ a) @ b

    assert count(lambda a, b: (run(a, a), run(b, b)), W, V) == [2]
    assert count(lambda a, b: (run(a, a), run(a, b)), W, V) == []


def test_what_a_checkpoint_computes_again_is_apart_from_the_first_time() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (jax.checkpoint(part)(w, jax.checkpoint(part)(w, x)) ** 2).sum()

    jaxpr = outlined(jax.value_and_grad(loss), W, X)
    bodies = {eqn.params["jaxpr"].jaxpr for eqn in calls(jaxpr)}
    marks = [{stage_name(eqn).is_recomputed for eqn in body.eqns if eqn.primitive.name == "sin"} for body in bodies]
    assert sorted(map(sorted, marks)) == [[False], [True]]


def test_stages_are_apart_and_what_is_outside_of_all_is_left() -> None:
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        for number in range(4):
            with ipu.stage(number // 2):
                x = part(w, x)
        return part(w, part(w, x))

    jaxpr = outlined(fun, W, X)
    assert [stage_name(eqn).stage for eqn in calls(jaxpr)] == [0, 0, 1, 1]
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("sin") == 2


def test_names() -> None:
    """Of the scopes of layers what all have in common at both ends, behind the function's name; calls keep all."""

    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        for number in range(3):
            with jax.named_scope(f"layer{number}"), jax.named_scope("inner"):
                x = part(w, x)
        return x

    jaxpr = outlined(fun, W, X)
    assert [name_stack(eqn) for eqn in calls(jaxpr)] == [f"layer{number}/inner" for number in range(3)]
    (body,) = {eqn.params["jaxpr"].jaxpr for eqn in calls(jaxpr)}
    assert {name_stack(eqn) for eqn in body.eqns} == {"part/inner"}


# --- any program ------------------------------------------------------------------------------------------------------

OPERATIONS: tuple[Callable[..., jax.Array], ...] = (
    *(jnp.sin, jnp.tanh, lambda a: a.T, lambda a: a[::-1], lambda a: a * 2, lambda a: jnp.broadcast_to(a[:1], (5, 5))),
    *(jnp.add, jnp.multiply, lambda a, b: a @ b / 5, lambda a, b: jnp.where(a > 0, a, b)),
)


def random_program(seed: int) -> Callable[..., list[jax.Array]]:
    """Blocks of operations, each several times, on values picked from those before."""
    rng = np.random.default_rng(seed)
    blocks = [
        [(OPERATIONS[int(rng.integers(len(OPERATIONS)))], rng.integers(0, 5, 2)) for _ in range(rng.integers(1, 9))]
        for _ in range(3)
    ]
    order, picks = rng.integers(0, 3, 12), rng.integers(0, 99, (12, 2))

    def fun(*values: jax.Array) -> list[jax.Array]:
        made = list(values)
        for number, pick in zip(order, picks, strict=True):
            own = [made[int(n) % len(made)] for n in pick]
            for operation, operands in blocks[int(number)]:
                arity = 2 if OPERATIONS.index(operation) > 5 else 1
                own.append(operation(*(own[-1 - int(n) % len(own)] for n in operands[:arity])))
            made.append(own[-1])
        return made[len(values) :: 2]

    return fun


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever pays, outlining is right; and something is outlined."""
    share_all(monkeypatch)
    assert count(random_program(seed), *(RNG.normal(size=(5, 5)).astype(np.float32) for _ in range(3)))


def test_equal_windows_are_those_with_equal_equations_and_dataflow() -> None:
    """The numbers of windows against a comparison of all pairs."""
    jaxpr = jax.make_jaxpr(random_program(3))(*[np.zeros((5, 5), np.float32)] * 3).jaxpr
    numbers = EquationNumbers()

    def form(start: int, length: int) -> tuple[Any, ...]:
        known: dict[Any, int] = {}
        return tuple(
            (
                numbers.of(eqn),
                *(
                    known.setdefault(a, len(known))
                    for a in (*eqn.invars, *eqn.outvars)
                    if hasattr(a, "count") or not hasattr(a, "val")
                ),
            )
            for eqn in jaxpr.eqns[start : start + length]
        )

    flow = Dataflow(jaxpr, numbers)
    for length in (1, 2, 3, 5, 8, 13):
        found = flow.windows(length).numbers.tolist()
        forms = [form(start, length) for start in range(len(found))]
        assert len(set(found)) == len(set(forms)) == len(set(zip(found, forms, strict=True)))
