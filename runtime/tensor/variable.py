"""A variable: memory of one shape and dtype, spread over tiles by a tile mapping the graph holds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.errors import shown_place


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in the user's program something comes from.

    Args:
        line: `file:line (function)` of the user's frame, empty when none is known.
        path: the JAX name stack or the Poplar debug path, empty when none is known.
        library: the line inside an installed library that the user's line leads to, empty when there is none.
        file: path of the file of `line`, whose text reports show; empty when none is known. Two origins that differ in
            it alone are equal.
        layer: names of the layers it is in, outermost first, `encoder/block[3]/dense`; empty when none is known.
        part: "forward", "backward", "recomputed" or "update"; empty in programs without a gradient.
        callers: the user's lines that called the function of `line`, innermost first.
    """

    line: str = ""
    path: str = ""
    library: str = ""
    file: str = field(default="", compare=False, repr=False)
    layer: str = ""
    part: str = ""
    callers: tuple[str, ...] = ()

    @classmethod
    def at(cls, place: tuple[str, int, str] | None) -> Origin:
        """That of a running line.

        Args:
            place: file, line and function, as `runtime.errors.user_place` finds them; None for none.
        """
        return cls() if place is None else cls(shown_place(place), file=place[0])

    def __str__(self) -> str:
        return self.line or self.path or "unknown"

    def in_library(self) -> Origin:
        """With the library's line in the place of the user's, which it names too."""
        line = f"{self.library}, from {self.line}" if self.line else self.library
        return replace(self, line=line) if self.library else self


def in_call(call: Origin, inner: Origin) -> Origin:
    """The origin of what a function does when it is called from somewhere.

    Args:
        call: origin of the call.
        inner: origin inside of the function.
    """
    layer = "/".join(filter(None, (call.layer, inner.layer)))
    return replace(inner, layer=layer, part=inner.part or call.part)


@dataclass(frozen=True, eq=False, slots=True)
class Variable:
    """Memory on tiles; equal only to itself.

    Args:
        shape: sizes of its dimensions, row-major.
        dtype: a numpy dtype, or one of JAX's extended dtypes (a PRNG key is one element).
        name: debug name.
        value: the constant it holds, as an array of `shape`; None for memory that programs write.
        monoid: name of the monoid ("add", "max"…) by which slots of dimension 0 combine, for a variable of partial
            results; the engine may then keep one slot instead of `shape[0]`.
        origin: where it comes from.
        by_replica: whether `value` is [replicas, *shape], a constant of its own for each replica.
    """

    shape: tuple[int, ...]
    dtype: Any
    name: str = ""
    value: Any = None
    monoid: str | None = None
    origin: Origin = Origin()
    by_replica: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the whole variable in bytes."""
        return self.size * element_bytes(self.dtype)

    @property
    def is_constant(self) -> bool:
        return self.value is not None

    def __repr__(self) -> str:
        return f"Variable({self.name or 'unnamed'}: {dtype_name(self.dtype)}{list(self.shape)})"


@cache  # by dtype: there are few
def is_key_dtype(dtype: Any) -> bool:
    """Whether `dtype` is a PRNG key dtype, whose elements are keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


@cache
def element_bytes(dtype: Any) -> int:
    """Bytes of one element; a PRNG key counts its key data (threefry: two 32-bit words)."""
    return int(dtype.itemsize) if is_key_dtype(dtype) else int(np.dtype(dtype).itemsize)


@cache
def dtype_name(dtype: Any) -> str:
    """The dtype's JAX name, `float32` or `key<fry>`."""
    return str(dtype) if is_key_dtype(dtype) else np.dtype(dtype).name
