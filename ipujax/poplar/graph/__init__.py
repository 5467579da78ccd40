"""Graphs as Poplar programs see them: variables, mapping, virtual graphs, and replicated graphs."""

from ipujax.poplar.graph.graph import Graph as Graph, ReplicatedGraph as ReplicatedGraph, VirtualGraph as VirtualGraph
from ipujax.poplar.graph.groups import (
    Replicas as Replicas,
    all_replicas as all_replicas,
    replicated_graph_of as replicated_graph_of,
)
