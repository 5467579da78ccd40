"""Profiles of programs that do not use ipujax: what JAX runs, recorded as it runs, compiled afterwards."""

from ipujax.jax_scripts.hidden_frames import hide_frames as hide_frames
from ipujax.jax_scripts.profiling_run import ProfilingRun as ProfilingRun, profiling as profiling
from ipujax.jax_scripts.run_table import (
    NOTHING as NOTHING,
    PROGRAM_HEAD as PROGRAM_HEAD,
    ProfiledCalls as ProfiledCalls,
    SingleOperations as SingleOperations,
    program_cells as program_cells,
    types_apart as types_apart,
)
