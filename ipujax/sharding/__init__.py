"""Shardings of calls, for the pass `partition`, and programs over the IPUs of a mesh."""

from ipujax.sharding.call_shardings import (
    NO_SHARDINGS as NO_SHARDINGS,
    UNSET as UNSET,
    CallShardings as CallShardings,
    ShardingSettings as ShardingSettings,
    check_blocks as check_blocks,
    constrained as constrained,
    in_explicit_mesh as in_explicit_mesh,
    place_in_call as place_in_call,
)
from ipujax.sharding.meshes import (
    current_mesh as current_mesh,
    in_words as in_words,
    mesh_of_constraints as mesh_of_constraints,
    run_on_one_device as run_on_one_device,
    to_one_device as to_one_device,
    with_axes as with_axes,
    without_axes as without_axes,
    without_splits as without_splits,
)
from ipujax.sharding.partitioning import (
    Partitioning as Partitioning,
    PlanShardings as PlanShardings,
    check_split_alike as check_split_alike,
)
