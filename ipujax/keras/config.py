"""`IPUConfig`: which IPUs a Keras program uses, and how models are compiled for them.

Input: named options with types, some in categories. Output: a device and compiler options. Names are those of
Graphcore's TensorFlow (`ipu.config.IPUConfig`); an option that has no meaning here does not exist, and is refused.
The configuration that was made last is the one of strategies that are given none, as in that port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from ipujax.device import IPUModel
from ipujax.runtime.errors import ArgumentAttributeError, ArgumentError
from ipujax.runtime.options import RECOMPUTATIONS, Options
from ipujax.runtime.target import CHIP_NAMES, nearest


class _Setting(NamedTuple):
    """An option: its value at first, what it takes in words, and whether it takes a value."""

    first: Any
    expected: str
    takes: Callable[[Any], bool]


def _is_count(least: int) -> Callable[[Any], bool]:
    return lambda given: isinstance(given, Integral) and not isinstance(given, bool) and int(given) >= least


def _is_power_of_two(given: Any) -> bool:
    return _is_count(1)(given) and int(given) & (int(given) - 1) == 0


class _Category:
    """Options by name, each checked when it is set."""

    _path = ""
    _settings: Mapping[str, _Setting] = {}

    def __init__(self) -> None:
        for name, setting in self._settings.items():
            object.__setattr__(self, name, setting.first)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._names() - set(self._settings):
            what = f"{self._path}.{name} is a category of options"
            inside = ", ".join(f"{self._path}.{name}.{each}" for each in getattr(self, name)._settings)
            raise ArgumentError(what, expected=inside, got=repr(value))
        if name not in self._settings:
            raise self._unknown(name)
        setting = self._settings[name]
        if not setting.takes(value):
            raise ArgumentError(f"{self._path}.{name} takes no such value", expected=setting.expected, got=repr(value))
        object.__setattr__(self, name, value)

    if not TYPE_CHECKING:  # which knows the options that there are

        def __getattr__(self, name: str) -> Any:
            raise self._unknown(name)

    def _unknown(self, name: str) -> ArgumentAttributeError:
        """Builds the error for an option that there is not, read or set."""
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
    """Options of the machine.

    Attributes:
        version: of the chip: "ipu1" (Mk1), "ipu2" (Mk2) or "ipu21" (Bow); also "mk1", "mk2" and "bow".
        tiles_per_ipu: tiles of each IPU; 0 for all that the chip has.
    """

    version: str
    tiles_per_ipu: int
    _path = "IPUConfig.ipu_model"
    _settings = {  # noqa: RUF012 - a table
        "version": _Setting(
            "ipu2",
            f"one of {', '.join(map(repr, CHIP_NAMES))}",
            lambda given: isinstance(given, str) and given in CHIP_NAMES,
        ),
        "tiles_per_ipu": _Setting(0, "a number of tiles, 0 for all", _is_count(0)),
    }


class IoTilesConfig(_Category):
    """Options of I/O tiles.

    Attributes:
        num_io_tiles: tiles of each IPU that only move data from and to the host, see `ipu.Options.io_tiles`.
        prefetch_depth: batches that they are ahead, see `ipu.Options.prefetch_depth`.
    """

    num_io_tiles: int
    prefetch_depth: int
    _path = "IPUConfig.io_tiles"
    _settings = {  # noqa: RUF012 - a table
        "num_io_tiles": _Setting(0, "a number of tiles", _is_count(0)),
        "prefetch_depth": _Setting(1, "a number of batches, 1 or more", _is_count(1)),
    }


class IPUConfig(_Category):
    """Which IPUs a program uses, and how models are compiled for them.

    Attributes:
        auto_select_ipus: number of IPUs, a power of two.
        allow_recompute: whether gradients may compute values again where a model does not fit otherwise ("auto"), or
            a way of `ipu.Options.recompute`.
        io_tiles: see `IoTilesConfig`.
        ipu_model: see `IpuModelConfig`.

    Raises:
        ArgumentError: when an option is set or read that there is not, or set to a value that it does not take.
    """

    auto_select_ipus: int
    allow_recompute: bool | str
    io_tiles: IoTilesConfig
    ipu_model: IpuModelConfig
    _path = "IPUConfig"
    _settings = {  # noqa: RUF012 - a table
        "auto_select_ipus": _Setting(1, "a number of IPUs that is a power of two", _is_power_of_two),
        "allow_recompute": _Setting(
            False,
            f"True, False, or one of {', '.join(map(repr, RECOMPUTATIONS))}",
            lambda given: isinstance(given, bool) or (isinstance(given, str) and given in RECOMPUTATIONS),
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "io_tiles", IoTilesConfig())
        object.__setattr__(self, "ipu_model", IpuModelConfig())
        _LAST.set(self)

    def _names(self) -> set[str]:
        return {*self._settings, "io_tiles", "ipu_model"}

    def configure_ipu_system(self) -> None:
        """Makes this the configuration of strategies that are given none, if another was made since."""
        _LAST.set(self)

    @property
    def device(self) -> IPUModel:
        """The IPUs.

        Raises:
            TargetError: for a number of tiles that the chip cannot have.
        """
        tiles = self.ipu_model.tiles_per_ipu
        changes = {"tiles_per_ipu": int(tiles)} if tiles else {}
        return IPUModel(int(self.auto_select_ipus), CHIP_NAMES[self.ipu_model.version], **changes)

    @property
    def options(self) -> Options:
        """The compiler options."""
        allowed = self.allow_recompute
        recompute = allowed if isinstance(allowed, str) else "auto" if allowed else "none"
        io_tiles = self.io_tiles
        return Options(recompute=recompute, io_tiles=io_tiles.num_io_tiles, prefetch_depth=io_tiles.prefetch_depth)


_LAST: ContextVar[IPUConfig | None] = ContextVar("ipujax_keras_config", default=None)


def get_ipu_config() -> IPUConfig | None:
    """The configuration that was made, or made the current one, last."""
    return _LAST.get()


def reset_ipu_configuration() -> None:
    """Forgets it: strategies then use one Mk2."""
    _LAST.set(None)
