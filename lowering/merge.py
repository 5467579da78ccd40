"""Merges compute sets that do not depend on each other: one sync and one exchange for all of them.

Input: a graph and a program of lowered equations. Output: the same program with fewer steps; its sequences change, and
a merged compute set has the vertex groups of all its members.

A compute set moves up to an earlier one of the same IPU if it is independent of that one and of all steps between.
Merging never costs cycles: tiles with work in only one of the two do it at the same time. It may cost memory, because
results are live earlier and operands of both at once; so a set moves past a few steps only, and only if the cost of the
bytes of its results on a tile is below that of the sync it saves, and operands and results of the merged set take no
more of a tile than those of one operation may. Host exchanges, loops, branches, calls and collectives are never passed.

Limits: dependence is by variable, so two writes to parts of one variable are not merged.
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

_MAX_PASSED = 16  # steps that a compute set may pass; assumed: few farther sets are independent and have small results
_MIN_BYTE_COST_CYCLES = 2.0  # cost of a byte above which a merged set may take less than one operation; assumed
_MAX_NAMES = 3  # compute sets in the name of a merged one


@dataclass(slots=True)
class _Step:
    """A step of a sequence, which grows as later compute sets are merged into it.

    Args:
        program: the step.
        effects: its effects, those of merged sets among them.
        ipu: the one IPU of a compute set that may be merged; None for other steps.
        block_bytes: bytes that its vertices read and write on a tile.
        members: compute sets that are merged into it.
    """

    program: Program
    effects: Effects
    ipu: int | None
    block_bytes: int
    members: list[ComputeSet]


def merge_compute_sets(graph: Graph, program: Program) -> None:
    """Merges independent compute sets in all sequences of a program, also those of loops and functions."""
    max_bytes = _max_block_bytes(graph)
    effects = EffectsOf(graph)
    # The rounds of a collective have a schedule of their own.
    fixed = {node for outer in distinct(program) if isinstance(outer, Collective) for node in distinct(outer)}
    for node in list(distinct(program)):
        if type(node) is ProgramSequence and node not in fixed:
            node.replace_all(_merged_steps(graph, node, effects, max_bytes))


def _merged_steps(graph: Graph, sequence: ProgramSequence, effects: EffectsOf, max_bytes: float) -> list[Program]:
    """Steps of a sequence after merging: each compute set that may run together with an earlier one is part of that.

    Fewer compute sets mean fewer syncs.

    Args:
        graph: the graph, from which merged compute sets are removed.
        sequence: the sequence.
        effects: what each step reads and writes.
        max_bytes: most bytes that vertices of a merged compute set may read and write on a tile.
    """
    steps: list[_Step] = []
    for program in sequence.children():
        step = _Step(program, effects(program), _ipu_of_mergeable(graph, program), _block_bytes(graph, program), [])
        place = None if step.ipu is None else _find_earlier_step(graph, steps, step, max_bytes - step.block_bytes)
        if place is None:
            steps.append(step)
            continue
        place.effects = _union(place.effects, step.effects)
        place.block_bytes += step.block_bytes
        assert isinstance(program, Execute)
        place.members.append(program.compute_set)
    return [_merged_step(graph, step) for step in steps]


def _max_block_bytes(graph: Graph) -> float:
    """Bytes that a merged set may read and write on a tile: as many as one operation, fewer where a byte costs more."""
    return graph.target.operation_bytes * _MIN_BYTE_COST_CYCLES / max(graph.byte_cost_cycles, _MIN_BYTE_COST_CYCLES)


def _find_earlier_step(graph: Graph, steps: list[_Step], step: _Step, max_bytes: float) -> _Step | None:
    """Earliest step that a compute set can be merged into, among those that read and write at most `max_bytes`.

    None if there is none. A set passes no step that it depends on, nor other steps than compute sets and copies.

    Args:
        graph: the graph.
        steps: the steps before the set, in order.
        step: the compute set.
        max_bytes: limit for the earlier step without this one.
    """
    place = None
    for passed, earlier in enumerate(reversed(steps[-_MAX_PASSED - 1 :])):
        movable = isinstance(earlier.program, Execute | Copy) and not _reads_clock(graph, earlier.program)
        if not movable or not _independent(earlier.effects, step.effects):
            break
        fits = earlier.ipu == step.ipu and earlier.block_bytes <= max_bytes
        if fits and (passed == 0 or _may_be_earlier(graph, step)):
            place = earlier
    return place


def _may_be_earlier(graph: Graph, step: _Step) -> bool:
    """True if results that are live earlier, as the set passes steps, cost no more than the sync that it saves."""
    return graph.byte_cost_cycles * _result_bytes(graph, step.program) <= graph.target.internal_sync_cycles


def _independent(left: Effects, right: Effects) -> bool:
    return (
        left.writes.isdisjoint(right.writes)
        and left.writes.isdisjoint(right.reads)
        and left.reads.isdisjoint(right.writes)
    )


def _union(left: Effects, right: Effects) -> Effects:
    return Effects(left.reads | right.reads, left.writes | right.writes, left.kills | right.kills)


def _ipu_of_mergeable(graph: Graph, program: Program) -> int | None:
    """IPU of all vertices of a compute set that may be merged; None for other steps.

    Fallbacks are not merged, which a profile lists by name, nor readings of the cycle counter.
    """
    if not isinstance(program, Execute) or program.compute_set in graph.notes.fallbacks or _reads_clock(graph, program):
        return None
    tiles = [tile for group in graph.groups[program.compute_set] for tile in _tile_range(group.tile)]
    ipus = {tile // graph.target.tiles_per_ipu for tile in tiles}
    return ipus.pop() if len(ipus) == 1 else None


def _reads_clock(graph: Graph, program: Program) -> bool:
    """True for a step that reads the cycle counter: cycles before and after it are told apart."""
    return isinstance(program, Execute) and any(g.codelet.reads_clock for g in graph.groups[program.compute_set])


def _tile_range(tile: np.ndarray) -> tuple[int, ...]:
    """First and last tile with a vertex; empty if there is none."""
    if not tile.size:
        return ()
    first_tile = int(tile.min())
    return (first_tile, int(tile.max())) if first_tile != NO_TILE else _tile_range(tile[tile != NO_TILE])


def _block_bytes(graph: Graph, program: Program) -> int:
    """Bytes that a compute set reads and writes on a tile: its largest blocks, or an even share if that is more."""
    if not isinstance(program, Execute):
        return 0
    total = 0
    for group in graph.groups[program.compute_set]:
        numbers = range(len(group.codelet.fields))
        sizes = zip(numbers, _largest_blocks(group, numbers), _bytes_per_tile(group, numbers), strict=True)
        total += sum(max(n * element_bytes(group.codelet.fields[number].dtype), even) for number, n, even in sizes)
    return total


def _largest_blocks(group: VertexGroup, numbers: Sequence[int]) -> list[int]:
    """Upper bound on the elements of the largest block of some fields of a group."""
    axes_by_field = [whole_axes(group, group.accesses[number]) for number in numbers]
    if None in axes_by_field:
        shapes = block_shapes(group)
        return [prod(int(np.max(length, initial=0)) for length in shapes[number]) for number in numbers]
    longest = [int(np.diff(axis.cuts).max(initial=0)) for axis in group.axes]
    return [prod(longest[axis] for axis in axes or ()) for axes in axes_by_field]


def _result_bytes(graph: Graph, program: Program) -> int:
    """Bytes of a compute set's results on a tile, if spread evenly over the tiles of its vertices."""
    assert isinstance(program, Execute)
    total = 0
    for group in graph.groups[program.compute_set]:
        results = [number for number, field in enumerate(group.codelet.fields) if field.direction == "out"]
        total += sum(_bytes_per_tile(group, results))
    return total


