"""Functions of several replicas: their primitive, its evaluation on stacked arrays, and values that may differ."""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.lowering.replicas.replicated_primitive import (
        AXIS as AXIS,
        BlockSplit as BlockSplit,
        Dims as Dims,
        Replicated as Replicated,
        Split as Split,
        Splits as Splits,
        evaluate as evaluate,
        global_shape as global_shape,
        join as join,
        local_shape as local_shape,
        on_one_replica as on_one_replica,
        replicated_p as replicated_p,
        shared_split as shared_split,
        split as split,
        unwrapped as unwrapped,
    )
    from ipujax.lowering.replicas.sharded_eval import Path as Path, ReplicaArray as ReplicaArray, Shards as Shards
    from ipujax.lowering.replicas.stacked_eval import HOST_CALLS as HOST_CALLS, call_once as call_once
    from ipujax.lowering.replicas.summed_gradients import gradient_sums as gradient_sums
    from ipujax.lowering.replicas.varying import check_results as check_results, of_one_replica as of_one_replica
else:
    __getattr__ = lazy_names(__name__)
