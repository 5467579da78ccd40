"""Differences of arrays, and which of them rounding explains.

Input: an array by the program, the same by plain JAX, and the size of rounding errors; for that size an equation, its
operands and its results, arrays of one replica. Output: a `Difference`. The size of the rounding errors of a result is
that with which any order of the equation's operations computes it from these operands:

    sums of n products or terms    √n · ε · the same sum of magnitudes
    functions                      ε · the result, and its largest change when each operand changes by ε of itself
    other arithmetic               ε · the result
    moves, choices, integers       0

For many equations, one after the other, each result gets such an error of random sign (Monte Carlo arithmetic): the
spread of the last results is the size of their errors, however much the equations between them magnify it.

Sources: Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019 (√n); Parker, Monte Carlo
Arithmetic, 1997. Limits: the sizes are estimates; `MARGIN` covers what they miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.gcl import COLLECTIVES, is_collective
from ipujax.lowering.jax_compat import JaxprEqn, eval_equation, is_on_host
from ipujax.lowering.replicas.stacked_eval import Rounded
from ipujax.runtime.tensor import is_key_dtype, wide_dtype

MARGIN = 8.0  # assumed: rounding errors over their estimated size
SAMPLES = 4

_SUM_NAMES = (
    "dot_general ragged_dot_general conv_general_dilated reduce_sum cumsum reduce_window_sum scatter-add"
    " select_and_scatter_add"
)
_SUMS = frozenset(_SUM_NAMES.split())
_ROUNDED_ONCE = frozenset(("add", "add_any", "sub", "mul", "div", "sqrt", "convert_element_type", "reduce_precision"))
# Results are elements of operands, or exact: moves, choices, and functions that jump.
_EXACT_NAMES = (
    "neg abs sign copy reshape squeeze expand_dims broadcast_in_dim transpose rev slice concatenate pad dynamic_slice"
    " dynamic_update_slice gather scatter real imag complex conj stop_gradient optimization_barrier take_rows iota"
    " max min select_n clamp sort top_k floor ceil round rem nextafter reduce_max reduce_min cummax cummin"
    " reduce_window_max reduce_window_min scatter-max scatter-min select_and_gather_add"
)
_EXACT = frozenset(_EXACT_NAMES.split())


def is_inexact(x: Any) -> bool:
    """Return whether an array has elements that round."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def rounding_sizes(eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> list[jax.Array]:
    """Return for each result an array of the sizes of its rounding errors; of a collective for all replicas."""
    name = eqn.primitive.name
    is_sent = any(is_on_host(jax.typeof(x)) for x in (*operands, *results))
    if name in _EXACT or is_sent or not any(map(is_inexact, results)):
        return [jnp.zeros(jnp.shape(x), jnp.float32) for x in results]
    sizes = [_epsilon(x) * _magnitude(x) if is_inexact(x) else jnp.zeros(x.shape, jnp.float32) for x in results]
    if is_collective(eqn):
        replicas = operands[0].shape[0]
        magnitudes = COLLECTIVES[name](eqn, replicas).compute([_magnitude_like(x) for x in operands], replicas)
        changes = [replicas**0.5 * _epsilon(x) * _magnitude(y) for x, y in zip(results, magnitudes, strict=True)]
    elif name in _SUMS:
        changes = _sum_sizes(eqn, operands, results)
    elif name in _ROUNDED_ONCE or not all(map(is_inexact, results)):
        return sizes
    else:
        changes = _changes(eqn, operands, results)
    return [size + jnp.where(jnp.isnan(change), 0, change) for size, change in zip(sizes, changes, strict=True)]


