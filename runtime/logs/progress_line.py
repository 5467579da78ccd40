"""One line of a terminal that says how far work is, rewritten in place and cleared at the end.

Input: a function that says the text of this moment. Output: that text on standard error, from two seconds on, four
times a second; nothing where that is no terminal. It is written with carriage returns and spaces alone, which every
terminal understands. Limits: what others print meanwhile begins behind the line; log lines of ipujax hide it first.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Lock, Thread
from typing import TextIO

WAIT_SECONDS, _EVERY_SECONDS = 2.0, 0.25


class _Line:
    """A line, drawn by a thread of its own: a pass says nothing while it computes."""

    def __init__(self, stream: TextIO, text: Callable[[], str]) -> None:
        self._stream, self._text = stream, text
        self._shown, self._lock, self._is_over = 0, Lock(), Event()  # characters that are on the terminal now
        self._thread = Thread(target=self._draw, name="ipujax progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.hide()

    def hide(self) -> None:
        """Clears the line, until it is drawn again."""
        with self._lock:
            if self._shown:
                self._stream.write(f"\r{' ' * self._shown}\r")
                self._stream.flush()
                self._shown = 0

    def _draw(self) -> None:
        wait = WAIT_SECONDS
        while not self._is_over.wait(wait):
            wait = _EVERY_SECONDS
            text = self._text()[: shutil.get_terminal_size().columns - 1]
            with self._lock:
                self._stream.write(f"\r{text.ljust(self._shown)}")
                self._stream.flush()
                self._shown = len(text)


_LINE: ContextVar[_Line | None] = ContextVar("ipujax_progress_line", default=None)


@contextmanager
def progress_line(text: Callable[[], str]) -> Iterator[None]:
    """Shows how far what is inside has come, if standard error is a terminal.

    Args:
        text: what to show now; called by another thread.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield
        return
    line = _Line(stream, text)
    token = _LINE.set(line)
    line.start()
    try:
        yield
    finally:
        _LINE.reset(token)
        line.stop()


def hide_line() -> None:
    """Clears the line of progress, if there is one, before something else is written."""
    if (line := _LINE.get()) is not None:
        line.hide()
