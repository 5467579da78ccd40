"""Devices and targets with Poplar's names: `IPUModel().create_device().get_target()`.

`Target` is the runtime's machine description with Poplar's getters. An engine loads on a `Device`: a model of IPUs, or
the CPU, which is one tile with one worker and unlimited memory. All devices are models, so `attach` fails only on a
device that is attached already.

Source: Poplar & PopLibs user guide, "Programming with Poplar"; names of getters from poplar::Target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from ipujax.runtime.errors import TargetError
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import CHIP_NAMES, Arch, IpuVersion, Target as RuntimeTarget, nearest, preset

DeviceType = Literal["IPU_MODEL", "CPU"]  # there is no hardware to list
_TYPES: tuple[DeviceType, ...] = get_args(DeviceType)
_CPU_BYTES = 2**40  # assumed: more than any program here needs


class Target(RuntimeTarget):
    """Machine description with Poplar's getters; equal to another with the same values."""

    __slots__ = ()

    @classmethod
    def of(cls, target: RuntimeTarget) -> Target:
        """Add Poplar's getters to a machine description.

        Raises:
            TargetError: for other values than machine descriptions.
        """
        if not isinstance(target, RuntimeTarget):
            hint = "create_device().get_target()" if isinstance(target, IPUModel) else None
            raise TargetError(f"{target!r} must be a target", expected="a Target, or a Device for one", hint=hint)
        return target if isinstance(target, Target) else cls(**target._values(), sources=target.sources)

    def replace(self, **changes: Any) -> Target:
        """Return a copy with changed fields; see `ipujax.Target.replace`."""
        return Target.of(super().replace(**changes))

    def get_target_type(self) -> str:
        """Return the kind of device, "CPU" or "IPU_MODEL"."""
        return "CPU" if self.name == "cpu" else "IPU_MODEL"

    def get_target_arch_string(self) -> str:
        """Return the name of the machine: "mk1", "mk2", "bow" or "cpu"."""
        return self.name

    def get_num_ipus(self) -> int:
        """Return the number of IPUs of the system."""
        return self.num_ipus

    def get_tiles_per_ipu(self) -> int:
        """Return the number of tiles of one IPU."""
        return self.tiles_per_ipu

    def get_num_tiles(self) -> int:
        """Return the number of tiles of all IPUs."""
        return self.num_tiles

    def get_num_worker_contexts(self) -> int:
        """Return the number of worker threads of one tile."""
        return self.worker_contexts

    def get_bytes_per_tile(self) -> int:
        """Return the memory of one tile, in bytes."""
        return self.bytes_per_tile

    def get_exchange_bytes_per_cycle(self) -> float:
        """Return the bytes that a tile receives in a cycle of internal exchange."""
        return self.exchange_bytes_per_cycle

    def get_tile_clock_frequency(self) -> float:
        """Return the clock of the tiles, in Hz."""
        return self.clock_hz

    def get_data_path_width(self) -> int:
        """Return the number of bits of one vector load or store."""
        return self.vector_width_bytes * 8

    def get_vector_width(self, dtype: np.dtype) -> int:
        """Return the number of elements of a type in one vector."""
        return self.vector_width_bytes // self.get_type_size(dtype)

    def get_type_size(self, dtype: np.dtype) -> int:
        """Return the number of bytes of one element of a type."""
        return int(np.dtype(dtype).itemsize)


class Device:
    """Device that an engine can load programs on.

    Args:
        target: machine description of the device.
        device_id: number in a `DeviceManager`; 0 for a device created without one.
    """

    __slots__ = ("_attached", "_id", "_target")

    def __init__(self, target: RuntimeTarget, device_id: int = 0) -> None:
        self._target = Target.of(target)
        self._id = device_id
        self._attached = False

    @staticmethod
    def create_cpu_device() -> Device:
        """Return the host's CPU as one tile with one worker: numbers, and no limit of memory."""
        # Other constants are those of mk2: a CPU has no profile, see `Engine.profile`.
        target = preset("mk2").replace(name="cpu", tiles_per_ipu=1, worker_contexts=1, bytes_per_tile=_CPU_BYTES)
        return Device(target)

    @property
    def target(self) -> Target:
        """Machine description of the device."""
        return self._target

    @property
    def is_attached(self) -> bool:
        """True while the device is attached."""
        return self._attached

    def get_target(self) -> Target:
        """Return the device's machine description, under Poplar's name."""
        return self._target

    def get_id(self) -> int:
        """Return the device's number in the `DeviceManager` that listed it."""
        return self._id

    def attach(self) -> bool:
        """Attach to the device; returns False if it is attached already."""
        if self._attached:
            return False
        self._attached = True
        return True

    def detach(self) -> None:
        """Release the device."""
        self._attached = False

    def __repr__(self) -> str:
        target = self._target
        return f"Device({self._id}: {target.num_ipus} × {target.name}, {target.tiles_per_ipu} tiles)"


