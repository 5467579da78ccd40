"""Runs of the Python functions that equations were traced in, with the iterations of their loops.

Input: for each equation, in the order of tracing, the frames it was traced in, and the inputs that it reads. Output:
for each frame the run of its function, and the numbers of the iterations of the loops around its place, inferred from
the order of equations.

    for p in params:          dot_general   loss@12 > block@4     the first iteration of the loop around loss@12
        x = block(p, x)       tanh          loss@12 > block@9
                              dot_general   loss@12 > block@4     block goes back, and has no loop: it is called again

In one run of a function the source positions of equations only increase, except in its loops. If an equation is not
after the one before it, it belongs to the next iteration of the innermost loop around both; without such a loop the
function was called again, and the loop of its caller is in the next iteration. If the next stage (`ipu.stage`) begins
there, the loop around that loop is meant, if there is one. In a loop with equations at a single position the position
never decreases: there an iteration is a period of the sequence of primitives. Without any loop C code repeats the call,
as `functools.reduce` and `map` do, which counts as a loop at one position.

Runs of inner loops that the order does not separate are inferred from the inputs that they read.

    for ws in ps:             dot_general   mlp@4   reads ps[0][0]
        x = mlp(ws, x)        dot_general   mlp@4   reads ps[0][1]
                              dot_general   mlp@4   reads ps[1][0]     here `mlp` is called again

Where all equations of a function are in one loop, their order does not show where its next run begins: all iterations
seem to be of one run. The names of the inputs do: each run reads another element, `ps[0]`, `ps[1]`.
Limits: an iteration without equations is not seen. Repeated calls by a library, as by `jax.tree.map`, are in one
iteration. Runs stay together if all read the same inputs, as weights sliced out of one array, or as many as iterations.
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
        number: number of the call, where calls at one place are distinguished by it; 0 elsewhere.
    """

    place: Place
    before: tuple[Place, ...] = ()
    number: int = 0

    @property
    def code(self) -> CodeType:
        """Code of the function."""
        return self.place[0]

    @property
    def offset(self) -> int:
        """Offset of the instruction that runs."""
        return self.place[1]


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
        return tuple(call.code for call in self.calls)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Code and place of each call."""
        return tuple(call.place for call in self.calls)

    @cached_property
    def numbered_places(self) -> tuple[tuple[Place, int], ...]:
        """Code, place and number of each call."""
        return tuple((call.place, call.number) for call in self.calls)


class FunctionRun:
    """Run of a function, from its call to its return; equal only to itself.

    Its `iterations` are the numbers of those that its loops are in, at the equation reached so far; `repeated_loops`
    are those with more than one iteration, complete after the last equation.
    """

    __slots__ = ("iterations", "repeated_loops")

    def __init__(self) -> None:
        self.iterations: dict[Loop, int] = {}
        self.repeated_loops: set[Loop] = set()

    def next_iteration(self, loop: Loop) -> None:
        """Begin the next iteration of a loop; loops inside it start again from 0."""
        number = self.iterations.get(loop, 0) + 1
        outside = {x: n for x, n in self.iterations.items() if not (loop.first <= x.first and x.last <= loop.last)}
        # A new dictionary: states of earlier equations share the old one.
        self.iterations = outside | {loop: number}
        self.repeated_loops.add(loop)


@dataclass(frozen=True, eq=False, slots=True)
class RunState:
    """Run of a function at the time of an equation.

    Args:
        run: the run.
        offset: offset of the instruction that runs.
        iterations: number of the iteration of each loop.
    """

    run: FunctionRun
    offset: int
    iterations: dict[Loop, int]

    @property
    def loops(self) -> list[Loop]:
        """Loops with several iterations around the instruction, outer ones first; complete after the last equation."""
        return sorted(loop for loop in self.run.repeated_loops if loop.has(self.offset))


RunStates = tuple[RunState, ...]  # of each call around an equation, outermost first
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
    """Next iteration of a loop, which begins at an equation.

    Args:
        call_number: number of the call around the equation whose function has the loop.
        loop: the loop.
    """

    call_number: int
    loop: Loop


def run_states_of_equations(items: Sequence[Traced]) -> list[RunStates]:
    """Return for each equation the runs of Python functions that it was traced in, with the iterations of their loops.

    They are inferred from the order of equations. An equation at which a loop begins an iteration that this order does
    not show is a restart. Restarts are found by the states, and change them: both are computed again until no restart
    is new.
    """
    restarts = dict[int, Restart]()
    while True:
        states_of = _run_states_in_order(items, restarts)
        further = _find_restarts(items, states_of)
        if further.keys() <= restarts.keys():
            return states_of
        restarts = further | restarts  # those found first stay as they are, so each round adds some and the loop ends


def _run_states_in_order(items: Sequence[Traced], restarts: Mapping[int, Restart]) -> list[RunStates]:
    """Return for each equation the function runs that it was traced in, as the order of equations tells them.

    Args:
        items: the equations, in the order of tracing.
        restarts: iterations that the order does not tell, by the number of the equation with which they begin.
    """
    walk = _Walk()
    states_of = [walk.advance(item, restarts.get(n)) for n, item in enumerate(items)]
    # Consecutive equations of one place share an object of states: each such stretch is numbered together.
    start = 0
    for n in range(1, len(items) + 1):
        if n == len(items) or states_of[n] is not states_of[start]:
            if n - start > 1 and states_of[start]:
                _number_iterations(states_of, items, range(start, n))
            start = n
    return states_of


class _Walk:
    """Stack of running functions, updated from equation to equation."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._running: list[FunctionRun] = []
        self._states: RunStates = ()
        self._stage: int | None = None
        self._waiting: tuple[Frames, list[FunctionRun]] | None = None

    def advance(self, item: Traced, restart: Restart | None) -> RunStates:
        """Advance to the next equation; returns the function runs that it was traced in, outermost first.

        Calls that go on from the equation before keep their run; the others get a new one.

        Args:
            item: the equation.
            restart: the loop whose next iteration begins here, where the order of equations does not tell; else None.
        """
        frames = item.frames
        # Equations of one place share the tuple: `_run_states_in_order` compares it by identity.
        if restart is None and (frames is self._frames or frames.numbered_places == self._frames.numbered_places):
            return self._states
        is_next_stage = item.stage != self._stage
        if restart is not None:
            num_continued = self._repeat_loop(frames, restart, is_next_stage=False)
        else:
            has_returned = self._return_to_waiting(frames)
            num_continued = self._count_continued(frames, is_next_stage=is_next_stage, has_returned=has_returned)
        self._stage = item.stage
        self._running[num_continued:] = [FunctionRun() for _ in frames.calls[num_continued:]]
        self._frames = frames
        pairs = zip(self._running, frames.calls, strict=True)
        self._states = tuple(RunState(run, call.offset, run.iterations) for run, call in pairs)
        return self._states

    def _return_to_waiting(self, frames: Frames) -> bool:
        """Return to the frames of a generator that waits, if the next equation is in it again; returns whether it is.

        C code such as `sum` resumes generators. An addition that `sum` traces has the frames of its caller alone, while
        the generator waits. The equation after it, inside the generator again, belongs to the run of before: not to
        another call.

        Args:
            frames: frames of the next equation.
        """
        after, before = frames.numbered_places, self._frames.numbered_places
        has_left_inner = len(after) < len(before) and before[: len(after)] == after
        has_entered_inner = after[: len(before)] == before
        if has_left_inner:
            self._waiting = self._frames, list(self._running)
        elif self._waiting is not None and has_entered_inner:
            self._frames, self._running = self._waiting
            return True
        else:
            self._waiting = None
        return False

    def _count_continued(self, frames: Frames, *, is_next_stage: bool, has_returned: bool) -> int:
        """Return how many calls, from the outermost on, the next equation shares with the one before it.

        If the innermost of these is at an earlier place than before, its loop is in the next iteration.

        Args:
            frames: frames of the next equation, before `_frames` has become them.
            is_next_stage: whether a stage (`ipu.stage`) begins there. It begins in a loop over stages, around the loop
                over the layers of a stage: the outer one then goes to its next iteration, if there is one.
            has_returned: whether it follows the resumption of a generator, see `_return_to_waiting`.
        """
        before = self._frames.calls
        after = frames.calls
        length = min(len(before), len(after))
        differences = map(ne, self._frames.numbered_places, frames.numbered_places)
        differs = (n for n, is_other in enumerate(differences) if is_other)
        # Calls before number `same` are at the places of before. Equal frames after a wait: the innermost function,
        # which has waited, has come to its place again.
        same = next(differs, length - has_returned)
        if same < length and before[same].number != after[same].number:
            return self._repeat_call(frames, same, is_next_stage=is_next_stage)
        if same == length or before[same].code is not after[same].code:
            return same
        if after[same].offset > before[same].offset:  # one function, which has gone on
            return same + 1
        # It has gone back: to the next iteration of a loop around both places, or it was called again.
        loop = loop_around(after[same].code, after[same].offset, before[same].offset)
        if loop is None:
            return self._repeat_call(frames, same, is_next_stage=is_next_stage)
        return self._repeat_loop(frames, Restart(same, loop), is_next_stage=is_next_stage)

    def _repeat_call(self, frames: Frames, number: int, *, is_next_stage: bool) -> int:
        """Advance the loop that calls a function again; returns the number of calls that continue."""
        repeated = _find_repeating_loop(frames, number - 1) or _find_calling_place(frames, number - 1)
        return number if repeated is None else self._repeat_loop(frames, repeated, is_next_stage=is_next_stage)

    def _repeat_loop(self, frames: Frames, restart: Restart, *, is_next_stage: bool) -> int:
        """Advance a loop, or the one around it at the next stage; returns the number of calls that continue."""
        around = _find_loop_around(frames, restart) if is_next_stage else None
        call_number, loop = around or restart
        self._running[call_number].next_iteration(loop)
        return call_number + 1


