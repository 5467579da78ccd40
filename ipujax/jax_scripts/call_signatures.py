"""The signature of a call that JAX's C++ dispatch has run, found in about a microsecond.

Input: a jitted function, and arguments of calls. Output: the record of the signature.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import ref

import jax
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
