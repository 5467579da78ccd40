"""Tracebacks of errors that leave ipujax: the frames of the user's code, as JAX shows its errors.

Input: an exception where it leaves a public function. Output: the same exception without frames of ipujax, and without
those of other code that ipujax called, as far as `jax_traceback_filtering` asks for. Frames of JAX that the user's code
called are JAX's to remove. A fault of ipujax keeps all frames.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from traceback import walk_stack
from types import TracebackType
from typing import ParamSpec, TypeVar

import jax

from ipujax.runtime.errors import IpuError, is_of_ipujax, is_of_jax, is_of_user

_P = ParamSpec("_P")
_R = TypeVar("_R")
_VARIABLE = "JAX_TRACEBACK_FILTERING"
_NOTE = f"(without the frames of ipujax and JAX, which {_VARIABLE}=off shows)"


class UnfilteredTraceback(Exception):
    """Cause of an error whose traceback was shortened, with the traceback as it was."""


def showing_user_frames(fun: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a public function whose errors leave it with the frames of the user's code."""

    @functools.wraps(fun)
    def boundary(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            show_user_frames(error)
            raise

    return boundary


def show_user_frames(error: Exception) -> None:
    """Remove the frames of ipujax from the traceback of an error that is about to leave it, or mark them as hidden."""
    mode = _filtering()
    if mode == "off" or _is_fault(error):
        return
    if mode == "tracebackhide":
        for each in _chain(error):
            _hide(each.__traceback__)
    elif mode == "remove_frames":
        _shorten_with_cause(error)
    else:
        for each in _chain(error):
            each.__traceback__ = _of_user(each.__traceback__)
            if each.__context__ is not None and _of_user(each.__context__.__traceback__) is None:
                each.__suppress_context__ = True  # raised and handled in ipujax
        if _is_outermost() and not any(_VARIABLE in note for note in getattr(error, "__notes__", ())):
            error.add_note(_NOTE)


def _filtering() -> str:
    mode: str | None = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    if mode is not None and mode != "auto":
        return mode
    # JAX's choice; IPython is looked up, not imported.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return "quiet_remove_frames" if shell is None else "tracebackhide"


def _is_outermost() -> bool:
    """Return whether the public function that an error leaves was called by the user's code; JAX adds a note too."""
    for frame, _ in walk_stack(sys._getframe(3)):
        file = frame.f_code.co_filename
        if is_of_ipujax(file) or is_of_jax(file):
            return False
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break  # below a script is what runs it, `ipujax profile` too
    return True


def _is_fault(error: Exception) -> bool:
    """Return whether an error comes from ipujax itself and is not meant for users."""
    # A FloatingPointError is that of `jax.debug_nans`, about a user's numbers.
    return not isinstance(error, IpuError | FloatingPointError) and not [*_frames(error.__traceback__)][-1][1]


def _frames(traceback: TracebackType | None) -> Iterator[tuple[TracebackType, bool]]:
    """Return each frame, outermost first, with whether it is shown: code that is neither's goes by its caller."""
    is_shown = False
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        is_shown = not is_of_ipujax(file) and (is_shown or is_of_user(file))
        yield traceback, is_shown
        traceback = traceback.tb_next


def _of_user(traceback: TracebackType | None) -> TracebackType | None:
    frames: TracebackType | None = None
    for each in reversed([frame for frame, is_shown in _frames(traceback) if is_shown]):
        frames = TracebackType(frames, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return frames


def _hide(traceback: TracebackType | None) -> None:
    for frame, is_shown in _frames(traceback):
        if not is_shown:
            frame.tb_frame.f_locals["__tracebackhide__"] = True


def _shorten_with_cause(error: Exception) -> None:
    frames = _of_user(error.__traceback__)
    unfiltered = UnfilteredTraceback(f"{type(error).__name__} with the frames of ipujax")
    unfiltered.__traceback__ = error.__traceback__
    unfiltered.__cause__ = error.__cause__
    unfiltered.__context__ = error.__context__
    unfiltered.__suppress_context__ = error.__suppress_context__
    error.__traceback__ = frames
    error.__cause__ = unfiltered


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Return an error and those that Python prints before it."""
    visited: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in visited:
        visited.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
