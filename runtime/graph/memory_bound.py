"""What is said of an operation whose plan needs more memory than planners may use.

Input: made by a planner. Output: `UnmetBound`, kept by the graph, told of by the profile.
Source: poplibs plans with ever larger bounds when nothing fits, so that an over-tight plan may come back too large
without a word (reference machine.md §2); here each is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipujax.runtime.tensor.variable import Origin


@dataclass(frozen=True, slots=True)
class UnmetBound:
    """An operation for which no plan within the available memory proportion was found.

    Args:
        name: debug name of the operation.
        bound_bytes: what its operands and results may take of a tile.
        needed_bytes: what they take on the fullest tile.
        origin: where it comes from.
    """

    name: str
    bound_bytes: int
    needed_bytes: int
    origin: Origin

    def __str__(self) -> str:
        return f"{self.name} needs {self.needed_bytes:,} bytes of a tile, of {self.bound_bytes:,} that planners may use"
