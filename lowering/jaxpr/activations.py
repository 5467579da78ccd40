"""Which iteration of the Python loops around it an equation was traced in, from the order of equations.

Input: for each equation, in the order of tracing, the frames it was traced in. Output: for each frame the numbers of
the iterations of loops in its code that hold its place.

    for p in params:          dot_general   loss@12 > block@4     the first iteration of the loop around loss@12
        x = block(p, x)       tanh          loss@12 > block@9
                              dot_general   loss@12 > block@4     block goes back, and has no loop: it is called again

In one run of a function places only go forward, but for its loops. So a place that is not behind that of the equation
before it is in the next iteration of the innermost loop that holds both; without one the function runs another time,
and its caller's loop is in the next iteration.
A loop that traces equations at one place alone never goes back: there the sequence of what they do has a period.
Limits: an iteration without equations is not seen. What a library calls several times, as `jax.tree.map` does, is in
one iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import CodeType

from ipujax.lowering.jaxpr.loops_of_code import Loop, loop_around

Place = tuple[CodeType, int]  # of a frame: its code, and the instruction that runs


@dataclass(frozen=True, slots=True)
class Call:
    """A frame of a function that is neither JAX's nor ipujax's.

    Args:
        place: its code, and the place in it.
        before: the frames of JAX between its caller's and its own.
        run: number that calls at one place have which are known to follow each other; 0 where that is not known.
    """

    place: Place
    before: tuple[Place, ...] = ()
    run: int = 0


@dataclass(frozen=True, eq=False)
class Frames:
    """The frames an equation was traced in, outermost first; equal only to itself.

    Args:
        calls: those that are neither JAX's nor ipujax's.
        tail: those of JAX inside of the last.
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
    """One run of a function: its loops, in which iteration each is, and all of them that are seen to go round."""

    __slots__ = ("iterations", "rounds")

    def __init__(self) -> None:
        self.iterations: dict[Loop, int] = {}
        self.rounds: set[Loop] = set()

    def next_iteration(self, loop: Loop) -> None:
        """Goes round a loop once; loops inside of it begin anew."""
        number = self.iterations.get(loop, 0) + 1
        outside = {x: n for x, n in self.iterations.items() if not (loop[0] <= x[0] and x[1] <= loop[1])}
        self.iterations = outside | {loop: number}
        self.rounds.add(loop)


@dataclass(frozen=True, eq=False, slots=True)
class Moment:
    """A function's run, the place that runs, and the iterations of its loops then."""

    activation: Activation
    place: int
    iterations: dict[Loop, int]

    @property
    def loops(self) -> list[Loop]:
        """The loops around the place that go round, outer ones first; known once all equations have been seen."""
        return sorted(loop for loop in self.activation.rounds if loop[0] <= self.place <= loop[1])


Moments = tuple[Moment, ...]  # of each call of an equation


def follow(frames: Sequence[Frames], does: Callable[[int], Hashable]) -> list[Moments]:
    """The runs of functions that equations were traced in; one object for those of one place after the other.

    Args:
        frames: of each equation, in the order of tracing.
        does: from the number of an equation to what it does, equal for those that do the same.
    """
    walk, moments = _Walk(), list[Moments]()
    for item in frames:
        moments.append(walk.to(item))
    start = 0
    for n in range(1, len(frames) + 1):
        if n == len(frames) or moments[n] is not moments[start]:
            if n - start > 1 and moments[start]:
                _number_repetitions(moments, frames[start], range(start, n), does)
            start = n
    return moments


class _Walk:
    """The functions that run, from equation to equation."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._running: list[Activation] = []
        self._moments: Moments = ()

    def to(self, frames: Frames) -> Moments:
        """Goes on to the next equation."""
        if frames is self._frames or frames.runs == self._frames.runs:
            return self._moments
        same = self._continued(frames)
        self._running[same:] = [Activation() for _ in frames.calls[same:]]
        self._frames = frames
        pairs = zip(self._running, frames.calls, strict=True)
        self._moments = tuple(Moment(run, call.place[1], run.iterations) for run, call in pairs)
        return self._moments

    def _continued(self, frames: Frames) -> int:
        """The number of calls that go on, from the outermost; their loops go round where they do."""
        before, now = self._frames.calls, frames.calls
        least = min(len(before), len(now))
        differs = (n for n in range(least) if before[n].place != now[n].place or before[n].run != now[n].run)
        same = next(differs, least)
        if same < least and before[same].run != now[same].run:
            return self._called_again(frames, same)
        if same == least or before[same].place[0] is not now[same].place[0]:
            return same
        code, place = now[same].place
        if place > before[same].place[1]:
            return same + 1
        loop = loop_around(code, place, before[same].place[1])
        if loop is None:
            return self._called_again(frames, same)
        self._running[same].next_iteration(loop)
        return same + 1

    def _called_again(self, frames: Frames, number: int) -> int:
        """Goes round the loop that has a function run another time; returns the number of calls that go on."""
        repeated = _repeating_loop(frames, number - 1)
        if repeated is None:
            return number
        level, loop = repeated
        self._running[level].next_iteration(loop)
        return level + 1


def _repeating_loop(frames: Frames, level: int) -> tuple[int, Loop] | None:
    """The innermost loop that has a call run another time, and the call it is in; None if that is not known."""
    for number in range(level, -1, -1):
        inside = frames.calls[number + 1].before if number + 1 < len(frames.calls) else frames.tail
        if any(loop_around(*place) for place in inside):
            return None  # a loop of JAX may be what repeats it
        loop = loop_around(*frames.calls[number].place)
        if loop is not None:
            return number, loop
    return None


def _number_repetitions(
    moments: list[Moments], frames: Frames, numbers: range, does: Callable[[int], Hashable]
) -> None:
    """Numbers equations of one place after the other, if what they do has a period: the place is repeated."""
    repeated = _repeating_loop(frames, len(frames.calls) - 1)
    if repeated is None:
        return
    level, loop = repeated
    first = moments[numbers[0]]
    if loop in first[level].activation.rounds:
        return  # it goes back elsewhere
    done, count = [does(n) for n in numbers], len(numbers)
    period = next(n for n in range(1, count + 1) if count % n == 0 and done[n:] == done[: count - n])
    if period == count:
        return
    first[level].activation.rounds.add(loop)
    for start in range(0, count, period):
        moment = replace(first[level], iterations=first[level].iterations | {loop: start // period})
        item = (*first[:level], moment, *first[level + 1 :])
        for n in numbers[start : start + period]:
            moments[n] = item