def _bytes_per_tile(group: VertexGroup, numbers: Iterable[int]) -> list[int]:
    """Bytes on a tile of the tensors of some fields, if spread evenly over the tiles of the vertices."""
    used = group.tile[group.tile != NO_TILE]
    # Counted in place of `np.unique`, which takes ten times as long: every compute set of a program comes here.
    tiles = int(np.count_nonzero(np.bincount(used - used.min()))) if used.size else 1
    sizes = (group.accesses[n].tensor.size * element_bytes(group.codelet.fields[n].dtype) for n in numbers)
    return [-(-size // tiles) for size in sizes]


def _merged_step(graph: Graph, step: _Step) -> Program:
    """Program of a step; if compute sets were merged into it, one compute set with the vertices of all.

    It replaces them in the graph: a copy of the one with most vertices, under the names of all in their order.
    """
    if not step.members:
        return step.program
    assert isinstance(step.program, Execute)
    members = [step.program.compute_set, *step.members]
    largest = max(members, key=lambda member: sum(group.num_vertices for group in graph.groups[member]))
    merged = replace(largest, name=_name([member.name for member in members]))
    named_groups = [(group.name or member.name, group) for member in members for group in graph.groups.pop(member)]
    graph.groups[merged] = [replace(group, name=name) for name, group in named_groups]
    return Execute(merged)


def _name(names: list[str]) -> str:
    distinct_names = list(dict.fromkeys(names))
    suffix = f" and {len(distinct_names) - _MAX_NAMES} more" if len(distinct_names) > _MAX_NAMES else ""
    return ", ".join(distinct_names[:_MAX_NAMES]) + suffix
