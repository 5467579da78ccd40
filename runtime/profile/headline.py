"""First line of a report: what is wrong with a program that does not fit.

Input: what every tile needs. Output: a clause.
"""

from __future__ import annotations

import numpy as np

from ipujax.runtime.memory import MemoryReport
from ipujax.runtime.profile.text import size


def out_of_memory(memory: MemoryReport) -> str:
    """Clause that says how many tiles lack memory, and which lacks most; empty where the program fits.

    Args:
        memory: what every tile needs.
    """
    if not (lacking := memory.lacking()):
        return ""
    kind = max(lacking, key=lambda name: int(lacking[name].max()))
    short, need, have = lacking[kind], memory.needed(kind), memory.limits[kind]
    worst, tiles = int(short.argmax()), int(np.count_nonzero(short))
    of_kind = "" if kind == "memory" else kind.removeprefix("memory")
    return (
        f"{tiles:,} of {len(short):,} tile{'s' * (len(short) > 1)} need{'s' * (tiles == 1)} more than {size(have)}"
        f"{of_kind}; tile {worst:,} needs most, {size(int(need[worst]))}, which is {size(int(short[worst]))} too much "
        f"({need[worst] / have:,.0%} full)"
    )
