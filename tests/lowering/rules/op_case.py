"""Rows of the op table, and makers of their arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

Spec = Callable[[np.random.Generator], Any]


def normal(*shape: int, dtype: Any = np.float32, scale: float = 1.0) -> Spec:
    """Normally distributed numbers."""
    return lambda rng: np.asarray(scale * rng.normal(size=shape), dtype)


def uniform(*shape: int, low: float, high: float, dtype: Any = np.float32) -> Spec:
    """Uniformly distributed numbers in an interval."""
    return lambda rng: np.asarray(rng.uniform(low, high, shape), dtype)


def integers(*shape: int, low: int = -9, high: int = 10, dtype: Any = np.int32) -> Spec:
    """Integers from `low` up to `high`, exclusive."""
    return lambda rng: np.asarray(rng.integers(low, high, shape), dtype)


def booleans(*shape: int) -> Spec:
    """Booleans, three in four of them true."""
    return lambda rng: np.asarray(rng.random(shape) < 0.75)


def distinct(*shape: int) -> Spec:
    """Pairwise distinct numbers."""
    return lambda rng: rng.permutation(int(np.prod(shape))).reshape(shape).astype(np.float32)


@dataclass(frozen=True, slots=True)
class OpCase:
    """Row of the op table.

    Args:
        primitive: the primitive that `fun` must trace to.
        name: name among the rows of its primitive.
        fun: function of arrays.
        specs: makers of its arguments.
        rtol, atol: tolerance of the engine against plain JAX; 0 is equality to the bit.
        split_rtol, split_atol: tolerance of executions that reassociate sums; as the engine's when None.
        grad: whether the gradient is tested too.
        grad_rtol: relative tolerance of the gradient.
    """

    primitive: str
    name: str
    fun: Callable[..., Any]
    specs: tuple[Spec, ...]
    rtol: float = 0.0
    atol: float = 0.0
    split_rtol: float | None = None
    split_atol: float | None = None
    grad: bool = False
    grad_rtol: float = 1e-5

    @property
    def id(self) -> str:
        """Name of the row in a test report."""
        return f"{self.primitive}-{self.name}"

    def arguments(self) -> tuple[Any, ...]:
        """The row's arrays, equal in every call."""
        rng = np.random.default_rng(list(self.id.encode()))
        return tuple(spec(rng) for spec in self.specs)


MAIN = (13, 29)  # 377 elements: 1 to 11 tiles hold some
ULP = 3e-7  # a vector and a scalar version of one function differ in the last bit
HALF_ULP = {np.float32: ULP, np.float16: 2e-3, jnp.bfloat16: 1.6e-2}
