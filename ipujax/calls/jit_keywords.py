"""Keywords of `ipu.jit`, for type checkers, and the settings of the function that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from ipujax.calls.arguments import argument_places, dynamic_arguments
from ipujax.calls.in_specs import Places, Replication
from ipujax.calls.nesting import Compilation, FunctionName
from ipujax.device import CPU, Device, IPUModel, current_device
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target


# `jit` itself has no annotations: its overloads take these, so that both forms of the decorator have one list.
class Settings(TypedDict, total=False):
    """Keywords of `jit`."""

    device: Device | None
    replicas: int | None
    in_specs: Any
    out_specs: Any
    axis_name: str
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    offload_argnums: int | Sequence[int]
    in_shardings: Any
    out_shardings: Any
    options: Options | None


class FunctionSettings:
    """Settings of an `ipu.jit` function."""

    __name__: FunctionName
    _fun: Callable[..., Any]
    _device: Device | None
    _options: Options
    _offload: tuple[int, ...]
    _settings: dict[str, Any]
    _static: tuple[Any, Any]
    _replication: Replication | None

    @property
    def options(self) -> Options:
        """Compiler options."""
        return self._options

    @property
    def offload_argnums(self) -> tuple[int, ...]:
        """Positional arguments in streaming memory."""
        return self._offload

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positional arguments that are donated, as passed to `ipu.jit`, without those of `donate_argnames`."""
        return self._settings["donate_argnums"] or ()

    @property
    def device(self) -> Device | None:
        """Device that was given to `ipu.jit`; None for the default device of each call."""
        return self._device

    @property
    def target(self) -> Target:
        """Target of the device of the next call.

        Raises:
            ArgumentError: on a `CPU` device.
        """
        device = self._device or current_device()
        if isinstance(device, CPU):
            raise ArgumentError(f"{self.__name__} runs on ipu.CPU(), which computes numbers only")
        return device.target

    @property
    def _computes_whole(self) -> bool:
        """True if no sharding partitions the function: replicas split its arguments, or a `CPU` computes it."""
        return self._replication is not None or isinstance(self._device or current_device(), CPU)

    def _places(self, args: Sequence[Any]) -> Places:
        return argument_places(self._fun, args, *self._static)

    def _dynamic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[int, Any], dict[str, Any]]:
        return dynamic_arguments(self._fun, args, kwargs, *self._static)

    def _compilation(self, device: IPUModel) -> Compilation:
        return Compilation(device, self._replication.replicas if self._replication else 1)
