"""First line of a report about a program that does not fit.

Input: a memory report. Output: a clause.
"""

from __future__ import annotations

import numpy as np

from ipujax.runtime.memory import MemoryReport
from ipujax.runtime.profile.text import size


def out_of_memory(memory: MemoryReport) -> str:
    """Return a clause with the number of tiles that lack memory and the worst of them; empty where all fits."""
    if not (lacking := memory.lacking()):
        return ""
    kind = max(lacking, key=lambda name: int(lacking[name].max()))
    short = lacking[kind]
    need = memory.needed(kind)
    limit = memory.limits[kind]
    worst = int(short.argmax())
    tiles = int(np.count_nonzero(short))
    of_kind = "" if kind == "memory" else kind.removeprefix("memory")
    return (
        f"{tiles:,} of {len(short):,} tile{'s' * (len(short) > 1)} need{'s' * (tiles == 1)} more than {size(limit)}"
        f"{of_kind}; tile {worst:,} needs most, {size(int(need[worst]))}, which is {size(int(short[worst]))} too much "
        f"({need[worst] / limit:,.0%} full)"
    )
