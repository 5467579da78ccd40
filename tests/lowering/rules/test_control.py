"""Loops and branches against plain JAX: carries, stacks, closures, nesting, and trip counts of zero."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.runtime.graph import distinct
from ipujax.runtime.graph.program import Repeat, RepeatWhile, Switch
from tests.lowering.helpers import check, lowered, small_target

RNG = np.random.default_rng(3)
X = RNG.normal(size=(5, 29)).astype(np.float32)
Y = RNG.normal(size=(5, 29)).astype(np.float32)
SQUARE = RNG.normal(size=(9, 9)).astype(np.float32) / 3
TILES = (7,)  # test_ops.py has loops and branches on one tile, too


def close(fun: Callable[..., Any], *args: Any, tolerance: float = 1e-6) -> None:
    """Compares within the rounding of a fused multiply-add."""
    check(fun, *args, tiles=TILES, rtol=tolerance, atol=tolerance)


CARRIES: dict[str, Callable[[Any], Any]] = {
    "swapped": lambda c: (c[1], c[0]),
    "swapped-and-changed": lambda c: (c[1] * 0.5, c[0] + 1),
    "both-from-one": lambda c: (c[0] + c[1], c[0]),
    "same": lambda c: (c[0], c[1]),
    "one-same": lambda c: (c[0], c[1] + c[0]),
    "reversed-view": lambda c: (c[0][::-1], c[1][:, ::-1]),
    "overlapping-view": lambda c: (jnp.concatenate([c[0][1:], c[0][:1]]), c[1]),
    "one-twice": lambda c: (c[0], c[0]),
    "view-of-the-other": lambda c: (jnp.broadcast_to(c[1][:1], c[1].shape), c[0] * 2),
    "constant": lambda c: (jnp.ones_like(c[0]), c[1] + c[0]),
}


@pytest.mark.parametrize(("loop", "kind"), [*product(("fori", "while"), CARRIES)])
def test_carries(kind: str, loop: str) -> None:
    step = CARRIES[kind]
    if loop == "fori":  # a static trip count becomes a scan
        close(lambda x, y: lax.fori_loop(0, 3, lambda i, c: step(c), (x, y)), X, Y)
    else:
        close(lambda x, y: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, *step(s[1:])), (0, x, y)), X, Y)


def test_square_carry_transposed_in_place() -> None:
    close(lambda x: lax.fori_loop(0, 3, lambda i, c: c.T, x), SQUARE)
    close(lambda x: lax.fori_loop(0, 3, lambda i, c: c.T + c, x), SQUARE)


@pytest.mark.parametrize(("length", "reverse"), [*product((1, 2, 5), (False, True))])
def test_scan_pairs_slices_with_iterations(length: int, reverse: bool) -> None:
    def fun(xs: Any, c: Any) -> Any:
        return lax.scan(lambda c, x: (c * 0.5 + x, (c, x * 2)), c, xs, reverse=reverse)

    close(fun, X[:length], X[0])


@pytest.mark.parametrize("shape", [(0, 29), (0,), (3, 0), (3, 0, 2)])
def test_scan_over_empty_arrays(shape: tuple[int, ...]) -> None:
    xs = np.zeros(shape, np.float32)
    close(lambda xs, c: lax.scan(lambda c, x: (c + x.sum(), x + 1), c, xs), xs, np.float32(2))


@pytest.mark.parametrize("shape", [(0,), (0, 2, 2), (0, 7), (1, 0), (3, 0, 2)])
def test_loops_over_a_reshaped_array_without_elements(shape: tuple[int, ...]) -> None:
    """A stack of no slots may be a view of an array with other slots."""
    close(lambda x: lax.map(lambda row: row * 2, x.reshape(shape)), np.zeros((0, 4), np.float32))
    close(
        lambda x: lax.scan(lambda c, row: (c + row.sum(), row), 1.0, x.reshape(shape), reverse=True),
        np.zeros((0, 4), np.float32),
    )


def test_scan_without_carry_without_stacks_without_slices() -> None:
    close(lambda xs: lax.scan(lambda c, x: (None, x + 1), None, xs)[1], X)
    close(lambda c: lax.scan(lambda c, _: (c + 1, None), c, None, length=4)[0], X)
    close(lambda c: lax.scan(lambda c, _: (c, c * 2), c, None, length=4), X)


def test_stacks_slices_carries_and_constants() -> None:
    close(lambda xs: lax.scan(lambda c, x: (c + x, (x, c, jnp.zeros(3), x[::2], xs[0])), xs[0], xs), X)


def test_scan_over_a_view_and_over_a_result() -> None:
    def step(c: Any, x: Any) -> Any:
        return c + x, c.sum()

    close(lambda x: lax.scan(step, jnp.zeros(5), x.T), X, tolerance=1e-5)
    close(lambda x: lax.scan(step, jnp.zeros(29), jnp.broadcast_to(x[0], (3, 29))), X, tolerance=1e-5)
    close(lambda x: lax.scan(step, jnp.zeros(29), jnp.tanh(x)[1:4]), X, tolerance=1e-5)


def test_scans_of_integers_booleans_and_scalars() -> None:
    flags = X > 0
    close(lambda f: lax.scan(lambda c, x: (c ^ x, c & x), f[0], f), flags)
    close(lambda n: lax.scan(lambda c, x: (c + x, c * x), jnp.int32(1), n), np.arange(7, dtype=np.int32))


def test_carries_keys_through_loops() -> None:
    def draw(key: Any, x: Any) -> Any:
        def body(key: Any, row: Any) -> Any:
            key, sub = jax.random.split(key)
            return key, row + jax.random.uniform(sub, row.shape)

        return lax.scan(body, key, x)

    close(draw, jax.random.key(1), X[:3])
    close(
        lambda keys: lax.scan(lambda c, k: (c, jax.random.bits(k, (3,))), 0, keys)[1],
        jax.random.split(jax.random.key(2), 3),
    )


def test_gradient_of_scan() -> None:
    def loss(w: Any, xs: Any) -> Any:
        last, states = lax.scan(lambda c, x: ((s := jnp.tanh(c @ w + x[:9])), s.sum()), xs[0, :9], xs)
        return (last**2).sum() + (states * jnp.arange(5.0)).sum()

    check(jax.grad(loss, (0, 1)), SQUARE, X, tiles=TILES, rtol=1e-4, atol=1e-5)


def test_gradient_of_rematerialised_scan() -> None:
    def loss(w: Any, xs: Any) -> Any:
        body = jax.checkpoint(lambda c, x: (jnp.sin(c @ w) + x[:9], None))
        return lax.scan(body, xs[0, :9], xs, reverse=True)[0].sum()

    check(jax.grad(loss, (0, 1)), SQUARE, X, tiles=TILES, rtol=1e-4, atol=1e-5)


def test_scan_in_while_in_scan() -> None:
    def inner(c: Any, x: Any) -> Any:
        return lax.scan(lambda a, b: (a * 0.9 + b, a.sum()), c, x)

    def middle(c: Any, row: Any) -> Any:
        def body(s: Any) -> Any:
            total, sums = inner(s[1], X)
            return s[0] + 1, total + row * sums.mean()

        return lax.while_loop(lambda s: s[0] < 2, body, (0, c))[1], c[0]

    close(lambda x: lax.scan(middle, x[0], x[:3]), X, tolerance=2e-5)


def test_while_with_closures_in_condition_and_body() -> None:
    def fun(x: Any, limit: Any, step: Any) -> Any:
        return lax.while_loop(lambda c: c.max() < limit, lambda c: c + step * jnp.abs(x), x)

    close(fun, X, np.float32(5), np.float32(0.5), tolerance=1e-5)


def test_while_without_iteration_and_with_a_carried_predicate() -> None:
    close(lambda x: lax.while_loop(lambda c: c[0], lambda c: (c[0], c[1] + 1), (False, x)), X)
    close(
        lambda x: lax.while_loop(lambda c: c[0], lambda c: (c[1].sum() < 9, c[1] + 1), (True, x)),
        np.zeros(3, np.float32),
    )


def test_keeps_the_initial_value_of_a_loop() -> None:
    close(lambda x: (lax.fori_loop(0, 3, lambda i, c: c + 1, x), x, lax.fori_loop(0, 2, lambda i, c: c * 2, x)), X)


def test_batched_while() -> None:
    def count(n: Any, x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.5 + x), (0, x))

    close(jax.vmap(count), np.array([0, 3, 1, 5, 2], np.int32), X)
    close(jax.vmap(jax.vmap(count, (0, None)), (None, 0)), np.array([2, 0, 3], np.int32), X[:, 0])
    close(jax.vmap(count, (None, 0)), np.int32(3), X)
    close(
        jax.vmap(lambda k, n: lax.fori_loop(0, n, lambda i, k: jax.random.split(k)[0], k)),
        jax.random.split(jax.random.key(0), 3),
        np.array([0, 2, 1], np.int32),
    )


BRANCHES: dict[str, list[Callable[..., Any]]] = {
    "views": [lambda x, y: x, lambda x, y: y[::-1], lambda x, y: x[:1] * jnp.ones((5, 1))],
    "constants": [lambda x, y: jnp.zeros((5, 29)), lambda x, y: jnp.full((5, 29), x.sum()), lambda x, y: y],
    "several": [lambda x, y: (x, y.sum()), lambda x, y: (y, x.max()), lambda x, y: (x + y, jnp.float32(0))],
    "nothing": [lambda x, y: (), lambda x, y: (), lambda x, y: ()],
    "transposed": [lambda x, y: x.T, lambda x, y: y.T + 1, lambda x, y: jnp.zeros((29, 5))],
}


@pytest.mark.parametrize("kind", BRANCHES)
def test_branches(kind: str) -> None:
    for index in (-5, 0, 1, 2, 9):  # out of range is clamped
        check(
            lambda i, x, y: lax.switch(i, BRANCHES[kind], x, y), np.int32(index), X, Y, tiles=(7,), rtol=1e-5, atol=1e-5
        )


def test_loops_in_branches_and_branches_in_loops() -> None:
    def fun(x: Any) -> Any:
        def body(c: Any, row: Any) -> Any:
            loop = lambda r: lax.fori_loop(0, 2, lambda i, a: a * 0.5 + r, c)  # noqa: E731
            return lax.cond(row.sum() > 0, loop, lambda r: c, row), row.sum() > 0

        return lax.scan(body, x[0], x)

    close(fun, X)
    check(jax.grad(lambda x: fun(x)[0].sum()), X, tiles=TILES, rtol=1e-5, atol=1e-5)


def test_keeps_control_flow() -> None:
    def fun(x: Any) -> Any:
        c, _ = lax.scan(lambda c, row: (c + row, None), x[0], x)
        c = lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, c)
        return lax.cond(c[0] > 0, jnp.sin, jnp.cos, c)

    kinds = {type(node) for node in lowered(fun, (X,), small_target(4)).program.children()}
    assert {Repeat, RepeatWhile, Switch} <= kinds


def test_writes_a_stack_in_place() -> None:
    """No iteration copies or exchanges more than with a shorter stack."""

    def vertices_in_body(length: int) -> list[int]:
        program = lowered(
            lambda x: lax.scan(lambda c, r: (c, jnp.sin(r)), 0, x)[1], (np.ones((length, 512)),), small_target(4)
        )
        (loop,) = (node for node in program.program.children() if isinstance(node, Repeat))
        assert loop.count == length
        return [type(node).__name__ for node in loop.body.children()]

    assert vertices_in_body(3) == vertices_in_body(300)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("reverse", [False, True])
def test_stacks_what_it_carries(length: int, reverse: bool) -> None:
    """Values that are carried are stored one iteration later, beside the first vertices; the last behind the loop."""

    def run(c: Any, xs: Any) -> Any:
        return lax.scan(lambda c, x: ((c[0] + x, c[1] * 2), (c[0] + x, c[0], c[1] * 2)), (c, c), xs, reverse=reverse)

    xs = np.arange(3.0 * length, dtype=np.float32).reshape(length, 3)
    check(run, np.ones(3, np.float32), xs, tiles=(1, 4))


def test_counters_of_rows_take_no_step_of_a_loop() -> None:
    """A loop reads a row, adds it and stores the sum: counters advance beside that, a loop without rows has none."""

    def steps_of(fun: Callable[..., Any], *args: Any) -> list[int]:
        program = lowered(fun, args, small_target(16)).program
        return [len(node.body.children()) for node in distinct(program) if isinstance(node, Repeat)]

    assert steps_of(lambda xs, c: lax.scan(lambda c, x: (c + x, c + x), c, xs), X, X[0]) == [2]
    assert steps_of(lambda c: lax.fori_loop(0, 5, lambda _, c: jnp.cos(c), c), X) == [1]
