"""Checks of calls against signatures, with the nearest keyword as a hint.

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
from ipujax.runtime.tracebacks import show_user_frames

_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_F = TypeVar("_F", bound=Callable[..., Any])


_NO_HINTS: Mapping[str, str] = MappingProxyType({})


def checking_calls(who: str, first: str = "self", hints: Mapping[str, str] = _NO_HINTS) -> Callable[[_F], _F]:
    """Return a decorator for a public function or class that checks its calls, as `check_call` does.

    Its errors leave it as `show_user_frames` says.

    Args:
        who: its name for users, `ipu.jit`.
        first: name of a first parameter that users do not pass.
        hints: hints for keywords that it lacks and that users know from other libraries.
    """

    def decorate(target: Any) -> Any:
        fun = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        signature = inspect.signature(fun)
        # A bool as an index: True skips the first parameter.
        is_method = next(iter(signature.parameters), "") == first
        users_signature = signature.replace(parameters=list(signature.parameters.values())[is_method:])
        certain_keywords = None if is_method else _certain_keywords(signature)

        @functools.wraps(fun)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                if certain_keywords is None or len(args) > 1 or not kwargs.keys() <= certain_keywords:
                    check_call(who, users_signature, args[is_method:], kwargs, hints)
                return fun(*args, **kwargs)
            except Exception as error:
                show_user_frames(error)
                raise

        if isinstance(target, type):
            target.__init__ = checked  # type: ignore[misc]
            return target
        return checked

    return decorate


def _certain_keywords(signature: inspect.Signature) -> frozenset[str] | None:
    """Return keywords of which any are right beside one positional argument or none; None where there are no such."""
    # `ipu.jit` is called at each step of some programs: binding takes a tenth of the time.
    parameters = list(signature.parameters.values())
    takes_one = bool(parameters) and parameters[0].kind is inspect.Parameter.POSITIONAL_ONLY
    if not takes_one or any(p.default is p.empty and p.kind not in _STARS for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def check_call(
    who: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    hints: Mapping[str, str] = _NO_HINTS,
) -> inspect.BoundArguments:
    """Return the arguments of a call by name.

    Args:
        who: name of the function, for the message.
        signature: its signature.
        args: positional arguments.
        kwargs: keyword arguments.
        hints: as of `checking_calls`.

    Raises:
        ArgumentTypeError: missing arguments, too many, or unknown keywords, with the nearest one as a hint.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [p.name for p in signature.parameters.values() if p.kind not in _STARS]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        unknown = [] if takes_all else [name for name in kwargs if name not in names]
        reason = f"got an unexpected keyword argument {unknown[0]!r}" if unknown else error
        near = [hints.get(name) or nearest(name, [word for word in names if word not in kwargs]) for name in unknown]
        raise ArgumentTypeError(
            f"{who} cannot be called like this: {reason}",
            expected=shown_signature(who, signature),
            got=f"{who}({', '.join([*map(_show, args), *(f'{k}={_show(x)}' for k, x in kwargs.items())])})",
            hint=next((hint for hint in near if hint), None),
        ) from error


def shown_signature(who: str, signature: inspect.Signature) -> str:
    """Return a signature without values of defaults, which may be long: `add(a, b=…, *, c=…)`."""
    words: list[str] = []
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        words.append(f"{_STARS.get(p.kind, '')}{p.name}{'' if p.default is p.empty else '=…'}")
    return f"{who}({', '.join(words)})"


def _show(value: Any) -> str:
    return shortened(value) if isinstance(value, bool | int | float | str) else describe(value)


def describe(value: Any) -> str:
    """Return shape and dtype of an array, `float32[2,3]`; the name of the type of other values."""
    try:
        return jax.typeof(value).str_short()
    except (TypeError, ValueError, OverflowError):  # the latter two of masked arrays and of large numbers
        return type(value).__name__
