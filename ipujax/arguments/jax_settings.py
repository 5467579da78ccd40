"""Settings of an `ipu.jit` function that `jax.jit` has too, and its name, which tells other settings.

Input: keywords. Output: those that are passed on to `jax.jit`, checked, or an error with the reason of a refusal.

The name has the settings that functions around it check: it is a string, which JAX copies to every equation that calls
the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ipujax.arguments.arguments import as_names, as_numbers, function_file, function_name
from ipujax.device import Device
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError, calling_file


class FunctionName(str):
    """Name of an `ipu.jit` function, which JAX copies to every equation that calls it.

    Args:
        name: the name.
        device: the function's device; None for that of the outer function.
        replicas: its number of replicas; likewise.
        file: name of its file for profiles; empty when unknown.
    """

    def __new__(
        cls, name: str, device: Device | None = None, replicas: int | None = None, file: str = ""
    ) -> FunctionName:
        self = super().__new__(cls, name)
        self.device = device
        self.replicas = replicas
        self.file = file
        return self

    @classmethod
    def of(cls, fun: Callable[..., Any], device: Device | None, replicas: int | None) -> FunctionName:
        """Return the name of a function with its file, or the calling file if a library defines the function."""
        return cls(function_name(fun), device, replicas, function_file(fun) or calling_file())

    device: Device | None
    replicas: int | None
    file: str


def settings_of_jax(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `jax.jit` that a function passes on to it.

    Args:
        keywords: by name, those of `_CONVERSIONS` and "backend".

    Raises:
        ArgumentTypeError: a value of another type than `jax.jit` takes.
        ArgumentValueError: a backend.
    """
    if keywords["backend"] is not None:
        raise ArgumentValueError(
            "backend= of ipu.jit must be None: it chooses a platform of XLA, and ipu.jit compiles for a simulated IPU",
            expected="backend=None",
            got=repr(keywords["backend"]),
            hint="leave it out, jax.jit has deprecated it; device=ipu.CPU() computes numbers without a machine",
        )
    return {name: convert(name, keywords[name]) for name, convert in _CONVERSIONS.items()}


def _unless_none(convert: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else convert(name, value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | int | np.bool_) or value not in (0, 1):
        raise ArgumentTypeError(f"{name} of ipu.jit must be a flag", expected="True or False", got=repr(value))
    return bool(value)


def _options_of_xla(name: str, value: Any) -> dict[str, Any] | None:
    if not isinstance(value, Mapping) or not all(isinstance(option, str) for option in value):
        raise ArgumentTypeError(
            f"{name} of ipu.jit must be options of XLA by name, as of jax.jit",
            expected='a dict, as {"xla_cpu_enable_fast_math": True}, or None',
            got=repr(value),
            hint="options=ipu.Options(...) are those of the machine",
        )
    return dict(value) or None


_CONVERSIONS: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "donate_argnums": _unless_none(as_numbers),
        "donate_argnames": _unless_none(as_names),
        "static_argnums": _unless_none(as_numbers),
        "static_argnames": _unless_none(as_names),
        "keep_unused": _flag,
        "inline": _flag,
        "compiler_options": _unless_none(_options_of_xla),
    }
)
