"""Merges compute sets that do not depend on each other: one sync and one exchange for all of them.

Input: a graph and a program of lowered equations. Output: the same program with fewer steps; its sequences change, and
compute sets that took others in have their vertex groups.

A compute set moves up to an earlier one of the same IPU if no step between them, nor that one, touches what it touches.
Merging never takes more cycles: tiles that had work in only one of the two do it at the same time. What it may cost is
memory, since results are there earlier and operands of both at once; so a set moves only past a few steps, and only if
the bytes of its results on a tile are worth less than the sync it saves, and the operands of a merged set take no more
of a tile than those of one operation may. Host exchanges, loops, branches, calls and collectives are never passed.

Limits: dependence is by variable, so two writes to parts of one variable stay apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ipujax.runtime.analysis import Effects, EffectsOf
from ipujax.runtime.cost import block_shapes
from ipujax.runtime.graph import (
    NO_TILE,
    Collective,
    ComputeSet,
    Copy,
    Execute,
    Graph,
    Program,
    Sequence as ProgramSequence,
    VertexGroup,
    distinct,
    whole_axes,
)
from ipujax.runtime.tensor import element_bytes

_MOST_PASSED = 16  # steps that a compute set moves past; assumed: further away little is independent and still small
_LEAST_PRICE_CYCLES = 2.0  # of a byte, above which a merged set may read less than one operation; assumed
_NAMED = 3  # compute sets in the name of a merged one


@dataclass(slots=True)
class _Step:
    """A step of a sequence, its effects and, of a compute set, the IPU of all its vertices and what these read."""

    program: Program
    effects: Effects
    ipu: int | None
    operand_bytes: int
    taken_in: list[ComputeSet]


def merge_compute_sets(graph: Graph, program: Program) -> None:
    """Merges what can be merged in all sequences of a program, those of loops and functions too."""
    most_bytes = _most_operand_bytes(graph)
    effects = EffectsOf(graph)
    fixed = {node for outer in distinct(program) if isinstance(outer, Collective) for node in distinct(outer)}
    for node in list(distinct(program)):
        if type(node) is ProgramSequence and node not in fixed:
            node.replace_all(_merged(graph, node, effects, most_bytes))


def _merged(graph: Graph, sequence: ProgramSequence, effects: EffectsOf, most_bytes: float) -> list[Program]:
    steps: list[_Step] = []
    for program in sequence.children():
        step = _Step(program, effects(program), _ipu(graph, program), _operand_bytes(graph, program), [])
        place = None if step.ipu is None else _place_for(graph, steps, step, most_bytes - step.operand_bytes)
        if place is None:
            steps.append(step)
            continue
        place.effects = _both(place.effects, step.effects)
        place.operand_bytes += step.operand_bytes
        assert isinstance(program, Execute)
        place.taken_in.append(program.compute_set)
    return [_with_taken_in(graph, step) for step in steps]


def _most_operand_bytes(graph: Graph) -> float:
    """What a merged set may read on a tile: as much as one operation; above a price, in proportion less."""
    target, price = graph.target, graph.byte_price_cycles
    return (
        target.available_memory_proportion
        * target.bytes_per_tile
        * _LEAST_PRICE_CYCLES
        / max(price, _LEAST_PRICE_CYCLES)
    )


def _place_for(graph: Graph, steps: list[_Step], step: _Step, most_bytes: float) -> _Step | None:
    """The earliest step that a compute set can be merged into, if that reads few enough bytes."""
    found = None
    held_cycles = graph.byte_price_cycles * _result_bytes(graph, step.program)
    for passed, earlier in enumerate(reversed(steps[-_MOST_PASSED - 1 :])):
        movable = isinstance(earlier.program, Execute | Copy)
        if not movable or not _independent(earlier.effects, step.effects):
            break
        is_worth = passed == 0 or held_cycles <= graph.target.internal_sync_cycles
        if earlier.ipu == step.ipu and is_worth and earlier.operand_bytes <= most_bytes:
            found = earlier
    return found


def _independent(one: Effects, other: Effects) -> bool:
    return (
        one.writes.isdisjoint(other.writes)
        and one.writes.isdisjoint(other.reads)
        and one.reads.isdisjoint(other.writes)
    )


def _both(one: Effects, other: Effects) -> Effects:
    return Effects(one.reads | other.reads, one.writes | other.writes, one.kills | other.kills)


def _ipu(graph: Graph, program: Program) -> int | None:
    """The IPU that all vertices of a compute set are on; None for other steps, and for what is told of by name."""
    if not isinstance(program, Execute) or program.compute_set in graph.fallbacks:
        return None
    ends = [end for group in graph.groups[program.compute_set] for end in _ends(group.tile)]
    ipus = {tile // graph.target.tiles_per_ipu for tile in ends}
    return ipus.pop() if len(ipus) == 1 else None


def _ends(tile: np.ndarray) -> tuple[int, ...]:
    """The first and the last tile that have a vertex; nothing where none has."""
    if not tile.size:
        return ()
    first = int(tile.min())
    return (first, int(tile.max())) if first != NO_TILE else _ends(tile[tile != NO_TILE])


def _operand_bytes(graph: Graph, program: Program) -> int:
    """Bytes of what a compute set reads on a tile: its largest vertices, or all of them were that spread evenly."""
    if not isinstance(program, Execute):
        return 0
    total = 0
    for group in graph.groups[program.compute_set]:
        read = [number for number, field in enumerate(group.codelet.fields) if field.is_read]
        sizes = zip(read, _largest_blocks(group, read), _bytes_per_tile(group, read), strict=True)
        total += sum(max(n * element_bytes(group.codelet.fields[number].dtype), even) for number, n, even in sizes)
    return total


def _largest_blocks(group: VertexGroup, numbers: Sequence[int]) -> list[int]:
    """For some fields of a group no fewer elements than the largest of their blocks has."""
    named = [whole_axes(group, group.accesses[number]) for number in numbers]
    if None in named:
        shapes = block_shapes(group)
        return [prod(int(np.max(length, initial=0)) for length in shapes[number]) for number in numbers]
    longest = [int(np.diff(axis.cuts).max(initial=0)) for axis in group.axes]
    return [prod(longest[axis] for axis in axes or ()) for axes in named]


def _result_bytes(graph: Graph, program: Program) -> int:
    """Bytes of the results of a compute set on a tile, were they spread evenly over its vertices' tiles."""
    assert isinstance(program, Execute)
    total = 0
    for group in graph.groups[program.compute_set]:
        results = [number for number, field in enumerate(group.codelet.fields) if field.direction == "out"]
        total += sum(_bytes_per_tile(group, results))
    return total


