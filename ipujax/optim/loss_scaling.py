"""Wrappers of optimisers: loss scaling, so that small gradients survive half precision.

    optimizer = ipu.optim.automatic_loss_scale(optax.adam(1e-3))
    scale = ipu.optim.loss_scale(opt_state)
    grads = jax.grad(lambda params: loss(params, batch) * scale)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)

Input: an optax `GradientTransformation`, or any named tuple of `init` and `update` like it. Output: one of the same
type, whose gradients are those of the scaled loss. It divides by the scale before the optimiser sees them, in float32
unless `dtype` is another; the optimiser keeps its state in that dtype too.

Source: Micikevicius et al., "Mixed precision training" (2018), section 3.2.
Limits: the scale is one for all parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.calls import check_optimizer, floating_dtype
from ipujax.runtime.errors import ArgumentError, ArgumentValueError

Optimizer = Any  # an optax.GradientTransformation, or another named tuple of `init` and `update`


class StaticLossScaleState(NamedTuple):
    """State of `static_loss_scale`.

    Args:
        scale: what the loss is multiplied by, float32[].
        inner: state of the optimiser inside.
    """

    scale: Any
    inner: Any


class AutomaticLossScaleState(NamedTuple):
    """State of `automatic_loss_scale`.

    Args:
        scale: what the loss is multiplied by, float32[].
        good_steps: steps since the scale last changed, int32[].
        skipped_steps: steps that were left out so far, int32[].
        inner: state of the optimiser inside.
    """

    scale: Any
    good_steps: Any
    skipped_steps: Any
    inner: Any


def static_loss_scale(optimizer: Optimizer, scale: float, *, dtype: Any = jnp.float32) -> Optimizer:
    """An optimiser of gradients of a loss that is multiplied by a constant.

    Args:
        optimizer: the optimiser for gradients of the loss itself.
        scale: the constant; a power of two changes no number but those that under- or overflow.
        dtype: in which gradients are divided by it, and in which the optimiser keeps its state.

    Returns:
        The optimiser, of the same type; `loss_scale` of its state is the constant.

    Raises:
        ArgumentError: for what is no optimiser, a scale that is not positive, or a dtype of no real numbers.
    """
    check_optimizer(optimizer, "static_loss_scale")
    _check_positive("scale", scale, "static_loss_scale")
    working = floating_dtype("dtype of ipu.optim.static_loss_scale", dtype)

    def init(params: Any) -> StaticLossScaleState:
        return StaticLossScaleState(jnp.float32(scale), optimizer.init(_as(params, working)))

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
    """An optimiser of gradients of a scaled loss that keeps the scale as large as half precision bears.

    A step of which any gradient is not finite is left out: parameters and optimiser stay as they are, and the scale is
    divided by `factor`. After `growth_interval` steps that were not left out it is multiplied by it. The gradient of
    a replica's own part of the batch may be larger than that of all of it: replicas overflow a little earlier.

    Args:
        optimizer: the optimiser for gradients of the loss itself.
        initial_scale: the scale of the first step.
        growth_interval: steps before the scale grows.
        factor: by what it grows and shrinks.
        min_scale, max_scale: what it stays between.
        dtype: in which gradients are divided by it, and in which the optimiser keeps its state.
        axis: axis of replicas that leave out a step together, where gradients differ between them; None where all
            have the same gradients already.

    Returns:
        The optimiser, of the same type; `loss_scale` of its state is the scale for the next step.

    Raises:
        ArgumentError: for what is no optimiser, or numbers that make no sense.
    """
    who = "automatic_loss_scale"
    check_optimizer(optimizer, who)
    given = {"initial_scale": initial_scale, "growth_interval": growth_interval, "min_scale": min_scale}
    for name, value in given.items():
        _check_positive(name, value, who)
    if not factor > 1:
        raise ArgumentValueError(f"factor of ipu.optim.{who}", expected="a number above 1", got=factor)
    if not min_scale <= initial_scale <= max_scale:
        expected = "min_scale ≤ initial_scale ≤ max_scale"
        got = f"{min_scale} ≤ {initial_scale} ≤ {max_scale}"
        raise ArgumentValueError(f"scales of ipu.optim.{who} are out of order", expected=expected, got=got)
    working = floating_dtype(f"dtype of ipu.optim.{who}", dtype)

    def init(params: Any) -> AutomaticLossScaleState:
        good, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)  # two arrays: donated, each goes once
        inner = optimizer.init(_as(params, working))
        return AutomaticLossScaleState(jnp.float32(initial_scale), good, skipped, inner)

    def update(grads: Any, state: AutomaticLossScaleState, params: Any = None, **extra: Any) -> Any:
        unscaled = _unscaled(grads, state.scale, working)
        updates, inner = optimizer.update(unscaled, state.inner, _as(params, working), **extra)
        is_good = _all_finite(grads)
        if axis is not None:
            is_good = lax.pmin(is_good.astype(jnp.int32), axis).astype(bool)
        updates = jax.tree.map(lambda u: jnp.where(is_good, u, jnp.zeros_like(u)), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), inner, state.inner)
        grows = is_good & (state.good_steps + 1 >= growth_interval)
        up, down = jnp.minimum(state.scale * factor, max_scale), jnp.maximum(state.scale / factor, min_scale)
        scale = jnp.where(grows, up, jnp.where(is_good, state.scale, down))
        good_steps = jnp.where(is_good & ~grows, state.good_steps + 1, 0)
        skipped = state.skipped_steps + (~is_good).astype(jnp.int32)
        return updates, AutomaticLossScaleState(scale.astype(jnp.float32), good_steps, skipped, inner)

    return optimizer._replace(init=init, update=update)


def loss_scale(state: Any) -> Any:
    """What the loss is to be multiplied by, float32[].

    Args:
        state: state of an optimiser that scales the loss, also inside that of `optax.chain` and its like.

    Raises:
        ArgumentError: if no optimiser in it scales the loss, or several do.
    """
    kinds = (StaticLossScaleState, AutomaticLossScaleState)
    found = [part for part in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds)) if isinstance(part, kinds)]
    if len(found) != 1:
        raise ArgumentError(
            "ipu.optim.loss_scale needs the state of one optimiser that scales the loss",
            expected="what its init or update returned",
            got=f"{len(found)} of them in a {type(state).__name__}",
            hint="ipu.optim.static_loss_scale(optimizer, scale)" if not found else None,
        )
    return found[0].scale


# --- parts ------------------------------------------------------------------------------------------------------------


def _as(tree: Any, dtype: Any) -> Any:
    """Floating-point arrays in a dtype; None stays None."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x, tree)


def _unscaled(grads: Any, scale: Any, dtype: Any) -> Any:
    """Gradients of the loss itself: widened first, since what is small enough to need scaling would be lost again."""
    return jax.tree.map(lambda g: g / scale.astype(dtype), _as(grads, dtype))


def _all_finite(grads: Any) -> Any:
    finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
    return jnp.all(jnp.stack(finite)) if finite else jnp.asarray(True)


def _check_positive(name: str, value: Any, who: str) -> None:
    if not value > 0:
        raise ArgumentValueError(f"{name} of ipu.optim.{who}", expected="a positive number", got=value)
