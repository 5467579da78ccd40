"""Iterations of the Python loops that equations were traced in, inferred from the order of equations.

Input: for each equation, in the order of tracing, the frames it was traced in. Output: for each frame the numbers of
the iterations of the loops around its place.

    for p in params:          dot_general   loss@12 > block@4     the first iteration of the loop around loss@12
        x = block(p, x)       tanh          loss@12 > block@9
                              dot_general   loss@12 > block@4     block goes back, and has no loop: it is called again

In one run of a function the source positions of equations only increase, except in its loops. If an equation is not
after the one before it, it belongs to the next iteration of the innermost loop around both; without such a loop the
function was called again, and the loop of its caller is in the next iteration. If the next stage (`ipu.stage`) begins
there, the loop around that loop is meant, if there is one. In a loop with equations at a single position the position
never decreases: there an iteration is a period of the sequence of primitives. Without any loop C code repeats the call,
as `functools.reduce` and `map` do, which counts as a loop at one position.
Limits: an iteration without equations is not seen. Repeated calls by a library, as by `jax.tree.map`, are in one
iteration.

Runs of inner loops that the order does not separate are inferred from the inputs that they read.

    for ws in ps:             dot_general   mlp@4   reads ps[0][0]
        x = mlp(ws, x)        dot_general   mlp@4   reads ps[0][1]
                              dot_general   mlp@4   reads ps[1][0]     here `mlp` is called again

Where all equations of a function are in one loop, their order does not show where its next run begins: all iterations
seem to be of one run. The names of the inputs do: each run reads another element, `ps[0]`, `ps[1]`.
Limits: runs stay together if all read the same inputs, as weights sliced out of one array, or as many as iterations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import ne
from types import CodeType
from typing import NamedTuple

from ipujax.lowering.jaxpr.loops_of_code import Loop, loop_around, loops_of
from ipujax.runtime.errors import is_installed

Place = tuple[CodeType, int]  # of a frame: its code, and the offset of the instruction that runs


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
        outside = {x: n for x, n in self.iterations.items() if not (loop.first <= x.first and x.last <= loop.last)}
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
        return sorted(loop for loop in self.activation.repeating if loop.has(self.place))


Moments = tuple[Moment, ...]  # of each call of an equation
_Name = tuple[Hashable, ...]  # of an input, as a path


class Traced(NamedTuple):
    """Frames, stage, operation and inputs of an equation, in the order of tracing.

    Args:
        frames: frames that it was traced in.
        stage: number of its stage; None outside of stages.
        operation: name of its primitive, and its results' shapes and dtypes: equal for equations of equal iterations.
        inputs: names of the inputs of the program that it reads, each as a path: `ps[3]["w"]` is `("ps", "[3]", …)`.
    """

    frames: Frames
    stage: int | None
    operation: tuple[Hashable, ...]
    inputs: tuple[_Name, ...]


class Restart(NamedTuple):
    """Iteration of a loop that begins at an equation: number of the call that has the loop, and the loop."""

    level: int
    loop: Loop


def moments_of_equations(items: Sequence[Traced]) -> list[Moments]:
    """Return for each equation the moments of the functions that it was traced in.

    Iterations that the order does not tell (restarts) follow from the moments so far, which change with them: both are
    computed again until no restart is new.
    """
    restarts = dict[int, Restart]()
    while True:
        moments = _moments_in_order(items, restarts)
        further = _find_restarts(items, moments)
        if further.keys() <= restarts.keys():
            return moments
        restarts = further | restarts  # those found first stay as they are, so each round adds some and the loop ends


def _moments_in_order(items: Sequence[Traced], restarts: Mapping[int, Restart]) -> list[Moments]:
    """Return the moments of equations as their order tells them.

    Args:
        items: the equations.
        restarts: iterations that the order does not tell, by the number of the equation with which they begin.
    """
    # Consecutive equations of one place share an object: they are numbered together.
    walk = _Walk()
    moments = [walk.advance(item, restarts.get(n)) for n, item in enumerate(items)]
    start = 0
    for n in range(1, len(items) + 1):
        if n == len(items) or moments[n] is not moments[start]:
            if n - start > 1 and moments[start]:
                _number_iterations(moments, items, range(start, n))
            start = n
    return moments


class _Walk:
    """Stack of running functions, updated from equation to equation."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._running: list[Activation] = []
        self._moments: Moments = ()
        self._stage: int | None = None
        self._waiting: tuple[Frames, list[Activation]] | None = None

    def advance(self, item: Traced, restart: Restart | None) -> Moments:
        """Advance to the next equation; returns its moments.

        Args:
            item: the equation.
            restart: the loop whose next iteration begins here, where the order of equations does not tell; else None.
        """
        frames = item.frames
        # Equations of one place share the tuple: `_moments_in_order` compares it by identity.
        if restart is None and (frames is self._frames or frames.runs == self._frames.runs):
            return self._moments
        is_next_stage = item.stage != self._stage
        if restart is not None:
            num_continued = self._repeat_loop(frames, restart.level, restart.loop, is_next_stage=False)
        else:
            has_returned = self._return_to_waiting(frames)
            num_continued = self._count_continued(frames, is_next_stage=is_next_stage, has_returned=has_returned)
        self._stage = item.stage
        self._running[num_continued:] = [Activation() for _ in frames.calls[num_continued:]]
        self._frames = frames
        pairs = zip(self._running, frames.calls, strict=True)
        self._moments = tuple(Moment(run, call.place[1], run.iterations) for run, call in pairs)
        return self._moments

    def _return_to_waiting(self, frames: Frames) -> bool:
        """Return to the frames of a generator that C code resumes, such as `sum`; returns whether it has.

        An addition that `sum` traces has the frames of its caller alone, while the generator waits. The equation after
        it, inside the generator again, belongs to the run of before: not to another call.
        """
        runs, before = frames.runs, self._frames.runs
        has_left_inner = len(runs) < len(before) and before[: len(runs)] == runs
        has_entered_inner = runs[: len(before)] == before
        if has_left_inner:
            self._waiting = self._frames, list(self._running)
        elif self._waiting is not None and has_entered_inner:
            self._frames, self._running = self._waiting
            return True
        else:
            self._waiting = None
        return False

    def _count_continued(self, frames: Frames, *, is_next_stage: bool, has_returned: bool) -> int:
        """Return the number of outer calls that continue; advances the loop of the innermost one if it repeats.

        Args:
            frames: frames of the next equation, before `_frames` has become them.
            is_next_stage: whether a stage begins there: the loop around the one that repeats is meant, if there is one.
            has_returned: whether it follows the resumption of a generator, see `_return_to_waiting`.
        """
        before = self._frames.calls
        after = frames.calls
        length = min(len(before), len(after))
        differs = (n for n, is_other in enumerate(map(ne, self._frames.runs, frames.runs)) if is_other)
        # Equal frames after a wait: the innermost function, which has waited, has come to its place again.
        same = next(differs, length - has_returned)
        if same < length and before[same].run != after[same].run:
            return self._repeat_call(frames, same, is_next_stage=is_next_stage)
        if same == length or before[same].place[0] is not after[same].place[0]:
            return same
        code, place = after[same].place
        if place > before[same].place[1]:
            return same + 1
        loop = loop_around(code, place, before[same].place[1])
        if loop is None:
            return self._repeat_call(frames, same, is_next_stage=is_next_stage)
        return self._repeat_loop(frames, same, loop, is_next_stage=is_next_stage)

    def _repeat_call(self, frames: Frames, number: int, *, is_next_stage: bool) -> int:
        """Advance the loop that calls a function again; returns the number of calls that continue."""
        repeated = _find_repeating_loop(frames, number - 1) or _find_calling_place(frames, number - 1)
        return number if repeated is None else self._repeat_loop(frames, *repeated, is_next_stage=is_next_stage)

    def _repeat_loop(self, frames: Frames, level: int, loop: Loop, *, is_next_stage: bool) -> int:
        """Advance a loop, or the one around it at the next stage; returns the number of calls that continue."""
        around = _find_loop_around(frames, level, loop) if is_next_stage else None
        level, loop = around or (level, loop)
        self._running[level].next_iteration(loop)
        return level + 1


