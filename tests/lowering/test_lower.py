"""From jaxpr to program: streams, aliases of donated arguments, constants, names; run on tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.lower import LoweredProgram, lower
from ipujax.lowering.passes import ready
from ipujax.lowering.program_inputs import ProgramInputs, donated_aliases
from ipujax.lowering.replicas.replicated_primitive import unwrapped
from ipujax.runtime.compile import compile
from ipujax.runtime.graph.program import Copy, StreamIn, StreamOut
from ipujax.runtime.graph.walks import leaves
from ipujax.runtime.interpreter.interpreter import interpret
from tests.lowering.helpers import assert_same, check, quick_jit, run_engine, small_target

X = np.arange(6, dtype=np.float32).reshape(2, 3)
Y = X[::-1] * 0.5 + 1


def lowered(fun: Callable[..., Any], *args: Any, donated: Any = (), tiles: int = 4) -> LoweredProgram:
    return lower(ready(jax.make_jaxpr(fun)(*args)), small_target(tiles), ProgramInputs(donated=donated))


# --- donated arguments ------------------------------------------------------------------------------------------------

SQUARE = np.arange(9, dtype=np.float32).reshape(3, 3)
HALF = X.astype(np.float16)

ALIASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[bool], tuple[Any, ...]]] = {
    "nothing donated": (lambda a, b: (b, a), (X, Y), [False, False], (None, None)),
    "swapped": (lambda a, b: (b, a), (X, Y), [True, True], (0, 1)),
    "one of two": (lambda a, b: (b, a), (X, Y), [False, True], (1, None)),
    "more results than buffers": (lambda a: (a, a + 1, a), (X,), [True], (0, None, None)),
    "first of its kind": (lambda a, h: (h * 2, a * 2), (X, HALF), [True, True], (1, 0)),
    "other dtype": (lambda a: a.astype(jnp.int32), (X,), [True], (None,)),
    "other shape": (lambda a: a.T, (X,), [True], (None,)),
    "transposed": (lambda a: a.T, (SQUARE,), [True], (0,)),
    "unused": (lambda a, b: b + 1, (X, Y), [True, False], (0,)),
    "rotated": (lambda a, b, c: (b, c, a), (X, Y, X * Y), [True] * 3, (0, 1, 2)),
    "read again": (lambda a, b: (a + b, a * b, a - 1), (X, Y), [True, True], (0, 1, None)),
    "reversed": (lambda a: (a[::-1], a), (X,), [True], (0, None)),
    "half of another": (lambda a, b: (jnp.concatenate([b[:1], a[1:]]), a), (X, Y), [True, True], (0, 1)),
    "constant": (lambda a: jnp.ones((2, 3)), (X,), [True], (0,)),
    "loop": (lambda a, b: lax.fori_loop(0, 3, lambda i, c: (c[1], c[0] + 1), (a, b)), (X, Y), [True, True], (0, 1)),
}


@pytest.mark.parametrize("name", ALIASES)
def test_donated(name: str) -> None:
    """Pairs as expected, computes JAX's numbers on engine and tiles, and leaves results in arguments' variables."""
    fun, args, donated, aliases = ALIASES[name]
    jaxpr = jax.make_jaxpr(fun)(*args)
    assert donated_aliases(unwrapped(jaxpr), donated) == aliases
    expected = jax.tree.leaves(quick_jit(fun)(*args))
    for tiles in (1, 4, 7):
        program = lowered(fun, *args, donated=donated, tiles=tiles)
        assert program.aliases == aliases
        compile(program.graph, program.program)
        assert_same(run_engine(program, args), expected, 0, 0, "engine")
        outs = interpret(program.graph, program.program, dict(zip(program.inputs, args, strict=True)), seed=tiles)
        assert_same([outs[stream] for stream in program.outputs], expected, 0, 0, "tiles")
    into = {leaf.stream: leaf.destination for leaf in leaves(program.program) if isinstance(leaf, StreamIn)}
    out_of = {leaf.stream: leaf.source for leaf in leaves(program.program) if isinstance(leaf, StreamOut)}
    for stream, alias in zip(program.outputs, aliases, strict=True):
        assert stream.resident == (alias is not None)
        if alias is not None:
            assert out_of[stream].variables() == into[program.inputs[alias]].variables()
    assert [stream.resident for stream in program.inputs] == [n in aliases for n in range(len(args))]


def test_does_not_copy_an_argument_returned_in_its_place() -> None:
    program = lowered(lambda a, b: (a, b), X, Y, donated=[True, True])
    assert not [leaf for leaf in leaves(program.program) if isinstance(leaf, Copy)]


def test_aliases_equal_those_of_jax() -> None:
    """JAX marks the pair on the argument, in the text it gives to XLA."""
    for fun, args, donated, aliases in ALIASES.values():
        donated_numbers = tuple(n for n, flag in enumerate(donated) if flag)
        if len(donated_numbers) != len([alias for alias in aliases if alias is not None]) or not donated_numbers:
            continue  # with spare buffers JAX warns, and drops unused ones
        text = jax.jit(fun, donate_argnums=donated_numbers, keep_unused=True).lower(*args).as_text()
        marked = [int(part.split(" ")[0]) for part in text.split("tf.aliasing_output = ")[1:]]
        inputs = [alias for alias in range(len(args)) if alias in aliases]
        assert marked == [aliases.index(n) for n in inputs]


# --- streams, constants, names ----------------------------------------------------------------------------------------


def test_one_stream_for_each_input_and_output() -> None:
    jaxpr = jax.make_jaxpr(lambda a, b, c: (c, a, a))(X, 2.0, Y)
    program = lower(jaxpr, small_target(4), ProgramInputs(names=["w", "s", "x"]))
    assert [(s.name, s.shape) for s in program.inputs] == [("w", (2, 3)), ("s", ()), ("x", (2, 3))]
    assert [(s.name, s.shape) for s in program.outputs] == [("out0", (2, 3)), ("out1", (2, 3)), ("out2", (2, 3))]
    assert [v.name for v in program.graph.variables][:3] == ["w", "s", "x"]


def test_equal_scalars_are_one_constant() -> None:
    def constants(*values: float) -> int:
        def fun(x: jax.Array) -> jax.Array:
            for value in values:
                x = jnp.cumsum(x) * value
            return x

        return sum(v.is_constant for v in lowered(fun, X).graph.variables)

    assert constants(2.0, 2.0, 2.0) == constants(2.0) < constants(2.0, 3.0)
    assert constants(0.0, -0.0) == constants(2.0, 3.0)  # equal as numbers, not as bits


def test_everything_is_mapped() -> None:
    for fun, args, donated, _ in ALIASES.values():
        program = lowered(fun, *args, donated=donated)
        assert set(program.graph.mappings) >= {v for v in program.graph.variables if v.size}


TABLE = np.arange(3, dtype=np.float32)

RESULTS: dict[str, Callable[[jax.Array], Any]] = {
    "argument": lambda x: x,
    "argument twice": lambda x: (x, x),
    "literal": lambda x: (x, 3.0, True),
    "constant": lambda x: (jnp.asarray(TABLE), x + TABLE),
    "view of an argument": lambda x: (x.T, x[::-1, 1:], jnp.broadcast_to(x[0], (4, 3))),
    "view of a result": lambda x: (lambda y: (y.T, y.reshape(-1)[1:5]))(jnp.sin(x)),
    "constant of a branch": lambda x: lax.cond(x[0, 0] > 1, lambda: x + TABLE, lambda: x),
    "argument through a loop": lambda x: lax.fori_loop(0, 3, lambda i, c: (c[1], c[0]), (x, x + 1)),
    "nothing": lambda x: (),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str) -> None:
    check(RESULTS[name], jnp.asarray(X), tiles=(1, 4, 7), rtol=1e-6)


def test_operations_have_the_line_of_the_user() -> None:
    def fun(x: jax.Array) -> jax.Array:
        with jax.named_scope("first"):
            x = jnp.sort(x)
        return jnp.where(x > 0, x, x * 2)

    line = fun.__code__.co_firstlineno
    sets = {c.name: c.origin for c in lowered(fun, X).graph.groups}
    assert sets["first/sort"].line == f"test_lower.py:{line + 2} (fun)" and sets["first/sort"].path == "first"
    assert {o.line for name, o in sets.items() if name != "first/sort"} == {f"test_lower.py:{line + 3} (fun)"}
