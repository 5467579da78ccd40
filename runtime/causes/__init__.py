"""Causes of the cycles of a run, each with the cycles that vanish without it; bounds; changes that were tried."""

from ipujax.runtime.causes.advice_rows import AdviceRow as AdviceRow
from ipujax.runtime.causes.bound import Bound as Bound, bound_of_run as bound_of_run
from ipujax.runtime.causes.causes_of_run import (
    COMPUTATION as COMPUTATION,
    Cause as Cause,
    causes_of_run as causes_of_run,
    removable_cycles as removable_cycles,
)
