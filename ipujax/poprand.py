"""poprand: tensors of random numbers, under PopLibs' names in snake_case.

The seed is a tensor of two UNSIGNED_INT elements, read when the program runs; `seed_modifier` tells several draws from
one seed apart. Numbers are those of JAX's threefry generator for that key, and do not depend on tile mappings, so that
a program draws the same on any machine.
Source: names from poprand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.library import add, registrar
from ipujax.runtime.errors import GraphError, user_line
from ipujax.runtime.graph import Graph
from ipujax.runtime.program import Sequence as Program
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import dtype_name

add_codelets = registrar("poprand")

_WIDE = np.dtype(np.float32)


def _draw(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    sample: Callable[..., jax.Array],
    prog: Program,
    name: str,
    operands: Sequence[Tensor] = (),
) -> Tensor:
    if seed.size != 2 or seed.dtype != np.uint32:
        got = f"{dtype_name(seed.dtype)}{list(seed.shape)}"
        raise GraphError(f"{name}: this is no seed", where=user_line(), expected="uint32[2]", got=got)

    def drawn(words: jax.Array, *arrays: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words.reshape(2), impl="threefry2x32")
        return sample(jax.random.fold_in(key, seed_modifier), *arrays)

    result: Tensor = add(graph, drawn, [seed, *operands], prog, name)
    return result


def uniform(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    shape: Sequence[int],
    dtype: Any,
    low: float,
    high: float,
    prog: Program,
    name: str = "uniform",
) -> Tensor:
    """Numbers evenly between two bounds; integers include both, floats the lower.

    Args:
        graph: graph to add to.
        seed: UNSIGNED_INT [2].
        seed_modifier: tells draws from one seed apart.
        shape: sizes of the result.
        dtype: FLOAT, HALF or INT.
        low: least value.
        high: greatest value.
        prog: program the steps are added to.
        name: debug name.

    Returns:
        A new tensor.

    Raises:
        GraphError: something that is no seed.
    """
    size, dtype = tuple(shape), np.dtype(dtype)

    def sample(key: jax.Array) -> jax.Array:
        if dtype.kind in "iu":
            return jax.random.randint(key, size, int(low), int(high) + 1, dtype)
        return jax.random.uniform(key, size, dtype, low, high)

    return _draw(graph, seed, seed_modifier, sample, prog, name)


def normal(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    shape: Sequence[int],
    dtype: Any,
    mean: float,
    std_dev: float,
    prog: Program,
    name: str = "normal",
) -> Tensor:
    """Normally distributed numbers; arguments as of `uniform`."""

    def sample(key: jax.Array) -> jax.Array:
        return (mean + std_dev * jax.random.normal(key, tuple(shape), _WIDE)).astype(dtype)

    return _draw(graph, seed, seed_modifier, sample, prog, name)


def truncated_normal(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    shape: Sequence[int],
    dtype: Any,
    mean: float,
    std_dev: float,
    alpha: float,
    prog: Program,
    name: str = "truncated_normal",
) -> Tensor:
    """Normally distributed numbers within `alpha` standard deviations of the mean; arguments as of `uniform`."""

    def sample(key: jax.Array) -> jax.Array:
        return (mean + std_dev * jax.random.truncated_normal(key, -alpha, alpha, tuple(shape), _WIDE)).astype(dtype)

    return _draw(graph, seed, seed_modifier, sample, prog, name)


def bernoulli(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    shape: Sequence[int],
    dtype: Any,
    probability: float,
    prog: Program,
    name: str = "bernoulli",
) -> Tensor:
    """Ones with a probability, and zeros; arguments as of `uniform`."""

    def sample(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key, probability, tuple(shape)).astype(dtype)

    return _draw(graph, seed, seed_modifier, sample, prog, name)


def dropout(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    x: Tensor,
    keep_probability: float,
    scale: float,
    prog: Program,
    name: str = "dropout",
) -> Tensor:
    """A tensor with elements set to zero, those kept multiplied by `scale`; the same seed drops the same elements."""

    def sample(key: jax.Array, a: jax.Array) -> jax.Array:
        kept = jax.random.bernoulli(key, keep_probability, a.shape)
        return jnp.where(kept, a * jnp.asarray(scale, a.dtype), jnp.zeros((), a.dtype))

    return _draw(graph, seed, seed_modifier, sample, prog, name, [x])
