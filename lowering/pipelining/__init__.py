"""Pipelines: from a function of one micro-batch to a program in which several IPUs work on several of them at once.

jaxpr of one micro-batch ── partition ──▶ parts by stage and task ── lower, with a schedule ──▶ functions, rings, copies
"""

from ipujax.lowering.pipelining.cuts import (
    best_cuts as best_cuts,
    cut_cost as cut_cost,
    exchange_bytes as exchange_bytes,
)
from ipujax.lowering.pipelining.model_parallel import lower_staged as lower_staged
from ipujax.lowering.pipelining.pipeline_cost import Planning as Planning
from ipujax.lowering.pipelining.pipeline_program import PipelineRun as PipelineRun
from ipujax.lowering.pipelining.primitive import (
    REDUCTIONS as REDUCTIONS,
    PipelineSpec as PipelineSpec,
    Reduce as Reduce,
    Role as Role,
    bind_pipeline as bind_pipeline,
    pipeline_p as pipeline_p,
    staged_pipeline_p as staged_pipeline_p,
)
from ipujax.lowering.pipelining.row_shards import CutJaxpr as CutJaxpr, num_shards as num_shards, uncut as uncut
from ipujax.lowering.pipelining.stage_costs import Work as Work
from ipujax.lowering.pipelining.stage_search import Cuts as Cuts, StageSearch as StageSearch, find_stages as find_stages
