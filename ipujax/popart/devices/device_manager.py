"""`DeviceManager`: makes devices. All are simulated, so that acquiring one finds it free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ipujax as ipu
from ipujax.front_end import Log, read_options
from ipujax.popart.devices.device_info import IPU_VERSIONS, SYNC_PATTERNS, DeviceInfo
from ipujax.popart.enumerations import DeviceConnectionType, DeviceSelectionCriterion, DeviceType, SyncPattern
from ipujax.popart.exceptions import popart_exception, unknown_name

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
