"""Wrappers that JAX and `inspect` take for a function, without a reference to it.

Input: a wrapper and a function. Output: the wrapper with name, signature and source line of the function. A wrapper
that JAX's caches keep must not keep the function, which may be a closure of large arrays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

_ATTRIBUTES = tuple(name for name in functools.WRAPPER_ASSIGNMENTS if name != "__name__")


def make_alike(wrapper: Callable[..., Any], fun: Callable[..., Any], name: str) -> None:
    """Give a wrapper of a function its attributes, signature and line, and a name."""
    functools.update_wrapper(wrapper, fun, _ATTRIBUTES, updated=())
    wrapper.__name__ = name
    del wrapper.__wrapped__  # type: ignore[attr-defined]
    code = _code(fun)
    if code is not None:
        # JAX names the line of the innermost wrapped function in its messages.
        cells = tuple(CellType() for _ in code.co_freevars)
        wrapper.__wrapped__ = FunctionType(code, {}, str(name), None, cells)  # type: ignore[attr-defined]
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # builtins and some C functions have none, nor has the wrapper then: not its own
        wrapper.__signature__ = ()  # type: ignore[attr-defined]
        return
    parameters = [p if p.default is p.empty else p.replace(default=None) for p in signature.parameters.values()]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]


def _code(fun: Callable[..., Any]) -> CodeType | None:
    inner: Any = inspect.unwrap(fun)
    while isinstance(inner, functools.partial | MethodType):
        inner = inspect.unwrap(inner.func if isinstance(inner, functools.partial) else inner.__func__)
    return getattr(inner, "__code__", None)