def _find_repeating_loop(frames: Frames, level: int) -> Restart | None:
    """Return the number of a call and its innermost loop that can repeat calls inside; None if a loop of JAX may."""
    for number in range(level, -1, -1):
        if _is_in_loop_of_jax(frames, number):
            return None
        loop = loop_around(*frames.calls[number].place)
        if loop is not None:
            return Restart(number, loop)
    return None


def _find_calling_place(frames: Frames, level: int) -> Restart | None:
    """Return the innermost call of the user's that calls another one with nothing of JAX between, as a loop there."""
    for number in range(min(level, len(frames.calls) - 2), -1, -1):
        if _is_in_loop_of_jax(frames, number):
            return None
        code, place = frames.calls[number].place
        if not frames.calls[number + 1].before and not is_installed(code.co_filename):
            return Restart(number, Loop(place, place))
    return None


def _is_in_loop_of_jax(frames: Frames, number: int) -> bool:
    # JAX may repeat the call itself, as `jax.tree.map` does.
    inside = frames.calls[number + 1].before if number + 1 < len(frames.calls) else frames.tail
    return any(loop_around(*place) for place in inside)


def _find_loop_around(frames: Frames, level: int, loop: Loop) -> Restart | None:
    """Return the number of a call and its innermost loop around a loop of call `level`; None without one."""
    around = _loop_outside(frames.calls[level].place[0], loop)
    return Restart(level, around) if around else _find_repeating_loop(frames, level - 1)


