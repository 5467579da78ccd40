"""Computations as StableHLO: functions of arrays that `jax.export` serialises.

Input: a function of arrays, and their shapes. Output: bytes; from such bytes a function of arrays.
Source: JAX, "Exporting and serializing staged-out computations".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export

Computation = Callable[..., Sequence[Any]]


class ExportError(ValueError):
    """`jax.export` refuses a computation; the text says why."""


def exported_computation(function: Computation, avals: Sequence[Any]) -> bytes:
    """Return a function of arrays as bytes.

    Args:
        function: from arrays to a sequence of arrays.
        avals: shape and dtype of each argument.

    Raises:
        ExportError: an operation whose form other versions may not know, an effect, or a type.
    """
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    try:
        exported = jax.export.export(jax.jit(lambda *arrays: list(function(*arrays))), platforms=("cpu",))(*shapes)
        return bytes(exported.serialize())
    except (ValueError, NotImplementedError, TypeError) as error:
        raise ExportError(f"jax.export refuses it: {error}") from error


def read_computation(content: bytes) -> Computation:
    """Return the function of `exported_computation`; its content must be checked by a seal."""
    exported = jax.export.deserialize(bytearray(content))
    return lambda *arrays: list(exported.call(*arrays))
