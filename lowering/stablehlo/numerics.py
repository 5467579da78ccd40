"""Rules of products, reductions, windows, sorts, transforms and random numbers of StableHLO, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import mlir, stablehlo
from ipujax.lowering.stablehlo.arrays import known_integers
from ipujax.lowering.stablehlo.elementwise import Words64
from ipujax.lowering.stablehlo.regions import (
    only_operation,
    position_of_maximum,
    position_of_minimum,
    region_of_jax,
    signature,
    sort_of_keys,
)
from ipujax.lowering.stablehlo.translation import (
    Operation,
    Rule,
    Scope,
    UntranslatedError,
    Values,
    dtype_of,
    flags,
    has_64_bits,
    integer,
    ints,
    pairs,
    static_shape,
    word,
)

ir = mlir.ir
Fun = Callable[..., Any]


def _with_truths(of_numbers: Fun, of_truths: Fun) -> Fun:
    return lambda x, *rest: (of_truths if x.dtype == bool else of_numbers)(x, *rest)


def _smallest_number(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.inexact) else False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def _largest_number(dtype: Any) -> Any:
    return np.inf if jnp.issubdtype(dtype, jnp.inexact) else True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


class _Monoid(NamedTuple):
    """Functions of JAX for a monoid.

    Args:
        reduction: reduction of an array over dimensions.
        combine: operation of two arrays.
        neutral: neutral element of a dtype.
        cumulative: running results along a dimension; None where JAX has none.
    """

    reduction: Fun
    combine: Fun
    neutral: Fun
    cumulative: Fun | None = None


# By the operation of the region.
_MONOIDS = {
    "stablehlo.add": _Monoid(
        _with_truths(lax.reduce_sum, lax.reduce_or),
        _with_truths(lax.add, lax.bitwise_or),
        lambda _: 0,
        lax.cumsum,
    ),
    "stablehlo.multiply": _Monoid(
        _with_truths(lax.reduce_prod, lax.reduce_and),
        _with_truths(lax.mul, lax.bitwise_and),
        lambda _: 1,
        lax.cumprod,
    ),
    "stablehlo.maximum": _Monoid(_with_truths(lax.reduce_max, lax.reduce_or), lax.max, _smallest_number, lax.cummax),
    "stablehlo.minimum": _Monoid(_with_truths(lax.reduce_min, lax.reduce_and), lax.min, _largest_number, lax.cummin),
    "stablehlo.and": _Monoid(lax.reduce_and, lax.bitwise_and, lambda dtype: True if dtype == jnp.bool_ else -1),
    "stablehlo.or": _Monoid(lax.reduce_or, lax.bitwise_or, lambda _: 0),
    "stablehlo.xor": _Monoid(lax.reduce_xor, lax.bitwise_xor, lambda _: 0),
}


class _PositionSearch(NamedTuple):
    """Functions of JAX for the position of an extremum.

    Args:
        search: the position.
        of_vector: the same of a one-dimensional array, for the region that JAX makes for it.
        extremum: the extremum itself.
        initial: number that the search starts from.
    """

    search: Fun
    of_vector: Fun
    extremum: Fun
    initial: Fun


_POSITIONS = (
    _PositionSearch(lax.argmax, position_of_maximum, lax.reduce_max, _smallest_number),
    _PositionSearch(lax.argmin, position_of_minimum, lax.reduce_min, _largest_number),
)


def algorithm_name(algorithm: Any) -> str:
    """Name in JAX of an algorithm of a product, as BF16_BF16_F32_X3."""
    kinds = (algorithm.lhs_precision_type, algorithm.rhs_precision_type, algorithm.accumulation_type)
    count = algorithm.num_primitive_operations
    return "_".join([*(str(kind).upper() for kind in kinds), *([f"X{count}"] if count > 1 else [])])


def _dot_algorithm(algorithm: Any) -> lax.DotAlgorithmPreset:
    """Algorithm of a product in JAX."""
    name = algorithm_name(algorithm)
    if name not in lax.DotAlgorithmPreset.__members__:
        raise UntranslatedError(f"a product by the algorithm {name}")
    return lax.DotAlgorithmPreset[name]


def _precision_of(op: Operation) -> Any:
    if "algorithm" in op.attributes:
        return _dot_algorithm(stablehlo.DotAlgorithm(op.attributes["algorithm"]))
    if "precision_config" not in op.attributes:
        return None
    return tuple(lax.Precision[stablehlo.PrecisionAttr(x).value] for x in op.attributes["precision_config"])


def dot_general_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.dot_general`: the product of arrays over contracted dimensions, as JAX's of the same parameters."""
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    contracted = (tuple(numbers.lhs_contracting_dimensions), tuple(numbers.rhs_contracting_dimensions))
    batch = (tuple(numbers.lhs_batching_dimensions), tuple(numbers.rhs_batching_dimensions))
    dtype = dtype_of(op.results[0].type)
    lhs, rhs = operands
    return [lax.dot_general(lhs, rhs, (contracted, batch), precision=_precision_of(op), preferred_element_type=dtype)]


