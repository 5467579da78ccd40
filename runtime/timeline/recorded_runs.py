"""Runs of parts whose control was recorded, each different one once: effects on the clocks, by what was decided.

An iteration of a solver decides a few times, and most iterations decide alike. So the effect of a run is a node of a
graph whose children are the effects of its parts; a run of equal children is the same node, and its max-plus matrix is
computed once. The sums of work need only the number of runs of each part without recorded control.

Input: parts, and a walk that knows their choices. Output: clocks after runs of the parts, and the sums over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from ipujax.runtime.graph import Block, Branch, Call, Loop, Program
from ipujax.runtime.tensor import Origin, compose
from ipujax.runtime.timeline import maxplus
from ipujax.runtime.timeline.static_effect import StaticEffect, Sums, apply_to_rows

if TYPE_CHECKING:
    from ipujax.runtime.timeline.clock_walk import Clocks, Walk

OUTSIDE = Origin()  # of functions


class LoopTest(Program):
    """The test of a loop and the decision after it, as a node that can be walked."""

    __slots__ = ("loop", "test")

    def __init__(self, loop: Loop, test: Program) -> None:
        self.loop = loop
        self.test = test

    def children(self) -> tuple[Program, ...]:
        return (self.test,)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Effect of a run of parts, of which some have recorded control.

    Args:
        rows: rows of the clock state that they read or change.
        matrix: max-plus matrix over these rows, int64[rows, rows].
        parts: effects in their order, each with its number of runs in a row.
    """

    rows: tuple[int, ...]
    matrix: np.ndarray
    parts: _Parts


_Effect = StaticEffect | _Run
_Parts = tuple[tuple[_Effect, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRuns:
    """Effects of runs of the parts of a program, kept by what was decided."""

    _runs: dict[_Parts, _Run] = field(default_factory=dict)  # parts before those that they are parts of
    _static: dict[tuple[tuple[Program, ...], Origin], StaticEffect] = field(default_factory=dict)
    _decisions: dict[tuple[Program, Origin], StaticEffect] = field(default_factory=dict)
    _segments: dict[Program, tuple[tuple[Program, ...], ...]] = field(default_factory=dict)

    def advance(self, walk: Walk, parts: tuple[Program, ...], count: int, clocks: Clocks, caller: Origin) -> Sums:
        """Advance clocks over `count` runs of parts, in order; return the sums over them, which are not added."""
        reader = _Reader(self, walk, clocks)
        used: Counter[_Effect] = Counter()
        for effect, number in reader.in_a_row(parts, count, caller):
            apply_to_rows(effect.matrix, effect.rows, clocks.state, number)
            used[effect] += number
        for run in reversed(self._runs.values()):
            number = used.pop(run, 0)
            for part, times in run.parts if number else ():
                used[part] += number * times
        sums = Sums.none(walk.num_ipus)
        for effect, number in used.items():
            assert isinstance(effect, StaticEffect)
            sums.add(effect.sums.times(number))
        return sums

    def run_of(self, parts: _Parts, clock_rows: int) -> _Effect:
        """Return the effect of parts in order."""
        if len(parts) == 1 and parts[0][1] == 1:
            return parts[0][0]
        if parts not in self._runs:
            rows = tuple(sorted({row for effect, _ in parts for row in effect.rows}))
            state = maxplus.identity(clock_rows)[:, rows]
            for effect, count in parts:
                apply_to_rows(effect.matrix, effect.rows, state, count)
            self._runs[parts] = _Run(rows, state[list(rows)], parts)
        return self._runs[parts]

    def static(self, walk: Walk, parts: tuple[Program, ...], caller: Origin) -> StaticEffect:
        """Return the effect of parts without recorded control, in order."""
        if (parts, caller) not in self._static:
            self._static[parts, caller] = walk.effect_of(parts, caller)
        return self._static[parts, caller]

    def decision(self, walk: Walk, node: Program, caller: Origin) -> StaticEffect:
        """Return the effect of the decision of a loop or branch alone."""
        if (node, caller) not in self._decisions:
            self._decisions[node, caller] = walk.effect_of_leaf(node, caller)
        return self._decisions[node, caller]

    def segments(self, walk: Walk, block: Block) -> tuple[tuple[Program, ...], ...]:
        """Return the parts of a block, consecutive ones without recorded control together."""
        if block not in self._segments:
            groups = [(alike, tuple(parts)) for alike, parts in groupby(block.children(), walk.control.is_recorded)]
            segments = [((part,) for part in parts) if is_recorded else (parts,) for is_recorded, parts in groups]
            self._segments[block] = tuple(segment for group in segments for segment in group)
        return self._segments[block]


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    """Reads the choices of runs, and returns their effects."""

    runs: RecordedRuns
    walk: Walk
    clocks: Clocks

    def in_a_row(self, parts: tuple[Program, ...], count: int, caller: Origin) -> Iterator[tuple[_Effect, int]]:
        """Yield the effects of `count` runs of parts, each with the number of equal ones in a row."""
        effects = (self._effect_of(self._parts_of(parts, caller)) for _ in range(count))
        return _with_counts((effect, 1) for effect in effects)

    def _effect_of(self, parts: Iterator[tuple[_Effect, int]]) -> _Effect:
        return self.runs.run_of(tuple(_with_counts(parts)), self.walk.num_ipus + self.walk.slots)

    def _parts_of(self, parts: tuple[Program, ...], caller: Origin) -> Iterator[tuple[_Effect, int]]:
        """Yield the effects of parts in order, of which those with recorded control stand alone."""
        for part in parts:
            if not self.walk.control.is_recorded(part):
                yield self.runs.static(self.walk, (part,), caller), 1
            elif isinstance(part, Block):
                for segment in self.runs.segments(self.walk, part):
                    if len(segment) == 1 and self.walk.control.is_recorded(segment[0]):
                        yield self._effect_of(self._recorded(segment[0], caller)), 1
                    else:
                        yield self.runs.static(self.walk, segment, caller), 1
            else:
                yield from self._recorded(part, caller)

    def _recorded(self, part: Program, caller: Origin) -> Iterator[tuple[_Effect, int]]:
        """Yield the effects of a part with recorded control, as `Walk.visit` runs it."""
        walk = self.walk
        match part:
            case Call(function, origin):
                caller = compose(caller, origin) if origin != OUTSIDE else caller
                yield from self._parts_of((function.body,), caller)
            case Loop(test=condition):
                test = () if condition is None else (walk.test_of(part, condition),)
                yield from self._parts_of(test, caller)
                count = walk.control.trip_count(part, self.clocks)
                body = (part.body, *test)
                if any(map(walk.control.is_recorded, body)):
                    yield from self.in_a_row(body, count, caller)
                elif count:
                    yield self.runs.static(walk, body, caller), count
            case LoopTest():
                yield from self._parts_of((part.test,), caller)
                yield self.runs.decision(walk, part.loop, caller), 1
            case Branch():
                yield self.runs.decision(walk, part, caller), 1
                yield from self._parts_of((part.children()[walk.chosen_branch(part, self.clocks)],), caller)
            case _:
                yield from self._parts_of((part,), caller)


def _with_counts(effects: Iterator[tuple[_Effect, int]]) -> Iterator[tuple[_Effect, int]]:
    """Yield effects with the numbers of equal ones in a row."""
    latest: _Effect | None = None
    number = 0
    for effect, count in effects:
        if effect is latest:
            number += count
            continue
        if latest is not None:
            yield latest, number
        latest, number = effect, count
    if latest is not None:
        yield latest, number
