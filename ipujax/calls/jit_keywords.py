"""Keywords of `ipu.jit`, for type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from ipujax.device import Device
from ipujax.runtime.options import Options


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
    options: Options | None
