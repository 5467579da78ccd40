"""The input of `compile`: codelets, vertex groups, compute sets, the control program, and their text."""

from ipujax.runtime.graph.codelet import (
    BlockShapes as BlockShapes,
    Codelet as Codelet,
    Comparison as Comparison,
    Extras as Extras,
    Field as Field,
    Language as Language,
    Repetition as Repetition,
    SlowPath as SlowPath,
    SlowReason as SlowReason,
)
from ipujax.runtime.graph.forms import (
    Block as Block,
    Branch as Branch,
    ComputeSet as ComputeSet,
    Decision as Decision,
    HostStream as HostStream,
    Leaf as Leaf,
    Loop as Loop,
    Program as Program,
    RemoteBuffer as RemoteBuffer,
    check_program as check_program,
)
from ipujax.runtime.graph.graph import (
    BYTE_COST_CYCLES as BYTE_COST_CYCLES,
    Builder as Builder,
    Graph as Graph,
    ReplicaAxes as ReplicaAxes,
    check_group as check_group,
    of_replicas as of_replicas,
)
from ipujax.runtime.graph.graph_notes import (
    ComputedAgain as ComputedAgain,
    LeastWork as LeastWork,
    PaddedRows as PaddedRows,
    ReasonToRepeat as ReasonToRepeat,
    UnmetBound as UnmetBound,
)
from ipujax.runtime.graph.leaf_nodes import (
    HOST_LATENCY as HOST_LATENCY,
    Copy as Copy,
    CrossReplicaCopy as CrossReplicaCopy,
    Execute as Execute,
    RemoteIn as RemoteIn,
    RemoteOut as RemoteOut,
    StreamIn as StreamIn,
    StreamOut as StreamOut,
    Sync as Sync,
    SyncKind as SyncKind,
    Wait as Wait,
    WriteUndef as WriteUndef,
)
from ipujax.runtime.graph.operand_faults import (
    check_owned as check_owned,
    described_gap as described_gap,
    element_ranges as element_ranges,
    tensors_in as tensors_in,
    tile_gap as tile_gap,
)
from ipujax.runtime.graph.program import (
    TASK_KINDS as TASK_KINDS,
    Call as Call,
    Collective as Collective,
    Function as Function,
    If as If,
    PipelineLayout as PipelineLayout,
    PipelineTask as PipelineTask,
    Repeat as Repeat,
    RepeatWhile as RepeatWhile,
    Sequence as Sequence,
    Switch as Switch,
    WholeOperation as WholeOperation,
    direct_tensors as direct_tensors,
)
from ipujax.runtime.graph.repetitions import repetitions as repetitions
from ipujax.runtime.graph.vertex_group import (
    NO_TILE as NO_TILE,
    Access as Access,
    Axis as Axis,
    Dim as Dim,
    Extent as Extent,
    Term as Term,
    VertexBlocks as VertexBlocks,
    VertexGroup as VertexGroup,
    VertexPart as VertexPart,
    block as block,
    dim_extent as dim_extent,
    element as element,
    extents as extents,
    shift_vertices as shift_vertices,
    squeezed_shape as squeezed_shape,
    unsplit as unsplit,
    vertex_blocks as vertex_blocks,
    whole_axes as whole_axes,
)
from ipujax.runtime.graph.walks import (
    data_loops as data_loops,
    distinct as distinct,
    fold as fold,
    is_free as is_free,
    iteration as iteration,
    joining_streams as joining_streams,
    leaves as leaves,
    run_counts as run_counts,
    while_names as while_names,
)
