"""Warnings of settings that a function does not use: IPUs of its device, and options of its compiler.

Input: what the program of a function uses. Output: a line of the log, once for each device and each option.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipujax.runtime.logs import Log

_LOG = Log("jit")


class UnusedSettings:
    """Devices and options of which a function has warned, or need not warn.

    Args:
        name: name of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._settled_devices: set[Any] = set()
        self._named_options: set[str] = set()
        self._names_options = True

    def may_idle(self, device: Any) -> None:
        """Do not warn for a device whose other IPUs another function uses."""
        self._settled_devices.add(device)

    def ignore_options(self) -> None:
        """Do not warn of options: a front end sets them for all of its functions."""
        self._names_options = False

    def check_ipus(self, device: Any, num_used: int, num_ipus: int) -> None:
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

    def check_options(self, lines: Sequence[str]) -> None:
        """Warn of options without effect, each once: a line each, of `unused_options`."""
        if self._names_options:
            for line in lines:
                if line not in self._named_options:
                    self._named_options.add(line)
                    _LOG.warning("%s: %s", self._name, line)
