"""Collectives of replicas, under the names of Poplar's GCL: all-reduce, reduce-scatter, all-gather, all-to-all.

`collective_schedules` describes a collective as data: levels of groups of replicas. `cheapest` chooses the schedule of
least cost on the links of the machine, `rounds` adds it to a program, `stacked` computes it on arrays of all replicas,
and `collectives` has the functions for lowering rules and Poplar programs.
"""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.lowering.gcl.collective_params import (
        AXIS as AXIS,
        COLLECTIVES as COLLECTIVES,
        MONOIDS as MONOIDS,
        Form as Form,
        axes_of as axes_of,
        axis_of as axis_of,
        axis_rank as axis_rank,
        is_collective as is_collective,
        is_reduction as is_reduction,
    )
    from ipujax.lowering.gcl.collective_schedules import estimated_cycles as estimated_cycles
    from ipujax.lowering.gcl.stacked import Groups as Groups, whole as whole
else:
    __getattr__ = lazy_names(__name__)
