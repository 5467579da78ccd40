"""Records of primitives that compute: elementwise, products, reductions, windows, sorts,
and linear algebra and Fourier transforms, with the operations of their independent problems.

Source of these counts: textbooks (Golub and Van Loan, "Matrix Computations"); assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log2, prod
from typing import Any

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.popops import MONOIDS, OP_COSTS
from ipujax.lowering.primitives.record import (
    Factors,
    PrimitiveRecord,
    Problem,
    Shapes,
    batched,
    elementwise,
    factors_by_number,
    factors_except,
    shapes,
)


def _batch_record(
    rank: Callable[[Mapping[str, Any]], int],
    work: Callable[[int], float] | None = None,
    columns: Callable[[Mapping[str, Any]], int] | None = None,
) -> PrimitiveRecord:
    """The record of a primitive that solves a batch of problems, along the leading dimensions of its operands.

    Args:
        rank: from parameters to the number of dimensions of one problem, 2 for a matrix.
        work: from the size of a problem to operations an element; None where unknown.
        columns: from parameters to the dimension, < 0, of right-hand sides that are solved column by column; None
            without.
    """

    def factors(eqn: JaxprEqn) -> Factors:
        return batched(eqn, max(len(shapes(eqn.invars)[0]) - rank(eqn.params), 0))

    return PrimitiveRecord(factors, problem=Problem(rank, columns, work))


def _of_matrices(params: Mapping[str, Any]) -> int:
    return 2


def _of_vectors(params: Mapping[str, Any]) -> int:
    return 1


# First factors of the dimensions of a product; those of a batch begin with 0. A rank is less than 100.
_CONTRACTED = 100
_OUTER = (200, 300)  # of the dimensions that each operand has alone


def _product_factors(eqn: JaxprEqn) -> Factors:
    """Factors of a `dot_general`: an index for each batch and contracted dimension, and for each that one operand has.

    Operands and results share a factor's number where one index runs over dimensions of several of them.
    """
    (contracted, batch) = eqn.params["dimension_numbers"]
    ranks = [len(shape) for shape in shapes(eqn.invars)]
    factors_of_operands: list[list[int]] = []
    outer_factors: list[int] = []
    for side, rank in enumerate(ranks):  # the left operand, then the right one
        factor = {d: n for n, d in enumerate(batch[side])}
        factor |= {d: _CONTRACTED + n for n, d in enumerate(contracted[side])}
        factors_of_operands.append([factor.get(d, _OUTER[side] + d) for d in range(rank)])
        outer_factors += [_OUTER[side] + d for d in range(rank) if d not in factor]
    factors = factors_by_number(eqn, factors_of_operands, [[*range(len(batch[0])), *outer_factors]])
    return replace(factors, reductions={_CONTRACTED + n: "add" for n in range(len(contracted[0]))}, macs=1)


_BATCH, _OUT_CHANNELS, _IN_CHANNELS, _GROUPS = range(4)  # factors of a convolution


def _convolution_factors(eqn: JaxprEqn) -> Factors:
    """Factors of a convolution: the indices along which its parts can be computed by themselves.

    They are batch, channels or groups; None is a dimension that stays whole: space, and a batch in groups. `macs` are
    the multiply-adds of one point of the index space.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    rank = len(shapes(eqn.invars)[0])
    operand, kernel, result = (list[int | None]([None] * rank) for _ in range(3))
    if params["batch_group_count"] > 1:
        return replace(factors_by_number(eqn, [operand, kernel], [result]), macs=1)
    operand[numbers.lhs_spec[0]] = result[numbers.out_spec[0]] = _BATCH
    if params["feature_group_count"] > 1:
        operand[numbers.lhs_spec[1]] = kernel[numbers.rhs_spec[0]] = result[numbers.out_spec[1]] = _GROUPS
        factors = factors_by_number(eqn, [operand, kernel], [result])
        # A dimension of channels runs over groups, then over the channels of a group, which stay whole.
        return replace(factors, sizes={**factors.sizes, _GROUPS: params["feature_group_count"]}, macs=1)
    operand[numbers.lhs_spec[1]] = kernel[numbers.rhs_spec[1]] = _IN_CHANNELS
    kernel[numbers.rhs_spec[0]] = result[numbers.out_spec[1]] = _OUT_CHANNELS
    return replace(factors_by_number(eqn, [operand, kernel], [result]), reductions={_IN_CHANNELS: "add"}, macs=1)


