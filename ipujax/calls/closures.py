"""Checks of tracers, closed over or among arguments, whose transformation of JAX has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.arguments import has_tracer
from ipujax.lowering.refs import is_ref


def check_live(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_args: Mapping[int, Any],
    dynamic_kwargs: Mapping[str, Any],
) -> None:
    """Refuse a function that uses a tracer of a transformation that has ended, as one left in a list.

    Args:
        fun: a function that closes over tracers.
        args: positional arguments.
        kwargs: keyword arguments.
        dynamic_args: positional arguments that are not static, or their shapes, by position.
        dynamic_kwargs: keyword arguments that are not static, or their shapes.

    Raises:
        UnexpectedTracerError: JAX's, with the origin of the tracer.
    """
    settings = {name: value for name, value in kwargs.items() if name not in dynamic_kwargs}

    def run(positional: dict[int, Any], named: dict[str, Any]) -> Any:
        return fun(*(positional.get(n, x) for n, x in enumerate(args)), **settings, **named)

    # Traced once more: the tracers that a function closes over are constants of its jaxpr.
    _use(jax.make_jaxpr(run)(dict(dynamic_args), dict(dynamic_kwargs)).consts)


def check_live_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a tracer of a transformation that has ended among the arguments of a call."""
    # The error is JAX's; a trace alone would read the tracer's shape and not raise it.
    leaves = jax.tree.leaves((args, dict(kwargs)))
    if has_tracer(leaves):
        _use(leaves)


def _use(values: Sequence[Any]) -> None:
    """Copy each tracer, which JAX refuses after its transformation has ended."""
    for value in values:
        if isinstance(value, jax.core.Tracer) and not is_ref(jax.typeof(value)):
            jnp.copy(value)
