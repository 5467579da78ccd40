"""Line of a terminal with the progress of work, rewritten in place and cleared at the end.

Input: a function that returns the present text. Output: that text on standard error, from two seconds on, four times a
second; nothing where that is not a terminal. It is written with carriage returns and spaces alone, which every
terminal understands. Limits: text that others print begins behind the line; log lines of ipujax hide it first.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, Lock, Thread
from typing import TextIO

WAIT_SECONDS = 2.0  # before the line appears: short compilations show none
_EVERY_SECONDS = 0.25


class _Line:
    """Line drawn by a thread, because a pass that computes reports nothing."""

    def __init__(self, stream: TextIO, text: Callable[[], str]) -> None:
        self._stream = stream
        self._text = text
        self._width = 0  # characters that are on the terminal now
        self._lock = Lock()  # of stream and width: `hide` runs in the thread that compiles
        self._is_over = Event()
        self._thread = Thread(target=self._draw, name="ipujax progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.hide()

    def hide(self) -> None:
        """Clear the line, until it is drawn again."""
        with self._lock:
            if self._width:
                self._stream.write(f"\r{' ' * self._width}\r")
                self._stream.flush()
                self._width = 0

    def _draw(self) -> None:
        wait = WAIT_SECONDS
        while not self._is_over.wait(wait):
            wait = _EVERY_SECONDS
            # One column is left free: a full line would wrap, and a carriage return would not reach its start.
            text = self._text()[: shutil.get_terminal_size().columns - 1]
            with self._lock:
                self._stream.write(f"\r{text.ljust(self._width)}")
                self._stream.flush()
                self._width = len(text)


_LINE: ContextVar[_Line | None] = ContextVar("ipujax_progress_line", default=None)


@contextmanager
def progress_line(text: Callable[[], str]) -> Iterator[None]:
    """Show progress of the work inside on a terminal; another thread calls `text` for the present line."""
    stream = sys.stderr
    if stream is None or not stream.isatty():  # None in a process without a console
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
    """Clear the line of progress, if there is one, before other text is written."""
    if (line := _LINE.get()) is not None:
        line.hide()
