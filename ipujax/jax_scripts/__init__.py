"""Profiles of programs that do not use ipujax: functions of `jax.jit`, recorded as they run, compiled afterwards."""

from ipujax.jax_scripts.profiling_run import (
    ProfiledCalls as ProfiledCalls,
    ProfilingRun as ProfilingRun,
    profiling as profiling,
)
from ipujax.jax_scripts.program_row import PROGRAM_HEAD as PROGRAM_HEAD, program_cells as program_cells
from ipujax.jax_scripts.replaced_names import PROFILED_FILES as PROFILED_FILES
