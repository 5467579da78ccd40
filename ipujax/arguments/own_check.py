"""Checks of its own that a callable has for the arguments of a call.

A callable whose class has a method `__check_arguments__`, with the parameters of `__call__`, has it called by `ipu.jit`
with the arguments of each call before they become arrays: JAX narrows 64-bit NumPy arrays without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

_METHOD = "__check_arguments__"


def own_check(fun: Callable[..., Any]) -> Callable[..., None] | None:
    """Return the check of a callable, of the one that a `functools.partial` or a bound `__call__` is of; else None."""
    if isinstance(fun, partial):
        check = own_check(fun.func)
        return None if check is None else partial(check, *fun.args, **fun.keywords)
    owner = fun.__self__ if isinstance(fun, MethodType) and fun.__name__ == "__call__" else fun
    return getattr(owner, _METHOD) if hasattr(type(owner), _METHOD) else None
