"""Partitioning: shardings become the program of one IPU of a mesh, with collectives."""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.lowering.partition.block_values import Notes as Notes
    from ipujax.lowering.partition.partition_cost import Estimate as Estimate, estimate as estimate
    from ipujax.lowering.partition.partition_pass import partition as partition
    from ipujax.lowering.partition.program_shardings import NONE as NONE, Shardings as Shardings, splits as splits
    from ipujax.lowering.partition.specs import (
        MeshAxes as MeshAxes,
        explicit_axes as explicit_axes,
        running_without_mesh as running_without_mesh,
        sizes_of as sizes_of,
        tracing_without_mesh as tracing_without_mesh,
    )
    from ipujax.lowering.partition.stored_rows import stored_stacks as stored_stacks
else:
    __getattr__ = lazy_names(__name__)
