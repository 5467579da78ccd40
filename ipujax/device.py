"""Devices: what a function is compiled for, and which one is used by default.

`IPUModel` is a simulated system of IPUs; `CPU` computes the numbers only, as Poplar's CPU target does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.presets import preset
from ipujax.runtime.target import Target


class IPUModel:
    """A simulated system of IPUs.

    Args:
        num_ipus: number of chips.
        arch: preset of the chip: "mk1" (GC2), "mk2" (GC200) or "bow".
        changes: fields of `Target` to set otherwise, for what-if studies: `bytes_per_tile=2**20`.

    Raises:
        TargetError: for an unknown preset or field, or a value that makes no sense.
    """

    __slots__ = ("_hash", "_target")

    def __init__(self, num_ipus: int = 1, arch: str = "mk2", **changes: Any) -> None:
        target = preset(arch, num_ipus)
        self._target = target.replace(**changes) if changes else target
        self._hash = hash(self._target)  # asked for at every call of a compiled function

    @property
    def target(self) -> Target:
        """The machine description."""
        return self._target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IPUModel) and self._target == other._target

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        target = self._target
        return f"IPUModel({target.num_ipus} × {target.name}, {target.tiles_per_ipu} tiles)"


class CPU:
    """The host's CPU: the numbers, without a machine, a limit or a profile."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CPU)

    def __hash__(self) -> int:
        return hash(CPU)

    def __repr__(self) -> str:
        return "CPU()"


Device = IPUModel | CPU


def check_device(device: object, who: str) -> None:
    """Refuses what is no device.

    Args:
        device: anything.
        who: what it was given to, for the message.

    Raises:
        ArgumentError: naming what was given.
    """
    if not isinstance(device, IPUModel | CPU):
        raise ArgumentError(
            f"{who} was given something else than a device", expected="ipu.IPUModel(...) or ipu.CPU()", got=repr(device)
        )


_DEFAULT: ContextVar[Device | None] = ContextVar("ipujax_default_device", default=None)


@contextmanager
def default_device(device: Device) -> Iterator[None]:
    """Makes `device` the one of every `ipu.jit` function called inside that names none.

    Args:
        device: `IPUModel(...)` or `CPU()`.

    Raises:
        ArgumentError: for anything else.
    """
    check_device(device, "ipu.default_device")
    token = _DEFAULT.set(device)
    try:
        yield
    finally:
        _DEFAULT.reset(token)


def current_device() -> Device:
    """The device of a function that names none: one Mk2 unless `default_device` says otherwise."""
    return _DEFAULT.get() or _one_mk2()


@cache
def _one_mk2() -> IPUModel:
    return IPUModel()
