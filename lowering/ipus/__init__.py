"""Several IPUs: the IPU of each equation, one IPU seen as a graph of its own, and copies between IPUs."""

from ipujax.lowering.ipus.ipus import Ipus as Ipus, IpuView as IpuView, MakeLowering as MakeLowering
from ipujax.lowering.ipus.placement import (
    Span as Span,
    assign_stages as assign_stages,
    check_flow as check_flow,
    homes as homes,
    named_stage as named_stage,
)
from ipujax.lowering.jaxpr import value_bytes as value_bytes, variables as variables
