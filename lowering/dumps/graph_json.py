"""A graph and its program as JSON.

    graph    ::= {"target", "num_ipus", "tiles_per_ipu", "replicas", "variables": [variable…],
                  "compute_sets": [{"name", "line", "groups": [group…]}…], "functions": [{"name", "body": node}…],
                  "program": node, "listing": text}
    variable ::= {"name", "dtype", "shape", "bytes", "is_constant", "is_in_graph"}
    group    ::= {"codelet", "vertices", "tiles", "axes": [{"name", "extent", "blocks", "kind"}…], "reads", "writes"}
    node     ::= {"type": as in `runtime.graph.program`, "reads", "writes", "children": [node…]} and its fields;
                 of a step, which computes, moves or waits: {"step": its number, "name", "line"};
                 of a loop or a branch: {"title": "repeat 3", "line"}

Compute sets, functions and variables are named by their position; "reads" and "writes" hold numbers of variables. Their
regions are in "listing", see `runtime.graph.listing`; the tiles of variables in `tile_map`.
Input: a graph, a program. Output: dicts and lists. Limits: of constants the shape is kept, not the elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ipujax.runtime.graph import (
    NO_TILE,
    Branch,
    Call,
    Collective,
    ComputeSet,
    CrossReplicaCopy,
    Execute,
    Function,
    Graph,
    Leaf,
    Loop,
    Program,
    RemoteIn,
    RemoteOut,
    StreamIn,
    StreamOut,
    Sync,
    VertexGroup,
    distinct,
)
from ipujax.runtime.graph.listing import listing
from ipujax.runtime.tensor import Tensor, Variable, dtype_name

Json = dict[str, Any]


def graph_json(graph: Graph, program: Program) -> Json:
    """Returns a graph and a program made of its compute sets and tensors."""
    return {**drawn_json(graph, program), "listing": listing(graph, program)}


def drawn_json(graph: Graph, program: Program) -> Json:
    """Return what drawings show: all of `graph_json` but the listing."""
    writer = _GraphJson(graph, program)
    target = graph.target
    body = writer.node(program)
    functions = [{"name": function.name, "body": writer.node(function.body)} for function in writer.functions]
    compute_sets = [
        {"name": step.name, "line": step.origin.line, "groups": [writer.group(group) for group in graph.groups[step]]}
        for step in writer.compute_sets
    ]
    return {
        "target": target.name,
        "num_ipus": target.num_ipus,
        "tiles_per_ipu": target.tiles_per_ipu,
        "replicas": graph.replication_factor,
        "variables": [writer.variable(variable) for variable in writer.variables],
        "compute_sets": compute_sets,
        "functions": functions,
        "program": body,
    }


class _GraphJson:
    """Writes one graph, whose parts are numbered; variables outside of it, as streaming memory, are last."""

    def __init__(self, graph: Graph, program: Program) -> None:
        self._own = set(graph.variables)
        self.variables: dict[Variable, int] = {v: n for n, v in enumerate(graph.variables)}
        self.compute_sets: dict[ComputeSet, int] = {c: n for n, c in enumerate(graph.groups)}
        called = dict.fromkeys(node.function for node in distinct(program) if isinstance(node, Call))
        self.functions: dict[Function, int] = {function: n for n, function in enumerate(called)}
        self._steps: dict[Leaf, int] = {}

    def node(self, node: Program) -> Json:
        """A program and all inside it; the bodies of functions are in a list of their own."""
        operands = {"reads": self._numbers(node.reads), "writes": self._numbers(node.writes)}
        children = () if isinstance(node, Call) else node.children()
        inside = [self.node(child) for child in children]
        return {"type": type(node).__name__, **self._place(node), **_fields(node), **operands, "children": inside}

    def group(self, group: VertexGroup) -> Json:
        """A group of vertices."""
        pairs = list(zip(group.codelet.fields, group.accesses, strict=True))
        return {
            "codelet": group.codelet.name,
            "vertices": group.num_vertices,
            "tiles": int(np.unique(group.tile[group.tile != NO_TILE]).size),
            "axes": [{"name": a.name, "extent": a.extent, "blocks": a.blocks, "kind": a.kind} for a in group.axes],
            "reads": self._numbers(access.tensor for field, access in pairs if field.is_read),
            "writes": self._numbers(access.tensor for field, access in pairs if field.is_written),
        }

    def variable(self, variable: Variable) -> Json:
        """Return the entry of a variable."""
        return {
            "name": variable.name,
            "dtype": dtype_name(variable.dtype),
            "shape": list(variable.shape),
            "bytes": variable.num_bytes,
            "is_constant": variable.is_constant,
            "is_in_graph": variable in self._own,
        }

    def _numbers(self, tensors: Iterable[Tensor]) -> list[int]:
        variables = dict.fromkeys(variable for tensor in tensors for variable in tensor.variables())
        return [self.variables.setdefault(variable, len(self.variables)) for variable in variables]

    def _place(self, node: Program) -> Json:
        """Return the names and numbers by which a node is found."""
        match node:
            case Call(function):
                return {"function": self.functions[function]}
            case Loop() | Branch():
                return {"title": _title(node), "line": node.origin.line}
            case Leaf():
                # A step that is in several places of the program has one number.
                number = self._steps.setdefault(node, len(self._steps))
                place = {"step": number, "name": node.label, "line": node.shown_origin.line}
                return (
                    {**place, "compute_set": self.compute_sets[node.compute_set]}
                    if isinstance(node, Execute)
                    else place
                )
        return {}


def _title(control: Loop | Branch) -> str:
    if isinstance(control, Branch):
        return type(control).__name__.lower()
    return "loop" if control.trips is None else f"repeat {control.trips}"


def _fields(node: Program) -> Json:
    """Return the fields that only this type of node has."""
    match node:
        case CrossReplicaCopy():
            return {"replica_map": [list(pair) for pair in node.replica_map]}
        case Collective():
            return {"is_same": node.is_same}
        case StreamIn(stream, _) | StreamOut(_, stream):
            return {"stream": stream.name, "is_resident": stream.resident}
        case RemoteIn(buffer, _) | RemoteOut(_, buffer):
            return {"buffer": buffer.name, "overlaps": node.overlaps}
        case Sync(kind):
            return {"kind": kind}
    return node.attributes
