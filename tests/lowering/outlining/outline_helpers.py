"""Counts and comparisons for tests of the pass `outline`."""

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
WIDTH = 16
LENGTH = 8


def normal(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / 4).astype(np.float32)


def calls(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Calls of functions written in a jaxpr and in nested ones, those of one function once."""
    visited: set[int] = set()

    def walk(body: Any) -> Iterator[JaxprEqn]:
        body = getattr(body, "jaxpr", body)
        if id(body) not in visited:
            visited.add(id(body))
            for eqn in body.eqns:
                if eqn.primitive.name == "function_call":
                    yield eqn
                for inner in jaxprs_in_params(eqn.params):
                    yield from walk(inner)

    yield from walk(jaxpr)


def op_by_op(jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Results of a jaxpr, one operation after the other, in functions too."""

    def equation(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        is_call = eqn.primitive.name == "function_call"
        return op_by_op(eqn.params["jaxpr"], values) if is_call else eval_equation(eqn, *values)

    return eval_jaxpr(jaxpr, list(map(jnp.asarray, operands)), equation, jnp.asarray)


def outlined(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """The jaxpr after `outline`, with the numbers before it, to the bit."""
    jaxprs = run_passes(jax.jit(fun).trace(*args).jaxpr)
    check_jaxpr(jaxprs["outline"].jaxpr)
    leaves = jax.tree.leaves(args)
    unshared = op_by_op(jaxprs["split_maps"], leaves)
    for actual, expected in zip(op_by_op(jaxprs["outline"], leaves), unshared, strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
    return jaxprs["outline"]


def count(fun: Callable[..., Any], *args: Any) -> list[int]:
    """Calls of each function, in falling order."""
    bodies = Counter(id(eqn.params["jaxpr"].jaxpr) for eqn in calls(outlined(fun, *args)))
    return sorted(bodies.values(), reverse=True)
