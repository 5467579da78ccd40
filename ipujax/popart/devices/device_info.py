"""`DeviceInfo`: a device of a session, under PopART's names, around `ipu.IPUModel` or `ipu.CPU`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import ipujax as ipu
from ipujax.front_end import CHIP_NAMES
from ipujax.popart.enumerations import DeviceConnectionType, DeviceType, SyncPattern

# PopART's pattern → `Target.sync_pattern`.
SYNC_PATTERNS: Mapping[SyncPattern, Literal["full", "single_pipeline", "ping_pong"]] = MappingProxyType(
    {
        SyncPattern.Full: "full",
        SyncPattern.SinglePipeline: "single_pipeline",
        SyncPattern.ReplicaAndLadder: "ping_pong",
    }
)
# Without the presets, which are chip names too.
IPU_VERSIONS = MappingProxyType({version: preset for version, preset in CHIP_NAMES.items() if version != preset})
_VERSIONS: Mapping[str, str] = MappingProxyType({preset: version for version, preset in IPU_VERSIONS.items()})


class DeviceInfo:
    """A device of a session; a context manager that detaches at its end.

    Args:
        kind: CPU, model or, simulated too, IPU.
        num_ipus: IPUs that the program asked for; the system may have more, a power of two.
        model: the simulated system; None for a CPU.
        number: in `enumerateDevices`.
        pattern: sync groups of its IPUs.
        connection_type: when a session attaches to it.
    """

    def __init__(
        self,
        kind: DeviceType,
        num_ipus: int,
        model: ipu.IPUModel | None,
        number: int = 0,
        pattern: SyncPattern = SyncPattern.Full,
        connection_type: DeviceConnectionType = DeviceConnectionType.Always,
    ) -> None:
        self._kind = kind
        self._num_ipus = num_ipus
        self._model = model
        self._number = number
        self._pattern = pattern
        self._connection_type = connection_type
        # Simulated devices are never busy: attaching cannot fail, and two sessions may share one.
        self._attached = connection_type is DeviceConnectionType.Always

    @property
    def device(self) -> ipu.IPUModel | ipu.CPU:
        """The device of `ipu.jit`."""
        return ipu.CPU() if self._model is None else self._model

    @property
    def type(self) -> DeviceType:
        """Kind of the device."""
        return self._kind

    @property
    def connectionType(self) -> DeviceConnectionType:
        """Time at which a session attaches to the device."""
        return self._connection_type

    @property
    def syncPattern(self) -> SyncPattern:
        """Sync groups of its IPUs."""
        return self._pattern

    @property
    def id(self) -> int:
        """Number of the device."""
        return self._number

    @property
    def numIpus(self) -> int:
        """Number of IPUs."""
        return self._num_ipus

    @property
    def tilesPerIPU(self) -> int:
        """Tiles of an IPU; 1 of a CPU."""
        return 1 if self._model is None else self._model.target.tiles_per_ipu

    @property
    def tilesPerIpu(self) -> int:
        """Tiles of an IPU; 1 of a CPU."""
        return self.tilesPerIPU

    @property
    def numWorkerContexts(self) -> int:
        """Workers of a tile; 1 of a CPU."""
        return 1 if self._model is None else self._model.target.worker_contexts

    @property
    def version(self) -> str:
        """Version of the IPU, as `ipuVersion`; "<unknown-cpu>" for a CPU."""
        return self.ipuVersion or "<unknown-cpu>"

    @property
    def ipuVersion(self) -> str:
        """Version of the IPU: "ipu1", "ipu2" or "ipu21"; empty for a CPU."""
        return "" if self._model is None else _VERSIONS[self._model.target.name]

    @property
    def driverIds(self) -> list[int]:
        """Numbers of the IPUs."""
        return list(range(self._num_ipus))

    @property
    def isAttached(self) -> bool:
        """True while a program is attached."""
        return self._attached

    def attach(self) -> bool:
        """Attach to the device; return True."""
        self._attached = True
        return True

    def tryAttachUntilTimeout(self) -> bool:
        """Attach to the device; return True."""
        return self.attach()

    def detach(self) -> None:
        """Release the device."""
        self._attached = False

    def __enter__(self) -> DeviceInfo:
        return self

    def __exit__(self, *_: Any) -> None:
        self.detach()

    def __repr__(self) -> str:
        kind = {DeviceType.Cpu: "CPU", DeviceType.IpuModel: "IPU_MODEL"}.get(self._kind, "IPU")
        tiles = "" if self._model is None else f", {self.tilesPerIPU} tiles, {self.ipuVersion}"
        return f"DeviceInfo({self._number}: {kind}, {self._num_ipus} IPUs{tiles})"
