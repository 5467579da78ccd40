"""`IPUConfig`: the IPUs of a Keras program, and the compiler options of its models.

Input: named options with types, some in categories. Output: a device and compiler options. Names are those of
Graphcore's TensorFlow (`ipu.config.IPUConfig`); an option without a meaning in this simulator does not exist, and is
refused. Strategies without a configuration use the latest one, as in that port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import ipujax as ipu
from ipujax.front_end import CHIP_NAMES, ArgumentAttributeError, Recompute, nearest

_RECOMPUTATIONS = get_args(Recompute)


class _Setting(NamedTuple):
    """An option: its default, a description of its values, and the test that a value passes."""

    default: Any
    expected: str
    accepts: Callable[[Any], bool]


def _is_count(minimum: int) -> Callable[[Any], bool]:
    # `True` is an `Integral`, and as a count always a mistake.
    return lambda value: isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum


def _is_power_of_two(value: Any) -> bool:
    return _is_count(1)(value) and int(value) & (int(value) - 1) == 0


class _Category:
    """Options by name, each checked when it is set."""

    _path = ""
    _settings: Mapping[str, _Setting] = {}

    def __init__(self) -> None:
        for name, setting in self._settings.items():
            object.__setattr__(self, name, setting.default)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._names() - set(self._settings):
            problem = f"{self._path}.{name} is a category of options"
            options = ", ".join(f"{self._path}.{name}.{each}" for each in getattr(self, name)._settings)
            raise ipu.ArgumentError(problem, expected=options, got=repr(value))
        if name not in self._settings:
            raise self._unknown(name)
        setting = self._settings[name]
        if not setting.accepts(value):
            problem = f"{self._path}.{name} must be {setting.expected}"
            raise ipu.ArgumentError(problem, expected=setting.expected, got=repr(value))
        object.__setattr__(self, name, value)

    if not TYPE_CHECKING:  # type checkers read the annotations of a category, and would accept any name

        def __getattr__(self, name: str) -> Any:
            raise self._unknown(name)

    def _unknown(self, name: str) -> ArgumentAttributeError:
        return ArgumentAttributeError(
            f"{self._path} has no option {name!r}",
            expected=", ".join(sorted(self._names())),
            hint=nearest(name, list(self._names())),
        )

    def _names(self) -> set[str]:
        return set(self._settings)

    def __repr__(self) -> str:
        return f"{self._path}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._settings)})"


class IpuModelConfig(_Category):
    """Options of the simulated chip.

    Attributes:
        version: the chip: "ipu1" (Mk1), "ipu2" (Mk2) or "ipu21" (Bow); also "mk1", "mk2" and "bow".
        tiles_per_ipu: tiles of each IPU; 0 for all that the chip has.
    """

    version: str
    tiles_per_ipu: int
    _path = "IPUConfig.ipu_model"
    _settings = {  # noqa: RUF012 - a table
        "version": _Setting(
            "ipu2",
            f"one of {', '.join(map(repr, CHIP_NAMES))}",
            lambda value: isinstance(value, str) and value in CHIP_NAMES,
        ),
        "tiles_per_ipu": _Setting(0, "a number of tiles, 0 for all", _is_count(0)),
    }


class IoTilesConfig(_Category):
    """Options of I/O tiles.

    Attributes:
        num_io_tiles: tiles of each IPU that are reserved for host exchange, see `ipu.Options.io_tiles`.
        prefetch_depth: batches that they load ahead, see `ipu.Options.prefetch_depth`.
    """

    num_io_tiles: int
    prefetch_depth: int
    _path = "IPUConfig.io_tiles"
    _settings = {  # noqa: RUF012 - a table
        "num_io_tiles": _Setting(0, "a number of tiles", _is_count(0)),
        "prefetch_depth": _Setting(1, "a number of batches, 1 or more", _is_count(1)),
    }


class DeviceConnectionType(Enum):
    """When a program takes hold of its IPUs."""

    ALWAYS = "always"
    ON_DEMAND = "on_demand"
    PRE_COMPILE = "pre_compile"
    NEVER = "never"


_CONNECTED = (DeviceConnectionType.ALWAYS, DeviceConnectionType.ON_DEMAND)


class DeviceConnectionConfig(_Category):
    """Options of the connection to IPUs: simulated ones are always there, so each option has but these values.

    Attributes:
        type: `DeviceConnectionType.ALWAYS` or `ON_DEMAND`, which are the same here.
        enable_remote_buffers: True: streaming memory can always be used.
    """

    type: DeviceConnectionType
    enable_remote_buffers: bool
    _path = "IPUConfig.device_connection"
    _settings = {  # noqa: RUF012 - a table
        "type": _Setting(
            DeviceConnectionType.ALWAYS,
            "DeviceConnectionType.ALWAYS or ON_DEMAND, as models of simulated IPUs are compiled when they run",
            lambda value: value in _CONNECTED,
        ),
        "enable_remote_buffers": _Setting(
            True, "True, as streaming memory of simulated IPUs can always be used", lambda value: value is True
        ),
    }


class IPUConfig(_Category):
    """The IPUs of a program, and the compiler options of its models.

    Attributes:
        auto_select_ipus: number of IPUs, a power of two.
        allow_recompute: True for recomputation where a model does not fit otherwise ("auto"), False for none, or a
            value of `ipu.Options.recompute`.
        device_connection: see `DeviceConnectionConfig`.
        io_tiles: see `IoTilesConfig`.
        ipu_model: see `IpuModelConfig`.

    Raises:
        ArgumentError: an option that does not exist is set or read, or one is set to a value that it does not accept.
    """

    auto_select_ipus: int
    allow_recompute: bool | Recompute
    device_connection: DeviceConnectionConfig
    io_tiles: IoTilesConfig
    ipu_model: IpuModelConfig
    _path = "IPUConfig"
    _settings = {  # noqa: RUF012 - a table
        "auto_select_ipus": _Setting(1, "a number of IPUs that is a power of two", _is_power_of_two),
        "allow_recompute": _Setting(
            False,
            f"True, False, or one of {', '.join(map(repr, _RECOMPUTATIONS))}",
            lambda value: isinstance(value, bool) or (isinstance(value, str) and value in _RECOMPUTATIONS),
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        # Past `__setattr__`, which refuses to replace a category.
        object.__setattr__(self, "device_connection", DeviceConnectionConfig())
        object.__setattr__(self, "io_tiles", IoTilesConfig())
        object.__setattr__(self, "ipu_model", IpuModelConfig())
        _CURRENT.set(self)

    def _names(self) -> set[str]:
        return {*self._settings, "device_connection", "io_tiles", "ipu_model"}

    def configure_ipu_system(self) -> None:
        """Make this the configuration of strategies without one, in place of a later one."""
        _CURRENT.set(self)

    @property
    def device(self) -> ipu.IPUModel:
        """The IPUs.

        Raises:
            TargetError: the chip cannot have that number of tiles.
        """
        tiles = self.ipu_model.tiles_per_ipu
        changes: dict[str, Any] = {"tiles_per_ipu": int(tiles)} if tiles else {}
        return ipu.IPUModel(int(self.auto_select_ipus), CHIP_NAMES[self.ipu_model.version], **changes)

    @property
    def options(self) -> ipu.Options:
        """The compiler options."""
        allow = self.allow_recompute
        recompute = allow if isinstance(allow, str) else "auto" if allow else "none"
        io_tiles = self.io_tiles
        return ipu.Options(recompute=recompute, io_tiles=io_tiles.num_io_tiles, prefetch_depth=io_tiles.prefetch_depth)


# Per context, so that threads configure themselves apart.
_CURRENT: ContextVar[IPUConfig | None] = ContextVar("ipujax_keras_config", default=None)


def get_ipu_config() -> IPUConfig | None:
    """Return the configuration that was created or configured latest; None for none."""
    return _CURRENT.get()


def reset_ipu_configuration() -> None:
    """Clear the current configuration: strategies then use one Mk2."""
    _CURRENT.set(None)