def _find_repeating_loop(frames: Frames, innermost: int) -> Restart | None:
    """Return the innermost Python loop that may have called a function again, and the number of the call it is in.

    None if there is none in calls 0 … `innermost`, or a loop of JAX's own code, such as `jax.tree.map`, is further in.
    """
    for number in range(innermost, -1, -1):
        if _is_in_loop_of_jax(frames, number):
            return None
        loop = loop_around(*frames.calls[number].place)
        if loop is not None:
            return Restart(number, loop)
    return None


def _find_calling_place(frames: Frames, innermost: int) -> Restart | None:
    """Return the place in the user's code that may have called a function again by C code, as `map` does: as a loop.

    It is in the innermost of calls 0 … `innermost` that calls without code of JAX between; None if there is none.
    """
    for number in range(min(innermost, len(frames.calls) - 2), -1, -1):
        if _is_in_loop_of_jax(frames, number):
            return None
        call = frames.calls[number]
        if not frames.calls[number + 1].before and not is_installed(call.code.co_filename):
            return Restart(number, Loop(call.offset, call.offset))
    return None


def _is_in_loop_of_jax(frames: Frames, number: int) -> bool:
    # JAX may repeat the call itself, as `jax.tree.map` does.
    inside = frames.calls[number + 1].before if number + 1 < len(frames.calls) else frames.tail
    return any(loop_around(*place) for place in inside)


