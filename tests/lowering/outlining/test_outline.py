"""Pass `outline`: equal and unequal runs, and numbers that stay to the bit, in any program.

The cost of code is high here, so that every repeated run is worth a function.
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
from ipujax.lowering.outlining import CallCosts, outline
from ipujax.lowering.outlining.repeats import Dataflow
from ipujax.lowering.source_info import name_stack
from tests.lowering.helpers import set_byte_cost, share_all
from tests.lowering.outlining.outline_helpers import LENGTH, RNG, WIDTH, calls, count, normal, outlined


@pytest.fixture(autouse=True)
def costly_code(monkeypatch: pytest.MonkeyPatch) -> None:
    set_byte_cost(monkeypatch, 8)


X = normal(LENGTH, WIDTH)
W = normal(WIDTH, WIDTH)
V = normal(WIDTH, WIDTH)


def block(w: jax.Array, x: jax.Array, scale: float = 2.0) -> jax.Array:
    return jnp.tanh(jnp.sin(jnp.tanh(x @ w) @ w) * scale) + x


def noisy(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda _: None, x[0, 0])
    return x


def in_scan(w: jax.Array, x: jax.Array) -> Any:
    return lax.scan(lambda c, _: (block(w, block(w, c)), c.sum()), x, None, length=3)


def nested_scans(w: jax.Array, x: jax.Array) -> Any:
    for _ in range(3):
        x = block(w, lax.scan(lambda c, _: (block(w, block(w, c)), None), x, None, length=3)[0])
    return x


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[int]]] = {
    "same weight": (lambda w, x: block(w, block(w, block(w, x))), (W, X), [3]),
    "other weights": (lambda w, v, x: block(w, block(v, block(w, x))), (W, V, X), [3]),
    "equations between": (lambda w, x: block(w, jnp.cumsum(block(w, jnp.sort(block(w, x))), 0)), (W, X), [3]),
    "once": (block, (W, X), []),
    "up to another literal": (lambda w, x: block(w, block(w, x), 3.0), (W, X), [2]),
    "another shape": (lambda w, x: (block(w, x), block(w, x[:4])), (W, X), []),
    "another dtype": (lambda w, x: (block(w, x), block(w.astype(np.float16), x.astype(np.float16))), (W, X), []),
    "effects between": (lambda w, x: block(w, noisy(block(w, noisy(x)))), (W, X), [2]),
    "in a loop": (in_scan, (W, X), [2]),
    "with loops inside": (nested_scans, (W, X), [3, 2]),
    "results of one run only": (lambda w, x: (y := block(w, x), block(w, y)[0], y.sum()), (W, X), [2]),
    "views of results": (lambda w, x: (block(w, x).T, block(w, 2 * x).T[::-1]), (W, X), [2]),
    "little work": (lambda x, y: (x * 2 + y, y * 2 + x), (X, X), []),
}


@pytest.mark.parametrize("name", CASES)
def test_outlines_equal_runs(name: str) -> None:
    fun, args, expected = CASES[name]
    assert count(fun, *args) == expected


def test_copies_that_one_operation_could_not_hold_cost_their_bytes() -> None:
    """They are live beside the values that they are copies of, while code is shared by all calls."""
    jaxpr = jax.make_jaxpr(lambda w, v, x: block(w, block(v, x)))(W, V, X)
    copied_bytes = X.nbytes + W.nbytes
    for operation_bytes, expected in ((2 * copied_bytes, 2), (0, 0)):
        costs = CallCosts(byte_cost=1e6, num_tiles=1, operation_bytes=operation_bytes)
        names = [eqn.primitive.name for eqn in outline(jaxpr, costs).eqns]
        assert names.count("function_call") == expected


def test_distinguishes_one_value_twice_from_two_values() -> None:
    """One value in a run is one value in its equals."""

    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sin(jnp.tanh(jnp.exp(a) @ b) @ a) @ b

    assert count(lambda a, b: (run(a, a), run(b, b)), W, V) == [2]
    assert count(lambda a, b: (run(a, a), run(a, b)), W, V) == []


def test_separates_recomputation_from_the_first_computation() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (jax.checkpoint(block)(w, jax.checkpoint(block)(w, x)) ** 2).sum()

    jaxpr = outlined(jax.value_and_grad(loss), W, X)
    bodies = {eqn.params["jaxpr"].jaxpr for eqn in calls(jaxpr)}
    marks = [{stage_name(eqn).is_recomputed for eqn in body.eqns if eqn.primitive.name == "sin"} for body in bodies]
    assert sorted(map(sorted, marks)) == [[False], [True]]


def test_separates_stages_and_skips_equations_without_one() -> None:
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        for number in range(4):
            with ipu.stage(number // 2):
                x = block(w, x)
        return block(w, block(w, x))

    jaxpr = outlined(fun, W, X)
    assert [stage_name(eqn).stage for eqn in calls(jaxpr)] == [0, 0, 1, 1]
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("sin") == 2


def test_skips_branches_that_put_values_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function runs as one piece, without transfers to streaming memory."""
    share_all(monkeypatch)
    host = jax.memory.Space.Host

    def branches(x: jax.Array) -> jax.Array:
        on_host = lax.cond(x[0, 0] > 0, lambda y: jax.device_put(-y, host), lambda y: jax.device_put(y, host), x)
        return block(W, jax.device_put(on_host, jax.memory.Space.Device))

    def fun(x: jax.Array) -> jax.Array:
        return branches(branches(x))

    np.testing.assert_allclose(ipu.jit(fun)(X), jax.jit(fun)(X), rtol=1e-5)


