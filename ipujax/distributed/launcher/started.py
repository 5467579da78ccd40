"""A started instance, as the launcher sees it: its process, its output, and ways to end it.

Limits: whether a process is about to end is known on Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ipujax.distributed.launcher.output import Lines, Relay

_PF_EXITING = 4  # of a task's flags in /proc/*/stat; linux/sched.h


@dataclass(eq=False, slots=True)
class Instance:
    """One process and its recorded state."""

    index: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    said: Lines = field(default_factory=lambda: Lines(None))  # on the control socket
    relays: list[Relay] = field(default_factory=list)
    last_sign: float = field(default_factory=time.monotonic)
    sign: str = "its start"
    ended: int | None = None  # exit code, as soon as the script is over
    is_reaped: bool = False

    def send(self, number: int, *, whole_group: bool = True) -> None:
        """Sends a signal, unless the process is gone."""
        if not self.is_reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, for a zombie
                (os.killpg if whole_group else os.kill)(self.process.pid, number)

    def has_ended(self) -> bool:
        """Whether the process has ended; it is not reaped here, except on macOS before Python 3.13."""
        if not hasattr(os, "waitid"):
            return self.process.poll() is not None
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def is_dying(self) -> bool:
        """Whether the process is exiting without having reported the end of its script. Known on Linux only."""
        if self.is_reaped or self.ended is not None or sys.platform != "linux":
            return False
        after_name = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return after_name[0] in "XZ" or bool(int(after_name[6]) & _PF_EXITING)

    def end(self) -> None:
        """Kills what is left of the group, and waits for the process."""
        self.send(signal.SIGKILL)  # before the wait: until then its number is nobody else's
        self.process.wait()
        self.is_reaped = True
