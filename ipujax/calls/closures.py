"""Tracers that a function closes over, or is given: of transformations of JAX that are running, or are over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.calls.arguments import has_tracer
from ipujax.lowering.refs import is_ref


def check_live(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Mapping[int, Any],
    named: Mapping[str, Any],
) -> None:
    """Refuses a function that uses a tracer which no transformation is tracing any more, as one left in a list.

    Args:
        fun: a function that closes over tracers.
        args: positional arguments.
        kwargs: keyword arguments.
        given: positional arguments that are not static, by position; shapes will do.
        named: keyword arguments that are not static; likewise.

    Raises:
        UnexpectedTracerError: JAX's, which says where the tracer comes from.
    """
    settings = {name: value for name, value in kwargs.items() if name not in named}

    def run(given: dict[int, Any], named: dict[str, Any]) -> Any:
        return fun(*(given.get(n, x) for n, x in enumerate(args)), **settings, **named)

    _use(jax.make_jaxpr(run)(dict(given), dict(named)).consts)


def check_live_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses such a tracer among the leaves of a call, of which only the shape is asked.

    Raises:
        UnexpectedTracerError: JAX's, as a call that computes raises it.
    """
    leaves = jax.tree.leaves((args, dict(kwargs)))
    if has_tracer(leaves):
        _use(leaves)


def _use(values: Sequence[Any]) -> None:
    """Computes something of each tracer, which JAX refuses once its transformation is over."""
    for value in values:
        if isinstance(value, jax.core.Tracer) and not is_ref(jax.typeof(value)):
            jnp.copy(value)
