"""Facts about a program: effects of its steps, live ranges, values that may differ between replicas."""

from ipujax.runtime.analysis.divergence import (
    Divergence as Divergence,
    divergent_decisions as divergent_decisions,
    meets as meets,
)
from ipujax.runtime.analysis.effects import Effects as Effects, EffectsOf as EffectsOf, group_tensors as group_tensors
from ipujax.runtime.analysis.intervals import Intervals as Intervals, nothing as nothing
from ipujax.runtime.analysis.liveness import Liveness as Liveness, Step as Step, constants as constants
