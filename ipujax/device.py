"""Devices: targets of a compilation, and the default device.

`IPUModel` is a simulated system of IPUs; `CPU` computes the numbers only, as Poplar's CPU target does. `make_mesh`
names the IPUs of a system by axes, for shardings; it needs no devices of JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from ipujax.runtime.errors import ArgumentError, TargetError
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import PRESETS, Arch, Target, TargetChanges, nearest, preset


@checking_calls("ipu.IPUModel")
class IPUModel:
    """A simulated system of IPUs.

    Numbers of IPUs are powers of two, as those of Pods (16, 64, 128, 256 and more) and of their partitions, to which
    programs attach (1, 2, 4, …; Graphcore, "Getting started with IPU-PODs" 3.1, section 1). A program that needs
    another number takes the next larger one.

    Args:
        num_ipus: number of chips, a power of two up to 65,536.
        arch: preset of the chip: "mk1" (GC2), "mk2" (GC200) or "bow".
        changes: fields of `Target` to replace, for what-if studies: `bytes_per_tile=2**20`.

    Raises:
        TargetError: an unknown preset or field, an invalid value, or a number of chips that is not a power of two.
        ArgumentTypeError: more than two arguments by position.
    """

    __slots__ = ("_hash", "_target")

    def __init__(self, num_ipus: int = 1, arch: Arch = "mk2", **changes: Unpack[TargetChanges]) -> None:
        if isinstance(num_ipus, str) and num_ipus in PRESETS:
            problem = "ipu.IPUModel takes the number of IPUs first"
            raise TargetError(problem, expected="a whole number", got=repr(num_ipus), hint=f"arch={num_ipus!r}")
        _check_fields(changes)
        target = preset(arch, num_ipus)
        _check_partition(target.num_ipus)
        self._target = target.replace(**changes) if changes else target
        self._hash = hash(self._target)  # looked up at every call of a compiled function

    @property
    def target(self) -> Target:
        """Machine description of all IPUs."""
        return self._target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IPUModel) and self._target == other._target

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        target = self._target
        return f"IPUModel({target.num_ipus} × {target.name}, {target.tiles_per_ipu} tiles)"


def _check_fields(changes: Mapping[str, Any]) -> None:
    """Refuse a keyword of `IPUModel` that is no constant of the machine, with the nearest."""
    # `sources` documents the other fields, and is no constant of the machine.
    names = {"arch", *(field.name for field in dataclasses.fields(Target) if field.name != "sources")}
    for name, value in changes.items():
        if name not in names:
            raise TargetError(
                f"ipu.IPUModel has no argument {name!r}, and its Target no constant {name!r}",
                expected="num_ipus, arch, or a field of ipu.Target",
                got=f"{name}={value!r}",
                hint=nearest(name, names) or "dataclasses.fields(ipu.Target) lists fields with unit and meaning",
            )


def _check_partition(num_ipus: int) -> None:
    larger = 1 << (num_ipus - 1).bit_length()
    if num_ipus != larger:
        raise TargetError(
            f"no system has {num_ipus} IPUs",
            expected="a power of two, as partitions of Pods are",
            got=num_ipus,
            hint=f"num_ipus={larger}; {larger - num_ipus} of them may stay unused",
        )


def device_of(target: Target) -> IPUModel:
    """Return the device of a target.

    Raises:
        TargetError: no system has so many IPUs.
    """
    _check_partition(target.num_ipus)
    device = IPUModel.__new__(IPUModel)
    device._target = target
    device._hash = hash(target)
    return device


@checking_calls("ipu.CPU")
@dataclass(frozen=True, slots=True)
class CPU:
    """The host's CPU: numbers without a machine model, a memory limit or a profile."""


Device = IPUModel | CPU


def check_device(device: object, who: str) -> None:
    """Refuse anything but a device as an argument of the public function `who`."""
    if not isinstance(device, IPUModel | CPU):
        raise ArgumentError(
            f"device of {who} must be a device",
            expected="ipu.IPUModel(...) or ipu.CPU()",
            got=repr(device),
            hint=_device_for(device),
        )


def _device_for(value: object) -> str | None:
    """Return code of the device that a wrong argument most likely means, or what a device of JAX is for."""
    if isinstance(value, jax.Device):
        return "leave it out, jax.jit has deprecated it: jax.device_put(x, device) chooses a device of JAX"
    if isinstance(value, str) and value.lower() == "cpu":
        return "ipu.CPU()"
    if isinstance(value, str) and value.lower() in PRESETS:
        return f'ipu.IPUModel(arch="{value.lower()}")'
    if isinstance(value, int) and not isinstance(value, bool):
        return f"ipu.IPUModel(num_ipus={value})"
    return None


_DEFAULT: ContextVar[Device | None] = ContextVar("ipujax_default_device", default=None)


@contextmanager
def default_device(device: Device) -> Iterator[None]:
    """Set the device of all `ipu.jit` functions without one that are called inside.

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


device_of_context = _DEFAULT.get  # that of `default_device`, None outside; for each call, which a function would slow


def current_device() -> Device:
    """Return the device of functions without one: that of `default_device`, else one Mk2."""
    return _DEFAULT.get() or _single_mk2()


@cache  # validating a target takes longer than looking up a compiled function
def _single_mk2() -> IPUModel:
    return IPUModel()


@checking_calls("ipu.make_mesh")
def make_mesh(
    axis_shapes: Sequence[int], axis_names: Sequence[str], *, axis_types: Sequence[AxisType] | None = None
) -> AbstractMesh:
    """Make a mesh of IPUs, the last axis varying fastest; its signature is that of `jax.make_mesh`.

    Args:
        axis_shapes: number of IPUs along each axis.
        axis_names: name of each axis.
        axis_types: type of each axis: `AxisType.Explicit`, so that types of values say their shardings, the default of
            JAX, or `AxisType.Auto`, so that the compiler chooses those that no annotation says.

    Returns:
        A `jax.sharding.AbstractMesh`, for `NamedSharding`, `jax.sharding.use_abstract_mesh` and `jax.shard_map`.

    Raises:
        ArgumentError: lengths that differ, a size below 1, a name that comes twice.
    """
    sizes = tuple(int(size) if isinstance(size, np.integer) else size for size in axis_shapes)
    names = tuple(axis_names)
    if len(sizes) != len(names) or len(set(names)) != len(names) or any(size < 1 for size in sizes):
        raise ArgumentError(
            "ipu.make_mesh needs a size of at least 1 and a distinct name for each axis",
            expected='ipu.make_mesh((2, 4), ("data", "model"))',
            got=f"ipu.make_mesh({sizes}, {names}), of {prod(sizes)} IPUs",
        )
    types = (AxisType.Explicit,) * len(sizes) if axis_types is None else tuple(axis_types)
    if len(types) != len(sizes):
        raise ArgumentError("ipu.make_mesh needs a type for each axis", expected=len(sizes), got=types)
    return AbstractMesh(sizes, names, types)
