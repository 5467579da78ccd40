"""Bounds on what the constants and shapes of a model may grow to.

A file of a few bytes can declare results of 10^18 elements, loops of 10^18 iterations and functions that call one
another 2^40 times. Sizes are known from shapes alone, so they are checked before anything is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.onnx.onnx_errors import OnnxError

_BYTES_PER_ELEMENT = 4  # 2^31 elements for 8 GiB: also elements of one byte or less are counted in 64-bit indices
DEFAULT_MAX_BYTES = 8 << 30
DEFAULT_MAX_UNROLLED_NODES = 5_000
_HINT_BYTES = "ipujax.onnx.load(…, max_bytes=n) sets another bound"
_HINT_NODES = "ipujax.onnx.load(…, max_unrolled_nodes=n) sets another bound"

MAX_STATIC_ELEMENTS = 1 << 16  # assumed: more than any shape or table of indices, less than weights that matter
MAX_COUNTED_ITERATIONS = 1 << 22  # assumed: more than any sequence has steps; 0.1 s of counting
_MAX_TERMS = 1 << 10  # assumed: more than the taps of any filter; each is a few equations
_MAX_TABLE_ELEMENTS = 1 << 22  # assumed: 32 MiB in double precision, of which an operator makes several
_MAX_INDEX_ELEMENTS = 1 << 26  # assumed: 256 MiB of 32-bit indices, of which an operator makes several


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of a model.

    Args:
        max_bytes: of one value. It may have an element for each four of them, whatever its dtype.
        max_unrolled_nodes: nodes that unrolled loops and nested subgraphs may add to those of the file.
    """

    max_bytes: int = DEFAULT_MAX_BYTES
    max_unrolled_nodes: int = DEFAULT_MAX_UNROLLED_NODES

    @property
    def max_elements(self) -> int:
        """Elements that one value may have."""
        return self.max_bytes // _BYTES_PER_ELEMENT

    def check(self, shape: Sequence[int], dtype: Any, value: str) -> None:
        """Refuse a value that is too large.

        Args:
            shape: its shape.
            dtype: its dtype; None where it is not known.
            value: its name in the error.

        Raises:
            OnnxError: more elements or bytes than the budget has.
        """
        elements = math.prod(shape)
        item_bytes = 1 if dtype is None else getattr(dtype, "itemsize", _BYTES_PER_ELEMENT)
        if elements > self.max_elements or elements * item_bytes > self.max_bytes:
            expected = f"at most {self.max_elements:,} elements and {self.max_bytes:,} bytes"
            got = f"{dtype or 'elements of'}{list(shape)}, {elements:,} elements"
            raise OnnxError(f"{value} is too large", expected=expected, got=got, hint=_HINT_BYTES)

    def check_repeats(self, repeats: int, things: str) -> None:
        """Refuse more repeats of something than one value may have elements."""
        if repeats > self.max_elements:
            expected = f"at most {self.max_elements:,}"
            raise OnnxError(f"too many {things}", expected=expected, got=f"{repeats:,}", hint=_HINT_BYTES)

    def check_unrolled(self, repeats: int, things: str) -> None:
        """Refuse more things, each a node of the traced program, than loops may be unrolled into."""
        if repeats > self.max_unrolled_nodes:
            expected = f"at most {self.max_unrolled_nodes:,}"
            raise OnnxError(f"too many {things}", expected=expected, got=f"{repeats:,}", hint=_HINT_NODES)


def check_table(elements: int, table: str) -> None:
    """Refuse a table that an operator computes in NumPy while a model is traced."""
    if elements > _MAX_TABLE_ELEMENTS:
        expected = f"at most {_MAX_TABLE_ELEMENTS:,} elements"
        raise OnnxError(f"{table} cannot be computed while tracing", expected=expected, got=f"{elements:,}")


def check_indices(elements: int, table: str) -> None:
    """Refuse a table of indices that a program computes, where it is too large for a constant."""
    if elements > _MAX_INDEX_ELEMENTS:
        raise OnnxError(
            f"{table} is too large", expected=f"at most {_MAX_INDEX_ELEMENTS:,} elements", got=f"{elements:,}"
        )


def check_terms(terms: int, operator: str) -> None:
    """Refuse an operator that would trace too many terms of a sum."""
    if terms > _MAX_TERMS:
        raise OnnxError(f"{operator} has too many terms", expected=f"at most {_MAX_TERMS:,}", got=f"{terms:,}")


def checked_budget(max_bytes: Any, max_unrolled_nodes: Any) -> Budget:
    """Return the budget of the arguments of `load`; refuse what is no positive integer."""
    for name, bound in (("max_bytes", max_bytes), ("max_unrolled_nodes", max_unrolled_nodes)):
        if isinstance(bound, bool) or not isinstance(bound, int | np.integer) or bound <= 0:
            raise OnnxError(f"{name} must be a bound", expected="an int > 0", got=repr(bound))
    return Budget(int(max_bytes), int(max_unrolled_nodes))


class SubgraphNodes:
    """Nodes of subgraphs that one evaluation of a model may still trace; counts down.

    Args:
        limit: nodes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def spend(self, nodes: int) -> None:
        """Count the nodes of a subgraph that is traced; refuse those beyond the limit."""
        self._left -= nodes
        if self._left < 0:
            message = "an unrolled loop or nested subgraphs have too many nodes"
            raise OnnxError(message, expected=f"at most {self._limit:,} nodes", got="more", hint=_HINT_NODES)
