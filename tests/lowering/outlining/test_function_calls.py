"""Callees that are called several times: which become functions, their numbers, their costs and savings.

They are inlined, and outlined again; each jaxpr by itself, so that a loop shares no function with its surroundings,
nor a branch with another. The cost of code is high here, so that small callees are functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, check_jaxpr, jaxpr_as_fun, jaxprs_in_params
from ipujax.lowering.jaxpr import stage_name
from ipujax.lowering.passes import ready
from ipujax.runtime.graph import Execute
from ipujax.runtime.graph.program import Call
from ipujax.runtime.graph.walks import distinct
from tests.lowering.helpers import check, lowered, set_byte_cost, share_all, small_target

RNG = np.random.default_rng(8)
WEIGHTS = [RNG.normal(size=(9, 9)).astype(np.float32) / 3 for _ in range(4)]
X = RNG.normal(size=(6, 9)).astype(np.float32)
TILES = (1, 7)


@pytest.fixture(autouse=True)
def costly_code(monkeypatch: pytest.MonkeyPatch) -> None:
    set_byte_cost(monkeypatch, 4)


@jax.jit
def block(w: jax.Array, x: jax.Array) -> jax.Array:
    """Two products and the operations between them."""
    h = jnp.tanh(x @ w)
    with jax.named_scope("second"):
        return x + jnp.tanh(h @ w) * h


@jax.jit
def pair(v: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
    return block(w, block(v, x)) + 1


def chain(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = block(w, x)
    return x


def passed(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    jaxpr = ready(jax.make_jaxpr(fun)(*args))
    check_jaxpr(jaxpr.jaxpr)
    return jaxpr


def calls(jaxpr: Jaxpr) -> Iterator[Any]:
    """Calls of functions in a jaxpr, those inside of a function once for each of its calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "function_call":
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from calls(getattr(inner, "jaxpr", inner))


def functions(fun: Callable[..., Any], *args: Any, ipus: int = 1) -> tuple[int, int]:
    """Number of functions in a program, and of calls written in it."""
    program = lowered(fun, args, small_target(7, num_ipus=ipus)).program
    callees = [node.function for node in distinct(program) if isinstance(node, Call)]
    return len(set(callees)), len(callees)


def in_loop(w: jax.Array, x: jax.Array) -> Any:
    first = block(w, x)
    last, sums = lax.scan(lambda c, _: (block(w, block(w, c)), c.sum()), first, None, length=3)
    return first, last, sums


def in_branches(w: jax.Array, x: jax.Array, p: jax.Array) -> Any:
    return lax.cond(p, lambda: block(w, x), lambda: block(w, 2 * x)) + block(w, x + 1)


def in_while(w: jax.Array, x: jax.Array) -> Any:
    def condition(c: Any) -> jax.Array:
        return (block(w, c[1]).sum() < 1000) & (c[0] < 3)

    return lax.while_loop(condition, lambda c: (c[0] + 1, block(w, c[1]) + block(w, -c[1])), (0, x))


