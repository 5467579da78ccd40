"""Changes of a program that `ipu.advise` has compiled, and those that need an edit of the user's function.

Input: none. Output: `AdviceRow`, a row of `Figures.advice`; its annotations are the schema of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ipujax.runtime.files.figure_kinds import Large
from ipujax.runtime.files.kinds import Integer

_Change = Annotated[int, Integer(-(2**53) + 1)]  # below 0 for a change that costs


@dataclass(frozen=True, slots=True)
class AdviceRow:
    """Result of compiling a function with one change, or a change that only the user can make.

    Args:
        change: the change, ready to paste where it is code.
        cycles: cycles of the whole batch; 0 if the program does not fit.
        worst_tile_bytes: memory of the fullest tile.
        fits: whether the program fits all tiles.
        refused: text of the error if it cannot be compiled, else None.
        unpriced: number of operations that `cycles` does not count, see `Profile.unpriced`.
        saved_cycles: cycles that it saves of those of the program as it is, less than 0 where it costs; 0 if one of the
            two does not fit. Of a change that is not tried those that vanish without the cause, at most.
        saved_bytes: likewise of the memory of the fullest tile.
        tried: whether it was compiled.
    """

    change: str
    cycles: Large = 0
    worst_tile_bytes: Large = 0
    fits: bool = False
    refused: str | None = None
    unpriced: Large = 0
    saved_cycles: _Change = 0
    saved_bytes: _Change = 0
    tried: bool = True
