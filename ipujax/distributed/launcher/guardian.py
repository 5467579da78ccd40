"""Ends the instances of a launcher that can no longer do it itself, because it was killed.

Input: lines "+pid" and "-pid" for each process group that starts and ends, on standard input. When the launcher's end
of that pipe closes, the groups that are left are killed: instances and whatever they started.

Limits: a process that left its instance's group by `setsid` is not found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Reads until the end, then kills what is left."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
