"""A graph and its program, jaxprs, and tile maps as JSON.

    graph    ::= {"target", "num_ipus", "tiles_per_ipu", "replicas", "variables": [variable…],
                  "compute_sets": [{"name", "line", "groups": [group…]}…], "functions": [{"name", "body": node}…],
                  "program": node, "listing": text}
    variable ::= {"name", "dtype", "shape", "bytes", "is_constant", "is_in_graph"}
    group    ::= {"codelet", "vertices", "tiles", "axes": [{"name", "extent", "blocks", "kind"}…], "reads", "writes"}
    node     ::= {"type": as in `runtime.graph.program`, "reads", "writes", "children": [node…]} and its fields;
                 of a step, which computes, moves or waits: {"step": its number, "name", "line"};
                 of a loop or a branch: {"title": "repeat 3", "line"}

Compute sets, functions and variables are named by their position; "reads" and "writes" hold numbers of variables. Their
regions are in "listing", see `runtime.graph.listing`; the tiles of variables in the tile map.
Input: a graph, a program. Output: dicts and lists. Limits: of constants the shape is kept, not the elements.

Jaxprs as JSON: one list of all of them, those inside equations too, each once.

    jaxpr    ::= {"inputs": [value…], "constants": [value…], "equations": [equation…], "outputs": [operand…]}
    value    ::= {"name": "v3", "type": "f32[8,8]"}: a value that a pass keeps has the name it had, "_" is unused
    equation ::= {"primitive", "inputs": [operand…], "outputs": [value…], "params": {name: …},
                  "bodies": {parameter: [number of a jaxpr…]}, "line": "train.py:12 (loss)", "scope": name stack}
    operand  ::= the name of a value, or {"literal": "2.0:f32[]"}

Input: jaxprs. Output: lists and dicts. Limits: of constants the type is kept, not the elements; of functions and
objects among parameters the text, without addresses.

Tile map of a graph as JSON: the tiles of every variable, and its elements on each.

    map      ::= {"target", "num_tiles", "variables": [variable…]}
    variable ::= {"name", "dtype", "shape", "line", "tiles": [tile…], "elements": [of each of them…], "mapping"}
    mapping  ::= {"blocks": {"cuts": [[0, …] of each dimension], "tiles": [of each block, row-major]}}
               | {"intervals": {"starts": [first element, row-major…], "tiles": [of each interval]}}
               | null without a mapping

Input: a graph. Output: dicts and lists. Tiles are those of one replica.
Source: PopART user guide, "Saving the tensor map"; the form is ours, for intervals alone would take gigabytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import chain
from numbers import Integral
from typing import Any

import numpy as np

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from ipujax.lowering.source_info import name_stack, source_line
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
from ipujax.runtime.tensor import Blocked, Tensor, TileMapping, Variable, dtype_name

Json = dict[str, Any]
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class JaxprList:
    """A list of jaxprs, numbered as they are added, by identity; the list holds them, so that no other one gets it."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._jaxprs: list[Jaxpr] = []
        self._names: dict[Var, str] = {}

    def number_of(self, jaxpr: ClosedJaxpr | Jaxpr) -> int:
        """Returns the number of a jaxpr, which is added if it is not there."""
        opened = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
        if id(opened) not in self._numbers:
            self._numbers[id(opened)] = len(self._jaxprs)
            self._jaxprs.append(opened)
        return self._numbers[id(opened)]

    def json(self) -> list[Json]:
        """All jaxprs, and those inside them, by their numbers."""
        written: list[Json] = []
        while len(written) < len(self._jaxprs):  # writing one may add those that it holds
            written.append(self._jaxpr(self._jaxprs[len(written)]))
        return written

    def _jaxpr(self, jaxpr: Jaxpr) -> Json:
        return {
            "inputs": [self._value(var) for var in jaxpr.invars],
            "constants": [self._value(var) for var in jaxpr.constvars],
            "equations": [self._equation(eqn) for eqn in jaxpr.eqns],
            "outputs": [self._operand(atom) for atom in jaxpr.outvars],
        }

    def _equation(self, eqn: JaxprEqn) -> Json:
        """An equation as JSON; jaxprs that it holds are numbers, by which `json` lists them after this one."""
        bodies = bodies_of(eqn)
        return {
            "primitive": eqn.primitive.name,
            "inputs": [self._operand(atom) for atom in eqn.invars],
            "outputs": [self._value(var) for var in eqn.outvars],
            "params": {key: plain(value) for key, value in eqn.params.items() if key not in bodies},
            "bodies": {key: [self.number_of(body) for body in jaxprs] for key, jaxprs in bodies.items()},
            "line": source_line(eqn),
            "scope": name_stack(eqn),
        }

    def _value(self, var: Var) -> Json:
        return {"name": self._name(var), "type": short_type(var)}

    def _operand(self, atom: Atom) -> Any:
        return {"literal": literal_text(atom)} if isinstance(atom, Literal) else self._name(atom)

    def _name(self, var: Var) -> str:
        return "_" if isinstance(var, DropVar) else self._names.setdefault(var, f"v{len(self._names)}")


def bodies_of(eqn: JaxprEqn) -> dict[str, list[Jaxpr]]:
    """The jaxprs that an equation holds, by parameter."""
    return {key: jaxprs for key, value in eqn.params.items() if (jaxprs := _jaxprs(value))}


def _jaxprs(value: Any) -> list[Jaxpr]:
    if isinstance(value, tuple | list):
        return [jaxpr for item in value for jaxpr in _jaxprs(item)]
    if isinstance(value, ClosedJaxpr):
        return [value.jaxpr]
    return [value] if isinstance(value, Jaxpr) else []


