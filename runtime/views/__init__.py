"""Contents of reports as plain values, computed from figures; other rooms draw them."""

from ipujax.runtime.views.answer import Answer as Answer
from ipujax.runtime.views.answers import answers as answers
from ipujax.runtime.views.layer_view import (
    LayerKind as LayerKind,
    LayerNode as LayerNode,
    layer_kinds as layer_kinds,
    layer_tree as layer_tree,
    tree_of as tree_of,
)
from ipujax.runtime.views.liveness_view import LivenessView as LivenessView, liveness_view as liveness_view
from ipujax.runtime.views.memory_view import (
    CategoryRow as CategoryRow,
    MemoryView as MemoryView,
    memory_view as memory_view,
)
from ipujax.runtime.views.operation_view import OperationRow as OperationRow, operation_rows as operation_rows
from ipujax.runtime.views.source_view import SourceFile as SourceFile, source_view as source_view
from ipujax.runtime.views.stage_view import (
    STAGE_HEAD as STAGE_HEAD,
    STAGE_NOTE as STAGE_NOTE,
    TaskView as TaskView,
    pipeline_sentence as pipeline_sentence,
    stage_cells as stage_cells,
    task_view as task_view,
)
from ipujax.runtime.views.trace_view import TraceView as TraceView, trace_view as trace_view
from ipujax.runtime.views.verdict import Verdict as Verdict, verdict as verdict
