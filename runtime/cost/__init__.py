"""Cycles of one step: compute sets, copies between tiles and IPUs, and copies between replicas."""

from ipujax.runtime.cost.compute_set import (
    ComputeSetCost as ComputeSetCost,
    ExchangeCost as ExchangeCost,
    block_shapes as block_shapes,
    compute_set_cost as compute_set_cost,
    cost_key as cost_key,
    slowest_workers as slowest_workers,
    whole_vertex_cycles as whole_vertex_cycles,
)
from ipujax.runtime.cost.compute_set_counts import (
    ComputeSetCycles as ComputeSetCycles,
    KnownCounts as KnownCounts,
    compute_set_counts as compute_set_counts,
    compute_set_cycles as compute_set_cycles,
    slowest_tiles as slowest_tiles,
)
from ipujax.runtime.cost.copy_costs import (
    CopyCost as CopyCost,
    CopyCosts as CopyCosts,
    IpuCopyCost as IpuCopyCost,
    copy_cost as copy_cost,
    cross_replica_cost as cross_replica_cost,
)
from ipujax.runtime.cost.ipu_window import tile_range as tile_range
from ipujax.runtime.cost.links import Flows as Flows, link_cycles as link_cycles
from ipujax.runtime.cost.padded_rows import bytes_in_memory as bytes_in_memory, choose_padded_rows as choose_padded_rows
from ipujax.runtime.cost.transfer import (
    StreamCost as StreamCost,
    SyncCost as SyncCost,
    WaitCost as WaitCost,
    stream_cost as stream_cost,
    tensor_tile_bytes as tensor_tile_bytes,
    wait_cost as wait_cost,
)
from ipujax.runtime.cost.transfer_counts import (
    CopyCycles as CopyCycles,
    StreamCycles as StreamCycles,
    copy_cycles_on as copy_cycles_on,
    copy_key as copy_key,
    copying_counts as copying_counts,
    slowest_tiles_of_copy as slowest_tiles_of_copy,
    stream_cycles_on as stream_cycles_on,
)
