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
    """Process of an instance, and the launcher's record of it.

    Args:
        index: number of the instance.
        process: the process, leader of its group.
        control: socket to the instance.
        messages: joins bytes from the socket to messages.
        relays: its standard output and errors.
        last_sign_at: time of its last sign of life, of `time.monotonic`.
        last_sign: description of that sign.
        script_code: exit code of the script, None while it runs; the process outlives its script by exit handlers.
        is_reaped: whether the process has been waited for.
    """

    index: int
    process: subprocess.Popen[bytes]
    control: socket.socket
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
