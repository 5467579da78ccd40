"""Cache of compiled programs on disk: a traced function is looked up by its key, and lowered only if it is not there.

LoweringPlan ── program_key ──▶ ProgramEntry ──▶ a hit: Lowered, of stored figures          a miss: Lowered, stored
"""

from ipujax.caching.program_entry import (
    CallFigures as CallFigures,
    ProgramEntry as ProgramEntry,
    entry_of as entry_of,
    find_or_lower as find_or_lower,
    options_data as options_data,
    program_key as program_key,
)
