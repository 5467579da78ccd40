"""Name of an `ipu.jit` function, with the settings that functions around it check.

Input: a function and its settings. Output: a string, which JAX copies to every equation that calls the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ipujax.arguments.arguments import function_file, function_name
from ipujax.device import Device
from ipujax.runtime.errors import calling_file


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
