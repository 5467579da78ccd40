"""Random programs: a small grammar over the families of operations, and what a program of it computes.

    program ::= inputs, step…          step ::= operation, picks, body…          body ::= step…

A step takes operands from the values made so far, by its picks, and bends them to what it needs: every program is
valid, and a smaller one is valid too. Values know whether they are exact. What rounds makes others that are not, and
what jumps (comparisons, indices, rounding to integers) takes exact ones only: else the last bit of a sum, which any
compiler may choose, would decide. What has a kink takes exact ones only in a program that is differentiated.

Limits: numbers stay small by construction, so that one tolerance does for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from tests.lowering.random_operations import OPERATIONS, SHAPES, Picks, fitted

_NUM_PICKS = 5
_MAX_SIZE = 240
_MAX_RANK = 4


@dataclass(frozen=True)
class Step:
    """One operation on values picked from those made so far; loops and branches hold bodies of further steps."""

    op: str
    picks: Picks
    bodies: tuple[tuple[Step, ...], ...] = ()


@dataclass(frozen=True)
class Program:
    """Inputs by the numbers of their shapes, steps, and whether it is to be differentiated."""

    shapes: tuple[int, ...]
    steps: tuple[Step, ...]
    differentiable: bool
    seed: int

    def arguments(self) -> tuple[np.ndarray, ...]:
        """Floats in steps of an eighth, with ties, then integers, then weights in half precision."""
        rng = np.random.default_rng(self.seed)
        floats = [rng.integers(-16, 17, SHAPES[n]).astype(np.float32) / 8 for n in self.shapes]
        integers = rng.integers(-9, 10, (3, 5)).astype(np.int32), np.int32(rng.integers(0, 5))
        halves = [rng.integers(-1, 2, (5, 3)).astype(dtype) for dtype in (jnp.bfloat16, np.float16)]
        return (*floats, *integers, *halves)

    def __call__(self, *arguments: Any) -> list[jax.Array]:
        """All values that no step reads; of a big one a box."""
        pool = Pool([Value(jnp.asarray(x), True) for x in arguments], self.differentiable)
        for step in self.steps:
            pool.run(step)
        return [value.array for value in pool.unread()]

    def gradient(self, *arguments: Any) -> tuple[jax.Array, ...]:
        """The gradient of a weighted sum of the results with respect to the arguments: float0 for integers."""

        def weighted(*inputs: Any) -> jax.Array:
            results = [y for y in self(*inputs) if y.dtype == jnp.float32 and y.size]
            ramps = [np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape) for y in results]
            return sum((jnp.sum(y * ramp) for y, ramp in zip(results, ramps, strict=True)), jnp.float32(0))

        return jax.grad(weighted, tuple(range(len(arguments))), allow_int=True)(*arguments)


@dataclass(eq=False)
class Value:
    """An array, whether every execution gives it to the bit, and whether a step has read it."""

    array: jax.Array
    exact: bool
    read: bool = False


class Pool:
    """The values made so far."""

    def __init__(self, values: Sequence[Value], differentiable: bool) -> None:
        self.values = list(values)
        self.differentiable = differentiable

    def unread(self) -> list[Value]:
        """What only the caller can use; the last value if there is nothing."""
        return [value for value in self.values if not value.read] or self.values[-1:]

    def pick(self, pick: int, kind: str, exact: bool) -> Value:
        """A value of a kind: float, int, bool, half, or any; made from another where there is none."""
        actual = [v for v in self.values if (v.exact or not exact) and (kind == "any" or _kind(v.array) == kind)]
        if actual:
            value = actual[pick % len(actual)]
            value.read = True
            return value
        if kind == "bool":
            return Value(self.pick(pick, "int", True).array % 2 == 0, True)
        if kind == "half":
            return Value(jnp.ones((5, 3), jnp.bfloat16), True)
        return Value(jnp.asarray(np.arange(6).reshape(2, 3), np.float32 if kind == "float" else np.int32), True)

    def run(self, step: Step) -> None:
        """Appends the results of a step."""
        if step.op in _CONTROL:
            row = _CONTROL[step.op]
            operands = [self.pick(n, kind, False) for n, kind in zip(step.picks, row.kinds, strict=False)]
            self.values += [Value(_bounded(array), False) for array in row.fun(self, step, operands)]
            return
        operation = OPERATIONS[step.op]
        exact = operation.demand == "exact" or (operation.demand == "continuous" and self.differentiable)
        operands = [self.pick(n, kind, exact) for n, kind in zip(step.picks, operation.kinds, strict=False)]
        arrays = [value.array for value in operands]
        made = operation.fun(*arrays, step.picks)
        results = made if isinstance(made, list | tuple) else [made]
        is_exact = operation.moves and all(value.exact for value in operands)
        self.values += [Value(_bounded(array), is_exact) for array in results]


def _kind(x: jax.Array) -> str:
    return "half" if x.dtype in (jnp.bfloat16, np.float16) else {"f": "float", "i": "int", "b": "bool"}[x.dtype.kind]


def _bounded(x: jax.Array) -> jax.Array:
    """A box of at most `_MAX_SIZE` elements and `_MAX_RANK` dimensions."""
    if x.ndim > _MAX_RANK:
        outer = x.ndim - _MAX_RANK + 1
        x = x.reshape((prod(x.shape[:outer]), *x.shape[outer:]))
    sizes = list(x.shape)
    while np.prod(sizes) > _MAX_SIZE:
        sizes[int(np.argmax(sizes))] //= 2
    return lax.slice(x, [0] * x.ndim, sizes) if tuple(sizes) != x.shape else x


# --- loops and branches: inside them nothing is exact but what comes from outside ---


def _inside(pool: Pool, body: tuple[Step, ...], own: Sequence[jax.Array], outer: Sequence[Value]) -> Pool:
    """A body run on values of its own and on some from outside."""
    inner = Pool([*(Value(x, False) for x in own), *(Value(v.array, v.exact) for v in outer)], pool.differentiable)
    for step in body:
        inner.run(step)
    return inner


def _result(inner: Pool, shape: Sequence[int]) -> jax.Array:
    """One float of a shape that hangs on the last floats of a pool."""
    last = [v.array for v in inner.values if _kind(v.array) == "float"][-2:]
    return jnp.tanh(sum(fitted(x, shape) for x in last))


def _scanned(pool: Pool, step: Step, operands: list[Value]) -> list[jax.Array]:
    carry = operands[0].array
    xs = operands[1].array
    outer = operands[2:]
    xs = xs.reshape(-1)[:4] if xs.ndim == 0 else xs[:5]
    if step.picks[4] % 8 < 2:  # no iteration
        xs = xs.reshape(-1)[:0].reshape(0, 1 + step.picks[3] % 3)

    def turn(c: Any, x: jax.Array) -> Any:
        inner = _inside(pool, step.bodies[0], [c["x"], x], outer)
        return {**c, "x": _result(inner, c["x"].shape)}, (None, inner.values[-1].array)

    last, (nothing, made) = lax.scan(turn, {"x": carry, "none": None}, xs, reverse=bool(step.picks[4] % 2))
    assert last["none"] is nothing is None
    return [last["x"], made]


def _repeated(pool: Pool, step: Step, operands: list[Value]) -> list[jax.Array]:
    start, count, *outer = operands

    def turn(_: Any, c: jax.Array) -> jax.Array:
        return _result(_inside(pool, step.bodies[0], [c], outer), c.shape)

    trips = 1 + step.picks[3] % 3
    if pool.differentiable or step.picks[4] % 2:
        return [lax.fori_loop(0, trips, turn, start.array)]
    return [lax.fori_loop(0, fitted(count.array, (1,))[0] % 4, turn, start.array)]


def _branched(pool: Pool, step: Step, operands: list[Value]) -> list[jax.Array]:
    selector, *outer = operands
    shape = outer[0].array.shape
    branches = [lambda body=body: _result(_inside(pool, body, [], outer), shape) for body in step.bodies]
    index = fitted(selector.array, (1,))[0]
    if step.picks[4] % 2:
        return [lax.cond(index % 2 == 0, *branches[:2])]
    return [lax.switch(index, branches)]


def _called(pool: Pool, step: Step, operands: list[Value]) -> list[jax.Array]:
    wrap = (jax.jit, jax.checkpoint)[step.picks[4] % 2]

    def callee(none: None, *arrays: jax.Array) -> tuple[None, jax.Array]:
        return none, _result(_inside(pool, step.bodies[0], arrays, []), arrays[0].shape)

    call = wrap(callee)
    a, b = (value.array for value in operands)
    return [call(None, a, b)[1], call(None, fitted(b, a.shape), fitted(a, b.shape))[1]]


@dataclass(frozen=True)
class _Control:
    """A row for steps with bodies: how many, the kinds of operands, and from pool, step and operands to results."""

    bodies: int
    kinds: tuple[str, ...]
    fun: Callable[[Pool, Step, list[Value]], list[jax.Array]]


_CONTROL = {
    "scan": _Control(1, ("float", "float", "float", "int"), _scanned),
    "loop": _Control(1, ("float", "int", "float", "int"), _repeated),
    "branch": _Control(3, ("int", "float", "float"), _branched),
    "call": _Control(1, ("float", "float"), _called),
}


@st.composite
def steps(draw: st.DrawFn, depth: int) -> Step:
    """A step; one in eight is a loop, a branch or a call, nested at most `depth` deep."""
    name = draw(st.sampled_from([*OPERATIONS, *(_CONTROL if depth else ()), *(_CONTROL if depth else ())]))
    picks = draw(st.tuples(*[st.integers(0, 999)] * _NUM_PICKS))
    body = st.lists(steps(depth - 1), min_size=1, max_size=3).map(tuple)
    return Step(name, picks, tuple(draw(body) for _ in range(_CONTROL[name].bodies if name in _CONTROL else 0)))


@st.composite
def programs(draw: st.DrawFn, least: int = 5, most: int = 14) -> Program:
    """Programs of `least` to `most` steps; loops and branches are nested two deep."""
    shapes = draw(st.lists(st.integers(0, len(SHAPES) - 1), min_size=2, max_size=3))
    body = draw(st.lists(steps(2), min_size=least, max_size=most))
    return Program(tuple(shapes), tuple(body), draw(st.booleans()), draw(st.integers(0, 99)))
