"""Results that are written over an operand: variables with one address, each of which takes the memory of another.

A result takes the memory of an operand where an elementwise vertex group, the only one that reads the operand in its
compute set, writes an element of the result where it reads the same element of the operand, for the last time; and
where both have as many bytes on every tile. Apart from such compute sets they are never live together.

Input: a graph and the frames of its program. Output: the frames, in which an operand is no longer live at the step that
writes over it, and the variable whose memory each result takes.
Source: popops/ElementWise.hpp, `mapInPlace`, and PopART's pass that makes operations work in place.
Limits: one result takes the memory of one operand; a result that is written in parts takes none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ipujax.runtime.analysis import Liveness
from ipujax.runtime.analysis.liveness import Interval
from ipujax.runtime.cost import bytes_in_memory
from ipujax.runtime.graph import Access, Execute, Graph, VertexGroup
from ipujax.runtime.memory.frames import Frames, Owner
from ipujax.runtime.memory.packing import Span, merge_spans
from ipujax.runtime.tensor import Tensor, Variable, substitute

Pair = tuple[Variable, Variable]  # an operand, and the result that may be written over it


def with_results_in_place(graph: Graph, frames: Frames) -> Frames:
    """Return the frames in which results take the memory of operands, with `Frames.memory`."""
    liveness: dict[Owner, Liveness] = {}
    memory: dict[Variable, Variable] = {}
    for owner, frame in frames.liveness.items():
        shared = _join_in_order(frame, _pairs_of(graph, frame))
        liveness[owner] = shared.frame
        memory.update(shared.memory)
    return replace(frames, liveness=liveness, memory=memory)


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """A frame in which results take the memory of operands, and the variable whose memory each of them takes."""

    frame: Liveness
    memory: Mapping[Variable, Variable]


def _pairs_of(graph: Graph, frame: Liveness) -> Mapping[Pair, set[int]]:
    """Return the operands that end where a result begins which may be written over them, with these positions."""
    starts: dict[int, set[Variable]] = defaultdict(set)
    last_at: dict[int, set[Variable]] = defaultdict(set)
    for interval in frame.intervals:
        starts[interval.first].add(interval.variable)
        last_at[interval.last].add(interval.variable)
    pairs: dict[Pair, set[int]] = defaultdict(set)
    for position in sorted(starts.keys() & last_at.keys()):
        step = frame.steps[position]
        if isinstance(step, Execute):
            for operand, result in _pairs_in(graph, graph.groups[step.compute_set]):
                if operand in last_at[position] and result in starts[position]:
                    pairs[operand, result].add(position)
    return pairs


def _pairs_in(graph: Graph, groups: Sequence[VertexGroup]) -> Iterator[Pair]:
    """Yield the pairs of a compute set, whatever is live."""
    if not any(group.codelet.in_place for group in groups):
        return
    uses: dict[Variable, int] = defaultdict(int)
    for variable in (v for group in groups for access in group.accesses for v in access.tensor.variables()):
        uses[variable] += 1
    for group in groups:
        if group.codelet.in_place:
            fields = list(zip(group.codelet.fields, group.accesses, strict=True))
            read = [access for field, access in fields if field.is_read]
            for result in (access for field, access in fields if not field.is_read):
                yield from _pairs_of_result(graph, read, result, lambda variable: uses[variable] == 1)


def _pairs_of_result(
    graph: Graph, read: Iterable[Access], result: Access, is_used_once: Callable[[Variable], bool]
) -> Iterator[Pair]:
    """Yield the operands of a vertex group that one of its results may be written over, each with that result."""
    written = _only_variable(result.tensor)
    if written is None or not is_used_once(written):
        return
    for access in read:
        operand = _only_variable(access.tensor)
        if operand is None or not is_used_once(operand) or not _are_alike(graph, operand, written):
            continue
        if Access(substitute(access.tensor, {operand: written}), access.dims).is_same(result):
            yield operand, written


def _only_variable(tensor: Tensor) -> Variable | None:
    variables = set(tensor.variables())
    return variables.pop() if len(variables) == 1 else None


def _are_alike(graph: Graph, x: Variable, y: Variable) -> bool:
    """Return whether two variables have the same elements, of equal bytes, on every tile."""
    if x.is_constant or x.size != y.size or graph.mappings[x] != graph.mappings[y]:
        return False
    lengths = graph.padded_lengths
    return bytes_in_memory(x, lengths) == bytes_in_memory(y, lengths)


def _join_in_order(frame: Liveness, pairs: Mapping[Pair, set[int]]) -> _Shared:
    """Join the pairs that are live together only where one is written over the other, the first pairs first."""
    spans: dict[Variable, list[Span]] = defaultdict(list)  # of all variables in the memory of one
    for interval in frame.intervals:
        spans[interval.variable].append((interval.first, interval.last))
    memory: dict[Variable, Variable] = {}
    overwritten: dict[Variable, set[int]] = {}  # operand → steps that write over it
    for (operand, result), positions in pairs.items():
        place = _place(memory, operand)
        other = _place(memory, result)
        is_free = result not in memory and operand not in overwritten and place is not other
        if is_free and _common_steps(spans[place], spans[other]) <= positions:
            ended = [(first, last - 1 if last in positions else last) for first, last in spans[place]]
            spans[place] = list(merge_spans([*ended, *spans.pop(other)]))
            overwritten[operand] = positions
            memory[result] = place
    intervals = tuple(_ended_before(frame.intervals, overwritten))
    return _Shared(replace(frame, intervals=intervals), {x: _place(memory, x) for x in memory})


def _place(memory: Mapping[Variable, Variable], variable: Variable) -> Variable:
    """Return the variable that has the memory of another in the end."""
    while variable in memory:
        variable = memory[variable]
    return variable


def _common_steps(spans: Iterable[Span], other_spans: Sequence[Span]) -> set[int]:
    """Return the steps that lie in a span of each, or as many of them as show that there are several."""
    overlaps = ((max(low, first), min(high, last)) for low, high in spans for first, last in other_spans)
    return {step for low, high in overlaps if low <= high for step in (low, high)}


def _ended_before(intervals: Iterable[Interval], overwritten: Mapping[Variable, set[int]]) -> Iterator[Interval]:
    """Yield intervals, those of operands without the step that writes over them."""
    for interval in intervals:
        is_ended = interval.last in overwritten.get(interval.variable, ())
        last = interval.last - is_ended
        if interval.first <= last:
            yield replace(interval, last=last)
