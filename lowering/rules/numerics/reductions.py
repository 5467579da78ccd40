"""Rules for reductions by a monoid or any function, indices of largest elements, running results, and windows.

Windows slide for pooling, its gradients, and sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ipujax.lowering import popops
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.popops.indexing.windows import select_and_scatter
from ipujax.lowering.popops.reductions.arg_reduce import arg_reduce
from ipujax.lowering.popops.reductions.reduce import reduce
from ipujax.lowering.rules.base.context import Context, Rule, bound, lower_array_function
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.lowering.rules.base.long_rows import long_cumulative, parts_of
from ipujax.runtime.tensor import Tensor

_MONOIDS = {"reduce_window_max": "max", "reduce_window_min": "min", "reduce_window_sum": "add"}


def reduce_window_rule(ctx: Context, x: Tensor, **geometry: Any) -> Tensor | Sequence[Tensor]:
    """Maximum, minimum or sum of each window."""
    if not x.size or not ctx.out_avals[0].size:
        return fallback(ctx, x)
    reducer = popops.primitive_reducer(ctx.primitive)
    monoid = _MONOIDS[ctx.primitive.name]
    return popops.reduce_window(ctx.builder, [x], _windows(x.ndim, **geometry), monoid, reducer)


def reduce_window_by_function_rule(
    ctx: Context, *operands: Tensor, jaxpr: Any, consts: Sequence[Any], **geometry: Any
) -> Sequence[Tensor]:
    """Reduces each window of one tensor, or of several together, by a user's function.

    Args:
        ctx: the equation.
        operands: the arrays, then as many scalars, the initial values of the reduction.
        jaxpr: the function, of two elements of each array.
        consts: its constants, none.
        geometry: window, strides, padding and dilations, as `_windows` takes them.
    """
    count = len(operands) // 2
    arrays = operands[:count]
    starts = operands[count:]
    assert not consts, "JAX refuses functions that close over arrays"
    if not ctx.out_avals[0].size:
        return fallback(ctx, *operands)
    if not arrays[0].size:
        return [start.broadcast_in_dim(aval.shape, ()) for start, aval in zip(starts, ctx.out_avals, strict=True)]
    reducer = popops.primitive_reducer(ctx.primitive, jaxpr=jaxpr, consts=())
    windows = _windows(arrays[0].ndim, **geometry)
    monoid = "mul"  # for the cost; the function is unknown
    return popops.reduce_window(ctx.builder, arrays, windows, monoid, reducer, starts)


def select_and_gather_add_rule(
    ctx: Context, tangents: Tensor, x: Tensor, *, select_prim: Any, **geometry: Any
) -> Tensor | Sequence[Tensor]:
    """Adds the tangent of a maximum or minimum over windows: that of the element that each window selects."""
    if not x.size or not ctx.out_avals[0].size:
        return fallback(ctx, tangents, x)
    reducer = popops.primitive_reducer(ctx.primitive, select_prim=select_prim)
    windows = _windows(x.ndim, **geometry)
    return popops.reduce_window(ctx.builder, [tangents, x], windows, "max", reducer)


def select_and_scatter_add_rule(
    ctx: Context, source: Tensor, x: Tensor, *, select_prim: Any, **geometry: Any
) -> Tensor | Sequence[Tensor]:
    """Adds the gradient of a maximum or minimum over windows: each window's is added where it selects its element."""
    if not x.size or not source.size:
        return fallback(ctx, source, x)
    scatter = popops.primitive_scatter(ctx.primitive, select_prim=select_prim)
    return select_and_scatter(ctx.builder, source, x, _windows(x.ndim, **geometry), scatter)


def select_and_scatter_rule(
    ctx: Context,
    x: Tensor,
    source: Tensor,
    start: Tensor,
    *,
    select_jaxpr: Any,
    select_consts: Sequence[Any],
    scatter_jaxpr: Any,
    scatter_consts: Sequence[Any],
    padding: Sequence[tuple[int, int]],
    **geometry: Any,
) -> Tensor | Sequence[Tensor]:
    """Gradient of pooling: each element of `source` goes to the element of `x` that its window selects.

    Args:
        ctx: the equation.
        x: array that windows move over.
        source: an element for each window.
        start: scalar, the value of an element that no window selects.
        select_jaxpr: function of two elements: whether a window selects the first rather than the second.
        select_consts: its constants, none.
        scatter_jaxpr: function that combines sources of windows which select one element.
        scatter_consts: its constants, none.
        padding: elements around `x`, (before, after) for each dimension.
        geometry: window and strides, as `_windows` takes them.
    """
    assert not select_consts and not scatter_consts, "JAX refuses functions that close over arrays"
    if not x.size or not source.size:
        return start.broadcast_in_dim(x.shape, ())
    scatter = popops.scatter_by_functions(select_jaxpr, scatter_jaxpr)
    windows = _windows(x.ndim, padding=padding, **geometry)
    return select_and_scatter(ctx.builder, source, x, windows, scatter, start)


