"""Iterations of the Python loops that equations were traced in, inferred from the order of equations.

Input: for each equation, in the order of tracing, the frames it was traced in. Output: for each frame the numbers of
the iterations of the loops around its place.

    for p in params:          dot_general   loss@12 > block@4     the first iteration of the loop around loss@12
        x = block(p, x)       tanh          loss@12 > block@9
                              dot_general   loss@12 > block@4     block goes back, and has no loop: it is called again

In one run of a function places only go forward, except in its loops. So a place that is not after that of the equation
before it is in the next iteration of the innermost loop around both; without one the function runs another time, and
its caller's loop is in the next iteration. At the next stage, `ipu.stage`, it is the loop around that one, if there is.
A loop that traces equations at a single place never goes back: there the sequence of their primitives has a period.
Limits: an iteration without equations is not seen. What a library calls several times, as `jax.tree.map` does, is in
one iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import CodeType

from ipujax.lowering.jaxpr.loops_of_code import Loop, loop_around, loops_of

Place = tuple[CodeType, int]  # of a frame: its code, and the instruction that runs


@dataclass(frozen=True, slots=True)
class Call:
    """Frame of a function that is neither JAX's nor ipujax's.

    Args:
        place: code of the function, and the place in it.
        before: frames of JAX between its caller's frame and this one.
        run: number of the call, where calls at one place are distinguished by it; 0 elsewhere.
    """

    place: Place
    before: tuple[Place, ...] = ()
    run: int = 0


@dataclass(frozen=True, eq=False)
class Frames:
    """Frames that an equation was traced in, outermost first; equal only to itself.

    Args:
        calls: frames that are neither JAX's nor ipujax's.
        tail: frames of JAX inside the last call.
    """

    calls: tuple[Call, ...] = ()
    tail: tuple[Place, ...] = ()

    @cached_property
    def codes(self) -> tuple[CodeType, ...]:
        """Code of each call."""
        return tuple(call.place[0] for call in self.calls)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Code and place of each call."""
        return tuple(call.place for call in self.calls)

    @cached_property
    def runs(self) -> tuple[tuple[Place, int], ...]:
        """Code, place and number of each call."""
        return tuple((call.place, call.run) for call in self.calls)


class Activation:
    """Run of a function: the iterations of its loops, and the loops with more than one iteration."""

    __slots__ = ("iterations", "repeating")

    def __init__(self) -> None:
        self.iterations: dict[Loop, int] = {}
        self.repeating: set[Loop] = set()

    def next_iteration(self, loop: Loop) -> None:
        """Begin the next iteration of a loop; loops inside it start again from 0."""
        number = self.iterations.get(loop, 0) + 1
        outside = {x: n for x, n in self.iterations.items() if not (loop[0] <= x[0] and x[1] <= loop[1])}
        # A new dictionary: moments before share the old one.
        self.iterations = outside | {loop: number}
        self.repeating.add(loop)


@dataclass(frozen=True, eq=False, slots=True)
class Moment:
    """Run of a function at the time of an equation: the place in its code, and the iterations of its loops."""

    activation: Activation
    place: int
    iterations: dict[Loop, int]

    @property
    def loops(self) -> list[Loop]:
        """Loops with several iterations around the place, outer ones first; complete after the last equation."""
        return sorted(loop for loop in self.activation.repeating if loop[0] <= self.place <= loop[1])


Moments = tuple[Moment, ...]  # of each call of an equation


def moments_of_equations(
    frames: Sequence[Frames], stages: Sequence[int | None], operation_of: Callable[[int], Hashable]
) -> list[Moments]:
    """Return for each equation, of which stages are known, the moments of the functions that it was traced in."""
    # Consecutive equations of one place share an object. `operation_of`: number of an equation → equal keys if equal.
    walk = _Walk()
    moments = [walk.advance(item, stage) for item, stage in zip(frames, stages, strict=True)]
    start = 0
    for n in range(1, len(frames) + 1):
        if n == len(frames) or moments[n] is not moments[start]:
            if n - start > 1 and moments[start]:
                _number_iterations(moments, frames[start], range(start, n), operation_of)
            start = n
    return moments


