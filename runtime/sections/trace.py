"""Ids of the programs that ran, one after the other: every iteration of every loop.

Input: the numbering of an executable, its timeline, and recorded choices of data-dependent control. Output: the first
ids, and the number of all.
Source: Poplar & PopLibs user guide, "Profiling", section "Program trace information".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from ipujax.runtime.graph import Block, Branch, Decision, Loop, Program, fold, while_names
from ipujax.runtime.sections.ids import Numbering
from ipujax.runtime.timeline import Recording, Timeline

TRACE_LIMIT = 100_000  # ids; a longer trace is cut off


def program_trace(
    program: Program,
    ids: Numbering,
    timeline: Timeline,
    trip_counts: Mapping[str, int],
    recording: Recording | None,
    limit: int = TRACE_LIMIT,
) -> tuple[list[int], int]:
    """Return the ids of the first programs that ran, and the number of all.

    Args:
        program: that ran.
        ids: the numbering of its executable.
        timeline: of the run.
        trip_counts: iterations of loops by name, for those that were not recorded.
        recording: choices of data-dependent control.
        limit: number of ids to return at most.
    """
    # The length is a product of counts: a trace of millions of ids is never walked.
    length = sum(runs * len(ids.programs_of(node)) for node, runs in timeline.executions.items())
    tracer = _Tracer(program, ids, timeline, trip_counts, recording or {})
    return list(islice(tracer.visit(program), limit)), length


class _Tracer:
    """Walk of a program as it ran."""

    def __init__(
        self, program: Program, ids: Numbering, timeline: Timeline, trip_counts: Mapping[str, int], recording: Recording
    ) -> None:
        self.ids = ids
        self.static_choices = timeline.taken
        self.trip_counts = trip_counts
        self.names = while_names(program)
        self.recorded = {node: iter(choices) for node, choices in recording.items()}
        self.has_programs = fold(self._has_programs)  # remembered by node

    def visit(self, node: Program) -> Iterator[int]:
        match node:
            case Block():
                for child in node.children():
                    yield from self.visit(child)
            case Loop(test=None):
                # A long loop without programs would take time and yield nothing.
                for _ in range(self.trips(node) if self.has_programs(node.body) else 0):
                    yield from self.visit(node.body)
            case Loop(test=Program() as test):
                yield from self.visit(test)
                yield from self.ids.programs_of(node)
                for _ in range(self.trips(node)):  # the test runs once more than the body
                    yield from self.visit(node.body)
                    yield from self.visit(test)
                    yield from self.ids.programs_of(node)
            case Branch():
                yield from self.ids.programs_of(node)
                yield from self.visit(node.children()[self.choice(node)])
            case _:
                yield from self.ids.activity_ids(node)

    def _has_programs(self, node: Program, children: list[bool]) -> bool:
        return isinstance(node, Decision) or bool(self.ids.activity_ids(node)) or any(children)

    def trips(self, loop: Loop) -> int:
        if loop.trips is not None:
            return loop.trips
        if loop in self.recorded:
            return int(next(self.recorded[loop]))
        return next(self.trip_counts[name] for name in self.names[loop] if name in self.trip_counts)

    def choice(self, node: Branch) -> int:
        if node not in self.recorded:
            return self.static_choices[node]
        return node.recorded_choice(int(next(self.recorded[node])))