def short_type(atom: Atom) -> str:
    """The type of a value as jaxprs show it, `f32[8,8]`."""
    return str(atom.aval.str_short(short_dtypes=True))


EquationKind = tuple[str, str, str]  # primitive, text of its types, line


class EquationKinds:
    """The kinds of equations, those inside others too; passes keep most equations, or their traces."""

    def __init__(self) -> None:
        self._types = dict[Any, str]()  # by abstract value, of which there are few
        self._lines = dict[Any, str]()  # by traceback
        # By the identity of an equation, which is kept: its kind, and the jaxprs in it.
        self._kinds = dict[int, tuple[JaxprEqn, EquationKind, list[Jaxpr]]]()

    def of(self, jaxpr: ClosedJaxpr | Jaxpr, level: int = 0) -> list[tuple[EquationKind, int]]:
        """The kinds of the equations of a jaxpr in its order, each with the number of equations that it is inside.

        `level` is that of the jaxpr itself.
        """
        rows = list[tuple[EquationKind, int]]()
        for eqn in jaxpr.eqns:
            if id(eqn) not in self._kinds:
                self._kinds[id(eqn)] = eqn, self._kind(eqn), list(chain.from_iterable(bodies_of(eqn).values()))
            _, kind, bodies = self._kinds[id(eqn)]
            rows.append((kind, level))
            for body in bodies:
                rows += self.of(body, level + 1)
        return rows

    def _kind(self, eqn: JaxprEqn) -> EquationKind:
        operands, results = (" ".join(map(self._type, atoms)) for atoms in (eqn.invars, eqn.outvars))
        return eqn.primitive.name, f"{operands} → {results}", self._line(eqn)

    def _type(self, atom: Atom) -> str:
        if atom.aval not in self._types:
            self._types[atom.aval] = short_type(atom)
        return self._types[atom.aval]

    def _line(self, eqn: JaxprEqn) -> str:
        trace = eqn.source_info.traceback
        if trace not in self._lines:
            self._lines[trace] = source_line(eqn)
        return self._lines[trace]


def literal_text(literal: Literal) -> str:
    """A literal as text, `2.0:f32[]`."""
    return f"{literal.val}:{short_type(literal)}"


def plain(value: Any) -> Any:
    """Converts a parameter of an equation to JSON: numbers, texts, lists and dictionaries stay, all else is a text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Integral):
        return int(value)
    if hasattr(value, "_asdict"):
        value = value._asdict()  # of a named tuple
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    # Addresses in memory would make equal dumps differ.
    return _ADDRESS.sub("", str(getattr(value, "__qualname__", None) or value))


class TileMap(dict[str, Any]):
    """Tile map as a dict of JSON values; a short `repr` for consoles, all of it as `str`."""

    def __repr__(self) -> str:
        """Return a summary for a session, in place of all entries: the number of variables, and the widest one."""
        rows = self["variables"]
        longest = max(rows, key=lambda row: len(row["tiles"]), default=None)
        widest = f", the widest, {longest['name']!r}, on {len(longest['tiles']):,}" if longest else ""
        return (
            f"TileMap({len(rows):,} variables on {self['num_tiles']:,} tiles of {self['target']}{widest}; "
            '["variables"] lists the name, line, tiles, elements and mapping of each, print() shows it all)'
        )

    def __str__(self) -> str:
        return dict.__repr__(self)


def tile_map(graph: Graph) -> TileMap:
    """Return the tile map of a graph."""
    num_tiles = graph.target.num_tiles
    rows = [_row(variable, graph.mappings.get(variable), num_tiles) for variable in graph.variables]
    return TileMap(target=graph.target.name, num_tiles=num_tiles, variables=rows)


def _row(variable: Variable, mapping: TileMapping | None, num_tiles: int) -> Json:
    """Entry of a variable in the map of tiles, as JSON: the tiles that hold elements, and how many each has.

    `mapping` is None for a variable that is not mapped.
    """
    elements = np.zeros(0, np.int64) if mapping is None else mapping.elements_per_tile(num_tiles)
    tiles = np.flatnonzero(elements)
    return {
        "name": variable.name,
        "dtype": dtype_name(variable.dtype),
        "shape": list(variable.shape),
        "line": variable.origin.line,
        "tiles": tiles.tolist(),
        "elements": elements[tiles].tolist(),
        "mapping": None if mapping is None else _mapping(mapping),
    }


def _mapping(mapping: TileMapping) -> Json:
    if isinstance(mapping, Blocked):
        return {"blocks": {"cuts": [cut.tolist() for cut in mapping.cuts], "tiles": mapping.tiles.tolist()}}
    return {"intervals": {"starts": mapping.starts.tolist(), "tiles": mapping.tiles.tolist()}}


def graph_json(graph: Graph, program: Program) -> Json:
    """Returns a graph and a program made of its compute sets and tensors."""
    return {**drawn_json(graph, program), "listing": listing(graph, program)}


def drawn_json(graph: Graph, program: Program) -> Json:
    """Return a graph and its program as JSON, without the listing that `graph_json` adds: what drawings show.

    Variables, compute sets and functions are listed once; the program tree has their numbers.
    """
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
        """A vertex group as JSON; the variables that it reads and writes are given by number."""
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
        """Return the entry of a variable in the list of variables, which programs and vertex groups name by number."""
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
        """Return the fields of a program node's JSON that say what it is: a call, a loop, a branch, a step by number.

        A sequence has none.
        """
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
    """Return the JSON fields that only this type of program node has, such as the stream of a copy from the host."""
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
