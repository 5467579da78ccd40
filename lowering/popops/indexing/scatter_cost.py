"""Costs of a scatter beside those of its vertices: partial results, their combination with the table, full tiles.

Input: the fields of its vertices, and candidate grids. Output: cycles and bytes of each candidate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import lax

from ipujax.lowering.layout import Grids, total_elements
from ipujax.lowering.layout.choose import crowding_cycles
from ipujax.lowering.layout.grid_cost import Work
from ipujax.lowering.layout.operand_parts import fewest_runs
from ipujax.lowering.popops.reductions.partials import combining_cost
from ipujax.lowering.popops.vertices.elementwise_cycles import elementwise_cycles
from ipujax.runtime.exchange import receive_code_bytes, receive_cycles, superstep
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes


class Combination(NamedTuple):
    """Operation that combines the table with an updated neutral table: its row of `OP_COSTS`, and its function."""

    name: str
    fun: Callable[..., jax.Array]


# By monoid.
COMBINATIONS = {
    "add": Combination("add", lax.add),
    "signed_add": Combination("add", lax.add),
    "mul": Combination("mul", lax.mul),
    "min": Combination("min", lax.min),
    "max": Combination("max", lax.max),
}
INDICES_AND_UPDATES = slice(-3, -1)  # of all fields; the last is the result, or the table that is overwritten
_FIELDS_WITHOUT_TABLE = 3  # of a vertex that fills its table itself


@dataclass(frozen=True, slots=True)
class MemoryAndCombinationCost:
    """Cycles of combining partial results, and of tiles that lack memory, for each candidate grid.

    Args:
        work: vertices of one step.
        rank: number of dimensions of the table.
        dtype: dtype of the table.
        monoid: monoid of partial results; None where updates are uncut.
        steps: number of steps.
        table: table that is combined last: "neutral" for none, a "constant", unmapped ("free"), or mapped "elsewhere".
    """

    work: Work
    rank: int
    dtype: Any
    monoid: str | None
    steps: int
    table: Literal["neutral", "constant", "free", "elsewhere"]

    def __call__(self, grids: Grids, target: Target, cycles_per_byte: float) -> np.ndarray:
        """Cycles of each candidate partition beside those of its scatter vertices, float[candidates].

        They are a penalty for tiles that are nearly full; where updates are cut, the combination of the partial tables;
        and then the combination of the result with the table itself, unless that is neutral.

        Args:
            grids: the candidates: blocks and longest lengths along the axes of the table, then along that of updates.
            target: the machine.
            cycles_per_byte: cost of a byte of exchange code.
        """
        # Code fits below the interleaved region only: scaled to the bytes of a full tile.
        code_bytes = self.code_bytes(grids, target) * (target.bytes_per_tile / target.interleaved_offset_bytes)
        crowding = crowding_cycles(np.maximum(self.needed_bytes(grids), code_bytes), target)
        if self.monoid is None:
            return crowding
        parts = grids.blocks[self.rank]
        longest = grids.lengths[: self.rank]
        shape = grids.shape[: self.rank]
        cycles, longest = combining_cost(parts, longest, shape, self.dtype, self.monoid, target, cycles_per_byte)
        if self.table == "neutral":
            return crowding + cycles
        # An elementwise vertex of the table, a constant or a tensor that is received, and the combined updates.
        immediates = int(self.table == "constant")
        elements = np.prod(longest, axis=0)
        compute = elementwise_cycles(
            COMBINATIONS[self.monoid].name,
            self.dtype,
            operands=2 - immediates,
            immediates=immediates,
            elements=elements,
            target=target,
        )
        arriving = elements * element_bytes(self.dtype) if self.table == "elsewhere" else np.zeros_like(elements)
        receives = (arriving > 0).astype(np.int64)
        receiving = receive_cycles(arriving, shared_bytes=0, receives=receives, target=target)
        return crowding + cycles + superstep(target, receiving, compute_cycles=compute).total_cycles

    def block_bytes(self, grids: Grids) -> np.ndarray:
        """Bytes of the longest block of each field, int64[fields, candidates]."""
        pairs = zip(self.work.fields, self.work.codelet.fields, strict=True)
        sizes = [
            total_elements([span.lengths(grids.lengths) for span in use.spans]) * element_bytes(field.dtype)
            for use, field in pairs
        ]
        return np.stack([np.broadcast_to(size, grids.blocks.shape[1:]) for size in sizes]).astype(np.int64)

    def code_bytes(self, grids: Grids, target: Target) -> np.ndarray:
        """Bytes of the instructions by which a tile receives its fields, in as few fragments as possible."""
        received = [field.spans for field in self.work.fields if field.source == "elsewhere"]
        fragments = sum((fewest_runs(spans, grids.lengths) for spans in received), np.zeros((), np.int64))
        return receive_code_bytes(fragments, target)

    def needed_bytes(self, grids: Grids) -> np.ndarray:
        """Bytes of all fields of a tile, or of a partial result with its operand, whichever is larger."""
        blocks = self.block_bytes(grids)
        # A later step reads the result of the first as its table.
        reads_result = self.steps > 1 and len(self.work.fields) == _FIELDS_WITHOUT_TABLE
        field_bytes = blocks.sum(0) + (blocks[-1] if reads_result else 0)
        if self.monoid is None:
            return field_bytes
        return np.where(grids.blocks[self.rank] > 1, np.maximum(field_bytes, 2 * blocks[-1]), field_bytes)
