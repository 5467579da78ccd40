"""Causes of the cycles of a run, each with the cycles that vanish without it."""

from ipujax.runtime.causes.causes_of_run import (
    COMPUTATION as COMPUTATION,
    Cause as Cause,
    causes_of_run as causes_of_run,
)
