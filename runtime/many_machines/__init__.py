"""A compiled program on many machines: counts once, and cycles from the rates of all machines together."""

from ipujax.runtime.many_machines.program_counts import (
    MEMORY_CONSTANTS as MEMORY_CONSTANTS,
    Memory as Memory,
    ProgramCounts as ProgramCounts,
)
