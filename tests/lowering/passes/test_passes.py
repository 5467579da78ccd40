"""Passes: numbers after each of them, calls and source lines, texts of tiny cases."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jax_compat import (
    CALLEES,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    check_jaxpr,
    jaxpr_as_fun,
    jaxprs_in_params,
)
from ipujax.lowering.jaxpr import stage_name
from ipujax.lowering.lower import lower
from ipujax.lowering.passes import PASSES
from ipujax.lowering.passes.dce import dce
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.source_info import name_stack, source_line
from ipujax.runtime.graph.listing import listing
from tests.ipujax.models import MODELS, training_step
from tests.lowering.helpers import set_byte_cost, small_target


def traced(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(fun)(*args)


def after_each_pass(jaxpr: ClosedJaxpr) -> Iterator[tuple[str, ClosedJaxpr]]:
    """The jaxpr as traced, then after each pass, with their names."""
    yield "trace", jaxpr
    for name, run in PASSES:
        jaxpr = run(jaxpr)
        yield name, jaxpr


def all_equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Equations of a jaxpr and of those nested in it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from all_equations(inner)


def primitives(jaxpr: ClosedJaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in all_equations(jaxpr)]


def evaluate(jaxpr: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
    return jax.jit(jaxpr_as_fun(jaxpr))(*leaves)


def assert_close(actual: Any, expected: Any, message: str) -> None:
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual = jax.random.key_data(actual)
        expected = jax.random.key_data(expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=message)


def check_passes(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Asserts that each pass keeps the numbers and a valid jaxpr; returns the last jaxpr."""
    leaves = jax.tree.leaves(args)
    (_, first), *later = after_each_pass(traced(fun, *args))
    expected = evaluate(first, leaves)
    for name, jaxpr in later:
        check_jaxpr(jaxpr.jaxpr)
        assert [v.aval.shape for v in jaxpr.jaxpr.invars] == [np.shape(leaf) for leaf in leaves], name
        for actual, expected_leaf in zip(evaluate(jaxpr, leaves), expected, strict=True):
            assert_close(actual, expected_leaf, f"after {name}")
    return later[-1][1]


@pytest.mark.parametrize("name", MODELS)
def test_passes_keep_the_numbers_of_a_training_step(name: str) -> None:
    model = training_step(name)
    last = check_passes(model.step, model.state, *model.batch(0))
    names = set(primitives(last))
    assert names.isdisjoint(CALLEES)
    assert model.contains <= names


@jax.custom_jvp
def cube(x: jax.Array) -> jax.Array:
    return x * x * x


@cube.defjvp
def cube_jvp(primals: Any, tangents: Any) -> Any:
    return cube(primals[0]), 3 * primals[0] ** 2 * tangents[0]


@jax.custom_vjp
def halve(x: jax.Array) -> jax.Array:
    return x / 2


halve.defvjp(lambda x: (halve(x), None), lambda _, g: (g / 2,))


@jax.custom_vjp
def wave(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


wave.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.cos(x) * g,), optimize_remat=True)


@jax.custom_vjp
def differing(x: jax.Array) -> jax.Array:
    """A function whose forward has other values, so that it shows which one is computed."""
    return x * TABLE


differing.defvjp(lambda x: (jnp.cos(x), x), lambda x, g: (jnp.cos(x) * g,), optimize_remat=True)


@jax.custom_batching.custom_vmap
def doubled(x: jax.Array) -> jax.Array:
    return x * 2


@doubled.def_vmap
def doubled_batch(size: int, batched: Any, x: jax.Array) -> Any:
    return x * 2, batched[0]


TABLE = np.arange(5, dtype=np.float32)

CALLS: dict[str, Callable[[jax.Array], Any]] = {
    "jit": jax.jit(lambda x: jnp.sin(x) + 1),
    "jit in jit": jax.jit(lambda x: jax.jit(jnp.cos)(x) * jax.jit(jnp.cos)(2 * x)),
    "one callee twice": lambda x: jnp.where(x > 0, x, 0) + jnp.where(x < 1, x, 2),
    "custom_jvp": cube,
    "custom_vjp": halve,
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "gradient of checkpoint": jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)))(x).sum()),
    "constants of a callee": jax.jit(lambda x: x + jax.jit(lambda y: y * TABLE)(x) @ TABLE),
    "result is an argument": jax.jit(lambda x: (x, x + 1, x)),
    "result is a literal": jax.jit(lambda x: (x, 3.0)),
    "inside scan": lambda x: lax.scan(lambda c, a: (jax.jit(jnp.sin)(c) * a, cube(c)), x.sum(), x),
    "inside while": lambda x: lax.while_loop(lambda c: jax.jit(jnp.sum)(c) < 50, lambda c: cube(c) + 2, x),
    "inside cond": lambda x: lax.cond(x[0] > 0, jax.jit(jnp.sin), lambda y: jax.jit(jnp.cos)(y) * TABLE, x),
    "composite": lambda x: lax.composite(lambda y: y * 2 + TABLE, "test.twice")(x),
    "linear_call": lambda x: jax.custom_derivatives.linear_call(lambda r, y: y * r, lambda r, y: y * r, x, x + 1),
    "custom_vmap": doubled,
    "remat_opt, of which only the value is used": lambda x: jax.vjp(wave, x)[0],
    "remat_opt": jax.grad(lambda x: wave(x).sum() ** 2),
    "remat_opt, of which no residual is read": lambda x: jax.vjp(differing, x)[0],
    "remat_opt, of which all is read": jax.value_and_grad(lambda x: differing(x).sum()),
    "remat_opt inside scan": lambda x: lax.scan(lambda c, a: (jax.vjp(differing, c)[0] * a, a), x, x),
    "pipeline": ipu.pipeline(jax.jit(jnp.sin), micro_batches=5, reduce="stack"),
    "linear solve": lambda x: jnp.linalg.solve(jnp.eye(5) + x, x),
    "constants inside scan": lambda x: lax.scan(lambda c, _: (jax.jit(lambda y: y + TABLE)(c), None), x, None, 3),
}