def squared(weights: Any, x: jax.Array) -> jax.Array:
    return (chain(weights, x) ** 2).sum()


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, int]]] = {
    "chain": (chain, (WEIGHTS, X), (1, 4)),
    "results of all calls": (lambda v, w, x: [block(v, x), block(w, x), block(v, -x)], (*WEIGHTS[:2], X), (1, 3)),
    "result of a call, read after the next": (
        lambda v, w, x: (y := block(v, x), z := block(w, x), y.T @ z, y[::-1]),
        (*WEIGHTS[:2], X),
        (1, 2),
    ),
    "swapped": (lambda w, x: block(block(w, x[:9]), block(w, x[9:])), (WEIGHTS[0], np.tile(X, (3, 1))), (1, 3)),
    "views": (lambda w, x: block(w.T, block(w[::-1], x[:, ::-1])), (WEIGHTS[0], X), (1, 2)),
    "broadcast": (lambda w, x: block(w, jnp.broadcast_to(x[:1], (6, 9))) + block(w, x), (WEIGHTS[0], X), (1, 2)),
    "nested": (lambda a, b, c, x: pair(a, b, pair(b, c, pair(c, a, x))), (*WEIGHTS[:3], X), (1, 6)),
    "nested and outside": (lambda a, b, c, x: pair(a, b, block(c, x)), (*WEIGHTS[:3], X), (1, 3)),
    "loop": (in_loop, (WEIGHTS[0], X), (1, 2)),
    "branch": (in_branches, (WEIGHTS[0], X, np.bool_(True)), (0, 0)),
    "while": (in_while, (WEIGHTS[0], X), (1, 2)),
    "batched": (lambda v, w, x: jax.vmap(pair, (None, None, 0))(v, w, x), (*WEIGHTS[:2], np.stack([X, -X])), (1, 2)),
    "gradient": (jax.value_and_grad(squared), (WEIGHTS, X), (2, 7)),
    "recomputed": (jax.grad(lambda ws, x: sum(jax.checkpoint(chain)(ws, x)).sum()), (WEIGHTS, X), (2, 8)),
    # A tangent equal to its primal would have products in common with it in the first call.
    "tangent": (lambda ws, x, t: jax.jvp(chain, (ws, x), (ws, t)), (WEIGHTS, X, X[::-1]), (1, 4)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_with_functions(name: str) -> None:
    """Expected numbers of functions and calls; the results of plain JAX by jaxpr, engine and interpreter."""
    fun, args, expected = PROGRAMS[name]
    assert functions(fun, *args) == expected
    leaves = jax.tree.leaves(args)
    results = jaxpr_as_fun(passed(fun, *args))(*leaves)
    for actual, expected_leaf in zip(results, jax.tree.leaves(fun(*args)), strict=True):
        np.testing.assert_allclose(actual, expected_leaf, rtol=1e-4, atol=1e-5)
    check(fun, *args, tiles=TILES, rtol=1e-4, atol=1e-5)


def test_copies_results_before_the_next_call() -> None:
    """The function writes all its results to one place, but each is read later."""
    check(lambda v, w, x: [block(m, x) for m in (v, w, v, w)], *WEIGHTS[:2], X, tiles=TILES, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_shares_small_callees(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callees that return operands, literals, constants, keys and empty arrays."""
    share_all(monkeypatch)
    table = np.arange(9, dtype=np.float32) + seed

    @jax.jit
    def odd(x: jax.Array, key: jax.Array) -> Any:
        key, use = jax.random.split(key)
        return x, 3.0, x[::-1], x + table, key, jax.random.normal(use, (4,)), x[:0]

    def fun(x: jax.Array, key: jax.Array) -> Any:
        a = odd(x, key)
        b = odd(a[2], a[4])
        return a[:4], b[:4], a[5], b[5], b[6]

    assert functions(fun, X, jax.random.key(seed))[1] >= 2
    check(fun, X, jax.random.key(seed), tiles=TILES, rtol=1e-6)


def printing(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x[0, 0])
    return block(WEIGHTS[0], x)


@jax.jit
def one_product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.sin(jnp.cos(jnp.exp(x @ w))))


def staged(w: jax.Array, x: jax.Array) -> jax.Array:
    for number in range(4):
        with ipu.stage(number // 2):
            x = block(w, x)
    return x


@jax.jit
def with_stages(w: jax.Array, x: jax.Array) -> jax.Array:
    for number in range(2):
        with ipu.stage(number):
            x = jnp.tanh(jnp.tanh(x @ w) @ w) * x if number else jnp.tanh(x)
    return x


NOT_SHARED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "called once": (block, (WEIGHTS[0], X)),
    "little work": (lambda x, y: jax.jit(jnp.add)(x, y) + jax.jit(jnp.add)(y, y), (X, X)),
    "a callee of another shape": (lambda w, x: (block(w, x), block(w, x[:3])), (WEIGHTS[0], X)),
    "much to copy for one row": (lambda v, w, x: one_product(v, x[:1]) + one_product(w, x[1:2]), (*WEIGHTS[:2], X)),
}


@pytest.mark.parametrize("name", NOT_SHARED)
def test_inlines_cheap_callees(name: str) -> None:
    fun, args = NOT_SHARED[name]
    assert not list(calls(passed(fun, *args).jaxpr))


def test_inlines_callees_with_effects_and_shares_their_callees() -> None:
    noisy = jax.jit(printing)
    jaxpr = passed(lambda x: noisy(noisy(x)), X)
    assert [eqn.params["name"] for eqn in calls(jaxpr.jaxpr)] == ["block", "block"]
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("debug_print") == 2


def test_stages_share_no_function() -> None:
    called = list(calls(passed(staged, WEIGHTS[0], X).jaxpr))
    bodies = [id(eqn.params["jaxpr"].jaxpr) for eqn in called]
    assert bodies[0] == bodies[1] != bodies[2] == bodies[3]


def test_shares_stages_inside_of_callees() -> None:
    """Two calls of a function with stages, of which the second computes enough to be shared."""
    jaxpr = passed(lambda w, x: with_stages(w, x) + with_stages(w, 2 * x), WEIGHTS[0], X)
    assert [stage_name(eqn).stage for eqn in calls(jaxpr.jaxpr)] == [1, 1]


def test_functions_on_several_ipus() -> None:
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=16)
    loss = lambda w, x: (staged(w, x) ** 2).sum()  # noqa: E731
    actual = ipu.jit(jax.value_and_grad(loss), device=device)(WEIGHTS[0], X)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(jax.value_and_grad(loss)(WEIGHTS[0], X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert functions(staged, WEIGHTS[0], X, ipus=2) == (2, 4), "one on each IPU, called twice"
    graph = ipu.jit(staged, device=device).lower(WEIGHTS[0], X).graph
    ipus = [{int(t) // 16 for g in groups for t in np.unique(g.tile[g.tile >= 0])} for groups in graph.groups.values()]
    assert {0} in ipus and {1} in ipus and all(len(group_ipus) == 1 for group_ipus in ipus)


def test_shares_library_code_called_from_one_line() -> None:
    def fun(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.unwrap(x)
        return x

    jaxpr = passed(fun, X)
    line = inspect.getsourcelines(fun)[1] + 2
    assert len(list(calls(jaxpr.jaxpr))) == 3
    program = lowered(fun, (X,), small_target(7))
    lines = {compute_set.origin.line for compute_set in program.graph.groups}
    assert lines and all(text.startswith(f"test_function_calls.py:{line} ") for text in lines), lines


def copies(fun: Callable[..., Any], *args: Any) -> list[str]:
    graph = lowered(fun, args, small_target(7)).graph
    groups = [(compute_set.name, group) for compute_set, members in graph.groups.items() for group in members]
    return [group.name or name for name, group in groups if group.codelet.name.startswith("popops::Copy<")]


def test_does_not_copy_a_fixed_operand() -> None:
    def recurrent(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = block(w, x)
        return x

    names = copies(recurrent, WEIGHTS[0], X)
    assert names.count("block/operand0") == 4
    assert "block/operand1" not in names  # the weight
    assert copies(chain, WEIGHTS, X).count("block/operand1") == 4


def num_copied_results(fun: Callable[..., Any], *args: Any) -> int:
    """Number of copied results of calls: those read after the next call, or returned."""
    return sum(name.endswith("/kept") for name in copies(fun, *args))


def test_reads_results_in_place() -> None:
    """Only results that the next call would overwrite are copied, through views too, and returned ones."""

    def summed(weights: Any, x: jax.Array) -> jax.Array:
        outs = []
        for w in weights:
            outs.append(block(w, x).T)
        return sum(out.sum(0) for out in outs)

    def skipping(weights: Any, x: jax.Array) -> jax.Array:
        first = block(weights[0], x)
        return chain(weights[1:], first) * first

    assert num_copied_results(chain, WEIGHTS, X) == num_copied_results(skipping, WEIGHTS, X) == 1
    assert num_copied_results(summed, WEIGHTS, X) == len(WEIGHTS) - 1
    for fun in (chain, summed, skipping):
        check(fun, WEIGHTS, X, split_rtol=1e-5)


def test_reads_a_fixed_result_of_another_function() -> None:
    """It reads that result in place, so the other's next call must not overwrite it."""

    def spread(weights: Any, x: jax.Array) -> jax.Array:
        # No product of a block, nor a block, is computed twice: it would be joined.
        level = block(weights[0], -x)[0, 0]
        outs = []
        for w in weights:
            outs.append(jnp.where(jnp.tanh(x @ -w) > 0, jnp.exp(x @ w.T), jnp.broadcast_to(level, x.shape)) @ w)
        for w in weights:
            outs.append(block(w, x))
        return sum(outs)

    operands = [name for name in copies(spread, WEIGHTS, X) if "/operand" in name and not name.startswith("block")]
    assert len(operands) == 4 and len(set(operands)) == 1  # the weight
    check(spread, WEIGHTS, X, split_rtol=1e-5)


def test_drops_results_without_reader() -> None:
    @jax.jit
    def both(w: jax.Array, x: jax.Array) -> Any:
        return block(w, x), jnp.exp(x)

    jaxpr = passed(lambda v, w, x: both(v, both(w, x)[0])[0], *WEIGHTS[:2], X)
    (body,) = {id(eqn.params["jaxpr"].jaxpr): eqn.params["jaxpr"] for eqn in calls(jaxpr.jaxpr)}.values()
    assert "exp" not in [eqn.primitive.name for eqn in body.eqns] and len(body.out_avals) == 1


def test_names_and_lines_of_a_function() -> None:
    """Common beginning of the callers' name stacks, the function's name, its own scopes; and its own lines."""

    def fun(weights: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("model"):
            for number, w in enumerate(weights):
                with jax.named_scope(f"layer{number}"):
                    x = block(w, x)
        return (x**2).sum()

    graph = lowered(fun, (WEIGHTS, X), small_target(7)).graph
    origins = {s.origin.path: s.origin.line for s in graph.groups if "block" in s.origin.path}
    assert set(origins) == {"model/block", "model/block/second"}
    first = inspect.getsourcelines(block.__wrapped__)[1]
    assert origins["model/block/second"].startswith(f"test_function_calls.py:{first + 5} ")
    names = {group.name or compute_set.name for compute_set, groups in graph.groups.items() for group in groups}
    assert "model/layer2/block/operand0" in names
    assert "block/operand1" in {variable.name for variable in graph.variables}
    backward = lowered(jax.grad(fun), (WEIGHTS, X), small_target(7)).graph
    paths = {s.origin.path for s in backward.groups}
    assert "transpose(jvp(model))/block" in paths or "transpose(jvp(model/block))" in paths, sorted(paths)


def test_saves_code_for_few_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four blocks' code remains; few cycles are added beside those of copies."""
    device = ipu.IPUModel(tiles_per_ipu=64)
    args = [RNG.normal(size=(64, 64)).astype(np.float32) for _ in range(4)], np.ones((32, 64), np.float32)
    shared = ipu.jit(chain, device=device).lower(*args).compile().profile
    set_byte_cost(monkeypatch, 0)
    inlined = ipu.jit(lambda *args: chain(*args), device=device).lower(*args).compile().profile
    # Copies have vertices and exchanges of their own.
    for category, share in (("internalExchangeCode", 0.31), ("vertexInstanceState", 0.6)):
        assert shared.memory.by_category[category].sum() < share * inlined.memory.by_category[category].sum()
    groups = shared.executable.graph.groups
    copy_cycles = sum(
        step.ends[0] - step.starts[0]
        for step in shared.timeline.walk()
        if isinstance(step.program, Execute)
        and any(group.codelet.name.startswith("popops::Copy<") for group in groups[step.program.compute_set])
    )
    # Inlined, each block is laid out for its own operands; shared, all are laid out for those of the first call.
    assert inlined.cycles <= shared.cycles <= 1.05 * inlined.cycles + copy_cycles


def test_lowers_a_function_once() -> None:
    """Forty calls have the vertices of one run, which may be four calls."""
    single = lowered(lambda w, x: block(w, x), (WEIGHTS[0], X), small_target(7)).graph
    many = lowered(lambda w, x: chain([w + n for n in range(40)], x), (WEIGHTS[0], X), small_target(7)).graph
    assert len(many.groups) <= 4 * len(single.groups) + 40  # and forty additions
