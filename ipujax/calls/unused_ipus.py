"""Warning of devices that have more IPUs than a function uses.

Input: devices, and how many IPUs a program uses. Output: a line of the log, once for each device.
"""

from __future__ import annotations

from typing import Any

from ipujax.runtime.logs import Log

_LOG = Log("jit")


class UnusedIpus:
    """The devices that a function has been warned of.

    Args:
        name: of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: set[Any] = set()

    def may_idle(self, device: Any) -> None:
        """Says that other functions use the IPUs of a device that this one does not: no warning of them."""
        self._known.add(device)

    def check(self, device: Any, used: int, there: int) -> None:
        """Warns if a smaller device is enough.

        Args:
            device: what it runs on.
            used: IPUs that the program uses.
            there: IPUs of the device.
        """
        enough = 1 << (used - 1).bit_length()
        if enough < there and device not in self._known:
            self._known.add(device)
            what = "%s uses %d of the %d IPUs of its device; num_ipus=%d is enough (replicas=, or stages, use more)"
            _LOG.warning(what, self._name, used, there, enough)
