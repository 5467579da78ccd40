"""Copies that an engine adds or splits: operands and results between IPUs, and large copies of streams.

A vertex may be connected to memory of another IPU. Input: a graph and programs. Output: both with a copy before each
compute set that reads elements of other IPUs, and one after each that writes some. An operand with such elements is
copied as a whole to the tile of its vertex, in a variable that the vertex reads instead; an operand that vertices of
several tiles share goes to the tile of the first of them.

Poplar does so too: a connection may be to any tile of the system, and its exchange then crosses IPUs.
Limits: the vertices of an operation of a library that span several IPUs stay as they are, and the verifier refuses
them; one copy for each dtype, each an exchange of its own.

Copies of streams have a size limit: larger ones are an error that names the limit, or are several, with syncs between
them, so that one host buffer is enough for all parts.
Source: Poplar & PopLibs user guide, "Stream buffer size limit". The limit is on the bytes of each IPU; the split counts
all bytes of a copy, so that no part exceeds the limit for any tile mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ipujax.poplar.engine.streams import StreamPart
from ipujax.runtime.cost import tensor_tile_bytes
from ipujax.runtime.errors import EngineError
from ipujax.runtime.graph import (
    Access,
    Call,
    ComputeSet,
    Copy,
    Execute,
    Function,
    Graph,
    HostStream,
    Program,
    Sequence as ProgramSequence,
    StreamIn,
    StreamOut,
    Sync,
    VertexGroup,
    WholeOperation,
    block,
    distinct,
)
from ipujax.runtime.tensor import Flat, Tensor, Variable, concat, element_bytes, freeze
from ipujax.runtime.verify import IpuLookup


def check_stream_sizes(graph: Graph, program: Program) -> None:
    """Raise EngineError for a stream copy that moves more to or from an IPU than its stream buffer has room for."""
    limit_bytes = graph.target.stream_buffer_limit_bytes
    for node in distinct(program):
        match node:
            case StreamIn(stream, tensor, origin) | StreamOut(tensor, stream, origin):
                # A tensor within the limit is so on any IPU: only larger ones are worth the count by tile.
                if tensor.size * element_bytes(tensor.dtype) <= limit_bytes or not graph.is_mapped(tensor):
                    continue
                ipu_bytes = int(tensor_tile_bytes(graph, tensor).reshape(graph.target.num_ipus, -1).sum(1).max())
                if ipu_bytes > limit_bytes:
                    raise EngineError(
                        f"one copy of stream {stream.name} is over the stream buffer size limit",
                        where=origin,
                        expected=f"at most {limit_bytes:,} bytes an IPU",
                        got=f"{ipu_bytes:,} bytes",
                        hint='Engine(…, {"streams.splitLargeCopies": "true"}), or several smaller copies',
                    )


def split_large_copies(program: Program, limit_bytes: int) -> Program:
    """Split every stream copy over the limit into copies within it."""
    # A function that is called twice must stay one function.
    functions: dict[Function, Function] = {}

    def visit(node: Program) -> Program:
        match node:
            case StreamIn(stream, tensor) | StreamOut(tensor, stream):
                # Tensors in copies of users' streams are flat.
                if tensor.size * element_bytes(tensor.dtype) > limit_bytes and tensor.ndim == 1:
                    return _split_copy(node, stream, tensor, limit_bytes)
            case Call(function):
                if function not in functions:
                    functions[function] = replace(function, body=visit(function.body))
                return replace(node, function=functions[function])
        return node.rebuild([visit(child) for child in node.children()])

    return visit(program)


def _split_copy(node: StreamIn | StreamOut, stream: HostStream, tensor: Tensor, limit_bytes: int) -> Program:
    """Return copies of the parts of one transfer, a sync between any two."""
    part_elements = max(1, limit_bytes // element_bytes(tensor.dtype))
    program = ProgramSequence()
    for start in range(0, tensor.size, part_elements):
        part = tensor[start : start + part_elements]
        shape = part.shape
        name = stream.name
        part_stream = StreamPart(name, shape, stream.dtype, broadcast=stream.broadcast, transfer=stream, start=start)
        if start:  # the host refills its one buffer between parts
            program.add(Sync("external", node.origin))
        is_in = isinstance(node, StreamIn)
        program.add(StreamIn(part_stream, part, node.origin) if is_in else StreamOut(part, part_stream, node.origin))
    return program


def with_ipu_copies(graph: Graph, programs: Sequence[Program]) -> tuple[Graph, tuple[Program, ...]]:
    """Return a graph whose vertices touch memory of their own IPU, and the programs with the copies that this needs."""
    if graph.target.num_ipus == 1:
        return graph, tuple(programs)
    ipus = IpuLookup(graph)
    sets = {node.compute_set: None for p in programs for node in distinct(p) if isinstance(node, Execute)}
    foreign = {each: list(_foreign_operands(graph.groups[each], graph, ipus)) for each in sets if each in graph.groups}
    if not any(foreign.values()):
        return graph, tuple(programs)
    flat = graph.flat_copy()
    copies = {each: _add_copies(flat, each, operands) for each, operands in foreign.items() if operands}
    functions: dict[Function, Function] = {}
    return flat, tuple(_with_copies(program, copies, functions) for program in programs)


@dataclass(frozen=True, slots=True, eq=False)
class _ForeignOperand:
    """Blocks of an access that have elements on another IPU than their vertices.

    Args:
        group: number of the vertex group in its compute set.
        field: number of the field.
        rows: the blocks, rows of the tensor; none if its elements are not divided among the vertices.
        tiles: tile of each of `rows`, or the one tile to which the tensor goes.
    """

    group: int
    field: int
    rows: np.ndarray | None
    tiles: np.ndarray


def _foreign_operands(groups: Sequence[VertexGroup], graph: Graph, ipus: IpuLookup) -> Iterator[_ForeignOperand]:
    """Yield the operands of a compute set that are not on the IPU of their vertices."""
    for number, group in enumerate(groups):
        tiles = group.tile[group.tile >= 0]
        if not tiles.size or ipus.of_tile(tiles.min()) != ipus.of_tile(tiles.max()):
            continue
        for field, access in enumerate(group.accesses):
            is_mapped = all(v in graph.mappings for v in access.tensor.variables())
            if not is_mapped or ipus.is_surely_local(group, access):
                continue
            vertices = np.unique(ipus.foreign_elements(group, access).vertex)
            if not vertices.size:
                continue
            # Rows move to their vertices one by one; a tensor that all vertices read moves as a whole, to one tile.
            if _has_rows(group, access):
                yield _ForeignOperand(number, field, vertices, tiles[vertices])
            else:
                yield _ForeignOperand(number, field, None, tiles[:1])


def _has_rows(group: VertexGroup, access: Access) -> bool:
    """Return whether row v of the tensor is the block of vertex v, as in groups of vertices that were added singly."""
    return bool(access.dims) and access.dims[0] == block(0) and access.tensor.shape[0] == group.tile.size


_Copies = tuple[list[Copy], list[Copy]]  # before and after a compute set


def _add_copies(flat: Graph, compute_set: ComputeSet, operands: Sequence[_ForeignOperand]) -> _Copies:
    """Connect vertices to variables on their tiles; return the copies to these, and from them."""
    groups = list(flat.groups[compute_set])
    before: dict[np.dtype, list[tuple[Tensor, Tensor]]] = {}
    after: dict[np.dtype, list[tuple[Tensor, Tensor]]] = {}
    for operand in operands:
        group = groups[operand.group]
        access = group.accesses[operand.field]
        field = group.codelet.fields[operand.field]
        which, index = access.tensor.flat_indices()
        rows = slice(None) if operand.rows is None else operand.rows
        variables = access.tensor.variables()
        elements = _listed(variables, which[rows], index[rows], access.tensor.dtype)
        landing = _landing(flat, compute_set, field.name, elements, operand.tiles)
        which, index = (np.array(values) for values in (which, index))
        which[rows] = len(variables)
        index[rows] = np.arange(elements.size).reshape(elements.shape)
        tensor = _listed((*variables, *landing.variables()), which, index, access.tensor.dtype)
        accesses = [*group.accesses]
        accesses[operand.field] = replace(access, tensor=tensor)
        groups[operand.group] = replace(group, accesses=tuple(accesses))
        pair = (elements.flatten(), landing.flatten())
        if field.is_read:
            before.setdefault(elements.dtype, []).append(pair)
        if field.is_written:
            after.setdefault(elements.dtype, []).append(pair[::-1])
    flat.groups[compute_set] = groups
    name = compute_set.name
    return _joined(before, f"{name}/operands", compute_set), _joined(after, f"{name}/results", compute_set)


def _listed(variables: tuple[Variable, ...], which: np.ndarray, index: np.ndarray, dtype: np.dtype) -> Tensor:
    """Return a tensor of single elements: number of the variable, and index in it, of each."""
    used, number = np.unique(which, return_inverse=True)
    names = tuple(variables[n] for n in used)
    return Tensor(freeze(names, number.reshape(which.shape).astype(np.int64), index), which.shape, dtype)


def _landing(flat: Graph, compute_set: ComputeSet, name: str, elements: Tensor, tiles: np.ndarray) -> Tensor:
    """Add a variable of the shape of some elements, of which each tile of `tiles` has an equal part."""
    starts = np.arange(len(tiles), dtype=np.int64) * (elements.size // len(tiles))
    mapping = Flat(elements.size, starts, tiles.astype(np.int32))
    return flat.add_variable(elements.shape, elements.dtype, f"{compute_set.name}/{name}", mapping)


def _joined(pairs: dict[np.dtype, list[tuple[Tensor, Tensor]]], name: str, compute_set: ComputeSet) -> list[Copy]:
    """Return one copy for each dtype."""
    copies = []
    for parts in pairs.values():
        sources, destinations = zip(*parts, strict=True)
        copies.append(Copy(concat(sources), concat(destinations), name, compute_set.origin))
    return copies


def _with_copies(program: Program, copies: dict[ComputeSet, _Copies], functions: dict[Function, Function]) -> Program:
    """Put the copies of each compute set around its executions."""
    match program:
        case Execute(compute_set) if compute_set in copies:
            before, after = copies[compute_set]
            return ProgramSequence(*before, program, *after)
        case WholeOperation():
            return program
        case Call(function):
            if function not in functions:
                functions[function] = replace(function, body=_with_copies(function.body, copies, functions))
            return replace(program, function=functions[function])
    children = [_with_copies(child, copies, functions) for child in program.children()]
    return program.rebuild(children) if children else program
