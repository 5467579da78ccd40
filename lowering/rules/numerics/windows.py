"""Rules for sliding windows: pooling, its gradients, and sums over windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipujax.lowering.popops import Windows, primitive_reducer, primitive_scatter, reduce_window, scatter_by_functions
from ipujax.lowering.popops.indexing.windows import select_and_scatter
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.runtime.tensor import Tensor

_MONOIDS = {"reduce_window_max": "max", "reduce_window_min": "min", "reduce_window_sum": "add"}


def reduce_window_rule(ctx: Context, x: Tensor, **geometry: Any) -> Tensor | Sequence[Tensor]:
    """Maximum, minimum or sum of each window."""
    if not x.size or not ctx.out_avals[0].size:
        return fallback(ctx, x)
    reducer = primitive_reducer(ctx.primitive)
    monoid = _MONOIDS[ctx.primitive.name]
    return reduce_window(ctx.builder, [x], _windows(x.ndim, **geometry), monoid, reducer)


def reduce_window_by_function_rule(
    ctx: Context, *operands: Tensor, jaxpr: Any, consts: Sequence[Any], **geometry: Any
) -> Sequence[Tensor]:
    """Each window reduced by a user's function, one tensor or several together."""
    count = len(operands) // 2
    arrays = operands[:count]
    starts = operands[count:]
    assert not consts, "JAX refuses functions that close over arrays"
    if not ctx.out_avals[0].size:
        return fallback(ctx, *operands)
    if not arrays[0].size:
        return [start.broadcast_in_dim(aval.shape, ()) for start, aval in zip(starts, ctx.out_avals, strict=True)]
    reducer = primitive_reducer(ctx.primitive, jaxpr=jaxpr, consts=())
    windows = _windows(arrays[0].ndim, **geometry)
    return reduce_window(ctx.builder, arrays, windows, "mul", reducer, starts)


def select_and_gather_add_rule(
    ctx: Context, tangents: Tensor, x: Tensor, *, select_prim: Any, **geometry: Any
) -> Tensor | Sequence[Tensor]:
    """Tangent of the element that each window selects."""
    if not x.size or not ctx.out_avals[0].size:
        return fallback(ctx, tangents, x)
    reducer = primitive_reducer(ctx.primitive, select_prim=select_prim)
    windows = _windows(x.ndim, **geometry)
    return reduce_window(ctx.builder, [tangents, x], windows, "max", reducer)


def select_and_scatter_add_rule(
    ctx: Context, source: Tensor, x: Tensor, *, select_prim: Any, **geometry: Any
) -> Tensor | Sequence[Tensor]:
    """Gradient of a maximum or minimum over windows."""
    if not x.size or not source.size:
        return fallback(ctx, source, x)
    scatter = primitive_scatter(ctx.primitive, select_prim=select_prim)
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
    """Elements that windows select, combined with a source by the user's function."""
    assert not select_consts and not scatter_consts, "JAX refuses functions that close over arrays"
    if not x.size or not source.size:
        return start.broadcast_in_dim(x.shape, ())
    scatter = scatter_by_functions(select_jaxpr, scatter_jaxpr)
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
) -> Windows:
    """Windows of an equation's parameters, of which pooling has no dilations."""
    ones = (1,) * rank
    return Windows(
        tuple(window_dimensions),
        tuple(window_strides),
        tuple((int(low), int(high)) for low, high in padding),
        tuple(base_dilation or ones),
        tuple(window_dilation or ones),
    )


RULES: dict[str, Rule] = {
    **dict.fromkeys(_MONOIDS, reduce_window_rule),
    "reduce_window": reduce_window_by_function_rule,
    "select_and_gather_add": select_and_gather_add_rule,
    "select_and_scatter": select_and_scatter_rule,
    "select_and_scatter_add": select_and_scatter_add_rule,
}
