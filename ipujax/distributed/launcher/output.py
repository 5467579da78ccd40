"""Output of instances, line by line, each with its instance before it.

Input: pieces of bytes as they come through a pipe. Output: whole lines, so that those of different instances never mix.
A carriage return ends a line too, so progress bars come through as they move.

Limits: text without an end of line is shown when its line, or its process, ends.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from ipujax.runtime.errors import ArgumentError

DEFAULT_PREFIX = "[{instance}] "
_END_OF_LINE = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a "\r" at the end of a piece may be half of "\r\n"
_LONGEST_LINE_BYTES = 1 << 16  # a longer one is cut: assumed, as much as a pipe holds at once
_PIPE_BYTES = 1 << 16


class Prefix:
    """Text before each line.

    Args:
        text: may name {instance}, {instances}, {stream} ("out" or "err") and {time} (of the clock on the wall).
        instances: how many there are.

    Raises:
        ArgumentError: for another name in braces, or braces that do not match.
    """

    def __init__(self, text: str, instances: int) -> None:
        self._text, self._instances = text, instances
        try:
            self(0, "out")
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            what = f"the prefix {text!r} cannot be filled in"
            got = f"{type(error).__name__}: {error}"
            raise ArgumentError(what, expected="{instance}, {instances}, {stream} or {time}", got=got) from None

    def __call__(self, instance: int, stream: str) -> bytes:
        """The prefix of a line that an instance wrote just now."""
        now = time.strftime("%H:%M:%S")
        text = self._text.format(instance=instance, instances=self._instances, stream=stream, time=now)
        return text.encode(errors="surrogateescape")


class Lines:
    """Puts pieces together to lines.

    Args:
        longest_bytes: a longer line is cut; None for lines of any length.
    """

    def __init__(self, longest_bytes: int | None) -> None:
        self._rest, self._longest = b"", longest_bytes

    def add(self, piece: bytes) -> Iterator[bytes]:
        """Takes the next piece; gives the lines it completes, with their ends."""
        self._rest += piece
        start = 0
        for end in _END_OF_LINE.finditer(self._rest):
            yield self._rest[start : end.end()]
            start = end.end()
        self._rest = self._rest[start:]
        if self._longest is not None and len(self._rest) >= self._longest:
            yield from self.end()

    def end(self) -> Iterator[bytes]:
        """Gives what is left, as a line."""
        if self._rest:
            yield self._rest if self._rest.endswith(b"\r") else self._rest + b"\n"
        self._rest = b""


class Relay:
    """Hands on one stream of one instance.

    Args:
        stream: the read end of a pipe.
        prefix: makes the text before each line.
        show: takes lines, many at a time.
    """

    def __init__(self, stream: BinaryIO, prefix: Callable[[], bytes], show: Callable[[bytes], None]) -> None:
        os.set_blocking(stream.fileno(), False)
        self._stream, self._prefix, self._show, self._lines = stream, prefix, show, Lines(_LONGEST_LINE_BYTES)

    @property
    def is_open(self) -> bool:
        """Whether more may come."""
        return not self._stream.closed

    def fileno(self) -> int:
        """The file to wait for."""
        return self._stream.fileno()

    def read(self) -> bool:
        """Hands on a piece of what has come; whether there was something. Closes the stream at its end."""
        try:
            piece = os.read(self.fileno(), _PIPE_BYTES)
        except BlockingIOError:
            return False
        lines = list(self._lines.add(piece) if piece else self._lines.end())
        if not piece:
            self._stream.close()
        if lines:
            self._show(b"".join(self._prefix() + line for line in lines))
        return bool(piece)

    def close(self) -> None:
        """Stops handing on."""
        self._stream.close()
