"""A graph and its program as text: for reading, for comparing with a stored text, never for parsing.

    listing   ::= "target" name, IPUs and tiles, replicas if several
                  "variables" variable*
                  "program" step*
                  function*
    variable  ::= "%n" dtype[shape] "name", placement, "constant" value?, "partials of" monoid
    placement ::= "blocked 4×2 on 8 tiles" | "flat 3 intervals on 3 tiles" | "on tile 5" | "unmapped"
    step      ::= "execute" "name" "at" line, then its groups
                | "copy" "name" ("replica" from "->" to, …)?: view "->" view
                | "in" "stream" "->" view | "out" view "->" "stream"
                | "in" "buffer" ("row" view)? -> view | "out" view "->" "buffer" ("row" view)? | "sync" kind
                | "undefine" view | "repeat n" | ("while" | "until") view | "if" view | "switch" view, then their bodies
                | "call @n"
    group     ::= accesses written "=" codelet "(" accesses read ")" | axes | vertices and tiles
    access    ::= view "[" index, … "]" "?" fill;  a view of several words in brackets, an inout field on both sides
    index     ::= (terms "+" offset) "/" divisor;  "#k" is the block number of axis k, "2i" twice the index along i
    axis      ::= name extent "/" blocks, and its kind unless "map"
    view      ::= "%n" | "%n as [shape]" | "%n@offset(size:stride…, …)" sub-dimensions of a dimension joined by "."
                | "concat axis (view, …)" | "reshape [shape] (view)" | "elements [shape] of (%n, …)"
    function  ::= "function @n" "name", then its body

Variables are numbered in the order in which they were added, functions in the order of their calls, so that equal
graphs have equal texts. Nested sequences are written as one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import (
    Call,
    Collective,
    Copy,
    CrossReplicaCopy,
    Execute,
    Function,
    HostStream,
    If,
    Program,
    RemoteBuffer,
    RemoteIn,
    RemoteOut,
    Repeat,
    RepeatWhile,
    Sequence as ProgramSequence,
    StreamIn,
    StreamOut,
    Switch,
    Sync,
    Wait,
    WriteUndef,
)
from ipujax.runtime.graph.vertex_group import NO_TILE, Access, Axis, Dim, Term, VertexGroup
from ipujax.runtime.tensor import (
    Affine,
    Blocked,
    Concat,
    Indexed,
    Node,
    Origin,
    Reshaped,
    Tensor,
    TileMapping,
    Variable,
    dtype_name,
    is_key_dtype,
)

INDENT = "  "


def listing(graph: Graph, program: Program) -> str:
    """Return the text of a graph and a program of it, in the grammar of this module; no newline at the end."""
    writer = _Writer(graph)
    body = list(writer.steps(program))
    functions = list(writer.function_lines())  # writing a body may number further functions and variables
    target = graph.target
    head = f"target {target.name}, {_count(target.num_ipus, 'IPU')} of {_count(target.tiles_per_ipu, 'tile')}"
    if graph.replication_factor > 1:
        head += f", {graph.replication_factor} replicas"
    return "\n".join([head, "variables", *_indented(writer.variable_lines()), "program", *_indented(body), *functions])


class _Writer:
    """Writes one graph, numbering variables and functions as it goes."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._variables: dict[Variable, int] = {v: n for n, v in enumerate(graph.variables)}
        self._functions: dict[Function, int] = {}

    def variable_lines(self) -> Iterator[str]:
        """Yield a line for each variable."""
        in_graph = set(self._graph.variables)
        for variable, number in self._variables.items():
            parts = [f"%{number} {dtype_name(variable.dtype)}{_shape(variable.shape)} {_quoted(variable.name)}"]
            parts.append(_placement_text(self._graph.mappings.get(variable)))
            if variable.is_constant:
                parts.append(_constant(variable))
            if variable.monoid is not None:
                parts.append(f"partials of {variable.monoid}")
            # A program may use variables of another graph by mistake: they get numbers when met.
            if variable not in in_graph:
                parts.append("not of this graph")
            yield ", ".join(parts)

    def function_lines(self) -> Iterator[str]:
        """Yield the lines of the functions called so far, and of those that they call."""
        number = 0
        while number < len(self._functions):  # which grows as bodies are written
            function = list(self._functions)[number]
            yield f"function @{number} {_quoted(function.name)}"
            yield from _indented(self.steps(function.body))
            number += 1

    def steps(self, program: Program) -> Iterator[str]:
        """Yield the lines of a program."""
        match program:
            case Collective():
                replicas = "all replicas agree" if program.is_same else "each replica has its own"
                sources, results = (", ".join(map(self._view, part)) for part in (program.inputs, program.outputs))
                yield f"collective {_quoted(program.name)}: {sources} -> {results}, {replicas}{_at(program.origin)}"
                for child in program.children():
                    yield from _indented(self.steps(child))
            case ProgramSequence():
                for child in program.children():
                    yield from self.steps(child)
            case Execute(compute_set):
                yield f"execute {_quoted(compute_set.name)}{_at(compute_set.origin)}"
                yield from _indented(self._group(group) for group in self._graph.groups[compute_set])
            case Copy(source, destination, name, origin):
                yield f"copy {_quoted(name)}: {self._view(source)} -> {self._view(destination)}{_at(origin)}"
            case CrossReplicaCopy():
                for copy in program.ways:
                    replicas = ", ".join(f"{sender}->{receiver}" for sender, receiver in copy.replica_map)
                    views = f"{self._view(copy.source)} -> {self._view(copy.destination)}"
                    yield f"copy {_quoted(copy.name)} replica {replicas}: {views}{_at(copy.origin)}"
            case StreamIn(stream, destination):
                yield f"in {_stream(stream)} -> {self._view(destination)}"
            case WriteUndef(destination):
                yield f"undefine {self._view(destination)}"
            case StreamOut(source, stream):
                yield f"out {self._view(source)} -> {_stream(stream)}"
            case RemoteIn(buffer, destination, offset):
                yield f"in {self._rows(buffer, offset)} -> {self._view(destination)}{_overlap(program)}"
            case RemoteOut(source, buffer, offset):
                yield f"out {self._view(source)} -> {self._rows(buffer, offset)}{_overlap(program)}"
            case Wait(tensor):
                yield f"wait {self._view(tensor)}"
            case Sync(kind):
                yield f"sync {kind}"
            case Call(function):
                yield f"call @{self._functions.setdefault(function, len(self._functions))}"
            case _:
                for label, body in self._branches(program):
                    yield label
                    yield from _indented(self.steps(body))

    def _branches(self, program: Program) -> list[tuple[str, Program]]:
        """Return the bodies of control flow, each with the line above it."""
        match program:
            case Repeat(count, body, origin):
                return [(f"repeat {count}{_at(origin)}", body)]
            case RepeatWhile(condition, predicate, body, origin):
                word = "until" if program.until else "while"
                return [(f"{word} {self._view(predicate)}{_at(origin)}, computed by", condition), ("do", body)]
            case If(predicate, then, otherwise, origin):
                return [(f"if {self._view(predicate)}{_at(origin)}", then), ("else", otherwise)]
            case Switch(selector, cases, default, origin):
                labels = [f"case {number}" for number in program.values or range(len(cases))]
                labels[:1] = [f"switch {self._view(selector)}{_at(origin)}, {label}" for label in labels[:1]]
                return [*zip(labels, cases, strict=True), ("default", default)]
        raise AssertionError(f"unknown program node {program!r}")

    def _group(self, group: VertexGroup) -> str:
        pairs = list(zip(group.codelet.fields, group.accesses, strict=True))
        written = ", ".join(self._access(group, access) for field, access in pairs if field.is_written)
        read = ", ".join(self._access(group, access) for field, access in pairs if field.is_read)
        tiles = np.unique(group.tile[group.tile != NO_TILE]).size
        spread = f"{_count(group.num_vertices, 'vertex', 'vertices')} on {_count(tiles, 'tile')}"
        return f"{written} = {group.codelet.name}({read}) | {', '.join(map(_axis, group.axes))} | {spread}"

    def _access(self, group: VertexGroup, access: Access) -> str:
        dims = ",".join(_index(group.axes, dim) for dim in access.dims)
        fill = "" if access.fill is None else f"?{access.fill}"
        view = self._view(access.tensor)
        return f"{f'({view})' if ' ' in view else view}[{dims}]{fill}"

    def _rows(self, buffer: RemoteBuffer, offset: Tensor | None) -> str:
        return _quoted(buffer.name) + ("" if offset is None else f" row {self._view(offset)}")

    def _view(self, tensor: Tensor) -> str:
        return self._view_text(tensor.node)

    def _view_text(self, node: Node) -> str:
        """Return the text of a view, the views inside of it in brackets."""
        match node:
            case Affine():
                return self._affine(node)
            case Concat(axis, parts, _):
                return f"concat {axis} ({', '.join(map(self._view_text, parts))})"
            case Reshaped(source, shape):
                return f"reshape {_shape(shape)} ({self._view_text(source)})"
            case Indexed(variables, _, _):
                return f"elements {_shape(node.shape)} of ({', '.join(map(self._name, variables))})"
        raise AssertionError(f"unknown view {node!r}")

    def _affine(self, node: Affine) -> str:
        name = self._name(node.variable)
        if node.is_whole:
            return name if node.shape == node.variable.shape else f"{name} as {_shape(node.shape)}"
        dims = (".".join(f"{size}:{stride}" for size, stride in group) or "1" for group in node.dims)
        return f"{name}@{node.offset}({', '.join(dims)})"

    def _name(self, variable: Variable) -> str:
        return f"%{self._variables.setdefault(variable, len(self._variables))}"


