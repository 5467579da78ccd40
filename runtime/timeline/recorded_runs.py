"""Runs of parts whose control was recorded, each different one once: effects on the clocks, by what was decided.

An iteration of a solver decides a few times, and most iterations decide alike. So the effect of a run is a node of a
graph whose children are the effects of its parts; a run of equal children is the same node, and its max-plus matrix is
computed once. The sums of work need only the number of runs of each part without recorded control.

Input: parts, and a walk that knows their choices. Output: clocks after runs of the parts, and the sums over them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import numpy as np

from ipujax.runtime.graph import Block, Branch, Call, Loop, Program
from ipujax.runtime.tensor import Origin, compose
from ipujax.runtime.timeline import maxplus
from ipujax.runtime.timeline.clocks import StaticEffect, Sums, apply_to_rows
from ipujax.runtime.timeline.run_control import Clocks, Control

OUTSIDE = Origin()  # of functions


class LoopTest(Program):
    """The test of a loop and the decision after it, as a node that can be walked."""

    __slots__ = ("loop", "test")

    def __init__(self, loop: Loop, test: Program) -> None:
        self.loop = loop
        self.test = test

    def children(self) -> tuple[Program, ...]:
        return (self.test,)


class Walk(Protocol):
    """The walk over the program that the runs are part of, as far as they ask it."""

    @property
    def num_ipus(self) -> int:
        """IPUs of the system."""

    @property
    def slots(self) -> int:
        """Rows of the clock state beside the IPUs."""

    @property
    def control(self) -> Control:
        """Decides data-dependent control."""

    def effect_of(self, parts: tuple[Program, ...], caller: Origin) -> StaticEffect:
        """Return the effect of parts with static control, in order."""

    def effect_of_leaf(self, leaf: Program, caller: Origin) -> StaticEffect:
        """Return the effect of a leaf, or of the decision of a node without its children."""

    def test_of(self, loop: Loop, condition: Program) -> LoopTest:
        """Return the test of a loop as a node."""

    def chosen_branch(self, node: Branch, clocks: Clocks) -> int:
        """Return the branch of the current run of a node."""


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
_EffectList = list[tuple[_Effect, int]]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRuns:
    """Effects of runs of the parts of a program, kept by what was decided, and by the part of the step that calls them.

    Sums differ by the caller's part (`clocks.Runs`), which the equality of origins leaves out.
    """

    _runs: dict[_Parts, _Run] = field(default_factory=dict)  # parts before those that they are parts of
    _static: dict[tuple[tuple[Program, ...], str], StaticEffect] = field(default_factory=dict)
    _decisions: dict[tuple[Program, str], StaticEffect] = field(default_factory=dict)
    _segments: dict[tuple[Block, str], tuple[StaticEffect | Program, ...]] = field(default_factory=dict)

    def advance(self, walk: Walk, parts: tuple[Program, ...], count: int, clocks: Clocks, caller: Origin) -> Sums:
        """Advance clocks over `count` runs of parts, in order; return the sums over them, which are not added."""
        reader = _Reader(self, walk, clocks)
        used: Counter[_Effect] = Counter()
        for effect, number in reader.runs_in_a_row(parts, count, caller):
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
        if (parts, caller.part) not in self._static:
            self._static[parts, caller.part] = walk.effect_of(parts, caller)
        return self._static[parts, caller.part]

    def decision(self, walk: Walk, node: Program, caller: Origin) -> StaticEffect:
        """Return the effect of the decision of a loop or branch alone."""
        if (node, caller.part) not in self._decisions:
            self._decisions[node, caller.part] = walk.effect_of_leaf(node, caller)
        return self._decisions[node, caller.part]

    def segments(self, walk: Walk, block: Block, caller: Origin) -> tuple[StaticEffect | Program, ...]:
        """Return the parts of a block: those with recorded control, and effects of what is between them."""
        if (block, caller.part) not in self._segments:
            segments: list[StaticEffect | Program] = []
            for is_recorded, group in groupby(block.children(), walk.control.is_recorded):
                parts = tuple(group)
                segments += parts if is_recorded else (self.static(walk, parts, caller),)
            self._segments[block, caller.part] = tuple(segments)
        return self._segments[block, caller.part]


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    """Reads the choices of runs, and appends their effects to lists, each with the number of equal ones in a row."""

    runs: RecordedRuns
    walk: Walk
    clocks: Clocks

    def runs_in_a_row(self, parts: tuple[Program, ...], count: int, caller: Origin) -> _EffectList:
        """Return the effects of `count` runs of parts."""
        effects: _EffectList = []
        for _ in range(count):
            _append(effects, self._effect_of(parts, caller))
        return effects

    def _effect_of(self, parts: tuple[Program, ...], caller: Origin) -> _Effect:
        """Read the choices of the next run of parts, and return its effect: the same object for equal choices."""
        effects: _EffectList = []
        for part in parts:
            self._read(part, caller, effects)
        return self.runs.run_of(tuple(effects), self.walk.num_ipus + self.walk.slots)

    def _read(self, part: Program, caller: Origin, effects: _EffectList) -> None:
        """Read the choices of the next run of a part, in the order of `Walk.visit`, and append its effects on clocks.

        Parts of a block with recorded control are an effect each: blocks that decide alike in part share them.
        """
        walk = self.walk
        if not walk.control.is_recorded(part):
            _append(effects, self.runs.static(walk, (part,), caller))
            return
        match part:
            case Call(function, origin):  # before blocks, of which it is one
                self._read(function.body, compose(caller, origin) if origin != OUTSIDE else caller, effects)
            case Block():
                for segment in self.runs.segments(walk, part, caller):
                    effect = self._effect_of((segment,), caller) if isinstance(segment, Program) else segment
                    _append(effects, effect)
            case Loop(test=condition):
                test = () if condition is None else (walk.test_of(part, condition),)
                for each in test:
                    self._read(each, caller, effects)
                count = walk.control.trip_count(part, self.clocks)
                body = (part.body, *test)
                if any(map(walk.control.is_recorded, body)):
                    for effect, number in self.runs_in_a_row(body, count, caller):
                        _append(effects, effect, number)
                elif count:
                    _append(effects, self.runs.static(walk, body, caller), count)
            case LoopTest():
                self._read(part.test, caller, effects)
                _append(effects, self.runs.decision(walk, part.loop, caller))
            case Branch():
                _append(effects, self.runs.decision(walk, part, caller))
                self._read(part.children()[walk.chosen_branch(part, self.clocks)], caller, effects)
            case _:
                raise AssertionError(f"{part} has no recorded control")


def _append(effects: _EffectList, effect: _Effect, count: int = 1) -> None:
    """Append an effect with its number of runs; one more of the last effect is added to its number."""
    if effects and effects[-1][0] is effect:
        effects[-1] = effect, effects[-1][1] + count
    else:
        effects.append((effect, count))