@checking_calls("poplar.IPUModel")
@dataclass(slots=True)
class IPUModel:
    """Configuration of modelled IPUs, for `create_device`.

    Args:
        ipu_version: "ipu1" (GC2, Mk1), "ipu2" (GC200, Mk2) or "ipu21" (Bow), or a preset's own name.
        num_ipus: IPUs of the system.
        tiles_per_ipu: tiles of one IPU; those of the machine when None.
        bytes_per_tile: memory of one tile; that of the machine when None.
        min_ipu_sync_delay: cycles of a sync of an IPU's tiles; those of the machine when None.
    """

    ipu_version: IpuVersion | Arch = "ipu2"
    num_ipus: int = 1
    tiles_per_ipu: int | None = None
    bytes_per_tile: int | None = None
    min_ipu_sync_delay: int | None = None

    def create_device(self) -> Device:
        """Return a device of this model.

        Raises:
            TargetError: for an unknown version, or an invalid number.
        """
        if self.ipu_version not in CHIP_NAMES:
            message = f"no IPU {self.ipu_version!r}"
            hint = nearest(self.ipu_version, CHIP_NAMES)
            raise TargetError(message, expected=f"one of {sorted(CHIP_NAMES)}", got=repr(self.ipu_version), hint=hint)
        overrides = {
            "tiles_per_ipu": self.tiles_per_ipu,
            "bytes_per_tile": self.bytes_per_tile,
            "internal_sync_cycles": self.min_ipu_sync_delay,
        }
        changes = {name: value for name, value in overrides.items() if value is not None}
        target = preset(CHIP_NAMES[self.ipu_version], self.num_ipus)
        return Device(target.replace(**changes) if changes else target)


class DeviceManager:
    """Lists the available devices: a model of each known machine.

    Args:
        num_ipus: IPUs of each.
    """

    __slots__ = ("_devices",)

    def __init__(self, num_ipus: int = 1) -> None:
        # Two names of one machine give one device; a dict keeps the order of the table.
        presets = dict.fromkeys(CHIP_NAMES.values())
        self._devices = tuple(Device(preset(name, num_ipus), number) for number, name in enumerate(presets))

    @staticmethod
    def create_device_manager(num_ipus: int = 1) -> DeviceManager:
        """Return a device manager, under Poplar's name of the constructor."""
        return DeviceManager(num_ipus)

    def get_num_devices(self) -> int:
        """Return the number of devices."""
        return len(self._devices)

    def get_devices(self, target_type: DeviceType | None = None, num_ipus: int | None = None) -> tuple[Device, ...]:
        """Return the devices by number, or only those of a type ("IPU_MODEL" or "CPU") and of a number of IPUs.

        Raises:
            TargetError: for an unknown type.
        """
        if target_type not in (None, *_TYPES):
            raise TargetError(f"no devices of type {target_type!r}", expected=f"one of {', '.join(_TYPES)}")
        return tuple(
            device
            for device in self._devices
            if target_type in (None, device.target.get_target_type()) and num_ipus in (None, device.target.num_ipus)
        )

    def acquire_available_device(self, num_ipus: int = 1) -> Device:
        """Attach to the first free device with this number of IPUs.

        Raises:
            TargetError: if there is none.
        """
        candidates = self.get_devices(num_ipus=num_ipus)
        for device in candidates:
            if device.attach():
                return device
        hint = "device.detach() of one of them" if candidates else f"DeviceManager({num_ipus})"
        raise TargetError(f"no device of {num_ipus} IPUs is free", got=f"{len(candidates)}, all taken", hint=hint)

    def get_device(self, device_id: int) -> Device:
        """Return the device of a number.

        Raises:
            TargetError: for a number out of range.
        """
        if not 0 <= device_id < len(self._devices):
            raise TargetError(f"no device {device_id}", expected=f"0 … {len(self._devices) - 1}")
        return self._devices[device_id]
