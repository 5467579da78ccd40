"""Devices of sessions, and `DeviceManager`, which makes them.

A `DeviceInfo` is around `ipu.IPUModel` or `ipu.CPU`, under PopART's names. All are simulated, so that acquiring one
finds it free.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import ipujax as ipu
from ipujax.front_end import CHIP_NAMES, Log, read_options
from ipujax.popart.enumerations import DeviceConnectionType, DeviceSelectionCriterion, DeviceType, SyncPattern
from ipujax.popart.exceptions import popart_exception, unknown_name

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


_POD = 4  # IPUs of the simulated pod that `enumerateDevices` lists: those of one IPU-M2000
# Options of a model → their defaults. Others say how Poplar emulates it: the simulation here has one way.
_MODEL_OPTIONS = {"numIPUs": 1, "tilesPerIPU": 0, "ipuVersion": "ipu2"}
_LOG = Log("compile")  # PopART's own log is off by default


class DeviceManager:
    """Makes devices."""

    def createCpuDevice(self) -> DeviceInfo:
        """Return the host's CPU: numbers, without a profile and without limits."""
        return DeviceInfo(DeviceType.Cpu, 1, None)

    def createIpuModelDevice(self, options: Mapping[str, Any]) -> DeviceInfo:
        """Return a simulated system.

        Args:
            options: numIPUs; tilesPerIPU, those of the chip when it is missing; ipuVersion, "ipu1", "ipu2" (the
                default) or "ipu21".

        Raises:
            popart_exception: an unknown option or version, with the nearest.
        """
        return _modelled(DeviceType.IpuModel, options)

    def createSimDevice(self, options: Mapping[str, Any]) -> DeviceInfo:
        """Return a simulated system, of 4 tiles an IPU by default as PopART's; see `createIpuModelDevice`."""
        return _modelled(DeviceType.Sim, {"tilesPerIPU": 4, **options})

    def createOfflineIPUDevice(self, opts: Mapping[str, Any]) -> DeviceInfo:
        """Return a simulated system to compile for; see `createIpuModelDevice`."""
        return _modelled(DeviceType.OfflineIpu, {k: v for k, v in opts.items() if k != "syncPattern"})

    def createOfflineIpuFromDeviceInfo(self, deviceInfo: DeviceInfo) -> DeviceInfo:
        """Return a simulated system to compile for, as that of a device.

        Raises:
            popart_exception: a device without IPUs.
        """
        if not isinstance(deviceInfo.device, ipu.IPUModel):
            raise popart_exception("an offline IPU is made of a device with IPUs", got=repr(deviceInfo))
        pattern = deviceInfo.syncPattern
        return DeviceInfo(DeviceType.OfflineIpu, deviceInfo.numIpus, deviceInfo.device, pattern=pattern)

    def createOfflineIpuFromSystemString(self, system: str, numIpus: int) -> DeviceInfo:
        """Return a simulated system to compile for.

        Args:
            system: version of its IPUs, "ipu1", "ipu2" or "ipu21".
            numIpus: its IPUs.

        Raises:
            popart_exception: an unknown version, with the nearest.
        """
        return _system(DeviceType.OfflineIpu, numIpus, 0, system)

    def acquireAvailableDevice(
        self,
        numIpus: int = 1,
        tilesPerIpu: int = 0,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
        selectionCriterion: DeviceSelectionCriterion = DeviceSelectionCriterion.First,
    ) -> DeviceInfo:
        """Return a simulated system of Mk2 IPUs.

        Args:
            numIpus: its IPUs.
            tilesPerIpu: tiles of each; all of the chip when 0.
            pattern: sync groups.
            connectionType: when a session attaches to it.
            selectionCriterion: which of several; they are equal.
        """
        return _system(DeviceType.Ipu, numIpus, tilesPerIpu, "ipu2", pattern=pattern, connection_type=connectionType)

    def tryAcquireAvailableDevice(self, *args: Any, **keywords: Any) -> DeviceInfo:
        """Return a simulated system; see `acquireAvailableDevice`."""
        return self.acquireAvailableDevice(*args, **keywords)

    def enumerateDevices(
        self,
        pattern: SyncPattern = SyncPattern.Full,
        numIpus: int = 1,
        deviceType: DeviceType = DeviceType.Ipu,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
        tilesPerIPU: int = 0,
    ) -> list[DeviceInfo]:
        """Return the devices of a simulated pod of four IPUs with a number of IPUs, by number.

        Args:
            pattern: sync groups of each.
            numIpus: IPUs of each.
            deviceType: kind; only `Ipu` is listed.
            connectionType: when a session attaches to it.
            tilesPerIPU: tiles of each; all of the chip when 0.
        """
        if deviceType is not DeviceType.Ipu:
            return []
        first = sum(_POD >> step for step in range((numIpus - 1).bit_length()))
        return [
            _system(DeviceType.Ipu, numIpus, tilesPerIPU, "ipu2", first + i, pattern, connectionType)
            for i in range(_POD // numIpus)
        ]

    def acquireDeviceById(
        self,
        id: int,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
    ) -> DeviceInfo:
        """Return a device of the simulated pod: 0 to 3 of one IPU, 4 and 5 of two, 6 of four.

        Raises:
            popart_exception: another number.
        """
        counts = (1, 2, 4)
        listed = [d for n in counts for d in self.enumerateDevices(pattern, n, connectionType=connectionType)]
        if not 0 <= id < len(listed):
            raise popart_exception("no device has this number", expected=f"0 … {len(listed) - 1}", got=id)
        return listed[id]

    def tryAcquireDeviceById(self, id: int, *args: Any, **keywords: Any) -> DeviceInfo:
        """Return a device of the simulated pod; see `acquireDeviceById`."""
        return self.acquireDeviceById(id, *args, **keywords)

    def setOnDemandAttachTimeout(self, attachTimeout: int) -> None:
        """Simulated devices are free at once."""


def _modelled(kind: DeviceType, options: Mapping[str, Any]) -> DeviceInfo:
    """Return a simulated device of the options of `createIpuModelDevice`; warn of those without effect."""
    values, without_effect = read_options("device", options, _MODEL_OPTIONS, popart_exception)
    if without_effect:
        _LOG.warning("device options without effect: %s", ", ".join(without_effect))
    return _system(kind, *(values.get(name, default) for name, default in _MODEL_OPTIONS.items()))


def _system(
    kind: DeviceType,
    num_ipus: int,
    tiles_per_ipu: int,
    version: str,
    number: int = 0,
    pattern: SyncPattern = SyncPattern.Full,
    connection_type: DeviceConnectionType = DeviceConnectionType.Always,
) -> DeviceInfo:
    if num_ipus < 1:
        raise popart_exception("a device needs IPUs", expected="at least 1", got=num_ipus)
    if version not in IPU_VERSIONS:
        raise unknown_name("an IPU has a version", version, IPU_VERSIONS)
    # 0 tiles stand for all tiles of the chip, as in PopART.
    changes: dict[str, Any] = {"tiles_per_ipu": tiles_per_ipu} if tiles_per_ipu else {}
    # Systems have a power of two of IPUs; a model may use fewer.
    system = 1 << (num_ipus - 1).bit_length()
    model = ipu.IPUModel(system, IPU_VERSIONS[version], sync_pattern=SYNC_PATTERNS[SyncPattern(pattern)], **changes)
    return DeviceInfo(kind, num_ipus, model, number, SyncPattern(pattern), DeviceConnectionType(connection_type))


def syncPatternFromString(name: str) -> SyncPattern:
    """Return the sync pattern of a name, in any case.

    Raises:
        popart_exception: an unknown name, with the nearest.
    """
    names = {key.lower(): pattern for key, pattern in SyncPattern.__members__.items()}
    if name.lower() not in names:
        raise unknown_name("a device has a sync pattern", name, SyncPattern.__members__)
    return names[name.lower()]


def syncPatternToString(pattern: SyncPattern) -> str:
    """Return the name of a sync pattern."""
    return SyncPattern(pattern).name
