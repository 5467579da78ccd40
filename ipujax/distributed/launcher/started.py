"""A started instance, as the launcher sees it: its process, its output, and ways to end it.

Limits: whether a process is about to end is known on Linux only.

Output is shown line by line, with the number of the instance before each line. Input: bytes from a pipe, in pieces.
Output: whole lines, so that those of different instances never mix. A carriage return ends a line too, so progress bars
are shown as they move.

Limits: text without an end of line is shown when its line, or its process, ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
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
        instances: number of instances.

    Raises:
        ArgumentError: another name is in braces, or braces do not match.
    """

    def __init__(self, text: str, instances: int) -> None:
        self._text = text
        self._instances = instances
        try:
            self(0, "out")  # a bad prefix fails here, not at the first line of output
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            problem = f"the prefix {text!r} cannot be filled in"
            got = f"{type(error).__name__}: {error}"
            raise ArgumentError(problem, expected="{instance}, {instances}, {stream} or {time}", got=got) from None

    def __call__(self, instance: int, stream: str) -> bytes:
        """Return the prefix of a line that an instance wrote just now."""
        now = time.strftime("%H:%M:%S")
        text = self._text.format(instance=instance, instances=self._instances, stream=stream, time=now)
        return text.encode(errors="surrogateescape")


class Lines:
    """Join pieces of bytes to lines.

    Args:
        longest_bytes: a longer line is cut; None for lines of any length.
    """

    def __init__(self, longest_bytes: int | None) -> None:
        self._incomplete = b""  # a line without its end
        self._longest_bytes = longest_bytes

    def add(self, piece: bytes) -> Iterator[bytes]:
        """Append a piece, and yield the lines that it completes, with their ends."""
        self._incomplete += piece
        start = 0
        for end in _END_OF_LINE.finditer(self._incomplete):
            yield self._incomplete[start : end.end()]
            start = end.end()
        self._incomplete = self._incomplete[start:]
        if self._longest_bytes is not None and len(self._incomplete) >= self._longest_bytes:
            yield from self.end()

    def end(self) -> Iterator[bytes]:
        """Yield the incomplete line, if any, with an end."""
        if self._incomplete:
            yield self._incomplete if self._incomplete.endswith(b"\r") else self._incomplete + b"\n"
        self._incomplete = b""


class Relay:
    """Show one stream of one instance with prefixes.

    Args:
        stream: the read end of a pipe.
        prefix: returns the text before a line.
        show: writes lines, many at a time.
    """

    def __init__(self, stream: BinaryIO, prefix: Callable[[], bytes], show: Callable[[bytes], None]) -> None:
        os.set_blocking(stream.fileno(), False)  # a read after another event must not stop the event loop
        self._stream = stream
        self._prefix = prefix
        self._show = show
        self._lines = Lines(_LONGEST_LINE_BYTES)

    @property
    def is_open(self) -> bool:
        """True until the end of the stream has been read."""
        return not self._stream.closed

    def fileno(self) -> int:
        """Return the file descriptor that a selector waits for."""
        return self._stream.fileno()

    def read(self) -> bool:
        """Show the next piece of output, and return whether there was one; close the stream at its end."""
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
        """Close the stream."""
        self._stream.close()


_PF_EXITING = 4  # of a task's flags in /proc/*/stat; linux/sched.h


@dataclass(eq=False, slots=True)
class Instance:
    """Process of an instance, and the launcher's record of it.

    Args:
        index: number of the instance.
        process: the process, leader of its group.
        control: pipe from the instance, for its messages.
        messages: joins bytes from the pipe to messages.
        relays: its standard output and errors.
        last_sign_at: time of its last sign of life, of `time.monotonic`.
        last_sign: description of that sign.
        script_code: exit code of the script, None while it runs; the process outlives its script by exit handlers.
        is_reaped: whether the process has been waited for.
    """

    index: int
    process: subprocess.Popen[bytes]
    control: BinaryIO
    messages: Lines = field(default_factory=lambda: Lines(None))
    relays: list[Relay] = field(default_factory=list)
    last_sign_at: float = field(default_factory=time.monotonic)
    last_sign: str = "its start"
    script_code: int | None = None
    is_reaped: bool = False

    def send(self, number: int, *, whole_group: bool = True) -> None:
        """Send a signal, unless the process has ended."""
        if not self.is_reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, for a zombie
                (os.killpg if whole_group else os.kill)(self.process.pid, number)

    def has_ended(self) -> bool:
        """Return whether the process has ended, without reaping it, except on macOS before Python 3.13."""
        if not hasattr(os, "waitid"):
            return self.process.poll() is not None
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def is_dying(self) -> bool:
        """Return whether the process exits without a report of its script's end; False except on Linux."""
        if self.is_reaped or self.script_code is not None or sys.platform != "linux":
            return False
        after_name = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return after_name[0] in "XZ" or bool(int(after_name[6]) & _PF_EXITING)

    def end(self) -> None:
        """Kill the remaining processes of the group, and wait for the instance."""
        self.send(signal.SIGKILL)  # before the wait, after which the system may reuse the process number
        self.process.wait()
        self.is_reaped = True
