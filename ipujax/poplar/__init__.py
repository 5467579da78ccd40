"""Poplar in Python: graphs, codelets and control programs written by hand, with Poplar's names in snake_case.

    from ipujax import poplar

    graph = poplar.Graph(poplar.IPUModel().create_device().get_target())
    v1 = graph.add_variable(poplar.FLOAT, [4], "v1")
    graph.set_tile_mapping(v1, 0)

Source: Poplar & PopLibs user guide. Limits: see each module.
"""

from ipujax.poplar import program as program
from ipujax.poplar.device import (
    Device as Device,
    DeviceManager as DeviceManager,
    IPUModel as IPUModel,
    Target as Target,
)
from ipujax.poplar.engine import (
    Engine as Engine,
    StreamCallback as StreamCallback,
    serialize_to_cbor as serialize_to_cbor,
    serialize_to_json as serialize_to_json,
)
from ipujax.poplar.graph import Graph as Graph, ReplicatedGraph as ReplicatedGraph, VirtualGraph as VirtualGraph
from ipujax.poplar.types import (
    BOOL as BOOL,
    CHAR as CHAR,
    FLOAT as FLOAT,
    HALF as HALF,
    INT as INT,
    SHORT as SHORT,
    SIGNED_CHAR as SIGNED_CHAR,
    UNSIGNED_CHAR as UNSIGNED_CHAR,
    UNSIGNED_INT as UNSIGNED_INT,
    UNSIGNED_SHORT as UNSIGNED_SHORT,
    DataStream as DataStream,
    RemoteBuffer as RemoteBuffer,
    ReplicatedStreamMode as ReplicatedStreamMode,
    Type as Type,
)
from ipujax.poplar.vertex import (
    FieldRef as FieldRef,
    InOut as InOut,
    Input as Input,
    Output as Output,
    Vector as Vector,
    VectorList as VectorList,
    Vertex as Vertex,
    VertexRef as VertexRef,
)
from ipujax.public import public_names as _public_names
from ipujax.runtime.graph import ComputeSet as ComputeSet, Function as Function
from ipujax.runtime.tensor import Tensor as Tensor, append as append, concat as concat

In = Input  # the short names of the guide's examples
Out = Output
__dir__ = _public_names(globals(), "program")
