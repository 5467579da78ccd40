"""Arguments of calls of a function with loops or branches on data, which say how long each call took.

Calls of equal arguments are one sample, so calls with the same trip count are often compiled and run once. Arguments
are copied before the call, which may donate them, up to a number of samples and of bytes; calls beyond are counted.

Input: flat arguments of calls. Output: samples, each with its number of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