def dot_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Product of matrices or vectors."""
    return [lax.dot(*operands, precision=_precision_of(op), preferred_element_type=dtype_of(op.results[0].type))]


def convolution_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.convolution` and `dynamic_conv`, whose padding is an operand, by JAX's convolution.

    JAX has no reversed windows: the kernel is reversed in their place.
    """
    x, kernel, *padding = operands
    attribute = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    spatial = x.ndim - 2
    numbers = lax.ConvDimensionNumbers(
        (attribute.input_batch_dimension, attribute.input_feature_dimension, *attribute.input_spatial_dimensions),
        (
            attribute.kernel_output_feature_dimension,
            attribute.kernel_input_feature_dimension,
            *attribute.kernel_spatial_dimensions,
        ),
        (attribute.output_batch_dimension, attribute.output_feature_dimension, *attribute.output_spatial_dimensions),
    )
    is_reversed = flags(op, "window_reversal", spatial)
    dims = [d for d, is_turned in zip(numbers.rhs_spec[2:], is_reversed, strict=True) if is_turned]
    ones = (1,) * spatial
    return [
        lax.conv_general_dilated(
            x,
            lax.rev(kernel, dims) if dims else kernel,
            window_strides=ints(op, "window_strides", ones),
            padding=_padding(op, padding, spatial),
            lhs_dilation=ints(op, "lhs_dilation", ones),
            rhs_dilation=ints(op, "rhs_dilation", ones),
            dimension_numbers=numbers,
            feature_group_count=integer(op, "feature_group_count", 1),
            batch_group_count=integer(op, "batch_group_count", 1),
            precision=_precision_of(op),
            preferred_element_type=dtype_of(op.results[0].type),
        )
    ]


def _padding(op: Operation, operand: Values, spatial: int) -> list[tuple[int, int]]:
    if not operand:
        return pairs(op, "padding", spatial)
    sizes = known_integers(operand[0])
    return list(zip(sizes[::2], sizes[1::2], strict=True))


def reduce_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.reduce` by the narrowest operation of JAX: a reduction by a monoid, an `argmax`, or by any function.

    Operands are the arrays, then their initial values.
    """
    count = len(operands) // 2
    arrays, initial = operands[:count], operands[count:]
    dims = ints(op, "dimensions")
    monoid = _MONOIDS.get(only_operation(op.regions[0])) if count == 1 else None
    if monoid is not None:
        # It starts from the neutral element; another initial value is combined with its result.
        result = monoid.reduction(arrays[0], dims)
        if _equals(initial[0], monoid.neutral(result.dtype)):
            return [result]
        return [monoid.combine(result, lax.broadcast(initial[0], result.shape))]
    position = _position_rule(op, arrays, initial, dims)
    if position is not None:
        return position
    return list(lax.reduce(arrays, initial, lambda a, b: scope.block(op.regions[0], [*a, *b]), dims))


def _equals(value: Any, expected: Any) -> bool:
    """True for a value that is known while the module is read, and is the expected number."""
    return isinstance(value, np.ndarray) and bool(value == np.asarray(expected).astype(value.dtype))


def _position_rule(op: Operation, arrays: Values, initial: Values, dims: tuple[int, ...]) -> Sequence[Any] | None:
    """Extremum and its position, if a reduction, of numbers and positions, is JAX's `argmax` or `argmin`; else None.

    Args:
        op: the reduction.
        arrays: the reduced arrays: numbers and positions.
        initial: initial value of each.
        dims: reduced dimensions.
    """
    if len(arrays) != 2 or len(dims) != 1 or arrays[1].dtype != np.int32 or arrays[0].dtype == bool:
        return None
    numbers = op.operands[1].owner
    if getattr(numbers, "name", "") != "stablehlo.iota" or integer(numbers, "iota_dimension") != dims[0]:
        return None
    x = arrays[0]
    for position in _POSITIONS:
        region = region_of_jax("stablehlo.reduce", position.of_vector, str(x.dtype))
        is_start = _equals(initial[1], 0) and _equals(initial[0], position.initial(x.dtype))
        if region == signature(op.regions[0]) and is_start:
            return [position.extremum(x, dims), position.search(x, dims[0], np.int32)]
    return None


def reduce_window_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.reduce_window` by the narrowest operation of JAX: a running sum or the like, pooling, or any function.

    Operands are the arrays, then their initial values. Windows as long as the array, moved over its end, make a running
    sum.
    """
    count = len(operands) // 2
    arrays, initial = operands[:count], operands[count:]
    rank = arrays[0].ndim
    ones = (1,) * rank
    window = ints(op, "window_dimensions")
    padding = pairs(op, "padding", rank)
    steps = [ints(op, name, ones) for name in ("window_strides", "base_dilations", "window_dilations")]
    monoid = _MONOIDS.get(only_operation(op.regions[0])) if count == 1 else None
    if monoid is None:

        def combine_any(a: Values, b: Values) -> Values:
            return scope.block(op.regions[0], [*a, *b])

        return list(lax.reduce_window(arrays, initial, combine_any, window, steps[0], padding, *steps[1:]))
    x = arrays[0]
    axes = [d for d, n in enumerate(window) if n > 1]
    is_from_neutral = _equals(initial[0], monoid.neutral(x.dtype))
    if monoid.cumulative and len(axes) == 1 and all(s == ones for s in steps) and is_from_neutral:
        # A window as long as the array, which padding moves over one of its ends.
        (axis,) = axes
        paddings = [(window[axis] - 1, 0), (0, window[axis] - 1)]
        is_whole = window[axis] == x.shape[axis] and all(p == (0, 0) for d, p in enumerate(padding) if d != axis)
        if is_whole and padding[axis] in paddings and x.dtype != bool:
            return [monoid.cumulative(x, axis, reverse=padding[axis] == paddings[1])]
    return [lax.reduce_window(x, initial[0], monoid.combine, window, steps[0], padding, *steps[1:])]


def select_and_scatter_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.select_and_scatter`, the gradient of pooling by maxima or minima; another one has no counterpart."""
    x, source, initial = operands
    select, scatter = op.regions
    comparison = only_operation(select)
    direction = word(select.blocks[0].operations[0].operation, "comparison_direction")
    primitives = {"GE": lax.ge_p, "LE": lax.le_p}
    if comparison != "stablehlo.compare" or direction not in primitives or only_operation(scatter) != "stablehlo.add":
        raise UntranslatedError("a select_and_scatter by other functions")
    if not _equals(initial, 0):
        raise UntranslatedError("a select_and_scatter from another value than 0")
    return [
        lax.select_and_scatter_add_p.bind(
            source,
            x,
            select_prim=primitives[direction],
            window_dimensions=ints(op, "window_dimensions"),
            window_strides=ints(op, "window_strides", (1,) * x.ndim),
            padding=tuple(pairs(op, "padding", x.ndim)),
        )
    ]


