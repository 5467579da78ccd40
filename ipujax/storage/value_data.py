"""Values of the compiler as data and bytes: plans, costs, counts.

Input: None, numbers, texts, dtypes, arrays, functions of ipujax, and tuples and dataclasses of these. Output: JSON-able
data and the bytes of the arrays; from both an equal value.
Limits: a value of another type has no such form. An array of one repeated number is one number in memory again, all
are read-only.
"""

from __future__ import annotations

import zlib
from dataclasses import fields, is_dataclass
from functools import reduce
from importlib import import_module
from math import prod
from types import FunctionType
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.storage.sealed import DamagedError

_PACKAGE = "ipujax."
_ATOMS = (type(None), bool, int, float, str)
_LEVEL = 1  # of compression: most arrays repeat few numbers
_ALIGNMENT_BYTES = 8  # of the largest element


class NoDataError(TypeError):
    """A value without such a form; the text says which."""


def value_data(value: object) -> tuple[Any, bytes]:
    """Return a value as JSON-able data, and the bytes of its arrays.

    Raises:
        NoDataError: it has a value of a type that is not listed above.
    """
    arrays: list[bytes] = []
    data = _data(value, arrays)
    return data, zlib.compress(b"".join(arrays), _LEVEL)


def value_of_data(data: Any, content: bytes) -> Any:
    """Return the value of `value_data`.

    Raises:
        DamagedError: the data describe no value, or name no dataclass or function of ipujax.
    """
    try:
        return _Arrays(zlib.decompress(content)).value(data)
    except (zlib.error, ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        raise DamagedError(f"it describes no value: {error}") from error


def _data(value: Any, arrays: list[bytes]) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is tuple:
        return [_data(item, arrays) for item in value]
    if kind is np.ndarray and value.dtype.kind in "biuf":
        stored = value[:1] if value.ndim == 1 and value.strides == (0,) else value
        content = np.ascontiguousarray(stored).tobytes()
        arrays.append(content + bytes(-len(content) % _ALIGNMENT_BYTES))
        return {"array": value.dtype.name, "shape": value.shape, "stored": stored.shape}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if kind is FunctionType:
        return {"function": _name(value)}
    if is_dataclass(kind):
        members = [_data(getattr(value, field.name), arrays) for field in fields(kind) if field.init]
        return {"type": _name(kind), "fields": members}
    raise NoDataError(f"{kind.__module__}.{kind.__qualname__}")


def _name(value: Any) -> list[str]:
    """Return module and name of a class or function of ipujax."""
    name = [value.__module__, value.__qualname__]
    if not value.__module__.startswith(_PACKAGE) or "<" in value.__qualname__ or _named(name) is not value:
        raise NoDataError(f"{value.__module__}.{value.__qualname__}")
    return name


def _named(name: list[str]) -> Any:
    module, qualified_name = name
    if not module.startswith(_PACKAGE):
        raise ValueError(f"{module} is not of ipujax")
    return reduce(getattr, qualified_name.split("."), import_module(module))


class _Arrays:
    """Values by their data; their arrays are read one after the other from `content`."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._position = 0

    def value(self, data: Any) -> Any:
        match data:
            case list():
                return tuple(map(self.value, data))
            case {"array": dtype, "shape": shape, "stored": stored}:
                return np.broadcast_to(self._array(np.dtype(dtype), stored), shape)
            case {"dtype": name}:
                return jnp.dtype(name)
            case {"function": name} if isinstance(function := _named(name), FunctionType):
                return function
            case {"type": name, "fields": members} if is_dataclass(kind := _named(name)) and isinstance(kind, type):
                names = [field.name for field in fields(kind) if field.init]
                return kind(**dict(zip(names, map(self.value, members), strict=True)))
        if type(data) in _ATOMS:
            return data
        raise ValueError(f"{type(data).__name__} is no value")

    def _array(self, dtype: np.dtype[Any], shape: list[int]) -> np.ndarray:
        count = prod(shape)
        array = np.frombuffer(self._content, dtype, count, self._position) if count else np.empty(0, dtype)
        self._position += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return array.reshape(shape)
