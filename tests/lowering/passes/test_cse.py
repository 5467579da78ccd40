"""Pass `cse`: equal equations are computed once, apart from those that are computed again on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jax_compat import ClosedJaxpr, check_jaxpr, jaxpr_as_fun
from ipujax.lowering.jaxpr import primitive_names
from ipujax.lowering.passes import PASSES, run_passes
from ipujax.lowering.passes.cse import cse
from ipujax.lowering.passes.dce import dce
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.recomputation import Recomputation, recompute
from tests.lowering.helpers import check

RNG = np.random.default_rng(3)
X = RNG.normal(size=(6, 8)).astype(np.float32)
W = RNG.normal(size=(8, 8)).astype(np.float32)
TABLE = np.arange(8, dtype=np.float32)


def passed(fun: Callable[..., Any], *args: Any, **settings: Any) -> ClosedJaxpr:
    """The jaxpr after the pass, checked against the function."""
    traced = inline(jax.make_jaxpr(fun)(*args))
    jaxpr = dce(cse(traced, **settings))
    check_jaxpr(jaxpr.jaxpr)
    leaves = jax.tree.leaves(args)
    for actual, expected in zip(jaxpr_as_fun(jaxpr)(*leaves), jaxpr_as_fun(traced)(*leaves), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    return jaxpr


def count(jaxpr: ClosedJaxpr, name: str) -> int:
    return list(primitive_names(jaxpr.jaxpr)).count(name)


def in_loop(x: Any) -> Any:
    return lax.scan(lambda c, row: (jnp.sin(c) + jnp.sin(c) * row, jnp.sin(c)), x[0], x)


def drawn(x: Any) -> Any:
    key = jax.random.key(1)
    return x + jax.random.uniform(key, x.shape) * jax.random.uniform(key, x.shape)


def constants(x: Any) -> Any:
    @jax.jit
    def callee(y: Any) -> Any:
        return jnp.sin(y * TABLE)

    return callee(x) * callee(x)


def equal_loops(x: Any) -> Any:
    one, other = (lax.fori_loop(0, 3, lambda _, y: jnp.sin(y) + 1, x) for _ in range(2))
    return one * other


JOINED: dict[str, tuple[Callable[..., Any], str]] = {
    "operands in either order": (lambda x: jnp.sin(x + x[0]) * jnp.sin(x[0] + x), "sin"),
    "a chain": (lambda x: jnp.cos(jnp.sin(x)) - 2 * jnp.cos(jnp.sin(x)), "cos"),
    "results": (lambda x: (jnp.sin(x), jnp.sin(x)), "sin"),
    "in a loop": (in_loop, "sin"),
    "in a branch": (lambda x: lax.cond(x[0, 0] > 0, lambda: jnp.sin(x) * jnp.sin(x), lambda: x), "sin"),
    "in calls": (lambda x: jax.jit(jnp.sin)(x) * jax.jit(jnp.sin)(x), "sin"),
    "constants of a callee": (constants, "sin"),
    "loops": (equal_loops, "sin"),
    "random bits of one key": (drawn, "random_bits"),
    "gathers": (lambda x: x[jnp.array([3, 1])] * jnp.cos(x[jnp.array([3, 1])]), "gather"),
    "parts of a repeated scalar": (lambda x: [jnp.sin(y) for y in lax.split(lax.full((4,), x[0, 0]), (2, 2))], "sin"),
    "one of several results": (lambda x: jnp.linalg.qr(x)[0].sum() * jnp.linalg.qr(x)[1], "qr"),
}


@pytest.mark.parametrize("name", JOINED)
def test_joins(name: str) -> None:
    fun, primitive = JOINED[name]
    jaxpr = passed(fun, X)
    assert count(jaxpr, primitive) == 1, jaxpr


def two_stages(x: Any) -> Any:
    parts = []
    for number in range(2):
        with ipu.stage(number):
            parts.append(jnp.sin(x))
    return parts


def two_phases(x: Any) -> Any:
    parts = []
    for number in range(2):
        with ipu.phase(number):
            parts.append(jnp.sin(x))
    return parts


def behind_barriers(x: Any) -> Any:
    return jnp.sin(lax.optimization_barrier(x)) * jnp.sin(lax.optimization_barrier(x))


def with_effects(x: Any) -> Any:
    for _ in range(2):
        jax.debug.callback(lambda _: None, x, ordered=True)
    return x


def host_calls(x: Any) -> Any:
    return [jax.pure_callback(np.sin, x, x) for _ in range(2)]


def masks_of_stages(x: Any) -> Any:
    """Masks outside of stages: their readers decide on the IPU of each."""
    masks = [jnp.sin(lax.iota(jnp.float32, 8)) for _ in range(2)]
    for number in range(2):
        with ipu.stage(number):
            x = x * masks[number]
    return x


SEPARATE: dict[str, tuple[Callable[..., Any], str]] = {
    "other parameters": (lambda x: jnp.cumsum(x, 0) + jnp.cumsum(x, 1), "cumsum"),
    "other dtypes": (lambda x: (jnp.sin(x), jnp.sin(x.astype(np.float16))), "sin"),
    "0 and -0": (lambda x: (lax.div(x, 0.0), lax.div(x, -0.0)), "div"),
    "stages": (two_stages, "sin"),
    "masks of stages": (masks_of_stages, "sin"),
    "phases": (two_phases, "sin"),
    "barriers": (behind_barriers, "sin"),
    "effects": (with_effects, "debug_callback"),
    "calls of Python": (host_calls, "pure_callback"),
    "keys": (lambda x: [jax.random.uniform(jax.random.key(n)) for n in range(2)], "random_bits"),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_leaves_apart(name: str) -> None:
    fun, primitive = SEPARATE[name]
    assert count(passed(fun, X), primitive) == 2


def loss_of_layers(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def loss(w: Any, x: Any) -> Any:
        for _ in range(3):
            x = wrap(lambda y: jnp.sin(jnp.tanh(y @ w)))(x)
        return (x**2).sum()

    return loss


def layers(wrap: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(loss_of_layers(wrap))


def test_recomputed_values_stay_recomputed() -> None:
    """In whichever order the passes run, and also in checkpoints inside of others."""
    checkpointed = passed(layers(jax.checkpoint), W, X)
    assert count(checkpointed, "tanh") == 6
    nested = passed(jax.grad(jax.checkpoint(loss_of_layers(jax.checkpoint))), W, X)
    assert count(nested, "tanh") == 6  # without those of the loss, which is not returned
    plain = inline(jax.make_jaxpr(layers(lambda f: f))(W, X))
    everything = Recomputation("all")
    before, after = recompute(cse(plain), everything), cse(recompute(plain, everything))
    assert count(before, "tanh") == count(dce(before), "tanh") == count(dce(after), "tanh") > count(plain, "tanh") == 3


def test_a_forward_value_is_not_computed_again_for_the_gradient() -> None:
    @jax.custom_vjp
    def wave(x: Any) -> Any:
        return jnp.sin(x)

    wave.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.sin(x),))
    assert count(passed(jax.value_and_grad(lambda x: wave(x).sum()), X), "sin") == 1


def test_a_cheap_value_does_not_raise_the_peak() -> None:
    """It is computed again where it would live on beside larger values; a product is not."""

    def used_again(compute: Callable[..., Any]) -> Callable[..., Any]:
        def fun(x: Any, w: Any) -> Any:
            y = compute(x, w)
            z = jnp.cumsum(jnp.sort(y @ w, 0), 0)
            wide = jnp.concatenate([z, jnp.sort(z)], 1)
            small = jnp.cumsum(wide, 1).sum()
            return small * compute(x, w)

        return fun

    x, w = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)
    apart: list[Any] = []
    cheap = passed(used_again(lambda x, w: x - w), x, w, kept_apart=apart)
    assert count(cheap, "sub") == 2 and [eqn.primitive.name for eqn in apart] == ["sub"]
    assert count(passed(used_again(lambda x, w: x - w), x, w, byte_cost=0.0), "sub") == 1
    assert count(passed(used_again(lambda x, w: jnp.tanh(x - w)), x, w), "tanh") == 1


@pytest.mark.parametrize(("name", "solve"), [("cholesky", lax.linalg.cholesky), ("fft", lambda x: jnp.fft.fft(x).real)])
def test_a_problem_is_solved_once_however_long_its_result_lives(name: str, solve: Callable[..., Any]) -> None:
    x = 9 * np.eye(64, dtype=np.float32)
    assert count(passed(lambda x: [solve(x + x.T) * c for c in range(1, 5)], x), name) == 1


def test_joins_an_equation_whose_operands_are_only_then_equal() -> None:
    """The sum of a cheap value is small, so the value is not kept for it."""

    def fun(x: Any, w: Any) -> Any:
        first = (x - w).sum()
        z = jnp.cumsum(jnp.sort(x @ w, 0), 0)
        return jnp.cumsum(jnp.concatenate([z, jnp.sort(z)], 1), 1) * first + (x - w).sum()

    x = np.ones((64, 64), np.float32)
    jaxpr = passed(fun, x, x)
    assert count(jaxpr, "sub") == count(jaxpr, "reduce_sum") == 1


def test_equal_layers_share_what_they_join() -> None:
    """The mask moves before the first layer: the layers are still equal runs."""

    def layer(x: Any, w: Any) -> Any:
        mask = lax.iota(jnp.int32, 8)[None, :] <= lax.iota(jnp.int32, 8)[:, None]
        return jnp.tanh(jnp.where(mask, x @ w, 0.0)) @ w

    def fun(w: Any, x: Any) -> Any:
        for _ in range(3):
            x = layer(x, w)
        return x

    names = [eqn.primitive.name for eqn in passed(fun, W, W).eqns]
    assert names.count("iota") == 1 and names.index("le") < names.index("dot_general")
    start = names.index("dot_general")
    period = (len(names) - start) // 3
    assert names[start : start + period] * 3 == names[start:]


def adam_step(params: Any, state: Any, x: Any) -> Any:
    """Writes two powers for each weight, as Keras does."""
    value, grads = jax.value_and_grad(lambda p, x: ((jnp.tanh(x @ p[0]) @ p[1]) ** 2).mean())(params, x)
    step = state[2] + 1
    new = []
    for p, m, v, g in zip(params, state[0], state[1], grads, strict=True):
        rate = jnp.sqrt(1 - jnp.power(0.999, step)) / (1 - jnp.power(0.9, step))
        m, v = m + 0.1 * (g - m), v + 0.001 * (g * g - v)
        new.append((p - 0.01 * rate * m / (jnp.sqrt(v) + 1e-7), m, v))
    return value, [p for p, _, _ in new], ([m for _, m, _ in new], [v for _, _, v in new], step)


def test_powers_of_an_optimiser_are_computed_once() -> None:
    params = [W, W]
    args = params, ([0 * W, 0 * W], [0 * W, 0 * W], jnp.float32(0)), X
    last = list(run_passes(jax.make_jaxpr(adam_step)(*args)).values())[-1]
    assert count(last, "pow") == 2
    step = ipu.jit(adam_step, device=ipu.IPUModel(tiles_per_ipu=4), donate_argnums=(0, 1))
    expected = jax.jit(adam_step)(*args)
    for actual, right in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-4, atol=1e-6)


def test_results_that_are_one_value_have_places_of_their_own() -> None:
    """A result that is written over two donated arguments, and carries of a loop that are one value."""

    def fun(x: Any, y: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            a, b = carry
            return jnp.sin(a) + 1, jnp.sin(a) + 1 + 0 * b

        a, b = lax.fori_loop(0, 3, body, (x, y))
        return a * 2, a * 2, b

    check(fun, X, X + 1, tiles=(1, 7), rtol=1e-5)
    step = ipu.jit(lambda x, y: (x * 2 + y, x * 2 + y), device=ipu.IPUModel(tiles_per_ipu=4), donate_argnums=(0, 1))
    for actual in step(jnp.asarray(X), jnp.asarray(X + 1)):
        np.testing.assert_allclose(actual, X * 3 + 1, rtol=1e-5)


def test_stages_of_a_pipeline_compute_their_parts_for_themselves() -> None:
    """Numbers are those of plain JAX, and no stage sends what the other computes too."""

    def staged(params: Any, x: Any) -> Any:
        with ipu.stage(0):
            h = jnp.tanh(x @ params) * jnp.sin(params).sum() + jnp.sin(params).mean()
        with ipu.stage(1):
            return (jnp.tanh(h @ params) * jnp.sin(params)[0]).sum()

    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = ipu.pipeline(jax.value_and_grad(staged), micro_batches=2)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    optimizer = optax.adam(0.1)
    args = W, optimizer.init(jnp.asarray(W)), X
    actual = ipu.jit(step, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=4))(*args)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_micro_batch_with_open_stages_stays_unchanged() -> None:
    traced = jax.make_jaxpr(lambda x: jnp.sin(x) * jnp.sin(x))(X)
    assert cse(traced, is_micro_batch=True) is traced


def test_the_first_line_stays() -> None:
    def fun(x: Any) -> Any:
        with jax.named_scope("first"):
            y = jnp.sin(x)
        with jax.named_scope("second"):
            return y * jnp.sin(x)

    (eqn,) = [eqn for eqn in passed(fun, X).eqns if eqn.primitive.name == "sin"]
    assert str(eqn.source_info.name_stack) == "first"


def test_the_profile_names_what_is_computed_again() -> None:
    device = ipu.IPUModel(tiles_per_ipu=4)
    rows = ipu.jit(layers(jax.checkpoint), device=device).profile(W, X).computed_again
    assert {(row.operation, row.reason, row.count) for row in rows} >= {("tanh", "recomputation", 3)}
    profile = ipu.jit(lambda x: jnp.sin(x) + jnp.sin(x), device=device).profile(X)
    assert not profile.computed_again
    text = ipu.jit(layers(jax.checkpoint), device=device).profile(W, X).summary(show_optimizations=True)
    assert "3 × tanh for recomputation, test_cse.py" in text


def test_a_gather_that_is_read_twice_costs_no_more_than_two() -> None:
    """Functions of many instructions take all tiles, also behind a look-up that takes fewer."""

    def once(w: Any, i: Any) -> Any:
        rows = w[i]
        return rows * jnp.cos(rows)

    shapes = jax.ShapeDtypeStruct((1000, 16), np.float32), jax.ShapeDtypeStruct((1000,), np.int32)
    profile = ipu.jit(once).profile(*shapes)
    spread = ipu.jit(lambda x: x * jnp.cos(x)).profile(jax.ShapeDtypeStruct((1000, 16), np.float32))
    assert profile.phase_cycles["compute"] < 1.2 * spread.phase_cycles["compute"]
    assert profile.cycles - profile.phase_cycles["host_exchange"] <= 34_574  # gathered twice, before the pass


def test_runs_by_name() -> None:
    assert dict(PASSES)["cse"] is cse
