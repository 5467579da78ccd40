"""Contents of reports as plain values, computed from figures; other rooms draw them."""

from ipujax.runtime.views.answers import answers as answers
from ipujax.runtime.views.graph_view import GraphNode as GraphNode, GraphView as GraphView, graph_view as graph_view
from ipujax.runtime.views.memory_view import (
    CategoryRow as CategoryRow,
    LivenessView as LivenessView,
    MemoryView as MemoryView,
    liveness_view as liveness_view,
    memory_view as memory_view,
)
from ipujax.runtime.views.operation_view import OperationRow as OperationRow, operation_rows as operation_rows
from ipujax.runtime.views.part_answers import Answer as Answer
from ipujax.runtime.views.part_views import (
    STAGE_HEAD as STAGE_HEAD,
    STAGE_NOTE as STAGE_NOTE,
    LayerNode as LayerNode,
    TaskView as TaskView,
    pipeline_sentence as pipeline_sentence,
    stage_cells as stage_cells,
    task_view as task_view,
    tree_of as tree_of,
)
from ipujax.runtime.views.source_view import SourceFile as SourceFile, source_view as source_view
from ipujax.runtime.views.time_view import (
    NO_IPU as NO_IPU,
    WAIT_CAUSES as WAIT_CAUSES,
    TraceView as TraceView,
    WaitView as WaitView,
    trace_view as trace_view,
    wait_view as wait_view,
)
from ipujax.runtime.views.verdict import (
    Verdict as Verdict,
    certainty as certainty,
    tried_changes as tried_changes,
    verdict as verdict,
)
