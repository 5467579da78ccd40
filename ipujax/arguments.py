"""Says what is wrong with a call's arguments, once JAX has refused them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ipujax.runtime.errors import ArgumentError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def has_tracer(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a transformation of JAX is tracing through the call."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))


def check_arguments(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
) -> None:
    """Refuses leaves that are no arrays.

    Raises:
        ArgumentError: naming function, argument and place in its tree, and the static argument that would allow it.
    """
    parameters = positional_parameters(fun)
    names = [*parameters[: len(args)], *(f"arg{n}" for n in range(len(parameters), len(args)))]
    places = {n % len(args) for n in static_argnums if -len(args) <= n < len(args)}
    places |= {n for n, name in enumerate(names) if name in static_argnames}
    for number, value in enumerate(args):
        if number not in places:
            _check_leaves(fun, names[number], value, f"static_argnums={number}")
    by_number = {parameters[n] for n in static_argnums if -len(parameters) <= n < len(parameters)}
    for name, value in kwargs.items():
        if name not in static_argnames and name not in by_number:
            _check_leaves(fun, name, value, f"static_argnames={name!r}")


def _check_leaves(fun: Callable[..., Any], name: str, value: Any, remedy: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        try:
            jax.typeof(leaf)
        except TypeError as error:
            dtype = f" of {leaf.dtype}" if hasattr(leaf, "dtype") else ""
            raise ArgumentError(
                f"argument {name}{jax.tree_util.keystr(path)} of {function_name(fun)} is not an array",
                expected="a jax or numpy array of a dtype JAX has, or a Python number",
                got=f"{type(leaf).__name__}{dtype} {leaf!r:.60}",
                hint=f"pass {remedy} to ipu.jit if it is a setting, or convert it to an array",
            ) from error


def positional_parameters(fun: Callable[..., Any]) -> list[str]:
    """Names of the parameters that can be given by position; none where a function has no signature."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # builtins and some C functions have no signature
        return []
    return [p.name for p in parameters if p.kind in _POSITIONAL]


def function_name(fun: Callable[..., Any]) -> str:
    """The function's name for messages: that of the innermost function of a `functools.partial`, or the class's."""
    inner = fun
    while not hasattr(inner, "__name__") and hasattr(inner, "func"):
        inner = inner.func
    return getattr(inner, "__name__", None) or type(inner).__name__
