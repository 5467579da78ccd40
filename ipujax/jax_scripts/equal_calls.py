"""Calls of a function that count as one: those of one signature, and those of equal arguments.

A signature is found in about a microsecond, as C++ dispatches a call. How long calls of a function with loops or
branches on data take depends on their arguments. Calls of equal arguments are one sample, so calls with the same trip
count are often compiled and run once. Arguments are copied before the call, which may donate them, up to a number of
samples and of bytes; calls beyond are counted.

Input: a jitted function, and arguments of its calls. Output: the record of each signature; samples, each with its
number of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np

_R = TypeVar("_R")
_MOST = 64  # signatures of one function by the values of its Python numbers; beyond it these count by type
_NUMBERS = bool, int, float, complex
_UNKNOWN = object()


class Signatures(Generic[_R]):
    """Records of a jitted function by signature.

    Args:
        fun: function of `jax.jit`.
    """

    def __init__(self, fun: Any) -> None:
        self._fun = ref(fun)
        self._records: dict[Hashable, Any] = {}
        self._first: Any = _UNKNOWN

    @property
    def only(self) -> _R | None:
        """The record of a function that JAX has compiled for one signature; None if that is unknown."""
        if self._first is _UNKNOWN:
            return None
        fun = self._fun()
        return self._first if fun is not None and fun._cache_size() == 1 else None

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], record_of: Callable[[Any, Any, Any], _R]) -> _R:
        """Return the record of a call, from `record_of` with the function and the arguments if it is the first."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        by_value = len(self._records) < _MOST
        key = tree, tuple([_leaf_key(x, by_value) for x in leaves])
        record = self._records.get(key, _UNKNOWN)
        if record is _UNKNOWN:
            fun: Any = self._fun()
            record = self._records[key] = record_of(fun, args, kwargs)
            self._first = record if len(self._records) == 1 and fun._cache_size() == 1 else _UNKNOWN
        return record


def _leaf_key(x: Any, by_value: bool) -> Any:
    """Return a description of a leaf, equal where JAX compiles once."""
    if isinstance(x, jax.Array):
        return (x.aval, x.sharding) if isinstance(x.sharding, jax.sharding.NamedSharding) else x.aval
    if isinstance(x, np.ndarray | np.generic):
        return x.shape, x.dtype
    return (type(x), x) if by_value or not isinstance(x, _NUMBERS) else type(x)


MOST_SAMPLES = 16  # of one function
MOST_CALLS = 256  # of one function that are looked at, which takes about 0.2 ms each
MOST_BYTES = 1 << 28  # of the samples of one function
_COMPARED_BYTES = 1 << 14  # arguments of more are not compared


@dataclass(eq=False)
class CallSamples:
    """Samples of a function.

    Args:
        arguments: copies of the arguments of each sample.
        calls: number of calls with these arguments.
    """

    arguments: list[tuple[Any, ...]] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    _keys: list[Any] = field(default_factory=list)  # values of the arguments of each sample, None if not compared
    _stride: int = 1  # every so many different calls there is a sample
    _different: int = 0
    _seen: int = 0

    @property
    def is_open(self) -> bool:
        """Whether further calls should be looked at."""
        return self._seen < MOST_CALLS

    def add(self, args: Sequence[Any]) -> None:
        """Count a call with flat arguments."""
        self._seen += 1
        size = sum(int(getattr(x, "nbytes", 0)) for x in args)
        key = _key(args) if size <= _COMPARED_BYTES else None
        if key is not None and key in self._keys:
            self.calls[self._keys.index(key)] += 1
            return
        self._different += 1
        if (self._different - 1) % self._stride:
            return
        if self.arguments and len(self.arguments) >= min(MOST_SAMPLES, max(1, MOST_BYTES // max(size, 1))):
            self._drop_every_other()
            if (self._different - 1) % self._stride:
                return
        self.arguments.append(tuple(map(_copied, args)))
        self.calls.append(1)
        self._keys.append(key)

    def _drop_every_other(self) -> None:
        """Keep samples that are evenly spread over the calls."""
        self._stride *= 2
        for values in (self.arguments, self.calls, self._keys):
            del values[1::2]


def _key(args: Sequence[Any]) -> Any:
    """Return the values of arguments; None if they cannot be read here."""
    if any(isinstance(x, jax.Array) and not _is_readable(x) for x in args):
        return None
    return tuple((x.shape, str(x.dtype), x.tobytes()) for x in map(np.asarray, args))


def _is_readable(x: jax.Array) -> bool:
    return x.is_fully_addressable and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _copied(x: Any) -> Any:
    """Return a value that neither donation nor the script changes later."""
    return x.copy() if isinstance(x, jax.Array | np.ndarray) else x
