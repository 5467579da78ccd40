"""A model of the tests: one training step as a pure function, its initial state, and its batches.

Limits: attention in the models has no biases. Softmax ignores the sum with a bias of the keys, so that its gradient is
nothing but rounding, which Adam scales up to the size of a step: any two compilers differ in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]
SEED = 1234


@dataclass(frozen=True)
class TrainingStep:
    """One training step and its arguments.

    Args:
        step: `step(state, *batch) -> (state, loss)`, pure, not jitted.
        state: parameters, optimizer state, random keys…: a pytree of arrays.
        batch: `batch(number)` gives the arrays of one batch, the same each time.
        contains: names of primitives the step is here for.
    """

    step: Callable[..., tuple[Any, jax.Array]]
    state: Any
    batch: Callable[[int], tuple[np.ndarray, ...]]
    contains: frozenset[str] = frozenset()


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Normally distributed float32 numbers."""
    return (np.random.default_rng(seed + SEED).normal(size=shape) * scale).astype(np.float32)


def weights(seed: int, *shape: int) -> jax.Array:
    """Initial weights: normal, with a variance of one over all but the last dimension."""
    return jnp.asarray(numbers(*shape, seed=seed, scale=float(np.prod(shape[:-1])) ** -0.5))


@lru_cache(maxsize=4096)
def classes(batch: int, count: int, seed: int) -> np.ndarray:
    """Random labels, int32[batch]."""
    return np.random.default_rng(seed + SEED).integers(0, count, batch).astype(np.int32)


def images(batch: int, side: int, channels: int = 1, count: int = 10) -> Callable[[int], tuple[np.ndarray, ...]]:
    """Batches of `side`² images in NHWC with labels that a small model can learn."""

    def make(number: int) -> tuple[np.ndarray, ...]:
        labels = classes(batch, count, number)
        patterns = numbers(count, side, side, channels, seed=7)
        return patterns[labels] + numbers(batch, side, side, channels, seed=number + 100, scale=0.5), labels

    return make


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[int], tuple[np.ndarray, ...]]:
    """Batches of token sequences, int32[batch, length], that count upwards from random starts."""

    def make(number: int) -> tuple[np.ndarray, ...]:
        start = classes(batch, vocabulary, number)[:, None]
        return ((start + np.arange(length, dtype=np.int32)) % vocabulary,)

    return make