def _placement_text(mapping: TileMapping | None) -> str:
    if mapping is None:
        return "unmapped"
    tiles = np.unique(mapping.tiles)
    if tiles.size == 1:
        return f"on tile {tiles[0]}"
    if isinstance(mapping, Blocked):
        return f"blocked {'×'.join(map(str, mapping.tile.shape))} on {_count(tiles.size, 'tile')}"
    return f"flat {_count(len(mapping.starts), 'interval')} on {_count(tiles.size, 'tile')}"


def _constant(variable: Variable) -> str:
    if variable.by_replica:
        return "constant of each replica"
    if variable.size != 1 or is_key_dtype(variable.dtype):
        return "constant"
    return f"constant {np.asarray(variable.value).reshape(())}"


def _axis(axis: Axis) -> str:
    kind = "" if axis.kind == "map" else f" {axis.kind}"
    return f"{axis.name} {axis.extent}/{axis.blocks}{kind}"


def _index(axes: Sequence[Axis], dim: Dim) -> str:
    """Return one index of an access, `2i+k-1` or `(i-1)/2`."""
    text = "".join(_term(axes, term) for term in dim.terms)
    if dim.offset or not text:
        text += f"{dim.offset:+d}"
    text = text.removeprefix("+")
    return text if dim.divisor == 1 else f"({text})/{dim.divisor}"