def _loop_outside(code: CodeType, loop: Loop) -> Loop | None:
    """Return the innermost loop around another loop of a function; None without one."""
    return next((x for x in loops_of(code) if x != loop and x.has(loop.first) and x.has(loop.last)), None)


def _number_iterations(moments: list[Moments], items: Sequence[Traced], numbers: range) -> None:
    """Number consecutive equations of one place by iteration, if their operations have a period.

    Args:
        moments: moments of all equations; updated: those of the numbered equations get their iterations.
        items: all equations.
        numbers: the consecutive equations, which have one moment.
    """
    frames = items[numbers[0]].frames
    innermost = len(frames.calls) - 1
    repeated = _find_repeating_loop(frames, innermost)
    restart = repeated or _find_calling_place(frames, innermost)
    if restart is None:
        return
    level, loop = restart
    first = moments[numbers[0]]
    if loop in first[level].activation.repeating:
        return  # the loop goes back at another place, which has numbered its iterations
    period = _shortest_period([items[n].operation for n in numbers])
    starts = numbers[::period]
    # One function may trace equal operations at one place: calls by C code read different inputs too.
    read = [{x for n in range(start, start + period) for x in items[n].inputs} for start in starts]
    reads_new_inputs = all(x.difference(*read[:n]) for n, x in enumerate(read))
    if len(starts) == 1 or (repeated is None and not reads_new_inputs):
        return
    first[level].activation.repeating.add(loop)
    for iteration, start in enumerate(starts):
        moment = replace(first[level], iterations=first[level].iterations | {loop: iteration})
        numbered = (*first[:level], moment, *first[level + 1 :])
        for n in range(start, start + period):
            moments[n] = numbered


