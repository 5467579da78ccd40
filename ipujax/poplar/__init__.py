"""Poplar in Python: graphs, codelets and control programs written by hand, with Poplar's names in snake_case.

    from ipujax import poplar

    graph = poplar.Graph(poplar.IPUModel().create_device().get_target())
    v1 = graph.add_variable(poplar.FLOAT, [4], "v1")
    graph.set_tile_mapping(v1, 0)

Source: Poplar & PopLibs user guide. Limits: see each module.
"""

from ipujax.poplar import program as program
from ipujax.poplar.device import Device as Device
from ipujax.poplar.device import DeviceManager as DeviceManager
from ipujax.poplar.device import IPUModel as IPUModel
from ipujax.poplar.device import Target as Target
from ipujax.poplar.engine.engine import Engine as Engine
from ipujax.poplar.engine.streams import StreamCallback as StreamCallback
from ipujax.poplar.engine.summary import serialize_to_cbor as serialize_to_cbor
from ipujax.poplar.engine.summary import serialize_to_json as serialize_to_json
from ipujax.poplar.graph.graph import Graph as Graph
from ipujax.poplar.graph.graph import ReplicatedGraph as ReplicatedGraph
from ipujax.poplar.graph.graph import VirtualGraph as VirtualGraph
from ipujax.poplar.types import BOOL as BOOL
from ipujax.poplar.types import CHAR as CHAR
from ipujax.poplar.types import FLOAT as FLOAT
from ipujax.poplar.types import HALF as HALF
from ipujax.poplar.types import INT as INT
from ipujax.poplar.types import SHORT as SHORT
from ipujax.poplar.types import SIGNED_CHAR as SIGNED_CHAR
from ipujax.poplar.types import UNSIGNED_CHAR as UNSIGNED_CHAR
from ipujax.poplar.types import UNSIGNED_INT as UNSIGNED_INT
from ipujax.poplar.types import UNSIGNED_SHORT as UNSIGNED_SHORT
from ipujax.poplar.types import DataStream as DataStream
from ipujax.poplar.types import RemoteBuffer as RemoteBuffer
from ipujax.poplar.types import ReplicatedStreamMode as ReplicatedStreamMode
from ipujax.poplar.types import Type as Type
from ipujax.poplar.vertex.store import FieldRef as FieldRef
from ipujax.poplar.vertex.store import VertexRef as VertexRef
from ipujax.poplar.vertex.vertex import InOut as InOut
from ipujax.poplar.vertex.vertex import Input as Input
from ipujax.poplar.vertex.vertex import Output as Output
from ipujax.poplar.vertex.vertex import Vector as Vector
from ipujax.poplar.vertex.vertex import VectorList as VectorList
from ipujax.poplar.vertex.vertex import Vertex as Vertex
from ipujax.public import public_names as _public_names
from ipujax.runtime.graph.program import ComputeSet as ComputeSet
from ipujax.runtime.graph.program import Function as Function
from ipujax.runtime.tensor.tensor import Tensor as Tensor
from ipujax.runtime.tensor.tensor import append as append
from ipujax.runtime.tensor.tensor import concat as concat

In, Out = Input, Output
__dir__ = _public_names(globals(), "program")
