"""Warning of devices that have more IPUs than a function uses.

Input: devices, and the number of IPUs that a program uses. Output: a line of the log, once for each device.
"""

from __future__ import annotations

from typing import Any

from ipujax.runtime.logs import Log

_LOG = Log("jit")


class UnusedIpus:
    """Devices for which a function has warned, or need not warn.

    Args:
        name: name of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._settled_devices: set[Any] = set()

    def may_idle(self, device: Any) -> None:
        """Do not warn for a device whose other IPUs another function uses."""
        self._settled_devices.add(device)

    def check(self, device: Any, num_used: int, num_ipus: int) -> None:
        """Warn, once for each device, if a smaller device is enough.

        Args:
            device: device of the function.
            num_used: IPUs that the program uses.
            num_ipus: IPUs of the device.
        """
        enough = 1 << (num_used - 1).bit_length()  # systems have powers of two
        # A function is compiled for each shape, which would repeat the line.
        if enough < num_ipus and device not in self._settled_devices:
            self._settled_devices.add(device)
            text = "%s uses %d of the %d IPUs of its device; num_ipus=%d is enough (replicas=, or stages, use more)"
            _LOG.warning(text, self._name, num_used, num_ipus, enough)
