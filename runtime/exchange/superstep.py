"""The cost of a superstep: one sync, one exchange, the copies on tiles around it, and computation.

    superstep ::= sync ; exchange of operands, one after the other ; copies on the tile, computing

Input: bytes and contiguous pieces of a tile, of one plan or of an array of candidates or tiles. Output: cycles. The
final cost of compute sets and copies is added up from these functions, and so is every planner's estimate: a term that
is added here is known everywhere.

Source: reference A2 (width; a tile sends and receives at once; control slots a fragment; sync), B5 (start-up, copies),
A1 and 2 (tiles that share a bus). Constants: `Target`.
Limits: all pairs of tiles are equally far. A part that is no multiple of four bytes takes a word, or its bytes over the
width if that is more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.runtime.target import Target

Count = Any  # int, or int64 array of tiles or of candidates

_INSTRUCTION_BYTES = 4  # reference A2: one control slot is one instruction
_SHORT_SEND_WORDS = 64  # largest number of 4-byte words of one send instruction, reference machine.md §1.4
_LONG_SEND_WORDS = 4_148  # the same of two: the second continues behind the first


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
        slow_cycles: of copying rows that are no whole vectors, see `atoms`.
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


def send_code_bytes(sends: Count, sent_bytes: Count) -> Count:
    """Return the bytes of the instructions that send so many contiguous parts, as if all were equally long."""
    words = -(-sent_bytes // 4)
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
        slow_cycles: of other rows, copied in the same phase, see `atoms`.

    Source: reference B5, a fit to copies before and after an exchange on Mk1.
    """
    stream_cycles = np.ceil(copied_bytes / target.memcpy_bytes_per_cycle).astype(np.int64)
    busy_cycles = stream_cycles + copied_fragments * target.copy_fragment_cycles + slow_cycles
    return np.where(busy_cycles > 0, target.copy_startup_cycles + busy_cycles, 0)