def _groups_of_block(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> Mapping[str, Any]:
    numbers = eqn.params["dimension_numbers"]
    channels = operands[0][numbers.lhs_spec[1]]
    return {"feature_group_count": channels // max(operands[1][numbers.rhs_spec[1]], 1)}


def _dot_macs(eqn: JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    (operand, _), (result,) = shapes(eqn.invars), shapes(eqn.outvars)
    return prod(result) * prod(operand[d] for d in contracted)


def _conv_macs(eqn: JaxprEqn) -> int:
    (_, kernel), (result,) = shapes(eqn.invars), shapes(eqn.outvars)
    out_channels = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return prod(result) * prod(kernel) // max(out_channels, 1)


# Monoids of collectives, which combine numbers: of truths "and" is a minimum, "or" a maximum.
_OVER_DEVICES = {"add": "add", "max": "max", "min": "min"}
_OVER_DEVICES_OF_TRUTHS = {**_OVER_DEVICES, "or": "max", "and": "min"}


def _reduction_factors(eqn: JaxprEqn) -> Factors:
    (shape,) = shapes(eqn.invars)
    axes = eqn.params["axes"]
    factors = factors_by_number(eqn, [range(len(shape))], [[d for d in range(len(shape)) if d not in axes]])
    aval: Any = eqn.invars[0].aval
    collectives = _OVER_DEVICES_OF_TRUTHS if aval.dtype == bool else _OVER_DEVICES
    return replace(factors, reductions=dict.fromkeys(axes, collectives.get(MONOIDS[eqn.primitive.name], "own")))


def _factors_without_axes(eqn: JaxprEqn) -> Factors:
    """Reduced axes are whole: an index, or a user's function of two elements, is no collective."""
    params = eqn.params
    axes = params.get("axes", params.get("dimensions", ()))
    rank = len(shapes(eqn.outvars)[0]) + len(axes)
    operands = [[None if d in axes else d for d in range(rank)] if shape else [] for shape in shapes(eqn.invars)]
    return factors_by_number(eqn, operands, [[d for d in range(rank) if d not in axes] for _ in eqn.outvars])


def _factors_without_axis_of(param: str) -> Any:
    return lambda eqn: factors_except(eqn, (eqn.params[param] % len(shapes(eqn.outvars)[0]),))


def _top_k_factors(eqn: JaxprEqn) -> Factors:
    rank = len(shapes(eqn.outvars)[0])
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", rank - 1))
    return factors_except(eqn, (axis % rank,))


def _window_factors(eqn: JaxprEqn) -> Factors:
    """Factors of a reduction of windows: the dimensions along which its parts can be computed by themselves.

    They are those whose window is one element; parts along others would need elements of their neighbours.
    """
    params = eqn.params
    result = shapes(eqn.outvars)[0]
    ones = (1,) * len(result)
    one_element = (1, 1, (0, 0), 1, 1)  # window, stride, padding, dilation of the operand and of the window
    window_of_dim = zip(
        params["window_dimensions"],
        params.get("window_strides") or ones,
        params.get("padding") or ((0, 0),) * len(result),
        params.get("base_dilation") or ones,
        params.get("window_dilation") or ones,
        strict=True,
    )
    return factors_except(eqn, [d for d, window in enumerate(window_of_dim) if window != one_element])


_CHEAP = frozenset(
    (
        *("neg", "add", "sub", "mul", "add_any", "max", "min", "abs", "square", "integer_pow"),
        *("convert_element_type", "eq", "ne", "ge", "gt", "le", "lt", "and", "or", "not", "select_n"),
    )
)
_COMMUTATIVE = frozenset(("add", "add_any", "mul", "max", "min", "and", "or", "xor", "eq", "ne"))
_COMPARING = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "max", "min"))


def _bitcast_factors(eqn: JaxprEqn) -> Factors:
    (before,), (after,) = shapes(eqn.invars), shapes(eqn.outvars)
    rank = min(len(before), len(after))
    # A dtype of another size adds or drops the last dimension.
    numbers = [[d if d < rank else None for d in range(len(shape))] for shape in (before, after)]
    return factors_by_number(eqn, numbers[:1], numbers[1:])


def elementwise_record(name: str) -> PrimitiveRecord:
    """The record of an elementwise primitive, by its name: whether it is commutative, cheap, compares, or is linear."""
    return PrimitiveRecord(
        elementwise,
        cost="elementwise",
        is_elementwise=True,
        is_commutative=name in _COMMUTATIVE,
        is_cheap=name in _CHEAP,
        compares=name in _COMPARING,
        keeps_sums=name in ("copy", "neg"),
    )


RECORDS: dict[str, PrimitiveRecord] = {
    "cholesky": _batch_record(_of_matrices, lambda n: n / 3),
    "triangular_solve": _batch_record(
        _of_matrices, lambda n: n, columns=lambda params: -1 if params["left_side"] else -2
    ),
    "lu": _batch_record(_of_matrices, lambda n: 2 * n / 3),
    "qr": _batch_record(_of_matrices, lambda n: 4 * n),
    "householder_product": _batch_record(_of_matrices, lambda n: 2 * n),
    "ormqr": _batch_record(_of_matrices, lambda n: 2 * n, columns=lambda params: -1 if params["left"] else -2),
    "eigh": _batch_record(_of_matrices, lambda n: 9 * n),
    "eig": _batch_record(_of_matrices, lambda n: 25 * n),
    "svd": _batch_record(_of_matrices, lambda n: 20 * n),
    "schur": _batch_record(_of_matrices, lambda n: 25 * n),
    "hessenberg": _batch_record(_of_matrices, lambda n: 10 * n / 3),
    "tridiagonal": _batch_record(_of_matrices, lambda n: 4 * n / 3),
    "symmetric_product": _batch_record(_of_matrices, lambda n: n),
    "tridiagonal_solve": _batch_record(_of_vectors, lambda n: 8, columns=lambda params: -1),
    "lu_pivots_to_permutation": _batch_record(_of_vectors, lambda n: 1),
    "fft": _batch_record(lambda params: len(params["fft_lengths"]), lambda n: 5 * log2(n + 1)),
    "cholesky_update": PrimitiveRecord(problem=Problem(work=lambda n: 4)),
    **{name: elementwise_record(name) for name in OP_COSTS},
    # A dtype of another size changes the shape.
    "bitcast_convert_type": replace(elementwise_record("bitcast_convert_type"), factors=_bitcast_factors),
    "copy": replace(elementwise_record("copy"), cost="view", view="copied"),
    **dict.fromkeys(("copy_p", "threefry2x32", "random_gamma_grad"), PrimitiveRecord(elementwise)),
    "dot_general": PrimitiveRecord(_product_factors, cost="product", macs=_dot_macs),
    "conv_general_dilated": PrimitiveRecord(_convolution_factors, _groups_of_block, "product", macs=_conv_macs),
    **{
        name: PrimitiveRecord(
            _reduction_factors, monoid=monoid, compares=monoid in ("max", "min"), keeps_sums=monoid == "add"
        )
        for name, monoid in MONOIDS.items()
    },
    **dict.fromkeys(("argmax", "argmin"), PrimitiveRecord(_factors_without_axes, compares=True)),
    "reduce": PrimitiveRecord(_factors_without_axes),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), PrimitiveRecord(_factors_without_axis_of("axis"))
    ),
    "sort": PrimitiveRecord(_factors_without_axis_of("dimension")),
    "top_k": PrimitiveRecord(_top_k_factors),
    "approx_top_k": PrimitiveRecord(_top_k_factors, problem=Problem(work=lambda n: log2(n + 1))),
    **dict.fromkeys(
        (
            *("reduce_window_sum", "reduce_window_max", "reduce_window_min"),
            *("select_and_gather_add", "select_and_scatter_add"),
        ),
        PrimitiveRecord(_window_factors),
    ),
}
