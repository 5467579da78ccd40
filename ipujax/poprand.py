"""poprand: tensors of random numbers, under PopLibs' names in snake_case.

The seed is a tensor of two UNSIGNED_INT elements, read when the program runs; `seed_modifier` distinguishes draws
from one seed. Where PopLibs takes a reference tensor, the result has its shape and tile mapping; for a shape instead
the library maps it.

The numbers depend on seed, modifier, shape, type and bounds alone, not on tile mappings: they are those of JAX's
threefry generator for that key, so that a program draws the same numbers on any target and with any split.
Source: poprand `RandomGen.hpp`. Limits: PopLibs' numbers come from a generator in each tile, and depend on the mapping;
no seeds of the hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.poplar.library import add, check_arguments, check_tensors, registrar
from ipujax.poplar.types import cast_values, element_type
from ipujax.poputil import clone
from ipujax.public import public_names
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name

add_codelets = registrar("poprand")

_WIDE = np.dtype(np.float32)  # type of draws that are rounded to the result's type afterwards

Reference = Tensor | Sequence[int]


# `fold_in` separates the draws of one seed; a sum of seed and modifier would make draws of two seeds equal.
def _draw(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    reference: Reference,
    dtype: Any,
    sample: Callable[..., jax.Array],
    prog: Program,
    name: str,
    operands: Sequence[Tensor] = (),
) -> Tensor:
    """Add `sample(key, size, *operands)`; the result has the tile mapping of a reference that is a tensor."""
    check_tensors(name, seed)
    if seed.size != 2 or seed.dtype != np.uint32:
        got = f"{dtype_name(seed.dtype)}{list(seed.shape)}"
        raise GraphError(f"{name}: seed must be a tensor of two words", expected="uint32[2]", got=got)
    if not isinstance(seed_modifier, int | np.integer) or not 0 <= seed_modifier < 2**32:
        expected = "an integer from 0 to 2**32 - 1"
        raise GraphError(f"{name}: seed_modifier must be an unsigned word", expected=expected, got=seed_modifier)
    kind = element_type(dtype, name)
    size = reference.shape if isinstance(reference, Tensor) else tuple(reference)

    # The seed is an operand, not a constant: the host may write another before each run.
    def draw(words: jax.Array, *arrays: jax.Array) -> jax.Array:
        # threefry by name: the default generator is a setting of JAX that must not change a program's numbers.
        key = jax.random.wrap_key_data(words.reshape(2), impl="threefry2x32")
        return sample(jax.random.fold_in(key, np.uint32(seed_modifier)), size, *arrays)

    out = [clone(graph, reference, name, kind)] if isinstance(reference, Tensor) else []
    return add(graph, draw, [seed, *operands], prog, name, out)


def _check_probability(name: str, probability: float) -> None:
    if not 0 <= probability <= 1:
        raise GraphError(f"{name}: must have a probability", expected="0 to 1", got=probability)


def _check_floats(name: str, dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jnp.floating):
        raise GraphError(
            f"{name}: dtype must be floating-point", expected="FLOAT or HALF", got=dtype_name(np.dtype(dtype))
        )


def _check_normal(name: str, dtype: Any, mean: float, std_dev: float) -> None:
    _check_floats(name, dtype)
    if not std_dev >= 0:  # true for NaN too
        raise GraphError(f"{name}: the standard deviation", expected="at least 0", got=std_dev)
    # Beyond the largest value of the type all numbers would be infinite.
    cast_values(np.array([mean, std_dev]), np.dtype(dtype), f"{name}: mean and standard deviation")


def uniform(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    reference: Reference,
    dtype: Any,
    low: float,
    high: float,
    prog: Program,
    name: str = "uniform",
) -> Tensor:
    """Draw uniformly distributed numbers; integers include both bounds, floats the lower.

    Args:
        graph: graph to add to.
        seed: UNSIGNED_INT [2].
        seed_modifier: distinguishes draws from one seed.
        reference: tensor whose shape and tile mapping the result gets, or a shape.
        dtype: FLOAT, HALF or INT.
        low: lower bound.
        high: upper bound.
        prog: program to add to.
        name: debug name.

    Returns:
        A new tensor.

    Raises:
        GraphError: an invalid seed, or bounds in the wrong order; bounds, or a difference of floats, out of
            the range of the type.
    """
    dtype = np.dtype(dtype)
    if not low <= high:
        raise GraphError(f"{name}: bounds", expected="low at most high", got=f"{low}, {high}")
    if dtype.kind not in "iu":
        _check_floats(name, dtype)
    cast_values(np.array([low, high]), dtype, f"{name}: bounds")
    if dtype.kind not in "iu":  # JAX multiplies the difference of floats
        cast_values(np.array(high) - low, dtype, f"{name}: the difference of bounds")

    def sample(key: jax.Array, size: tuple[int, ...]) -> jax.Array:
        if dtype.kind in "iu":
            return _integers(key, size, int(low), int(high), dtype)
        return jax.random.uniform(key, size, dtype, low, high)

    return _draw(graph, seed, seed_modifier, reference, dtype, sample, prog, name)


def _integers(key: jax.Array, size: tuple[int, ...], low: int, high: int, dtype: np.dtype) -> jax.Array:
    """Draw integers of a type, both bounds included."""
    # Both bounds are included, but JAX excludes the upper, and `high + 1` may overflow the type.
    limits = np.iinfo(dtype)
    # As arrays: JAX takes Python's integers for INT, which lacks the upper half of UNSIGNED_INT.
    if high < limits.max:
        return jax.random.randint(key, size, np.array(low, dtype), np.array(high + 1, dtype), dtype)
    if low > limits.min:
        below = np.array(low - 1, dtype)
        return jax.random.randint(key, size, below, np.array(high, dtype), dtype) + np.array(1, dtype)
    # All values of the type.
    return jax.lax.bitcast_convert_type(jax.random.bits(key, size, f"uint{8 * dtype.itemsize}"), dtype)


def normal(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    reference: Reference,
    dtype: Any,
    mean: float,
    std_dev: float,
    prog: Program,
    name: str = "normal",
) -> Tensor:
    """Draw normally distributed numbers; arguments as of `uniform`.

    Raises:
        GraphError: an invalid seed, a type that is not a float, a negative deviation, or numbers out of its range.
    """
    _check_normal(name, dtype, mean, std_dev)

    def sample(key: jax.Array, size: tuple[int, ...]) -> jax.Array:
        return (mean + std_dev * jax.random.normal(key, size, _WIDE)).astype(dtype)  # rounded once

    return _draw(graph, seed, seed_modifier, reference, dtype, sample, prog, name)


def truncated_normal(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    reference: Reference,
    dtype: Any,
    mean: float,
    std_dev: float,
    alpha: float,
    prog: Program,
    name: str = "truncated_normal",
) -> Tensor:
    """Draw normally distributed numbers within `alpha` deviations of the mean; arguments as of `uniform`.

    Raises:
        GraphError: as `normal`, or an `alpha` that is not positive.
    """
    _check_normal(name, dtype, mean, std_dev)
    if not alpha > 0:
        raise GraphError(f"{name}: alpha", expected="more than 0", got=alpha)

    def sample(key: jax.Array, size: tuple[int, ...]) -> jax.Array:
        return (mean + std_dev * jax.random.truncated_normal(key, -alpha, alpha, size, _WIDE)).astype(dtype)

    return _draw(graph, seed, seed_modifier, reference, dtype, sample, prog, name)


def bernoulli(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    reference: Reference,
    dtype: Any,
    probability: float,
    prog: Program,
    name: str = "bernoulli",
) -> Tensor:
    """Draw ones with a probability, else zeros; arguments as of `uniform`."""
    _check_probability(name, probability)

    def sample(key: jax.Array, size: tuple[int, ...]) -> jax.Array:
        return jax.random.bernoulli(key, probability, size).astype(dtype)

    return _draw(graph, seed, seed_modifier, reference, dtype, sample, prog, name)


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
    """Set random elements to zero and multiply the others by `scale`; the same seed drops the same elements.

    Args:
        graph: graph to add to.
        seed: UNSIGNED_INT [2].
        seed_modifier: distinguishes draws from one seed.
        x: the tensor.
        keep_probability: probability of each element not to be dropped.
        scale: usually 1 / `keep_probability`.
        prog: program to add to.
        name: debug name.

    Returns:
        A new tensor.

    Raises:
        GraphError: an invalid seed or probability, or a scale that the type of `x` cannot represent.

    Source: poprand::dropout, which also takes a reference for the layout of its draw.
    """
    return _drop(graph, seed, seed_modifier, x, x.shape, keep_probability, scale, prog, name)


def shaped_dropout(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    x: Tensor,
    reference: Reference,
    keep_probability: float,
    scale: float,
    prog: Program,
    name: str = "shaped_dropout",
) -> Tensor:
    """Drop slices: as `dropout`, with one draw for all elements along dimensions in which `reference` has size 1.

    Args:
        graph: graph to add to.
        seed: UNSIGNED_INT [2].
        seed_modifier: distinguishes draws from one seed.
        x: the tensor.
        reference: shape, or tensor of a shape, that broadcasts to that of `x`.
        keep_probability: probability of each draw not to drop.
        scale: factor of the elements that are not dropped.
        prog: program to add to.
        name: debug name.

    Raises:
        GraphError: as `dropout`, or a shape that does not broadcast.

    Source: poprand::shapedDropout.
    """
    shape = reference.shape if isinstance(reference, Tensor) else tuple(reference)
    aligned = (1,) * (x.ndim - len(shape)) + shape
    if len(aligned) != x.ndim or any(n not in (1, m) for n, m in zip(aligned, x.shape, strict=True)):
        raise GraphError(f"{name}: the reference must broadcast", expected=list(x.shape), got=list(shape))
    return _drop(graph, seed, seed_modifier, x, shape, keep_probability, scale, prog, name)


def _drop(
    graph: Graph,
    seed: Tensor,
    seed_modifier: int,
    x: Tensor,
    shape: tuple[int, ...],
    keep_probability: float,
    scale: float,
    prog: Program,
    name: str,
) -> Tensor:
    """Add a dropout: elements, or blocks that `shape` broadcasts, are kept and scaled, or become zero."""
    _check_probability(name, keep_probability)
    factor = cast_values(scale, x.dtype, f"{name}: the scale")

    def sample(key: jax.Array, size: tuple[int, ...], a: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(key, keep_probability, size)
        # Selected, not multiplied by zero: a dropped infinity becomes zero.
        return jnp.where(keep, a * factor, jnp.zeros((), a.dtype))

    return _draw(graph, seed, seed_modifier, shape, x.dtype, sample, prog, name, [x])


__all__ = [
    "Reference",
    "add_codelets",
    "bernoulli",
    "dropout",
    "normal",
    "shaped_dropout",
    "truncated_normal",
    "uniform",
]
__dir__ = public_names(globals())
check_arguments(globals())
