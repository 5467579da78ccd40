"""What tests of the pass `outline` count and compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    check_jaxpr,
    eval_equation,
    eval_jaxpr,
    jaxprs_in_params,
)
from ipujax.lowering.passes import run_passes

RNG = np.random.default_rng(5)
WIDTH, LENGTH = 16, 8


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
    for got, want in zip(op_by_op(after["outline"], leaves), op_by_op(after["swap_products"], leaves), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    return after["outline"]


def count(fun: Callable[..., Any], *args: Any) -> list[int]:
    """How often each function is called, most often first."""
    bodies = Counter(id(eqn.params["jaxpr"].jaxpr) for eqn in calls(outlined(fun, *args)))
    return sorted(bodies.values(), reverse=True)