def random_rounding(seed: jax.Array) -> Rounded:
    """Return a function that adds a rounding error of random sign to each result of an equation.

    Args:
        seed: uint32[]; each gives other signs.
    """
    numbers = count(1)

    def rounded(eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        sizes = rounding_sizes(eqn, operands, results)
        return [_rounded_up_or_down(x, size, seed + next(numbers)) for x, size in zip(results, sizes, strict=True)]

    return rounded


def _rounded_up_or_down(x: Any, size: Any, seed: jax.Array) -> Any:
    if not is_inexact(x) or is_on_host(jax.typeof(x)):
        return x
    return x + (_signs(x.shape, seed * jnp.uint32(7919)) * size).astype(x.dtype)


def _changes(eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> list[jax.Array]:
    """Return the largest changes of results when operands are rounded, in several samples: one may cancel."""
    largest = [jnp.zeros(x.shape, jnp.float32) for x in results]
    for sample in range(SAMPLES):
        seeds = range(sample * len(operands), (sample + 1) * len(operands))
        rounded = (_rounded(x, seed) if is_inexact(x) else x for seed, x in zip(seeds, operands, strict=True))
        changed = eval_equation(eqn, *rounded)
        changes = (_magnitude(y - x) for x, y in zip(results, changed, strict=True))
        largest = [jnp.maximum(a, b) for a, b in zip(largest, changes, strict=True)]
    return largest


def _sum_sizes(eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> list[jax.Array]:
    """Return the sizes of errors of sums: magnitudes and numbers of terms are sums of the same form."""
    params = dict(eqn.params)
    if (accumulator_dtype := params.get("preferred_element_type")) is not None:
        params["preferred_element_type"] = wide_dtype(jnp.dtype(accumulator_dtype))
    in_wide = eqn.replace(params=params)
    magnitudes = eval_equation(in_wide, *(_magnitude_like(x) if is_inexact(x) else x for x in operands))
    # Powers, not constants: a batch of operands then has a batch of ones, without which JAX refuses a ragged product.
    ones = [
        jax.lax.optimization_barrier(jax.lax.integer_pow(_magnitude_like(x), 0)) if is_inexact(x) else x
        for x in operands
    ]
    terms = eval_equation(in_wide, *ones)
    return [
        _epsilon(x) * jnp.sqrt(1 + _magnitude(n)) * _magnitude(y)
        for x, y, n in zip(results, magnitudes, terms, strict=True)
    ]


def _epsilon(x: Any) -> float:
    return float(jnp.finfo(x.dtype).eps)


def _magnitude(x: jax.Array) -> jax.Array:
    """Return absolute values, in single precision or wider."""
    return jnp.abs(x).astype(wide_dtype(jnp.abs(x).dtype))


def _magnitude_like(x: jax.Array) -> jax.Array:
    """Return absolute values in the dtype of a complex operand, else as `_magnitude`."""
    return jnp.abs(x).astype(x.dtype) if jnp.iscomplexobj(x) else _magnitude(x)


def _rounded(x: jax.Array, number: int) -> jax.Array:
    """Return an operand with each element changed by as much as it may have been rounded."""
    return x * (1 + _epsilon(x) * _signs(x.shape, jnp.uint32(number))).astype(x.dtype)


def _signs(shape: Sequence[int], seed: jax.Array) -> jax.Array:
    """Return 1 or −1 for each element, by a hash of its position."""
    size = 1
    for extent in shape:
        size *= extent
    words = (jax.lax.iota(jnp.uint32, size) + seed) * jnp.uint32(2654435761)
    words = (words ^ (words >> 15)) * jnp.uint32(2246822519)
    return (1 - 2 * ((words >> 13) & 1).astype(jnp.float32)).reshape(tuple(shape))


_FLIPS = 4  # assumed: elements that rounding may flip, over those that it flips in the samples


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two arrays.

    Args:
        largest: largest absolute difference of two elements; infinite where one of them is no number. Of integers and
            flags likewise.
        is_error: whether rounding does not explain it.
        index: of the element that differs most beyond rounding errors, or most if there is none.
        expected: that element by plain JAX.
        got: that element by the other.
    """

    largest: float
    is_error: bool
    index: tuple[int, ...]
    expected: str
    got: str


def is_equal(got: Any, expected: Any) -> bool:
    """Return whether two arrays have the same elements; NaN equals NaN."""
    return not difference(got, expected, None, is_sampled=False).largest


def difference(got: Any, expected: Any, size: Any, *, is_sampled: bool) -> Difference:
    """Compare two arrays.

    Args:
        got: array by the program.
        expected: array of the same shape and dtype by plain JAX.
        size: sizes of rounding errors of its elements; of integers and flags True for those that rounding may change.
            None for values without rounding errors.
        is_sampled: whether the sizes come from samples, each of which may be small by chance.
    """
    if is_key_dtype(expected.dtype):
        got = jax.random.key_data(got)
        expected = jax.random.key_data(expected)
        size = None
    array = np.asarray(got)
    reference = np.asarray(expected)
    if (array.shape, array.dtype) != (reference.shape, reference.dtype):
        texts = (f"{x.dtype}{list(x.shape)}" for x in (reference, array))
        return Difference(np.inf, True, (), *texts)
    if array.size == 0:
        return Difference(0.0, False, (), "", "")
    if size is None:
        size = np.zeros(reference.shape, np.float32)
    is_float = jnp.issubdtype(reference.dtype, jnp.inexact)
    distance = _distances(array, reference)
    beyond = distance - _tolerance(np.asarray(size), reference.dtype, is_sampled) if is_float else distance
    if not is_float:
        # Which elements rounding flips is chance, how many it flips is not.
        is_flipped = np.asarray(size).astype(bool)
        explained = np.count_nonzero(distance) <= _FLIPS * np.count_nonzero(is_flipped)
        beyond = np.where(is_flipped | explained, 0.0, distance)
    is_error = bool(np.any(beyond > 0))
    place = np.unravel_index(np.argmax(beyond if is_error else distance), distance.shape)
    index = tuple(map(int, place))
    return Difference(float(distance.max()), is_error, index, str(reference[index]), str(array[index]))


def _distances(array: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return absolute differences of elements as float64; NaN equals NaN."""
    wide = np.complex128 if reference.dtype.kind == "c" else np.float64
    a = array.astype(wide)
    b = reference.astype(wide)
    with np.errstate(all="ignore"):
        distance = np.abs(a - b)
    is_same = (a == b) | (np.isnan(a) & np.isnan(b))
    if reference.dtype.kind in "iu" and reference.dtype.itemsize == 8:  # float64 has not all of them
        is_same = array == reference
    distance = np.where(np.isnan(distance), np.inf, distance)
    return np.where(is_same, 0.0, np.where(distance == 0, 1.0, distance))


def _tolerance(size: np.ndarray, dtype: Any, is_sampled: bool) -> np.ndarray:
    """Return the largest difference that rounding explains, for each element."""
    sizes = size.astype(np.float64)
    finite = sizes[np.isfinite(sizes)]
    mean = float(np.sqrt(np.mean(finite**2))) if is_sampled and finite.size else 0.0
    # Processors may flush numbers below the smallest normal one to zero.
    return MARGIN * (sizes + mean) + 2 * float(jnp.finfo(dtype).tiny)