def _term(axes: Sequence[Axis], term: Term) -> str:
    sign = "-" if term.coeff < 0 else "+"
    size = abs(term.coeff)
    return f"{sign}{'' if size == 1 else size}{'#' if term.unit == 'block' else ''}{axes[term.axis].name}"


def _overlap(transfer: RemoteIn | RemoteOut) -> str:
    return " (overlaps)" if transfer.overlaps else ""


def _stream(stream: HostStream) -> str:
    return _quoted(stream.name) + (" (resident)" if stream.resident else " (broadcast)" if stream.broadcast else "")


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _at(origin: Origin) -> str:
    return f" at {origin.line}" if origin.line else ""


def _quoted(text: str) -> str:
    return f'"{text}"'


def _count(number: int, word: str, words: str | None = None) -> str:
    return f"{number} {word if number == 1 else words or word + 's'}"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (INDENT + line for line in lines)


def graph_counts(graph: Graph) -> Iterator[str]:
    """Yield lines for the log: the numbers of variables and their mappings, of compute sets, vertices and codelets."""
    layouts = Counter(_layout_of(graph.mappings.get(variable)) for variable in graph.variables)
    num_bytes = sum(variable.num_bytes for variable in graph.variables)
    laid_out = ", ".join(f"{count:,} {layout}" for layout, count in sorted(layouts.items()))
    yield f"{len(graph.variables):,} variables of {num_bytes:,} bytes: {laid_out or 'none'}"
    groups = [group for groups in graph.groups.values() for group in groups]
    vertices = sum(group.num_vertices for group in groups)
    yield f"{len(graph.groups):,} compute sets, {len(groups):,} vertex groups, {vertices:,} vertices"
    by_codelet: dict[str, list[VertexGroup]] = defaultdict(list)
    for group in groups:
        by_codelet[group.codelet.name].append(group)
    for name, its_groups in sorted(by_codelet.items()):
        count = f"{len(its_groups):,} group{'' if len(its_groups) == 1 else 's'}"
        yield f"codelet {name}: {sum(group.num_vertices for group in its_groups):,} vertices in {count}"


def _layout_of(mapping: TileMapping | None) -> str:
    if mapping is None:
        return "not mapped"
    if np.unique(mapping.tiles).size <= 1:
        return "on one tile"
    return "in blocks" if isinstance(mapping, Blocked) else "in intervals"