def _find_loop_around(frames: Frames, inner: Restart) -> Restart | None:
    """Return the innermost loop around another, of the same call or of one around it; None without one."""
    around = _loop_outside(frames.calls[inner.call_number].code, inner.loop)
    return Restart(inner.call_number, around) if around else _find_repeating_loop(frames, inner.call_number - 1)


def _loop_outside(code: CodeType, loop: Loop) -> Loop | None:
    """Return the innermost loop around another loop of a function; None without one."""
    return next((x for x in loops_of(code) if x != loop and x.has(loop.first) and x.has(loop.last)), None)


def _number_iterations(states_of: list[RunStates], items: Sequence[Traced], numbers: range) -> None:
    """Number consecutive equations of one place by iteration, if their operations have a period.

    Where a loop has equations at a single place, their places do not tell where an iteration begins.

    Args:
        states_of: states of each equation; updated: those of the numbered equations get their iterations.
        items: all equations.
        numbers: the consecutive equations, which share their states.
    """
    frames = items[numbers[0]].frames
    innermost = len(frames.calls) - 1
    repeated = _find_repeating_loop(frames, innermost)
    restart = repeated or _find_calling_place(frames, innermost)
    if restart is None:
        return
    call_number, loop = restart
    shared = states_of[numbers[0]]
    state = shared[call_number]
    if loop in state.run.repeated_loops:
        return  # the loop goes back at another place, which has numbered its iterations
    period = _shortest_period([items[n].operation for n in numbers])  # equations of an iteration
    starts = numbers[::period]
    # One function may trace equal operations at one place: calls by C code read different inputs too.
    read = [{x for n in range(start, start + period) for x in items[n].inputs} for start in starts]
    reads_new_inputs = all(x.difference(*read[:n]) for n, x in enumerate(read))
    if len(starts) == 1 or (repeated is None and not reads_new_inputs):
        return
    state.run.repeated_loops.add(loop)
    for iteration, start in enumerate(starts):
        in_iteration = replace(state, iterations=state.iterations | {loop: iteration})
        numbered = (*shared[:call_number], in_iteration, *shared[call_number + 1 :])
        for n in range(start, start + period):
            states_of[n] = numbered