def _bytes_per_tile(group: VertexGroup, numbers: Iterable[int]) -> list[int]:
    """Bytes on a tile of the tensors of some fields, were each spread evenly over the tiles of the vertices."""
    tiles = max(1, int(np.count_nonzero(np.bincount((group.tile - NO_TILE).ravel())[1:])))
    sizes = (group.accesses[n].tensor.size * element_bytes(group.codelet.fields[n].dtype) for n in numbers)
    return [-(-size // tiles) for size in sizes]


def _with_taken_in(graph: Graph, step: _Step) -> Program:
    """The step as one compute set; those it took in leave the graph."""
    if not step.taken_in:
        return step.program
    assert isinstance(step.program, Execute)
    members = [step.program.compute_set, *step.taken_in]
    largest = max(members, key=lambda one: sum(group.num_vertices for group in graph.groups[one]))
    merged = replace(largest, name=_name([one.name for one in members]))
    named = [(group.name or one.name, group) for one in members for group in graph.groups.pop(one)]
    graph.groups[merged] = [replace(group, name=name) for name, group in named]
    return Execute(merged)


def _name(names: list[str]) -> str:
    several = list(dict.fromkeys(names))
    more = f" and {len(several) - _NAMED} more" if len(several) > _NAMED else ""
    return ", ".join(several[:_NAMED]) + more
