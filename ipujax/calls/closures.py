"""What a function closes over: tracers of transformations of JAX that are running, and of those that are over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.lowering.refs import is_ref


def check_live(fun: Callable[..., Any], args: Sequence[Any], given: dict[int, Any], named: dict[str, Any]) -> None:
    """Refuses a tracer that no transformation is tracing any more, as one that a function leaves in a list.

    Args:
        fun: a function that closes over tracers, with its static keyword arguments.
        args: positional arguments.
        given: those that are not static, by position; shapes will do.
        named: keyword arguments that are not static; likewise.

    Raises:
        UnexpectedTracerError: JAX's, which says where the tracer comes from.
    """

    def run(given: dict[int, Any], named: dict[str, Any]) -> Any:
        return fun(*(given.get(n, x) for n, x in enumerate(args)), **named)

    for value in jax.make_jaxpr(run)(given, named).consts:
        if isinstance(value, jax.core.Tracer) and not is_ref(jax.typeof(value)):
            jnp.copy(value)
