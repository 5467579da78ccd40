"""Checks of a call's arguments, before anything is traced or run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ipujax.runtime.errors import ArgumentError

_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, jax.ShapeDtypeStruct)


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
    names = parameter_names(fun, len(args))
    static, (_, keywords) = split_static(fun, args, kwargs, static_argnums, static_argnames)
    settings = {place for place, _ in static}
    for number, value in enumerate(args):
        if number not in settings:
            _check_leaves(fun, names[number], value, f"static_argnums={number}")
    for name, value in keywords.items():
        _check_leaves(fun, name, value, f"static_argnames={name!r}")


def split_static(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
) -> tuple[tuple[tuple[Any, Any], ...], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Separates settings from arrays.

    Returns:
        The static arguments as hashable (place, value) pairs, and the dynamic ones as `(args, kwargs)`.
    """
    names = parameter_names(fun, len(args))
    places = {n % len(args) for n in static_argnums if -len(args) <= n < len(args)}
    places |= {n for n, name in enumerate(names) if name in static_argnames}
    static = [(n, args[n]) for n in sorted(places)] + sorted((k, v) for k, v in kwargs.items() if k in static_argnames)
    dynamic = tuple(value for n, value in enumerate(args) if n not in places)
    return tuple(static), (dynamic, {k: v for k, v in kwargs.items() if k not in static_argnames})


def _check_leaves(fun: Callable[..., Any], name: str, value: Any, remedy: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if not isinstance(leaf, _ARRAYS) and not hasattr(leaf, "__jax_array__"):
            raise ArgumentError(
                f"argument {name}{jax.tree_util.keystr(path)} of {function_name(fun)} is not an array",
                where=function_line(fun),
                expected="a jax or numpy array, or a Python number",
                got=f"{type(leaf).__name__} {leaf!r:.60}",
                hint=f"pass {remedy} to ipu.jit if it is a setting, or convert it to an array",
            )


def parameter_names(fun: Callable[..., Any], count: int) -> list[str]:
    """Names of the first `count` positional parameters; `arg3` where the signature has no name."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # builtins and some C functions have no signature
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds][:count]
    return names + [f"arg{n}" for n in range(len(names), count)]


def function_name(fun: Callable[..., Any]) -> str:
    """The function's name for messages."""
    return getattr(fun, "__name__", None) or repr(fun)


def function_line(fun: Callable[..., Any]) -> str | None:
    """`file:line (name)` of a function, None for one without Python source."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} ({function_name(fun)})" if code else None