def _shortest_period(operations: Sequence[tuple[Hashable, ...]]) -> int:
    """Return the length of the shortest part whose repetition is all operations, or is but for their shapes.

    That is the length of all operations if nothing is repeated.
    """
    count = len(operations)
    lengths = [n for n in range(1, count // 2 + 1) if count % n == 0]
    exact = (n for n in lengths if operations[n:] == operations[:-n])
    # A layer that is wider than the others has equal names; that a part repeats tells that its names are all of it.
    names = [operation[0] for operation in operations]
    wider = (n for n in lengths if names[n:] == names[:-n] and _repeats_at_an_end(operations, n))
    return next(exact, None) or next(wider, count)


def _repeats_at_an_end(operations: Sequence[tuple[Hashable, ...]], length: int) -> bool:
    first, second = operations[:length], operations[length : 2 * length]
    return first == second or operations[-length:] == operations[-2 * length : -length]


def _find_restarts(items: Sequence[Traced], moments: Sequence[Moments]) -> dict[int, Restart]:
    """Find the equations at which loops run again, of loops without equations around them that would tell.

    Args:
        items: the equations.
        moments: their moments so far, in which all iterations of such a loop seem to be of one run.

    Returns:
        By the number of the first equation of each run but the first the loop around that repeats it.
    """
    numbers: dict[Activation, list[int]] = defaultdict(list)
    levels = dict[Activation, int]()
    for n, item in enumerate(moments):
        for level, moment in enumerate(item):
            if moment.activation.repeating:
                numbers[moment.activation].append(n)
                levels[moment.activation] = level
    restarts = dict[int, Restart]()
    for activation, members in numbers.items():
        level = levels[activation]
        for loop in activation.repeating:
            outer = _find_outer_loop(items[members[0]], [moments[n] for n in members], level, loop)
            if outer is not None:
                iterations: dict[int, list[int]] = defaultdict(list)
                for n in members:
                    if loop.has(moments[n][level].place):
                        iterations[moments[n][level].iterations.get(loop, 0)].append(n)
                restarts.update((n, outer) for n in _first_of_runs(items, list(iterations.values())))
    return restarts


def _find_outer_loop(item: Traced, members: Sequence[Moments], level: int, loop: Loop) -> Restart | None:
    """Find the loop around a loop, if it has no equations of its own and seems to have one iteration.

    Args:
        item: an equation in the loop.
        members: moments of all equations of the function's run.
        level: number of the function among the calls of the equation.
        loop: the loop.
    """
    around = _loop_outside(item.frames.calls[level].place[0], loop)
    moments = [x[level] for x in members if around is None or around.has(x[level].place)]
    if not all(loop.has(x.place) for x in moments):
        return None
    outer = _find_loop_around(item.frames, level, loop)
    # A loop that repeats already has equations that tell.
    return None if outer is None or outer.loop in members[0][outer.level].activation.repeating else outer


def _first_of_runs(items: Sequence[Traced], iterations: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield the first equation of each run after the first; nothing if inputs do not tell runs apart.

    Runs differ in the part of a name that follows those that all iterations have in common: `[0]` and `[1]` of
    `ps[0][0]`, `ps[0][1]`, `ps[1][0]`.

    Args:
        items: all equations.
        iterations: numbers of the equations of each iteration, in order.
    """
    read = [{name for n in numbers for name in items[n].inputs} for numbers in iterations]
    common = set[_Name]().union(*read[:1]).intersection(*read)
    roots = [dict.fromkeys(name[0] for name in sorted(names - common, key=str)) for names in read]
    shared = [root for root in roots[0] if all(root in x for x in roots)] if roots else []
    for root in shared:
        names = [_common_start([x for x in names if x[0] == root]) for names in (x - common for x in read)]
        length = len(_common_start(names))
        keys = [name[length] if len(name) > length else None for name in names]
        runs = [key for key, _ in groupby(keys)]
        # Several runs, of several iterations, none of which comes twice.
        if 1 < len(runs) < len(keys) and len(set(runs)) == len(runs):
            yield from (iterations[n][0] for n in range(1, len(keys)) if keys[n] != keys[n - 1])
            return


def _common_start(names: Sequence[_Name]) -> _Name:
    shortest = min(names, key=len)
    return shortest[: next((n for n in range(len(shortest)) if len({x[n] for x in names}) > 1), len(shortest))]