def _shortest_period(operations: Sequence[tuple[Hashable, ...]]) -> int:
    """Return the length of the shortest part whose repetition is all operations, or is but for their shapes.

    That is the length of all operations if nothing is repeated.

    Args:
        operations: of each equation the name of its primitive, then shapes and dtypes of its results.
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


def _find_restarts(items: Sequence[Traced], states_of: Sequence[RunStates]) -> dict[int, Restart]:
    """Find the equations at which a function with a loop is called again, if all its equations are in that loop.

    Then the order of equations does not tell: all iterations seem to be of one run. The inputs that they read may.

    Args:
        items: the equations.
        states_of: for each the function runs that it was traced in, as known so far.

    Returns:
        By the number of the first equation of each run of such a loop but the first, the loop around that repeats it.
    """
    equations_of: dict[FunctionRun, list[int]] = defaultdict(list)
    call_number_of = dict[FunctionRun, int]()  # equal for all equations of a run
    for n, states in enumerate(states_of):
        for call_number, state in enumerate(states):
            if state.run.repeated_loops:
                equations_of[state.run].append(n)
                call_number_of[state.run] = call_number
    restarts = dict[int, Restart]()
    for run, numbers in equations_of.items():
        call_number = call_number_of[run]
        states_in_run = [states_of[n] for n in numbers]
        for loop in run.repeated_loops:
            outer = _find_outer_loop(items[numbers[0]].frames, states_in_run, Restart(call_number, loop))
            if outer is None:
                continue
            iterations: dict[int, list[int]] = defaultdict(list)  # numbers of the equations of each iteration
            for n in numbers:
                state = states_of[n][call_number]
                if loop.has(state.offset):
                    iterations[state.iterations.get(loop, 0)].append(n)
            restarts.update((n, outer) for n in _first_of_runs(items, list(iterations.values())))
    return restarts


def _find_outer_loop(frames: Frames, states_in_run: Sequence[RunStates], inner: Restart) -> Restart | None:
    """Find the loop around a loop, if it has no equations of its own and seems to have one iteration; None without.

    Args:
        frames: frames of an equation in the loop.
        states_in_run: states of all equations of the function's run.
        inner: the loop, and the call of its function.
    """
    # Equations beside the inner loop, in the function's loop around it or, without one, in the function, would repeat
    # with each iteration of the outer loop, and so tell its iterations.
    around = _loop_outside(frames.calls[inner.call_number].code, inner.loop)
    offsets = [states[inner.call_number].offset for states in states_in_run]
    if not all(inner.loop.has(offset) for offset in offsets if around is None or around.has(offset)):
        return None
    outer = _find_loop_around(frames, inner)
    # A loop that repeats already has equations that tell; it does so for all equations of the run.
    return None if outer is None or outer.loop in states_in_run[0][outer.call_number].run.repeated_loops else outer


def _first_of_runs(items: Sequence[Traced], iterations: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield the number of the equation at which each further run of a loop begins, as the inputs that it reads tell.

    Runs differ in the part of a name that follows those that all iterations have in common: `[0]` and `[1]` of
    `ps[0][0]`, `ps[0][1]`, `ps[1][0]`. Nothing if names do not tell runs apart.

    Args:
        items: all equations.
        iterations: numbers of the equations of each iteration, in order.
    """
    read = [{name for n in numbers for name in items[n].inputs} for numbers in iterations]
    common = set[_Name]().union(*read[:1]).intersection(*read)
    own = [names - common for names in read]  # inputs that all iterations read tell nothing
    roots = [dict.fromkeys(name[0] for name in sorted(names, key=str)) for names in own]  # first parts of names
    shared = [root for root in roots[0] if all(root in x for x in roots)] if roots else []
    for root in shared:
        # What the names have in common that an iteration reads: `ps[1]` of `ps[1][0]` and `ps[1][2]`.
        prefixes = [_common_start([name for name in names if name[0] == root]) for names in own]
        length = len(_common_start(prefixes))
        run_of_iteration = [prefix[length] if len(prefix) > length else None for prefix in prefixes]
        runs = [run for run, _ in groupby(run_of_iteration)]
        # Several runs, of several iterations, none of which comes twice.
        if 1 < len(runs) < len(iterations) and len(set(runs)) == len(runs):
            begins = (n for n in range(1, len(iterations)) if run_of_iteration[n] != run_of_iteration[n - 1])
            yield from (iterations[n][0] for n in begins)
            return


def _common_start(names: Sequence[_Name]) -> _Name:
    shortest = min(names, key=len)
    return shortest[: next((n for n in range(len(shortest)) if len({x[n] for x in names}) > 1), len(shortest))]
