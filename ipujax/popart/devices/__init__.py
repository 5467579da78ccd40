"""Devices of sessions."""

from ipujax.popart.devices.device_info import DeviceInfo as DeviceInfo
from ipujax.popart.devices.device_manager import (
    DeviceManager as DeviceManager,
    syncPatternFromString as syncPatternFromString,
    syncPatternToString as syncPatternToString,
)
