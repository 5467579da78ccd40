"""Analysis of programs: effects of steps, live ranges, values that may differ between replicas."""

from ipujax.runtime.analysis.agreement import Classes as Classes
from ipujax.runtime.analysis.divergence import (
    Differing as Differing,
    Divergence as Divergence,
    divergent_decisions as divergent_decisions,
    joins_replicas as joins_replicas,
    meeting_groups as meeting_groups,
)
from ipujax.runtime.analysis.effects import Effects as Effects, EffectsOf as EffectsOf, group_tensors as group_tensors
from ipujax.runtime.analysis.liveness import Liveness as Liveness, Step as Step, constants as constants
