"""Cache of compiled programs on disk: a traced function is looked up by its key, and lowered only if it is not there.

LoweringPlan ── program_key ──▶ ProgramEntry ──▶ a hit: Lowered, of stored figures          a miss: Lowered, stored
"""

from ipujax.caching.program_entry import find_or_lower as find_or_lower