class _Walk:
    """Stack of running functions, updated from equation to equation."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._running: list[Activation] = []
        self._moments: Moments = ()
        self._stage: int | None = None

    def advance(self, frames: Frames, stage: int | None) -> Moments:
        """Advance to the next equation; returns its moments."""
        if frames is self._frames or frames.runs == self._frames.runs:
            return self._moments
        same = self._count_continued(frames, stage != self._stage)
        self._stage = stage
        self._running[same:] = [Activation() for _ in frames.calls[same:]]
        self._frames = frames
        pairs = zip(self._running, frames.calls, strict=True)
        self._moments = tuple(Moment(run, call.place[1], run.iterations) for run, call in pairs)
        return self._moments

    def _count_continued(self, frames: Frames, is_next_stage: bool) -> int:
        """Return the number of outer calls that continue; advances the loop of the innermost one if it repeats."""
        before = self._frames.calls
        after = frames.calls
        length = min(len(before), len(after))
        differs = (n for n in range(length) if before[n].place != after[n].place or before[n].run != after[n].run)
        same = next(differs, length)
        if same < length and before[same].run != after[same].run:
            return self._repeat_call(frames, same, is_next_stage)
        if same == length or before[same].place[0] is not after[same].place[0]:
            return same
        code, place = after[same].place
        if place > before[same].place[1]:
            return same + 1
        loop = loop_around(code, place, before[same].place[1])
        if loop is None:
            return self._repeat_call(frames, same, is_next_stage)
        return self._repeat_loop(frames, same, loop, is_next_stage)

    def _repeat_call(self, frames: Frames, number: int, is_next_stage: bool) -> int:
        """Advance the loop that calls a function again; returns the number of calls that continue."""
        repeated = _find_repeating_loop(frames, number - 1)
        return number if repeated is None else self._repeat_loop(frames, *repeated, is_next_stage)

    def _repeat_loop(self, frames: Frames, level: int, loop: Loop, is_next_stage: bool) -> int:
        """Advance a loop, or the one around it at the next stage; returns the number of calls that continue."""
        around = _find_loop_around(frames, level, loop) if is_next_stage else None
        level, loop = around or (level, loop)
        self._running[level].next_iteration(loop)
        return level + 1


def _find_repeating_loop(frames: Frames, level: int) -> tuple[int, Loop] | None:
    """Return the number of a call and its innermost loop that can repeat calls inside; None if a loop of JAX may."""
    for number in range(level, -1, -1):
        inside = frames.calls[number + 1].before if number + 1 < len(frames.calls) else frames.tail
        if any(loop_around(*place) for place in inside):
            return None  # JAX may repeat the call itself, as `jax.tree.map` does
        loop = loop_around(*frames.calls[number].place)
        if loop is not None:
            return number, loop
    return None


def _find_loop_around(frames: Frames, level: int, loop: Loop) -> tuple[int, Loop] | None:
    """Return the number of a call and its innermost loop around a loop of call `level`; None without one."""
    outer = [x for x in loops_of(frames.calls[level].place[0]) if x != loop and x[0] <= loop[0] and loop[1] <= x[1]]
    return (level, outer[0]) if outer else _find_repeating_loop(frames, level - 1)


def _number_iterations(
    moments: list[Moments], frames: Frames, numbers: range, operation_of: Callable[[int], Hashable]
) -> None:
    """Number consecutive equations of one place by iteration, if their operations have a period."""
    repeated = _find_repeating_loop(frames, len(frames.calls) - 1)
    if repeated is None:
        return
    level, loop = repeated
    first = moments[numbers[0]]
    if loop in first[level].activation.repeating:
        return  # the loop goes back at another place, which has numbered its iterations
    operations = [operation_of(n) for n in numbers]
    count = len(numbers)
    period = next(n for n in range(1, count + 1) if count % n == 0 and operations[n:] == operations[: count - n])
    if period == count:
        return
    first[level].activation.repeating.add(loop)
    for start in range(0, count, period):
        moment = replace(first[level], iterations=first[level].iterations | {loop: start // period})
        item = (*first[:level], moment, *first[level + 1 :])
        for n in numbers[start : start + period]:
            moments[n] = item
