"""Partition rules of equations that compute: elementwise, products, reductions, windows, sorts, linear algebra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.partition.factors import Factors
from ipujax.lowering.partition.rules_base import (
    Blocks,
    Rule,
    aligned,
    bound,
    elementwise,
    except_dims,
    shapes,
)
from ipujax.lowering.popops import OP_COSTS


def _dot(eqn: JaxprEqn) -> Factors:
    (contracted, batch) = eqn.params["dimension_numbers"]
    ranks = [len(shape) for shape in shapes(eqn.invars)]
    numbers: list[list[int]] = []
    for side, rank in enumerate(ranks):
        # Batch dimensions are 0, 1, …; contracted ones 100, 101, …; others 200 and 300 and more, by operand.
        factor = {d: n for n, d in enumerate(batch[side])} | {d: 100 + n for n, d in enumerate(contracted[side])}
        numbers.append([factor.get(d, 100 * (side + 2) + d) for d in range(rank)])
    outer = [f for side in numbers for f in side if f >= 200]
    factors = aligned(eqn, numbers, [[*range(len(batch[0])), *outer]])
    return replace(factors, reductions={100 + n: "add" for n in range(len(contracted[0]))}, macs=1)


def _conv(eqn: JaxprEqn) -> Factors:
    params = eqn.params
    numbers = params["dimension_numbers"]
    field = shapes(eqn.invars)[0]
    operand, kernel, result = ([None] * len(field) for _ in range(3))
    batch, out_channels, in_channels, groups = 0, 1, 2, 3

    def label(dims: list[Any], dim: int, factor: int) -> None:
        dims[dim] = factor

    grouped = params["feature_group_count"] > 1
    if params["batch_group_count"] == 1:
        label(operand, numbers.lhs_spec[0], batch)
        label(result, numbers.out_spec[0], batch)
        if grouped:
            return _grouped_conv(eqn, (operand, kernel, result), groups)
        label(operand, numbers.lhs_spec[1], in_channels)
        label(kernel, numbers.rhs_spec[1], in_channels)
        label(kernel, numbers.rhs_spec[0], out_channels)
        label(result, numbers.out_spec[1], out_channels)
    factors = aligned(eqn, [operand, kernel], [result])
    return replace(factors, reductions={in_channels: "add"} if in_channels in factors.sizes else {}, macs=1)


def _grouped_conv(eqn: JaxprEqn, dims: tuple[list[Any], ...], groups: int) -> Factors:
    """Channels are groups, then those of a group."""
    numbers = eqn.params["dimension_numbers"]
    places = ((0, numbers.lhs_spec[1]), (1, numbers.rhs_spec[0]), (2, numbers.out_spec[1]))
    for value, dim in places:
        dims[value][dim] = groups
    factors = aligned(eqn, dims[:2], dims[2:])
    return replace(factors, sizes={**factors.sizes, groups: eqn.params["feature_group_count"]}, macs=1)


def _conv_block(blocks: Blocks) -> list[Any]:
    groups = blocks.mesh.size(blocks.axes.get(3, ()))
    return blocks.bind(feature_group_count=blocks.eqn.params["feature_group_count"] // groups)


_MONOIDS = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "max",
    "reduce_and": "min",
    "reduce_prod": "own",
    "reduce_xor": "own",
}


def _reduce(eqn: JaxprEqn) -> Factors:
    (shape,) = shapes(eqn.invars)
    axes = eqn.params["axes"]
    factors = aligned(eqn, [range(len(shape))], [[d for d in range(len(shape)) if d not in axes]])
    return replace(factors, reductions=dict.fromkeys(axes, _MONOIDS[eqn.primitive.name]))


def _whole_axes(eqn: JaxprEqn) -> Factors:
    """Reduced axes are whole: an index, or a user's function of two elements, is no collective."""
    params = eqn.params
    axes = params.get("axes", params.get("dimensions", ()))
    rank = len(shapes(eqn.outvars)[0]) + len(axes)
    operands = [[None if d in axes else d for d in range(rank)] if shape else [] for shape in shapes(eqn.invars)]
    return aligned(eqn, operands, [[d for d in range(rank) if d not in axes] for _ in eqn.outvars])


