"""Calls against signatures: what does not fit is refused with the nearest known keyword, and functions in words.

Input: a signature, and the arguments of a call. Output: the arguments by name, or an error that shows both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax

from ipujax.runtime.errors import ArgumentTypeError, shortened
from ipujax.runtime.target import nearest

_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_F = TypeVar("_F", bound=Callable[..., Any])


_NO_HINTS: Mapping[str, str] = MappingProxyType({})


def checking_calls(who: str, first: str = "self", hints: Mapping[str, str] = _NO_HINTS) -> Callable[[_F], _F]:
    """Makes a function or class of ipujax refuse calls that do not fit its signature, as `check_call` does.

    Args:
        who: its name for users, `ipu.jit`.
        first: name of the parameter that users do not write, if it is there.
        hints: by keywords it lacks, which users know from elsewhere, what to try in their place.

    Returns:
        A decorator.
    """

    def decorated(target: Any) -> Any:
        fun = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        signature = inspect.signature(fun)
        is_method = next(iter(signature.parameters), "") == first
        taken = signature.replace(parameters=list(signature.parameters.values())[is_method:])

        @functools.wraps(fun)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check_call(who, taken, args[is_method:], kwargs, hints)
            return fun(*args, **kwargs)

        if isinstance(target, type):
            target.__init__ = checked  # type: ignore[misc]
            return target
        return checked

    return decorated


def check_call(
    who: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    hints: Mapping[str, str] = _NO_HINTS,
) -> inspect.BoundArguments:
    """The arguments of a call by name.

    Args:
        who: the function, for the message.
        signature: what it takes.
        args: given by position.
        kwargs: given by name.
        hints: as of `checking_calls`.

    Raises:
        ArgumentTypeError: missing arguments, too many, or keywords that the function lacks, with the nearest it has.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        known = [p.name for p in signature.parameters.values() if p.kind not in _STARS]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        unknown = [] if takes_all else [name for name in kwargs if name not in known]
        reason = f"got an unexpected keyword argument {unknown[0]!r}" if unknown else error
        near = [hints.get(name) or nearest(name, [word for word in known if word not in kwargs]) for name in unknown]
        raise ArgumentTypeError(
            f"{who} cannot be called like this: {reason}",
            expected=shown_signature(who, signature),
            got=f"{who}({', '.join([*map(_given, args), *(f'{k}={_given(x)}' for k, x in kwargs.items())])})",
            hint=next((hint for hint in near if hint), None),
        ) from error


def shown_signature(who: str, signature: inspect.Signature) -> str:
    """Names of the parameters, as `add(a, b=…, *, c=…)`: defaults may be large."""
    words: list[str] = []
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        words.append(f"{_STARS.get(p.kind, '')}{p.name}{'' if p.default is p.empty else '=…'}")
    return f"{who}({', '.join(words)})"


def _given(value: Any) -> str:
    """A number or a text as it is written, else what it is in few words."""
    return shortened(value) if isinstance(value, bool | int | float | str) else described(value)


def described(value: Any) -> str:
    """An argument in few words: shape and dtype of an array, else its type."""
    try:
        return jax.typeof(value).str_short()
    except TypeError:
        return type(value).__name__