def test_names_functions_and_calls() -> None:
    """A function has its name and the common scopes of its calls; each call keeps its own."""

    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        for number in range(3):
            with jax.named_scope(f"layer{number}"), jax.named_scope("inner"):
                x = block(w, x)
        return x

    jaxpr = outlined(fun, W, X)
    assert [name_stack(eqn) for eqn in calls(jaxpr)] == [f"layer{number}/inner" for number in range(3)]
    (body,) = {eqn.params["jaxpr"].jaxpr for eqn in calls(jaxpr)}
    assert {name_stack(eqn) for eqn in body.eqns} == {"block/inner"}


OPERATIONS: tuple[Callable[..., jax.Array], ...] = (
    *(jnp.sin, jnp.tanh, lambda a: a.T, lambda a: a[::-1], lambda a: a * 2, lambda a: jnp.broadcast_to(a[:1], (5, 5))),
    *(jnp.add, jnp.multiply, lambda a, b: a @ b / 5, lambda a, b: jnp.where(a > 0, a, b)),
)


def random_program(seed: int) -> Callable[..., list[jax.Array]]:
    """Blocks of operations, each several times, on random earlier values."""
    rng = np.random.default_rng(seed)
    blocks = [
        [(OPERATIONS[int(rng.integers(len(OPERATIONS)))], rng.integers(0, 5, 2)) for _ in range(rng.integers(1, 9))]
        for _ in range(3)
    ]
    order = rng.integers(0, 3, 12)
    picks = rng.integers(0, 99, (12, 2))

    def fun(*values: jax.Array) -> list[jax.Array]:
        results = list(values)
        for number, pick in zip(order, picks, strict=True):
            values_of_block = [results[int(n) % len(results)] for n in pick]
            for operation, operands in blocks[int(number)]:
                arity = 2 if OPERATIONS.index(operation) > 5 else 1
                inputs = (values_of_block[-1 - int(n) % len(values_of_block)] for n in operands[:arity])
                values_of_block.append(operation(*inputs))
            results.append(values_of_block[-1])
        return results[len(values) :: 2]

    return fun


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outlining keeps the numbers whether it pays or not; and something is outlined."""
    share_all(monkeypatch)
    assert count(random_program(seed), *(RNG.normal(size=(5, 5)).astype(np.float32) for _ in range(3)))


def test_numbers_windows_by_equations_and_dataflow() -> None:
    """The numbers of windows against a comparison of all pairs."""
    jaxpr = jax.make_jaxpr(random_program(3))(*[np.zeros((5, 5), np.float32)] * 3).jaxpr
    numbers = EquationNumbers()

    def form(start: int, length: int) -> tuple[Any, ...]:
        variables: dict[Any, int] = {}
        return tuple(
            (
                numbers.of(eqn),
                *(
                    variables.setdefault(a, len(variables))
                    for a in (*eqn.invars, *eqn.outvars)
                    if hasattr(a, "count") or not hasattr(a, "val")
                ),
            )
            for eqn in jaxpr.eqns[start : start + length]
        )

    flow = Dataflow(jaxpr, numbers)
    for length in (1, 2, 3, 5, 8, 13):
        window_numbers = flow.windows(length).numbers.tolist()
        forms = [form(start, length) for start in range(len(window_numbers))]
        assert len(set(window_numbers)) == len(set(forms)) == len(set(zip(window_numbers, forms, strict=True)))


def test_casts_at_the_boundary_of_a_run_are_outside() -> None:
    def normalised(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        wide = (x @ w).astype(jnp.float32)
        mean = wide.mean(0)
        return (jnp.tanh(wide - mean) * 2).astype(jnp.float16), mean, wide

    def fun(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        total = jnp.zeros(WIDTH)
        for w in ws:
            x, mean, wide = normalised(w, x)
            total += mean + jnp.exp(wide).sum(0)
        return total

    ws = [normal(WIDTH, WIDTH).astype(np.float16) for _ in range(LENGTH)]
    jaxpr = outlined(fun, ws, normal(WIDTH, WIDTH).astype(np.float16))
    large = [
        atom.aval.dtype
        for call in calls(jaxpr)
        for atom in (*call.invars, *call.outvars)
        if atom.aval.shape == (WIDTH, WIDTH)
    ]
    assert large
    assert set(large) == {np.dtype(np.float16)}