@pytest.mark.parametrize("name", CALLS)
def test_inline_leaves_no_call(name: str) -> None:
    x = jnp.linspace(0.1, 1.5, 5)
    assert set(primitives(check_passes(CALLS[name], x))).isdisjoint(CALLEES)


def test_cases_cover_all_kinds_of_calls() -> None:
    names = {p for fun in CALLS.values() for p in primitives(traced(fun, jnp.ones(5)))}
    assert {"jit", "custom_jvp_call", "custom_vjp_call", "scan", "while", "cond"} <= names
    assert {"composite", "linear_call", "custom_vmap_call", "custom_linear_solve", "ipu_pipeline"} <= names
    assert {"checkpoint", "remat2"} & names


def on_platform(x: jax.Array) -> jax.Array:
    return lax.platform_dependent(x, tpu=jnp.cos, default=lambda x: jnp.sin(x) * TABLE)


CHOSEN: dict[str, tuple[Callable[[jax.Array], Any], set[str]]] = {
    "default": (on_platform, {"cos"}),
    "named": (lambda x: lax.platform_dependent(x, tpu=jnp.cos, cpu=jnp.sin, default=jnp.tan), {"cos", "tan"}),
    "gradient": (jax.grad(lambda x: on_platform(x).sum()), set()),
    "batch": (lambda x: jax.vmap(on_platform)(jnp.stack([x, x])), {"cos"}),
    "in a loop": (lambda x: lax.scan(lambda c, _: (on_platform(c), None), x, None, 3)[0], {"cos"}),
    "constant": (lambda x: lax.cond(True, jnp.sin, jnp.cos, x), {"cos"}),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_inlines_branches_with_a_constant_index(name: str) -> None:
    """No equation of the other branches stays."""
    fun, dropped = CHOSEN[name]
    names = set(primitives(check_passes(fun, jnp.linspace(0.1, 1.5, 5))))
    assert names.isdisjoint({"platform_index", "cond", *dropped})


def test_inline_defines_new_variables_for_each_call() -> None:
    jaxpr = inline(traced(CALLS["one callee twice"], jnp.ones(5))).jaxpr
    outs = [var for eqn in jaxpr.eqns for var in eqn.outvars]
    assert len(set(outs)) == len(outs)


def test_prefixes_name_stacks_of_callees_with_those_of_callers() -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        with jax.named_scope("inner"):
            return jnp.sin(x)

    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("first"):
            x = inner(x)
        with jax.named_scope("second"):
            return inner(x)

    stacks = [name_stack(eqn) for eqn in inline(traced(fun, jnp.ones(3))).eqns if eqn.primitive.name == "sin"]
    assert stacks == ["first/inner", "second/inner"]
    jaxpr = inline(traced(jax.grad(lambda x: fun(x).sum()), jnp.ones(3)))
    backward = [name_stack(eqn) for eqn in jaxpr.eqns if "transpose(" in name_stack(eqn)]
    scopes = [next(s for s in ("first", "second") if s in stack) for stack in backward if "inner" in stack]
    assert scopes and scopes == sorted(scopes, reverse=True), backward  # backward runs from the last scope to the first


def recomputed(x: jax.Array) -> jax.Array:
    for number in range(2):
        with jax.named_scope(f"part{number}"):
            x = jax.checkpoint(jax.jit(lambda y: jnp.sin(jax.jit(jnp.exp)(y))))(x)
    return x.sum()


@pytest.mark.parametrize("wrapped", [recomputed, jax.checkpoint(recomputed)])
def test_marks_recomputation_of_a_checkpoint(wrapped: Callable[..., Any]) -> None:
    """First computation and recomputation are told apart after all passes, with and without a checkpoint around."""
    last = check_passes(jax.value_and_grad(wrapped), jnp.linspace(0.1, 1.5, 5))
    exps = [stage_name(eqn) for eqn in all_equations(last) if eqn.primitive.name == "exp"]
    marks = [(name.is_recomputed, name.is_backward) for name in exps]
    assert marks[:2] == [(False, False)] * 2 and len(marks) > 3 and set(marks[2:]) == {(True, True)}
    gradients = [stage_name(eqn) for eqn in all_equations(last) if eqn.primitive.name == "mul"]
    assert gradients and all(name.is_backward and not name.is_recomputed for name in gradients)


def test_keeps_barriers_in_place() -> None:
    def fun(x: jax.Array) -> jax.Array:
        return jnp.cumsum(x) + jax.jit(lambda y: jnp.cumsum(lax.optimization_barrier(y)))(x)

    assert primitives(check_passes(fun, jnp.ones(3))) == ["cumsum", "optimization_barrier", "cumsum", "add"]


def test_gives_library_code_the_line_of_its_caller() -> None:
    def fun(x: jax.Array) -> jax.Array:
        y = jnp.where(x > 0, x, 0.0)
        return jnp.where(y > 1, y, 1.0)

    first = inspect.getsourcelines(fun)[1] + 1
    jaxpr = inline(traced(fun, jnp.ones(3)))
    lines = [source_line(eqn) for eqn in jaxpr.eqns if eqn.primitive.name == "select_n"]
    assert [line.split(" (")[0] for line in lines] == [f"test_passes.py:{first + n}" for n in range(2)]


def test_keeps_lines_of_a_users_callee() -> None:
    @jax.jit
    def callee(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    line = inspect.getsourcelines(callee.__wrapped__)[1] + 2
    [eqn] = inline(traced(lambda x: callee(x), jnp.ones(3))).eqns
    assert source_line(eqn).startswith(f"test_passes.py:{line} (")


def test_dce_drops_dead_equations() -> None:
    def fun(x: jax.Array, unused: jax.Array) -> jax.Array:
        jnp.exp(unused)

        def body(c: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
            return c * 2, jnp.sin(a)

        dead = lax.scan(body, x.sum(), x)[1]
        return jnp.cos(x) + 0 * lax.scan(body, x.sum(), x)[0] if dead.size else x

    jaxpr = dce(inline(traced(fun, jnp.ones(3), jnp.ones(2))))
    assert set(primitives(jaxpr)).isdisjoint({"exp", "sin"})
    assert "cos" in primitives(jaxpr) and primitives(jaxpr).count("scan") == 1
    assert [v.aval.shape for v in jaxpr.jaxpr.invars] == [(3,), (2,)]


def test_dce_keeps_effects() -> None:
    values: list[float] = []

    def body(c: jax.Array, _: Any) -> tuple[jax.Array, None]:
        jax.debug.callback(lambda v: values.append(float(v)), c, ordered=True)
        return c + 1, None

    def fun(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda v: values.append(float(v)), jnp.exp(x), ordered=True)
        lax.scan(body, x, None, 3)
        return x

    jaxpr = dce(inline(traced(fun, jnp.float32(0.0))))
    assert primitives(jaxpr).count("debug_callback") == 2 and "exp" in primitives(jaxpr)
    jax.block_until_ready(evaluate(jaxpr, [jnp.float32(0.0)]))
    jax.effects_barrier()
    assert values == [1.0, 0.0, 1.0, 2.0]


def layer(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    """Dense layer, with a dead equation."""
    jnp.sum(x)
    return jnp.where(x @ w + b > 0, x @ w, 0.0)


def running_sum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Loop that stacks its states."""
    return lax.scan(lambda c, a: (c + jax.jit(jnp.tanh)(a), c), jnp.zeros(3), x)


@jax.jit
def block(w: jax.Array, x: jax.Array) -> jax.Array:
    """Several equations, common to all callers."""
    h = jnp.tanh(x @ w)
    return x + jnp.tanh(h @ w) * h


def blocks(v: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
    """Two calls of one function."""
    return block(w, block(v, x))


TEXTS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "layer": (layer, [(6, 4), (4,), (5, 6)]),
    "running_sum": (running_sum, [(4, 3)]),
    "blocks": (blocks, [(6, 6), (6, 6), (8, 6)]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str, golden: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The jaxpr after each pass, and graph and program for a machine of four tiles, with a high cost of code."""
    set_byte_cost(monkeypatch, 4)
    fun, shapes = TEXTS[name]
    for number, (stage, jaxpr) in enumerate(after_each_pass(traced(fun, *map(jnp.ones, shapes)))):
        golden(str(jaxpr), f"{number}-{stage}")
    program = lower(jaxpr, small_target(4))
    start = inspect.getsourcelines(fun)[1]
    text = listing(program.graph, program.program)
    # Lines count from the function's own, so that editing this file does not change the text.
    text = re.sub(r"test_passes\.py:(\d+)", lambda match: f"{name}+{int(match[1]) - start}", text)
    golden(text, f"{number + 1}-graph")


def test_keeps_only_the_solution_of_a_linear_solve() -> None:
    x = np.eye(3, dtype=np.float32) * 2 + 1
    jaxpr = inline(jax.jit(jnp.linalg.inv).trace(x).jaxpr)  # has the product and its transposes too
    (inverse,) = jaxpr_as_fun(jaxpr)(x)
    np.testing.assert_allclose(inverse, np.linalg.inv(x), rtol=1e-5)
    assert {"lu", "triangular_solve"} <= set(primitives(jaxpr)) and "dot_general" not in primitives(jaxpr)
