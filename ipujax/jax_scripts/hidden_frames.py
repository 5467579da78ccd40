"""Tracebacks of a script without the frames of what records or runs it: those of plain Python.

Input: an exception where it leaves code that stands between a script and JAX. Output: the same exception, without the
frames of these files in its traceback, in those of its causes, contexts and members, and in texts of XLA, which quote
the Python stack of a callback.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")

_RECORDING = str(Path(__file__).parent)  # stands between a script and JAX
_RUNNING = str(Path(__file__).parents[1] / "cli")  # and this below a script
_QUOTED = re.compile(r'^  File "([^"\n]+)", line \d+, in .*\n', re.MULTILINE)


def hiding_frames(fun: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function whose errors leave it without frames of this folder."""

    @functools.wraps(fun)
    def boundary(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return fun(*args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise  # adds no frame

    return boundary


def hide_frames(error: BaseException) -> None:
    """Remove the frames of what records and runs a script from an exception and all that Python shows with it."""
    for each in _shown_with(error):
        # Not by assignment, which classes of exceptions may refuse.
        BaseException.with_traceback(each, _without_own(each.__traceback__))
        if isinstance(each, jax.errors.JaxRuntimeError):
            each.args = tuple(map(_without_quotes, each.args))
            vars(each).update({name: _without_quotes(value) for name, value in vars(each).items()})


def _shown_with(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception with its causes, contexts and members."""
    visited: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in visited:
            continue
        visited.add(id(each))
        yield each
        pending += each.__cause__, each.__context__
        if isinstance(each, BaseExceptionGroup):
            pending += each.exceptions


def _without_own(traceback: TracebackType | None) -> TracebackType | None:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    shortened: TracebackType | None = None
    for each in reversed(frames):
        if not each.tb_frame.f_code.co_filename.startswith((_RECORDING, _RUNNING)):
            shortened = TracebackType(shortened, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shortened


def _without_quotes(text: Any) -> Any:
    """Return a text without quoted frames of the files, and without those before the script; other values unchanged."""
    if not isinstance(text, str):
        return text
    quoted = list(_QUOTED.finditer(text))
    below = max((n for n, match in enumerate(quoted) if match[1].startswith(_RUNNING)), default=-1)
    for n, match in reversed(list(enumerate(quoted))):
        if n <= below or match[1].startswith(_RECORDING):
            text = text[: match.start()] + text[match.end() :]
    return text