def sort_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Sort in the order of JAX, by one or several of the arrays."""
    dtypes = [str(x.dtype) for x in operands]
    region = signature(op.regions[0])
    for num_keys in range(1, len(operands) + 1):
        if region == region_of_jax("stablehlo.sort", sort_of_keys(num_keys), *dtypes):
            dimension = integer(op, "dimension") % operands[0].ndim
            return list(lax.sort(tuple(operands), dimension=dimension, num_keys=num_keys))
    raise UntranslatedError("a sort by another order")


def fft_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Fourier transform."""
    kind = str(stablehlo.FftTypeAttr(op.attributes["fft_type"]).value)
    return [lax.fft(operands[0], kind, ints(op, "fft_length"))]


def rng_bit_generator_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.rng_bit_generator`: the next state, and random bits.

    A state of 64-bit numbers is pairs of 32-bit words where JAX has no 64 bits.
    """
    (state,) = operands
    if isinstance(state, np.ndarray) and state.dtype == np.uint64 and not has_64_bits():
        state = Words64(jnp.asarray(state.view(np.uint32).reshape(-1, 2)))
    algorithms = {"DEFAULT": "RNG_DEFAULT", "PHILOX": "RNG_PHILOX", "THREE_FRY": "RNG_THREE_FRY"}
    algorithm = lax.RandomAlgorithm[algorithms[word(op, "rng_algorithm")]]
    kind = op.results[1].type
    is_words = isinstance(state, Words64)
    key = lax.reshape(state.words, (2 * state.shape[0],)) if is_words else state
    new_key, bits = lax.rng_bit_generator(key, static_shape(kind), dtype_of(kind), algorithm)
    return [Words64(lax.reshape(new_key, (state.shape[0], 2))) if is_words else new_key, bits]


def top_k(x: jax.Array, k: int) -> Sequence[Any]:
    """The k largest numbers along the last dimension, and their positions."""
    return lax.top_k(x, k)


def top_k_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """The largest numbers along the last dimension, and their positions."""
    return top_k(operands[0], integer(op, "k"))


RULES: dict[str, Rule] = {
    "stablehlo.dot_general": dot_general_rule,
    "stablehlo.dot": dot_rule,
    "stablehlo.convolution": convolution_rule,
    "stablehlo.dynamic_conv": convolution_rule,
    "stablehlo.reduce": reduce_rule,
    "stablehlo.reduce_window": reduce_window_rule,
    "stablehlo.select_and_scatter": select_and_scatter_rule,
    "stablehlo.sort": sort_rule,
    "stablehlo.fft": fft_rule,
    "stablehlo.rng_bit_generator": rng_bit_generator_rule,
    "chlo.top_k": top_k_rule,
}
