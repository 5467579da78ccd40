"""The cost of a superstep: one sync, one exchange, the copies on tiles around it, and computation.

    superstep ::= sync ; exchange of operands, one after the other ; copies on the tile, computing

Input: bytes and contiguous pieces of a tile, of one plan or of an array of candidates or tiles; for copies also rows of
tensors. Output: cycles. The final cost of compute sets and copies is added up from these functions, and so is every
planner's estimate: a term that is added here is known everywhere.

Rows of whole vectors are copied 64 bits at a time. Other rows begin inside of a vector, so that every one of them is
copied by *atoms*, the largest units that divide it: words, halves or bytes. A row is one of the variable that an
element is cut from: planners cut rows of whole vectors between vectors.

Source: reference A2 (width; a tile sends and receives at once; control slots a fragment; sync), B5 (start-up, copies),
A1 and 2 (tiles that share a bus). Constants: `Target`. Atoms: poplibs `poplin/ConvModel.cpp`,
`addTransformCycleEstimate`: a regression over 10,000 random convolutions gives 587 cycles and 5.1484, 3.125 or 0.4404
cycles a byte for atoms of 2, 4 or 8 bytes, a multiple of 8 bytes being of the last kind; `tools/transforms.py` says how
it was made: of copies before convolutions whose operands were not created for them (`--use-create-input=0`). Rows of
whole vectors of created operands, and of transposed halves (`popops/Rearrange.cpp`), move 8 bytes a cycle, so the last
of these rates is not used here. The planner of PopLibs has by default a factor of 5/4 or 5/3 over the bytes of an
element instead, which it calls a fudge factor of a few layers of ResNet-50: 6 times less for halves.
Limits: all pairs of tiles are equally far. A part that is no multiple of four bytes takes a word, or its bytes over the
width if that is more. The regression has no atoms of one byte; they are taken to cost as many cycles as one of two
(assumed). Of its 587 cycles at the start only `copy_startup_cycles` are counted, since it measured whole programs.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from ipujax.runtime.exchange.count import Traffic
from ipujax.runtime.graph import SlowReason
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import VECTOR_BYTES, Tensor, element_bytes

Count = Any  # int, or int64 array of tiles or of candidates

_WORD_BYTES = 4  # of the exchange, reference A1
_CYCLES_PER_BYTE = {1: 2 * 5.1484, 2: 5.1484, 4: 3.125}  # by bytes of an atom
_ATOM_NAMES = {1: "byte by byte", 2: "by halves", 4: "by words"}
_INSTRUCTION_BYTES = 4  # reference A2: one control slot is one instruction
_SHORT_SEND_WORDS = 64  # largest number of 4-byte words of one send instruction, reference machine.md §1.4
_LONG_SEND_WORDS = 4_148  # the same of two: the second continues behind the first
# Waiting for the first part, and closing the port behind the last one: of a receiver's code that Poplar made for four
# parts, 10 words in all, the two that are not of a part (ipu21-rs, docs/EXCHANGE_INSTRUCTION_REFERENCE.md).
_INSTRUCTIONS_AROUND_PARTS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Superstep:
    """Cycles of one superstep by phase; each an int, or an array of candidates.

    Args:
        sync_cycles: of its sync.
        exchange_cycles: of its exchange, start-up included.
        copy_cycles: of the copies on the tile.
        compute_cycles: of the vertices.
    """

    sync_cycles: Count
    exchange_cycles: Count
    copy_cycles: Count
    compute_cycles: Count

    @property
    def total_cycles(self) -> Count:
        """Cycles of all phases, which follow one another."""
        return self.sync_cycles + self.exchange_cycles + self.copy_cycles + self.compute_cycles


def superstep(
    target: Target,
    receiving_cycles: Count = 0,
    sent_bytes: Count = 0,
    copied_bytes: Count = 0,
    copied_fragments: Count = 0,
    compute_cycles: Count = 0,
    slow_cycles: Count = 0,
) -> Superstep:
    """Cycles of one superstep, by phase.

    Args:
        target: the constants.
        receiving_cycles: `receive_cycles` of all operands together; an exchange of none has no start-up.
        sent_bytes: bytes that leave the busiest tile.
        copied_bytes: bytes that are copied on the tile.
        copied_fragments: contiguous parts of those.
        compute_cycles: cycles of the vertices.
        slow_cycles: of copying rows that are no whole vectors, see `atom_cycles`.
    """
    exchange = exchange_cycles(receiving_cycles, sent_bytes, target)
    copies = copy_cycles(copied_bytes, copied_fragments, target, slow_cycles)
    return Superstep(sync_cycles(1, target), exchange, copies, compute_cycles)


def least_cycles(target: Target) -> int:
    """Cycles of a superstep that exchanges something, its payload left out."""
    return target.internal_sync_cycles + target.exchange_startup_cycles


def sync_cycles(supersteps: Count, target: Target) -> Count:
    """Cycles of the syncs of a number of supersteps on one IPU (reference A2)."""
    return supersteps * target.internal_sync_cycles


def receive_cycles(
    received_bytes: Count, shared_bytes: Count, receives: Count, target: Target, fragments: Count = 0
) -> Any:
    """Return the cycles in which each tile receives one operand; arrays are int64[num_tiles].

    Args:
        received_bytes: bytes that arrive.
        shared_bytes: the part of them that all tiles of the same exchange bus receive.
        receives: parts that arrive, each from one tile to successive addresses.
        target: width and control costs.
        fragments: contiguous parts that are sent, each of a word at least.

    Source: reference A2, the larger of payload over width and the control slots of all receives; reference A1, §2 for
    the width of tiles that share a bus.
    """
    lane_bytes = received_bytes - shared_bytes + shared_bytes / target.tiles_per_exchange_bus
    payload_cycles = np.ceil(lane_bytes / target.exchange_bytes_per_cycle).astype(np.int64)
    return np.maximum(np.maximum(payload_cycles, fragments), receives * target.exchange_receive_cycles)


def receive_code_bytes(receives: Count, target: Target) -> Count:
    """Return the bytes of the instructions that receive so many parts, each from one tile to successive addresses."""
    return _INSTRUCTION_BYTES * target.exchange_receive_instructions * receives


def receiver_code_bytes(receives: np.ndarray) -> np.ndarray:
    """Return the bytes of the instructions that a tile which receives anything has once for each exchange."""
    return _INSTRUCTION_BYTES * _INSTRUCTIONS_AROUND_PARTS * (receives > 0)


def send_code_bytes(sends: Count, sent_bytes: Count) -> Count:
    """Return the bytes of the instructions that send so many contiguous parts, as if all were equally long."""
    words = -(-sent_bytes // _WORD_BYTES)
    continued = np.minimum(sends, words // (_SHORT_SEND_WORDS + 1))
    return _INSTRUCTION_BYTES * (sends + continued + words // (_LONG_SEND_WORDS + 1))


def exchange_cycles(receiving_cycles: Count, sent_bytes: Count, target: Target, sends: Count = 0) -> Any:
    """Return the cycles of each tile in one internal exchange, without the sync before it; arrays are int64[num_tiles].

    Args:
        receiving_cycles: `receive_cycles` of all operands together.
        sent_bytes: bytes that leave.
        target: width and start-up cost.
        sends: contiguous parts that leave, each of a word at least.

    Source: a tile sends and receives at once (reference A2); B5 for the start.
    """
    sending_cycles = np.ceil(sent_bytes / target.exchange_bytes_per_cycle).astype(np.int64)
    busy_cycles = np.maximum(receiving_cycles, np.maximum(sending_cycles, sends))
    return np.where(busy_cycles > 0, busy_cycles + target.exchange_startup_cycles, 0)


def copy_cycles(copied_bytes: Count, copied_fragments: Count, target: Target, slow_cycles: Count = 0) -> Any:
    """Return the cycles of each tile to rearrange bytes in its own memory; arrays are int64[num_tiles].

    Args:
        copied_bytes: bytes copied in whole vectors, as `Traffic.copied_bytes`.
        copied_fragments: contiguous parts of those.
        target: cost of a byte, of a part, and of starting at all.
        slow_cycles: of other rows, copied in the same phase, see `atom_cycles`.

    Source: reference B5, a fit to copies before and after an exchange on Mk1.
    """
    stream_cycles = np.ceil(copied_bytes / target.memcpy_bytes_per_cycle).astype(np.int64)
    busy_cycles = stream_cycles + copied_fragments * target.copy_fragment_cycles + slow_cycles
    return np.where(busy_cycles > 0, target.copy_startup_cycles + busy_cycles, 0)


def atom_bytes_of(row_bytes: int) -> int:
    """Return the bytes of the largest unit of at most 64 bits, a whole vector, that divides a row."""
    return gcd(row_bytes, VECTOR_BYTES)


def atom_cycles(num_bytes: Any, atom_bytes: int) -> Any:
    """Return the cycles of copying bytes by atoms of less than a vector: a float, or an array of floats."""
    return num_bytes * _CYCLES_PER_BYTE[atom_bytes]


def atom_name(atom_bytes: int) -> str:
    """Return the adverb of a copy: "by halves"."""
    return _ATOM_NAMES[atom_bytes]


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
