"""Ends the instances of a launcher that can no longer do it itself, because it was killed.

Input: lines "+pid" and "-pid" for each process group that starts and ends, on standard input. When the launcher's end
of that pipe closes, the remaining groups are killed: instances and their child processes.

Limits: a process that left its instance's group by `setsid` is not killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read until the end of the input, then kill the remaining groups."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    # The launcher sends "-pid" before the system may reuse the number: no other group is hit.
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