def _windows(
    rank: int,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> popops.Windows:
    """Windows of a reduction or of pooling, from the parameters of JAX's primitive; pooling has no dilations.

    Args:
        rank: number of dimensions of the array; each parameter has an entry for each.
        window_dimensions: size of the window.
        window_strides: distance of neighbouring windows.
        padding: elements before and after the array.
        base_dilation: distance of the array's elements; None for 1.
        window_dilation: distance of a window's elements; None for 1.
    """
    ones = (1,) * rank
    return popops.Windows(
        tuple(window_dimensions),
        tuple(window_strides),
        tuple((int(low), int(high)) for low, high in padding),
        tuple(base_dilation or ones),
        tuple(window_dilation or ones),
    )


def arg_reduce_rule(ctx: Context, x: Tensor, *, axes: Sequence[int], index_dtype: Any) -> Tensor | Sequence[Tensor]:
    """Lowers `argmax` and `argmin` over one dimension."""
    if not x.size or len(axes) != 1:
        return fallback(ctx, x)
    return arg_reduce(ctx.builder, x, int(axes[0]), ctx.primitive.name, index_dtype)


def cumulative_rule(ctx: Context, x: Tensor, *, axis: int, reverse: bool) -> Tensor | Sequence[Tensor]:
    """Adds running sums, products or extremes along one dimension, in parts on several tiles where rows are long."""
    if not x.size:
        return fallback(ctx, x)
    parts = parts_of(ctx.graph, x.shape, axis, [x.dtype])
    if parts > 1:
        fun, _ = popops.CUMULATIVE[ctx.primitive.name]
        return lower_array_function(
            ctx, partial(long_cumulative, fun=fun, axis=axis, reverse=reverse, parts=parts), [x]
        )
    return popops.cumulative(ctx.builder, x, axis, ctx.primitive.name, reverse)


def reduce_rule(ctx: Context, x: Tensor, *, monoid: str, axes: Sequence[int], **params: Any) -> Tensor:
    """Reduction by a monoid; a view over single elements, as at the end of the gradient of a broadcast bias."""
    out_shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    if all(x.shape[d] == 1 for d in axes):
        return x.reshape(out_shape)
    return reduce(ctx.builder, x, tuple(axes), monoid)


def reduce_by_function_rule(
    ctx: Context, *operands: Tensor, dimensions: Sequence[int], jaxpr: ClosedJaxpr, **params: Any
) -> Sequence[Tensor]:
    """`lax.reduce` by a user's function, on one tensor or several together.

    Args:
        ctx: the equation.
        operands: the arrays, then as many scalars, the initial values of the reduction.
        dimensions: dimensions that are reduced.
        jaxpr: the function, of two elements of each array.
        params: other parameters of the primitive.
    """
    count = len(operands) // 2
    arrays = operands[:count]
    starts = operands[count:]
    if not arrays[0].size:
        return [start.broadcast_in_dim(aval.shape, ()) for start, aval in zip(starts, ctx.out_avals, strict=True)]
    last = arrays[0].ndim - len(dimensions)  # the reduced dimensions of a block are joined at its end
    fun = bound(ctx.primitive, dimensions=(last,), jaxpr=jaxpr, **params)
    axes = tuple(sorted(int(d) for d in dimensions))
    return popops.reduce_by_function(ctx.builder, arrays, starts, axes, fun, len(jaxpr.eqns))


RULES: dict[str, Rule] = {
    **dict.fromkeys(_MONOIDS, reduce_window_rule),
    "reduce_window": reduce_window_by_function_rule,
    "select_and_gather_add": select_and_gather_add_rule,
    "select_and_scatter": select_and_scatter_rule,
    "select_and_scatter_add": select_and_scatter_add_rule,
    **{name: partial(reduce_rule, monoid=monoid) for name, monoid in popops.MONOIDS.items()},
    "reduce": reduce_by_function_rule,
    "argmax": arg_reduce_rule,
    "argmin": arg_reduce_rule,
    **dict.fromkeys(popops.CUMULATIVE, cumulative_rule),
}
