"""Early ends of a compilation: its deadline, and interrupts by Ctrl-C that Python would lose.

    with ending_at(time.monotonic() + 60):
        compile(graph, program)  # raises `OutOfTime` if it is not over within a minute

Both are checked where steps of a compilation begin, and where parts of them end. Python prints an exception of a
callback of its garbage collector or of a weak reference, and goes on. JAX has such callbacks, and a compilation
collects so often that one in eleven interrupts fell into them (44 searches were tried): these are kept until the check.

Input: a time of `time.monotonic`, or the handler of SIGINT. Output: `OutOfTime`, or `KeyboardInterrupt` where it was
raised or at the next check.
Limits: work in other threads, which the block has not started itself, has no deadline; what has neither steps nor parts
ends first.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from types import FrameType


class OutOfTime(BaseException):
    """The deadline of a compilation has passed.

    Not an `Exception`: code that goes on with another way where one fails must not go on here, as after an interrupt.
    """


_DEADLINE: ContextVar[float] = ContextVar("ipujax_deadline", default=inf)


@contextmanager
def ending_at(deadline: float) -> Iterator[None]:
    """Raise `OutOfTime` at the next check after a time of `time.monotonic`, or after that of an outer block."""
    token = _DEADLINE.set(min(deadline, _DEADLINE.get()))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def check_deadline() -> None:
    """Raise `OutOfTime` after the deadline."""
    if time.monotonic() > _DEADLINE.get():
        raise OutOfTime


@dataclass(slots=True)
class _Interrupts:
    """Whether an interrupt has come."""

    has_come: bool = False


_INTERRUPTS: ContextVar[_Interrupts | None] = ContextVar("ipujax_interrupts", default=None)


@contextmanager
def keeping_interrupts() -> Iterator[None]:
    """Keep interrupts whose exception is lost inside; they are raised by the next check, and at the end.

    Only the main thread has signals. A handler that raises nothing stays alone with its signal.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    interrupts = _Interrupts()

    def keep(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            interrupts.has_come = True
            raise

    token = _INTERRUPTS.set(interrupts)
    signal.signal(signal.SIGINT, keep)
    try:
        yield
        check_interrupt()
    finally:
        if signal.getsignal(signal.SIGINT) is keep:  # not one that the traced function has set meanwhile
            signal.signal(signal.SIGINT, handler)
        _INTERRUPTS.reset(token)


def check_interrupt() -> None:
    """Raise `KeyboardInterrupt` if one has come, and nothing has ended by it."""
    interrupts = _INTERRUPTS.get()
    if interrupts is not None and interrupts.has_come:
        interrupts.has_come = False
        raise KeyboardInterrupt
