"""Interrupts by Ctrl-C that Python would lose, kept until the next check of a compilation.

Python prints an exception of a callback of its garbage collector or of a weak reference, and goes on. JAX has such
callbacks, and a compilation collects so often that one in eleven interrupts fell into them (44 searches were tried).

Input: the handler of SIGINT. Output: `KeyboardInterrupt` where it was raised, or at the next check.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType


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
