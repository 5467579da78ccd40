"""Wrappers of optimisers: loss scaling, so that small gradients survive half precision.

    optimizer = ipu.optim.automatic_loss_scale(optax.adam(1e-3))
    scale = ipu.optim.loss_scale(opt_state)
    grads = jax.grad(lambda params: loss(params, batch) * scale)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)

Input: an optax `GradientTransformation`, or another named tuple of `init` and `update`. Output: an optimiser of the
same type for gradients of the scaled loss. It divides them by the scale in float32 or wider, and passes the quotients
in `dtype`, in which the inner optimiser has its state too.

Source: Micikevicius et al., "Mixed precision training" (2018), section 3.2.
Limits: all parameters have the same scale.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.arguments import check_optimizer, floating_dtype, whole_number
from ipujax.runtime.errors import ArgumentError, ArgumentValueError, shortened

_MOST_STEPS = (1 << 31) - 1  # that int32, the dtype of `good_steps`, counts
Optimizer = Any  # an optax.GradientTransformation, or another named tuple of `init` and `update`


class StaticLossScaleState(NamedTuple):
    """State of `static_loss_scale`.

    Args:
        scale: factor of the loss, float32[].
        inner: state of the inner optimiser.
    """

    scale: Any
    inner: Any


class AutomaticLossScaleState(NamedTuple):
    """State of `automatic_loss_scale`.

    Args:
        scale: factor of the loss, float32[].
        good_steps: steps since the scale last changed, int32[].
        skipped_steps: number of skipped steps so far, int32[].
        inner: state of the inner optimiser.
    """

    scale: Any
    good_steps: Any
    skipped_steps: Any
    inner: Any


def static_loss_scale(optimizer: Optimizer, scale: float, *, dtype: Any = jnp.float32) -> Optimizer:
    """Return an optimiser for gradients of a loss that is multiplied by a constant.

    Args:
        optimizer: optimiser for gradients of the unscaled loss.
        scale: the constant; a power of two is exact, except for values that under- or overflow.
        dtype: dtype of the unscaled gradients, and of the inner optimiser's state.

    Returns:
        An optimiser of the same type; `loss_scale` of its state is the constant.

    Raises:
        ArgumentError: `optimizer` is not an optimiser, the scale is not positive, or the dtype is not floating-point.
    """
    check_optimizer(optimizer, "static_loss_scale")
    _check_positive("scale", scale, "static_loss_scale")
    working = floating_dtype("dtype of ipu.optim.static_loss_scale", dtype)

    def init(params: Any) -> StaticLossScaleState:
        return StaticLossScaleState(jnp.float32(_as_float32(scale)), optimizer.init(_as(params, working)))

    def update(grads: Any, state: StaticLossScaleState, params: Any = None, **extra: Any) -> Any:
        unscaled = _unscaled(grads, state.scale, working)
        updates, inner = optimizer.update(unscaled, state.inner, _as(params, working), **extra)
        return updates, StaticLossScaleState(state.scale, inner)

    return optimizer._replace(init=init, update=update)


def automatic_loss_scale(
    optimizer: Optimizer,
    *,
    initial_scale: float = 2.0**15,
    growth_interval: int = 2000,
    factor: float = 2.0,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
    dtype: Any = jnp.float32,
    axis: str | None = None,
) -> Optimizer:
    """Return an optimiser that adapts the scale of the loss: as large as half precision allows.

    A step with a gradient that is not finite is skipped: parameters and the inner state do not change, and the scale is
    divided by `factor`. After `growth_interval` steps without a skip it is multiplied by `factor`. Gradients of one
    replica's part of the batch may be larger than those of the whole: replicas overflow slightly earlier.

    Args:
        optimizer: optimiser for gradients of the unscaled loss.
        initial_scale: scale of the first step.
        growth_interval: number of steps before the scale grows.
        factor: factor of growth, divisor of shrinking; more than 1.
        min_scale, max_scale: bounds of the scale.
        dtype: dtype of the unscaled gradients, and of the inner optimiser's state.
        axis: axis of replicas that skip a step together, where gradients differ between them; None where they are
            equal.

    Returns:
        An optimiser of the same type; `loss_scale` of its state is the scale of the next step.

    Raises:
        ArgumentError: `optimizer` is not an optimiser, or numbers are out of range or order.
    """
    who = "automatic_loss_scale"
    check_optimizer(optimizer, who)
    whole_number(f"growth_interval of ipu.optim.{who}", growth_interval, 1)
    if growth_interval > _MOST_STEPS:
        expected = f"at most {_MOST_STEPS:,} steps"
        raise ArgumentValueError(
            f"growth_interval of ipu.optim.{who}", expected=expected, got=shortened(growth_interval)
        )
    scales = {"initial_scale": initial_scale, "min_scale": min_scale, "max_scale": max_scale}
    for name, value in {**scales, "factor": factor}.items():
        _check_positive(name, value, who)
    factor_of_scale = _as_float32(factor)
    least, first, largest = (_as_float32(value) for value in (min_scale, initial_scale, max_scale))
    if not factor_of_scale > 1:
        raise ArgumentValueError(f"factor of ipu.optim.{who}", expected="a number above 1", got=factor)
    if not least <= first <= largest:
        expected = "min_scale ≤ initial_scale ≤ max_scale"
        got = f"{min_scale} ≤ {initial_scale} ≤ {max_scale}"
        raise ArgumentValueError(f"scales of ipu.optim.{who} are out of order", expected=expected, got=got)
    working = floating_dtype(f"dtype of ipu.optim.{who}", dtype)

    def init(params: Any) -> AutomaticLossScaleState:
        good_steps = jnp.zeros((), jnp.int32)
        skipped_steps = jnp.zeros((), jnp.int32)  # another array: a donated one must not be passed twice
        inner = optimizer.init(_as(params, working))
        return AutomaticLossScaleState(jnp.float32(first), good_steps, skipped_steps, inner)

    def update(grads: Any, state: AutomaticLossScaleState, params: Any = None, **extra: Any) -> Any:
        unscaled = _unscaled(grads, state.scale, working)
        updates, inner = optimizer.update(unscaled, state.inner, _as(params, working), **extra)
        # Of the gradients as passed: half precision overflows there, not in the division.
        is_good = _all_finite(grads)
        if axis is not None:
            is_good = lax.pmin(is_good.astype(jnp.int32), axis).astype(bool)
        # Selected, not branched: the inner update runs in either case, and a branch would need data-dependent control.
        updates = jax.tree.map(lambda u: jnp.where(is_good, u, jnp.zeros_like(u)), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), inner, state.inner)
        # At a bound the scale stays, and the count starts over.
        grows = is_good & (state.good_steps + 1 >= growth_interval)
        larger = jnp.minimum(state.scale * factor_of_scale, largest)
        smaller = jnp.maximum(state.scale / factor_of_scale, least)
        scale = jnp.where(grows, larger, jnp.where(is_good, state.scale, smaller))
        good_steps = jnp.where(is_good & ~grows, state.good_steps + 1, 0)
        skipped = state.skipped_steps + (~is_good).astype(jnp.int32)
        return updates, AutomaticLossScaleState(scale.astype(jnp.float32), good_steps, skipped, inner)

    return optimizer._replace(init=init, update=update)


def loss_scale(state: Any) -> Any:
    """Return the factor of the loss, float32[].

    Args:
        state: state of an optimiser that scales the loss, or a tree that contains it, as that of `optax.chain`.

    Raises:
        ArgumentError: the tree has no such state, or several.
    """
    kinds = (StaticLossScaleState, AutomaticLossScaleState)
    parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    states = [part for part in parts if isinstance(part, kinds)]
    if len(states) != 1:
        raise ArgumentError(
            "ipu.optim.loss_scale needs the state of one optimiser that scales the loss",
            expected="the result of its init or update",
            got=f"{len(states)} of them in a {type(state).__name__}",
            hint="ipu.optim.static_loss_scale(optimizer, scale)" if not states else None,
        )
    return states[0].scale


# --- parts ------------------------------------------------------------------------------------------------------------


def _as(tree: Any, dtype: Any) -> Any:
    """Convert floating-point arrays to a dtype; other arrays and None are unchanged."""
    is_floating = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if is_floating(x) else x, tree)


def _unscaled(grads: Any, scale: Any, dtype: Any) -> Any:
    # Converted first: in half precision quotients underflow, which the scale is to prevent, and scales overflow.
    wide = jnp.promote_types(dtype, scale.dtype)
    return _as(jax.tree.map(lambda g: g / scale.astype(wide), _as(grads, wide)), dtype)


def _all_finite(grads: Any) -> Any:
    finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
    return jnp.all(jnp.stack(finite)) if finite else jnp.asarray(True)


def _check_positive(name: str, value: Any, who: str) -> None:
    if not 0 < _as_float32(value) < np.inf:
        expected = "a positive number that float32 holds"
        raise ArgumentValueError(f"{name} of ipu.optim.{who}", expected=expected, got=value)


def _as_float32(value: Any) -> np.float32:
    """Return a number in the dtype of scales; NaN for anything else, infinity for one of too large a magnitude."""
    if not hasattr(value, "__float__") or np.size(value) != 1:  # texts have none
        return np.float32(np.nan)
    is_real = isinstance(value, Real)
    with np.errstate(over="ignore"):  # also in the comparison, of a number of half precision
        is_too_large = is_real and abs(value) > float(np.finfo(np.float32).max)
        return np.float32(np.inf if is_too_large else value)
