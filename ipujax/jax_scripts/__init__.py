"""Profiles of programs that do not use ipujax: functions of `jax.jit`, recorded as they run, compiled afterwards."""

from ipujax.jax_scripts.hidden_frames import hide_frames as hide_frames
from ipujax.jax_scripts.profiling_run import (
    PROGRAM_HEAD as PROGRAM_HEAD,
    ProfiledCalls as ProfiledCalls,
    ProfilingRun as ProfilingRun,
    profiling as profiling,
    program_cells as program_cells,
)
