"""Arguments of a call: their checks, differences of pytrees, and how `in_specs` split them over replicas."""

from ipujax.calls.annotations_without_effect import check_annotations as check_annotations
from ipujax.calls.compiled_call import (
    check_compiled_call as check_compiled_call,
    check_live as check_live,
    check_live_arguments as check_live_arguments,
)
from ipujax.calls.in_specs import (
    Places as Places,
    Replication as Replication,
    explaining_axis_errors as explaining_axis_errors,
    leaf_dims as leaf_dims,
    split_dims as split_dims,
)
from ipujax.calls.memory_kinds import (
    RunsApart as RunsApart,
    check_memories as check_memories,
    may_be_offloaded as may_be_offloaded,
    moves_apart as moves_apart,
    offloaded_arguments as offloaded_arguments,
    with_host_shapes as with_host_shapes,
)
from ipujax.calls.nan_location import locates_nans as locates_nans, run_equations as run_equations
from ipujax.calls.nesting import (
    Compilation as Compilation,
    PlainCalls as PlainCalls,
    compiling as compiling,
    compiling_for as compiling_for,
    inside_function as inside_function,
    is_inside_function as is_inside_function,
)
from ipujax.calls.shardings import (
    check_jaxpr as check_jaxpr,
    check_mesh_of_devices as check_mesh_of_devices,
    check_whole as check_whole,
)
from ipujax.calls.traced import CallArguments as CallArguments, Signature as Signature, Stage as Stage, Traced as Traced
