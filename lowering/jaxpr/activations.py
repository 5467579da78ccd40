"""Which iteration of the Python loops around it an equation was traced in, from the order of equations.

Input: for each equation, in the order of tracing, the frames it was traced in. Output: for each frame the numbers of
the iterations of loops in its code that hold its place.

    for p in params:          dot_general   loss@12 > block@4     the first iteration of the loop around loss@12
        x = block(p, x)       tanh          loss@12 > block@9
                              dot_general   loss@12 > block@4     block goes back, and has no loop: it is called again

In one run of a function places only go forward, but for its loops. So a place that is not behind that of the equation
before it is in the next iteration of the innermost loop that holds both; without one the function runs another time,
and its caller's loop is in the next iteration.
Limits: an iteration without equations is not seen. What a library calls several times, as `jax.tree.map` does, is in
one iteration.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import CodeType

from ipujax.lowering.jaxpr.loops_of_code import Loop, loop_around

Place = tuple[CodeType, int]  # of a frame: its code, and the instruction that runs


@dataclass(frozen=True, slots=True)
class Call:
    """A frame of a function that is neither JAX's nor ipujax's.

    Args:
        place: its code, and the place in it.
        before: the frames of JAX between its caller's and its own.
    """

    place: Place
    before: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames an equation was traced in, outermost first.

    Args:
        calls: those that are neither JAX's nor ipujax's.
        tail: those of JAX inside of the last.
    """

    calls: tuple[Call, ...] = ()
    tail: tuple[Place, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """Code and place of each call."""
        return tuple(call.place for call in self.calls)


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


@dataclass(frozen=True, slots=True)
class Moment:
    """A function's run, the place that runs, and the iterations of its loops then."""

    activation: Activation
    place: int
    iterations: dict[Loop, int] = field(repr=False)

    @property
    def indices(self) -> tuple[int, ...]:
        """Numbers of iterations, outer loops first; known once all equations have been seen."""
        around = sorted(loop for loop in self.activation.rounds if loop[0] <= self.place <= loop[1])
        return tuple(self.iterations.get(loop, 0) for loop in around)


class Activations:
    """The functions that run, followed from equation to equation."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._running: list[Activation] = []
        self._done: set[Hashable] = set()  # what the same frames have done, one after the other

    def follow(self, frames: Frames, does: Hashable) -> tuple[Moment, ...]:
        """Goes on to the next equation; returns the run of each of its calls.

        Args:
            frames: of the equation.
            does: what it does. JAX traces some of its functions as one instruction: equal frames do several things, and
                are repeated where they do one of them again.
        """
        is_same = frames == self._frames
        same = self._again(len(frames.calls) - 1, frames) if is_same and does in self._done else self._continued(frames)
        self._done = self._done | {does} if is_same and does not in self._done else {does}
        self._running[same:] = [Activation() for _ in frames.calls[same:]]
        self._frames = frames
        return tuple(
            Moment(run, call.place[1], run.iterations) for run, call in zip(self._running, frames.calls, strict=True)
        )

    def _continued(self, frames: Frames) -> int:
        """The number of calls that go on, from the outermost; their loops go round where they do."""
        before, now = self._frames.calls, frames.calls
        same = 0
        while same < min(len(before), len(now)) and before[same].place == now[same].place:
            same += 1
        if same == len(before) == len(now):
            return self._again(same - 1, frames) if _is_repeated(self._frames.tail, frames.tail) else same
        if same == min(len(before), len(now)) or before[same].place[0] is not now[same].place[0]:
            return same
        code, place = now[same].place
        if place > before[same].place[1]:
            return same + 1
        loop = loop_around(code, place, before[same].place[1])
        if loop is None:
            return self._again(same - 1, frames)
        self._running[same].next_iteration(loop)
        return same + 1

    def _again(self, level: int, frames: Frames) -> int:
        """The same for a call whose place runs another time."""
        for number in range(level, -1, -1):
            inside = frames.calls[number + 1].before if number + 1 < len(frames.calls) else frames.tail
            if any(loop_around(*place) for place in inside):
                return number + 1  # a library's loop may have come here, or that of a call
            loop = loop_around(*frames.calls[number].place)
            if loop is not None:
                self._running[number].next_iteration(loop)
                return number + 1
        return 0


def _is_repeated(before: Sequence[Place], now: Sequence[Place]) -> bool:
    """Whether frames of JAX, below the same place, say that the place ran another time: they go back, in no loop."""
    for (code, place), (other, later) in zip(before, now, strict=False):
        if code is not other or later > place:
            return False
        if later < place:
            return loop_around(code, place, later) is None
    return False
