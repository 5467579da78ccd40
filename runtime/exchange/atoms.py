"""Atoms of copies on a tile: the largest units that divide a row, and the cycles of copying rows unit by unit.

Rows of whole vectors are copied 64 bits at a time, see `superstep.copy_cycles`. Other rows begin inside of a vector, so
that every one of them is copied by words, by halves or by bytes, whichever divides it. A row is one of the variable
that an element is cut from: planners cut rows of whole vectors between vectors.

Source: poplibs `poplin/ConvModel.cpp`, `addTransformCycleEstimate`: a regression over 10,000 random convolutions gives
587 cycles and 5.1484, 3.125 or 0.4404 cycles a byte for atoms of 2, 4 or 8 bytes, a multiple of 8 bytes being of the
last kind; `tools/transforms.py` says how it was made: of copies before convolutions whose operands were not created for
them (`--use-create-input=0`). Rows of whole vectors of created operands, and of
transposed halves (`popops/Rearrange.cpp`), move 8 bytes a cycle, so the last of these rates is not used here. The
planner of PopLibs has by default a factor of 5/4 or 5/3 over the bytes of an element instead, which it calls a fudge
factor of a few layers of ResNet-50: 6 times less for halves.
Limits: the regression has no atoms of one byte; they are taken to cost as many cycles as one of two (assumed). Of its
587 cycles at the start only `copy_startup_cycles` are counted, since it measured whole programs.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from ipujax.runtime.exchange.count import Traffic
from ipujax.runtime.graph import SlowReason
from ipujax.runtime.tensor import VECTOR_BYTES, Tensor, element_bytes

_WORD_BYTES = 4  # of the exchange, reference A1
_CYCLES_PER_BYTE = {1: 2 * 5.1484, 2: 5.1484, 4: 3.125}
_NAMES = {1: "byte by byte", 2: "by halves", 4: "by words"}


def atom_bytes_of(row_bytes: int) -> int:
    """Return the bytes of the largest unit of at most 64 bits, a whole vector, that divides a row."""
    return gcd(row_bytes, VECTOR_BYTES)


def atom_cycles(num_bytes: Any, atom_bytes: int) -> Any:
    """Return the cycles of copying bytes by atoms of less than a vector: a float, or an array of floats."""
    return num_bytes * _CYCLES_PER_BYTE[atom_bytes]


def atom_name(atom_bytes: int) -> str:
    """Return the adverb of a copy: "by halves"."""
    return _NAMES[atom_bytes]


@dataclass(frozen=True, slots=True)
class Row:
    """A memory row of a tensor's variables.

    Args:
        elements: its length; 0 where each variable is one row, which begins with a vector.
        item_bytes: of an element.
        atom_bytes: the largest unit that divides it, of at most a vector.
    """

    elements: int
    item_bytes: int
    atom_bytes: int

    def because(self, what: str) -> SlowReason:
        """Return the reason of copies by atoms: what is copied, the atom, and the row."""
        vector_elements = VECTOR_BYTES // self.item_bytes
        return SlowReason(f"{what} {atom_name(self.atom_bytes)}", self.elements, vector_elements)


def shortest_atom(tensors: Sequence[Tensor], padded: Container[int] = ()) -> Row | None:
    """Return the row with the smallest atom among tensors' variables; None if all rows are whole vectors.

    `padded` are row lengths that are padded to whole vectors.
    """
    rows = [
        Row(elements, width, atom_bytes_of(elements * width))
        for tensor in tensors
        if (width := element_bytes(tensor.dtype)) < VECTOR_BYTES
        for elements in {row_of(variable.shape) for variable in tensor.variables()}
        if elements not in padded
    ]
    row = min(rows, key=lambda row: row.atom_bytes, default=None)
    return row if row is not None and row.atom_bytes < VECTOR_BYTES else None


def row_of(shape: Sequence[int]) -> int:
    """Return the elements of a memory row of a variable; 0 where it is one row, which begins with a vector."""
    sizes = [size for size in shape if size > 1]
    return sizes[-1] if len(sizes) > 1 else 0


def slow_copy_cycles(row: int, item_bytes: int, own: Any, received: Any) -> Any:
    """Return the cycles of putting an operand together whose rows are no whole vectors; 0 for one of other rows.

    Args:
        row: elements of a row, see `row_of`.
        item_bytes: of an element.
        own: elements of the operand on the tile, an int or int64 array.
        received: elements of it that arrive.
    """
    atom_bytes = atom_bytes_of(row * item_bytes)
    if atom_bytes == VECTOR_BYTES:
        return np.zeros_like(np.asarray(own))
    arriving = received * (atom_bytes < _WORD_BYTES)
    return np.ceil(atom_cycles((own + arriving) * item_bytes, atom_bytes)).astype(np.int64)


def slow_bytes(traffic: Traffic, atom_bytes: int, operands: np.ndarray | int) -> np.ndarray:
    """Return the bytes that each tile copies by atoms to put operands together, int64[num_tiles].

    Args:
        traffic: its local parts are copied as those of whole vectors are.
        atom_bytes: below a word parts that arrive are copied too: the exchange stores words.
        operands: operands of each tile; one that is one part is not put together.
    """
    is_scattered = traffic.fragments + traffic.local_fragments > operands
    arriving = traffic.received_bytes * (atom_bytes < _WORD_BYTES)
    return np.where(is_scattered, traffic.copied_bytes + arriving, 0)
