"""Partitioning: shardings become the program of one IPU of a mesh, with collectives."""

from ipujax.lowering.partition.block_evaluation import Move as Move, Notes as Notes
from ipujax.lowering.partition.partition_cost import Estimate as Estimate, estimate as estimate
from ipujax.lowering.partition.partition_pass import (
    NONE as NONE,
    Shardings as Shardings,
    partition as partition,
    splits as splits,
)
from ipujax.lowering.partition.specs import (
    MeshAxes as MeshAxes,
    explicit_axes as explicit_axes,
    running_without_mesh as running_without_mesh,
    tracing_without_mesh as tracing_without_mesh,
)