def _along_axis(param: str) -> Any:
    return lambda eqn: except_dims(eqn, (eqn.params[param] % len(shapes(eqn.outvars)[0]),))


def _top_k(eqn: JaxprEqn) -> Factors:
    rank = len(shapes(eqn.outvars)[0])
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", rank - 1))
    return except_dims(eqn, (axis % rank,))


def _windows(eqn: JaxprEqn) -> Factors:
    """Dimensions whose window is one element are split; others would need neighbours' elements."""
    params = eqn.params
    result = shapes(eqn.outvars)[0]
    ones = (1,) * len(result)
    per_dim = zip(
        params["window_dimensions"],
        params.get("window_strides") or ones,
        params.get("padding") or ((0, 0),) * len(result),
        params.get("base_dilation") or ones,
        params.get("window_dilation") or ones,
        strict=True,
    )
    return except_dims(eqn, [d for d, values in enumerate(per_dim) if values != (1, 1, (0, 0), 1, 1)])


def _matrices(eqn: JaxprEqn) -> Factors:
    """Linear algebra: all but the last two dimensions of the first operand are a batch."""
    batch = max(len(shapes(eqn.invars)[0]) - 2, 0)
    return _batched(eqn, batch)


def _batched(eqn: JaxprEqn, batch: int) -> Factors:
    def labels(shape: Sequence[int]) -> list[int | None]:
        return [d if d < batch else None for d in range(len(shape))]

    return aligned(eqn, [labels(s) for s in shapes(eqn.invars)], [labels(s) for s in shapes(eqn.outvars)])


def _fft(eqn: JaxprEqn) -> Factors:
    return _batched(eqn, len(shapes(eqn.invars)[0]) - len(eqn.params["fft_lengths"]))


ELEMENTWISE = frozenset(OP_COSTS) | {
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "name", "stop_gradient", "select_n", "clamp"),
    *("integer_pow", "square", "random_wrap", "device_put", "threefry2x32", "nextafter", "population_count", "clz"),
    *("digamma", "lgamma", "igamma", "igammac", "igamma_grad_a", "random_gamma_grad", "polygamma", "zeta"),
    *("bessel_i0e", "bessel_i1e", "regularized_incomplete_beta", "erf", "erfc", "erf_inv", "real", "imag", "conj"),
    *("complex", "is_finite", "add_any", "eq_to", "lt_to", "le_to", "atan2", "cbrt", "sharding_constraint", "reshard"),
    *("layout_constraint", "pvary", "mulhi", "exp2", "tan", "acosh", "asinh", "atanh", "sinh", "cosh"),
}

RULES: dict[str, Rule] = {
    "dot_general": Rule(_dot, bound),
    "conv_general_dilated": Rule(_conv, _conv_block),
    **{
        name: Rule(_reduce, bound)
        for name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "reduce_xor")
    },
    **{name: Rule(_whole_axes, bound) for name in ("argmax", "argmin", "reduce")},
    **{name: Rule(_along_axis("axis"), bound) for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")},
    "sort": Rule(_along_axis("dimension"), bound),
    "top_k": Rule(_top_k, bound),
    "approx_top_k": Rule(_top_k, bound),
    **{
        name: Rule(_windows, bound)
        for name in ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add")
    },
    "select_and_scatter_add": Rule(_windows, bound),
    "fft": Rule(_fft, bound),
    **{
        name: Rule(_matrices, bound)
        for name in (
            *("cholesky", "lu", "qr", "geqrf", "eigh", "eig", "svd", "triangular_solve", "householder_product"),
            *("tridiagonal", "schur", "hessenberg"),
        )
    },
}
_ELEMENTWISE_RULE = Rule(elementwise, bound)


def rule_of(name: str) -> Rule | None:
    """Rule of a primitive that computes; None if there is none."""
    return RULES.get(name, _ELEMENTWISE_RULE if name in ELEMENTWISE else None)
