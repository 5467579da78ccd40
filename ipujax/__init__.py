"""Compile and run JAX programs for a simulated Graphcore IPU.

::

    import ipujax as ipu

    @ipu.jit(device=ipu.IPUModel(arch="mk2"), donate_argnums=0)
    def step(params, batch): ...

step.profile(params, batch).summary() shows the cost on the machine; step(params, batch) computes the results.

`import ipujax` imports no part of the compiler: that, and most names below, are imported when they are first needed.
"""

import typing as _typing
from importlib import import_module as _import_module

from ipujax.device import CPU as CPU, IPUModel as IPUModel, default_device as default_device, make_mesh as make_mesh
from ipujax.jit import check as check, jit as jit
from ipujax.pipeline import phase as phase, pipeline as pipeline, stage as stage
from ipujax.public import public_names as _public_names
from ipujax.runtime.cache import clear_caches as clear_caches
from ipujax.runtime.errors import (
    ArgumentError as ArgumentError,
    GraphError as GraphError,
    IpuError as IpuError,
    MappingError as MappingError,
    ProfileError as ProfileError,
    ResultMismatchError as ResultMismatchError,
    ScheduleError as ScheduleError,
    StreamingMemoryError as StreamingMemoryError,
    TargetError as TargetError,
    TensorError as TensorError,
    TileMemoryError as TileMemoryError,
    VerifyError as VerifyError,
)
from ipujax.runtime.lazy_names import lazy_names as _lazy_names
from ipujax.runtime.options import Options as Options
from ipujax.runtime.target import Target as Target

if _typing.TYPE_CHECKING:
    from ipujax import (
        distributed as distributed,
        optim as optim,
        poplar as poplar,
        poplin as poplin,
        popnn as popnn,
        popops as popops,
        poprand as poprand,
        popsolver as popsolver,
        popsparse as popsparse,
        poputil as poputil,
        schedules as schedules,
    )
    from ipujax.advice import Advice as Advice, AdviceRow as AdviceRow, advise as advise
    from ipujax.auto_sharding import (
        ShardingPlan as ShardingPlan,
        ShardingPlans as ShardingPlans,
        auto_shard as auto_shard,
    )
    from ipujax.checking import CheckReport as CheckReport
    from ipujax.jax_scripts import ProfilingRun as ProfilingRun, profiling as profiling
    from ipujax.pipeline.plan import (
        PipelinePlan as PipelinePlan,
        TaskTime as TaskTime,
        pipeline_plan as pipeline_plan,
        pipeline_tasks as pipeline_tasks,
    )
    from ipujax.plan_search import Plan as Plan, Search as Search, SearchRow as SearchRow, search as search
    from ipujax.prefetching import prefetch as prefetch
    from ipujax.runtime.host import HostData as HostData
    from ipujax.runtime.report import Comparison as Comparison, Profile as Profile, compare as compare
    from ipujax.stages import Compiled as Compiled, Lowered as Lowered, Traced as Traced
    from ipujax.storage import LoadedProgram as LoadedProgram, load as load
    from ipujax.studies import (
        Sensitivities as Sensitivities,
        Sweep as Sweep,
        sensitivities as sensitivities,
        sweep as sweep,
    )
    from ipujax.tiles import (
        cycle_count as cycle_count,
        tile_barrier as tile_barrier,
        tile_gather as tile_gather,
        tile_map as tile_map,
        tile_put_replicated as tile_put_replicated,
        tile_put_sharded as tile_put_sharded,
    )
    from ipujax.tiles.codelet_calls import codelet_call as codelet_call

    __version__: str
else:  # a type checker would accept any name after a `__getattr__`
    # No function has the name of its module, which an import would put in its place.
    _read_name = _lazy_names(__name__)

    def __getattr__(name: str) -> _typing.Any:
        if name == "__version__":  # `importlib.metadata` is slow to import
            return _import_module("importlib.metadata").version("ipujax")
        return _read_name(name)


__dir__ = _public_names(globals(), "__version__", has_lazy_names=True)
