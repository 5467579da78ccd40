"""Codelets as Python classes, their single vertices, and the vertex groups of these."""

from ipujax.poplar.vertex.codelets import (
    codelet_of_call as codelet_of_call,
    codelets_in as codelets_in,
    connected_fields as connected_fields,
    field_number as field_number,
    result_shapes as result_shapes,
    state_fields as state_fields,
)
from ipujax.poplar.vertex.store import FieldRef as FieldRef, VertexRef as VertexRef, VertexStore as VertexStore
from ipujax.poplar.vertex.vertex import (
    NUM_DIMS as NUM_DIMS,
    InOut as InOut,
    Input as Input,
    Output as Output,
    Vector as Vector,
    VectorList as VectorList,
    Vertex as Vertex,
    VertexField as VertexField,
)
