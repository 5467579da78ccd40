"""The pass `outline`: numbers stay to the bit, what becomes a function, how long it takes; layers written as loops.

Code is dear here, so that all that is worth finding is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    check_jaxpr,
    eval_equation,
    eval_jaxpr,
    jaxprs_in_params,
    name_stack,
)
from ipujax.lowering.jaxpr import EquationNumbers, stage_name
from ipujax.lowering.passes import run_passes
from ipujax.lowering.passes.dataflow import Dataflow
from ipujax.lowering.passes.outline import outline
from tests.lowering.helpers import price_bytes, share_all

RNG = np.random.default_rng(5)
WIDTH, LENGTH = 16, 8


@pytest.fixture(autouse=True)
def dear_code(monkeypatch: pytest.MonkeyPatch) -> None:
    price_bytes(monkeypatch, 8)


def normal(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / 4).astype(np.float32)


def calls(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """The calls of functions written in a jaxpr and in those inside it, a function's once."""
    seen = set[int]()

    def walk(body: Any) -> Iterator[JaxprEqn]:
        body = getattr(body, "jaxpr", body)
        if id(body) not in seen:
            seen.add(id(body))
            for eqn in body.eqns:
                if eqn.primitive.name == "function_call":
                    yield eqn
                for inner in jaxprs_in_params(eqn.params):
                    yield from walk(inner)

    yield from walk(jaxpr)


def op_by_op(jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, one operation after the other, in functions too."""

    def equation(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        is_call = eqn.primitive.name == "function_call"
        return op_by_op(eqn.params["jaxpr"], values) if is_call else eval_equation(eqn, *values)

    return eval_jaxpr(jaxpr, list(map(jnp.asarray, operands)), equation, jnp.asarray)


def outlined(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """The jaxpr after all passes; its numbers are those before `outline`, to the bit."""
    after = run_passes(jax.jit(fun).trace(*args).jaxpr)
    check_jaxpr(after["outline"].jaxpr)
    leaves = jax.tree.leaves(args)
    for got, want in zip(op_by_op(after["outline"], leaves), op_by_op(after["dce"], leaves), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    return after["outline"]


def count(fun: Callable[..., Any], *args: Any) -> list[int]:
    """How often each function is called, most often first."""
    bodies = Counter(id(eqn.params["jaxpr"].jaxpr) for eqn in calls(outlined(fun, *args)))
    return sorted(bodies.values(), reverse=True)


# --- layers -----------------------------------------------------------------------------------------------------------


def dense(p: Any, x: jax.Array) -> jax.Array:
    """A layer of a perceptron, with a residual."""
    h = jnp.tanh(x @ p["w"] + p["b"])
    return x + jax.nn.gelu(h @ p["v"]) * h


def attention(p: Any, x: jax.Array) -> jax.Array:
    """A layer of a transformer of one head, without biases."""
    y = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    q, k, v = jnp.split(y @ p["qkv"], 3, -1)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), q @ k.T, -1e9)
    x = x + jax.nn.softmax(scores) @ v @ p["out"]
    return x + jax.nn.relu(x @ p["up"]) @ p["down"]


def dense_parameters() -> Any:
    return {"w": normal(WIDTH, WIDTH), "b": normal(WIDTH), "v": normal(WIDTH, WIDTH)}


def attention_parameters() -> Any:
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    return {name: normal(*shape) for name, shape in shapes.items()}


LAYERS = {"dense": (dense, dense_parameters), "attention": (attention, attention_parameters)}


def training(kind: str, layers: int, wrap: Callable[..., Any] = lambda fun: fun) -> tuple[Callable[..., Any], Any]:
    """A training step of layers in a loop, and its arguments."""
    layer, make = LAYERS[kind]
    params = {"first": normal(WIDTH, WIDTH), "layers": [make() for _ in range(layers)]}
    optimizer = optax.adam(1e-2)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x = x @ params["first"]
        for number, p in enumerate(params["layers"]):
            with jax.named_scope(f"layer{number}"):
                x = wrap(layer)(p, x)
        return (x**2).mean()

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), normal(LENGTH, WIDTH))


def is_of_loss(eqn: JaxprEqn) -> bool:
    """Whether an equation is not one of the optimiser."""
    return "jvp(" in name_stack(eqn)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_each_layer_is_one_call_forward_and_one_backward(kind: str, wrap: Callable[..., Any]) -> None:
    step, args = training(kind, 4, wrap)
    jaxpr = outlined(step, *args)
    found = [(stage_name(eqn).is_backward, id(eqn.params["jaxpr"])) for eqn in calls(jaxpr) if is_of_loss(eqn)]
    forward = [body for is_backward, body in found if not is_backward]
    backward = [body for is_backward, body in found if is_backward]
    assert (len(forward), len(set(forward))) == (len(backward), len(set(backward))) == (4, 1)


def test_the_size_of_twelve_layers() -> None:
    """Beside calls and the optimiser's updates little is left."""
    step, args = training("attention", 12)
    after = run_passes(jax.jit(step).trace(*args).jaxpr)
    bodies = Counter(id(eqn.params["jaxpr"]) for eqn in calls(after["outline"]) if is_of_loss(eqn))
    assert list(bodies.values()) == [12, 12]
    updates = 20 * len(jax.tree.leaves(args[0]))
    assert len(after["outline"].eqns) < updates + 24 + 60 < 0.6 * len(after["dce"].eqns)


def test_through_the_whole_compiler() -> None:
    step, args = training("dense", 3)
    device = ipu.IPUModel(tiles_per_ipu=16)
    lowered = ipu.jit(step, device=device).lower(*args)
    assert list(calls(lowered.jaxpr))
    got, expected = ipu.jit(step, device=device)(*args), jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


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


# --- time, and the same each time -------------------------------------------------------------------------------------


def test_time_grows_with_the_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the layers cost hardly more than four times the work, counted in elements of the arrays it makes."""
    made: list[int] = []
    windows = Dataflow.windows

    def counted(flow: Dataflow, length: int) -> Any:
        made.append(flow.count)
        return windows(flow, length)

    monkeypatch.setattr(Dataflow, "windows", counted)
    work = []
    for layers in (12, 48):
        step, args = training("dense", layers)
        jaxpr = run_passes(jax.jit(step).trace(*args).jaxpr)["dce"]
        made.clear()
        outline(jaxpr)
        work.append(sum(made))
    assert work[1] <= 6 * work[0]


_PROGRAM = """
from tests.lowering.passes.test_outline import run_passes, training
from ipujax.lowering.passes import function_call
import jax
function_call._BYTE_PRICE = 8
step, args = training("attention", 3)
print(run_passes(jax.jit(step).trace(*args).jaxpr)["outline"])
"""


def test_the_same_whatever_the_order_of_hashes() -> None:
    texts = [
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert "function_call" in texts[0] and texts[0] == texts[1]
