"""How sure the cycles of a run are: the interval that they are in, and the sources of the constants they rest on."""

from ipujax.runtime.uncertainty.certainty import (
    Certainty as Certainty,
    Energy as Energy,
    Interval as Interval,
    Uncertainty as Uncertainty,
    certainty_of_run as certainty_of_run,
    energy_of_run as energy_of_run,
    interval_of_run as interval_of_run,
)
from ipujax.runtime.uncertainty.spreads import COMPILED as COMPILED, SPREADS as SPREADS, Spread as Spread
