"""Variables: memory of one shape and dtype, spread over tiles by a tile mapping of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from ipujax.runtime.not_copied import OfGraph
from ipujax.runtime.tensor.dtypes import dtype_name, element_bytes
from ipujax.runtime.tensor.origin import Origin


@dataclass(frozen=True, eq=False, slots=True)
class Variable(OfGraph):
    """Memory on tiles; equal only to itself.

    Args:
        shape: sizes of its dimensions, row-major.
        dtype: a NumPy dtype, or one of JAX's extended dtypes (a PRNG key is one element).
        name: debug name.
        value: constant value, an array of `shape`; None for memory that programs write.
        monoid: name of the monoid ("add", "max"…) by which slots of dimension 0 combine, for a variable of partial
            results; the engine may then store one slot instead of `shape[0]`.
        origin: its origin.
        by_replica: whether `value` is [replicas, *shape], a constant for each replica.
        owner: the same object for all variables of a graph that a user builds and of its views; None for others.
    """

    shape: tuple[int, ...]
    dtype: Any
    name: str = ""
    value: Any = None
    monoid: str | None = None
    origin: Origin = Origin()
    by_replica: bool = False
    owner: object = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of all elements in bytes."""
        return self.size * element_bytes(self.dtype)

    @property
    def is_constant(self) -> bool:
        return self.value is not None

    def __repr__(self) -> str:
        return f"Variable({self.name or 'unnamed'}: {dtype_name(self.dtype)}{list(self.shape)})"
