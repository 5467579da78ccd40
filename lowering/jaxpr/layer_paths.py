"""Paths of layers: the scopes, functions and numbers that name an equation.

Input: the run states, scopes and frames of all forward equations of a jaxpr. Output: a `LayerPath` for each.

Where there are scopes, functions outside of them all are left out, and so are functions for which a library opens a
scope. Those outside stay that are numbered, or that have equations without scopes, which name them, while their caller
has scopes elsewhere: `block/attention/scores` is beside `block/attention`.

A number tells iterations of a loop, places at which a function calls another, `with` blocks that open the same scope,
or depths of a recursion apart, where no scope does. It follows the name of the repeated part: a function, a scope that
is opened inside the loop, else `loop`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import CodeType
from typing import Any

from ipujax.lowering.jaxpr.function_runs import FunctionRun, RunState, RunStates
from ipujax.lowering.jaxpr.loops_of_code import Loop, with_blocks_around
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.errors import is_installed

_NUMBER = re.compile(r"(\[\d+\])+$")
_UPDATE = re.compile(r"\.<locals>\.update\w*$")  # update function of an optimiser, nested in its constructor

Scopes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Call in the path of a layer.

    Args:
        code: code of the function.
        numbers: numbers of iterations and callees, for the calls inside it.
        depth: number of scopes around its run.
        around_loop: number of scopes around its loop; None if unknown.
        opens_scope: True if its loop opens the scope after these.
        recursion: number among the depths at which it calls itself; None without recursion.
        tells_apart: whether its run is named by equations without scopes, and its caller has scopes outside of it.
        scopes_outside: number of scopes that callers open around its call, at most `depth`.
        has_scope: True if a library opens the last of these for it, as for the method of a module.
    """

    code: CodeType
    numbers: tuple[int, ...] = ()
    depth: int = 0
    scopes_outside: int = 0
    has_scope: bool = False
    around_loop: int | None = None
    opens_scope: bool = False
    recursion: int | None = None
    tells_apart: bool = False

    @property
    def is_of_library(self) -> bool:
        """True for a function of a library, False for the user's."""
        return is_installed(self.code.co_filename)


@dataclass(frozen=True, slots=True)
class LayerPath:
    """Calls and scopes of an equation, both outermost first."""

    steps: tuple[Step, ...]
    scopes: Scopes

    def text(self, count: int | None = None) -> str:
        """Return the path of a layer, `encoder/block[3]/dense`, of the functions that were called and of scopes.

        With a count, that of the outermost calls alone. Without scopes all functions are in it. Else there are those
        outside of all scopes up to the last one that is numbered or tells scopes apart, and inside of scopes those
        that take a number, and the user's for which no library opens a scope.
        """
        # A step is a call, outermost first; its depth is the number of scopes around it.
        steps = _fold_recursions(self.steps[:count])
        outside = [n for n in range(1, len(steps)) if not steps[n].depth]
        last_outside = max((n for n in outside if steps[n].tells_apart or _is_numbered(steps, n - 1)), default=-1)
        text = _PathText(self.scopes)
        for n, (name, step) in enumerate(zip(_names_in_path(tuple(x.code for x in steps)), steps, strict=True)):
            if name and (text.numbers or not self.scopes or n <= last_outside):
                text.add_function(name, step)
            elif name and step.scopes_outside and not (step.has_scope or step.is_of_library):
                text.add_function_without_scope(name, step)
            if _is_numbered(steps, n):
                text.number_next(step)
        return text.finished()


class _PathText:
    """Text of a path while it is made: names of functions, and of the scopes between them.

    Args:
        scopes: all scopes of the path, outermost first.
    """

    def __init__(self, scopes: Scopes) -> None:
        self._scopes = scopes
        self._names = list[str]()
        self._used = 0  # number of scopes in the names
        self._numbering: Step | None = None  # the last function whose loop numbers its callees
        self.numbers = ""  # of the functions around, for the next name

    def _add_scopes(self, depth: int) -> None:
        self._names += self._scopes[self._used : depth]
        self._used = max(self._used, depth)

    def add_function(self, name: str, step: Step) -> None:
        """Add a function, numbered, inside of the scopes around its run."""
        self._add_scopes(step.depth)
        if step.depth and self._names and self._names[-1].rpartition(".")[2] == name:  # the function's own scope
            name = self._names.pop()
        self._names.append(name + self.numbers)
        self.numbers = ""

    def add_function_without_scope(self, name: str, step: Step) -> None:
        """Add a function that is called inside of scopes, unless one of its name is around it or opened by it."""
        self._add_scopes(step.scopes_outside)
        around_or_own = (*self._names[-1:], *self._scopes[self._used : step.depth][:1])
        if name not in (_NUMBER.sub("", scope).rpartition(".")[2] for scope in around_or_own):
            self._names.append(name)

    def number_next(self, step: Step) -> None:
        """Add the numbers that a function gives its callees to the next name."""
        self.numbers += "".join(f"[{number}]" for number in step.numbers)
        self._numbering = step

    def finished(self) -> str:
        """Return the path, names and scopes so far with all remaining scopes, `encoder/block[3]/dense`.

        Numbers (of iterations) that no function took go to the scope that the loop opens, else to a part of their own,
        `loop[3]`.
        """
        if self.numbers and self._numbering is not None:
            position = self._numbering.around_loop  # number of scopes around the loop that numbers
            opens_scope = self._numbering.opens_scope
            if position is None:  # unknown: the innermost scope is assumed inside the loop
                position = max(len(self._scopes) - 1, 0)
                opens_scope = self._used < len(self._scopes)
            self._add_scopes(position)
            if opens_scope and self._used < len(self._scopes):
                self._add_scopes(self._used + 1)
                self._names[-1] += self.numbers
            else:
                self._names.append(f"loop{self.numbers}")
        return "/".join((*self._names, *self._scopes[self._used :]))


def _fold_recursions(steps: Sequence[Step]) -> list[Step]:
    """Replace a chain of recursive calls by the innermost one, so that each depth of a recursion is a layer.

    The number of the depth, `recursion`, goes to the step of the first caller.
    """
    folded = list[Step]()
    for n, step in enumerate(steps):
        if n + 1 < len(steps) and step.recursion is not None and steps[n + 1].code is step.code:
            continue
        if step.recursion is not None:
            folded[-1] = replace(folded[-1], numbers=(*folded[-1].numbers, step.recursion))
        folded.append(step)
    return folded


def _is_numbered(steps: Sequence[Step], number: int) -> bool:
    # Loops of the user's functions number all callees, those of a library's only modules.
    step = steps[number]
    if not step.numbers:
        return False
    inside = steps[number + 1].code.co_name if number + 1 < len(steps) else ""
    return inside == "__call__" or not step.is_of_library


class LayerPaths:
    """Paths of all forward equations of a jaxpr.

    Args:
        codes: for the states and scopes of each equation the codes of its frames.
    """

    def __init__(self, codes: Mapping[tuple[RunStates, Scopes], Sequence[CodeType]]) -> None:
        """Collect what all equations tell about each run of a function, loop and calling place.

        Before any path is made: which scopes are around all of its equations, and whether a number is needed beside
        them to tell iterations, or calls of one function, apart.
        """
        self._blocks = _WithBlocks(codes)
        # Scopes that all equations of a run of a function, or of an iteration of a loop, have in common.
        self._scopes_of_run: dict[FunctionRun, Scopes] = {}
        self._scopes_of_iteration: dict[Hashable, Scopes] = {}
        self._with_scopes: Counter[tuple[FunctionRun, bool]] = Counter()  # places with and without scopes in a run
        self._blocks_in_loop: dict[Hashable, set[int]] = {}  # `with` blocks in a loop, around all of its equations
        # Numbers of calls of a function by itself, by the outermost run; keys in the order of tracing, without values.
        self._recursion_depths: dict[FunctionRun, dict[int, None]] = defaultdict(dict)
        # By run of a loop and iteration: the scopes of all equations there.
        iterations: dict[Hashable, dict[int, set[Scopes]]] = defaultdict(lambda: defaultdict(set))
        # By run of a function and callee: the calling places, each with the scopes that its equations have in common.
        calls: dict[tuple[FunctionRun, CodeType], dict[int, Scopes]] = defaultdict(dict)
        for (states, plain_scopes), functions in codes.items():
            scopes = self._blocks.numbered(states, plain_scopes)
            for n, state in enumerate(states):
                _narrow_prefix(self._scopes_of_run, state.run, scopes)
                self._with_scopes[state.run, bool(scopes)] += 1
                for run, loop in _runs_of_loops(state):
                    iterations[run][state.iterations.get(loop, 0)].add(scopes)
                # Only a function that has the equations itself opens all scopes inside its loop.
                if all(x.co_name.startswith("<") for x in functions[n + 1 :]):
                    self._narrow_loops(state, functions[n], scopes)
            for state, callee in zip(states, functions[1:], strict=False):
                if _is_layer(callee):
                    _narrow_prefix(calls[state.run, callee], state.offset, scopes)
            for first, last in _neighbouring_calls(functions):
                self._recursion_depths[states[first].run].setdefault(last - first)
        # Loops whose iterations have scopes of their own: their numbers would say it twice.
        self._named_by_scopes = {key for key, scopes in iterations.items() if _are_disjoint(scopes.values())}
        # Places at which a run of a function calls another, in order, unless each has a scope.
        self._places = {key: list(scopes) for key, scopes in calls.items() if len(set(scopes.values())) < len(scopes)}

    def _narrow_loops(self, state: RunState, code: CodeType, scopes: Scopes) -> None:
        """Narrow scopes and `with` blocks of the loops around a call to those around another equation too."""
        blocks = with_blocks_around(code, state.offset) if state.loops else ()
        for run, loop in _runs_of_loops(state):
            _narrow_prefix(self._scopes_of_iteration, (run, state.iterations.get(loop, 0)), scopes)
            inside = set(filter(loop.has, blocks))
            self._blocks_in_loop[run] = self._blocks_in_loop.get(run, inside) & inside

    def of(self, states: RunStates, plain_scopes: Scopes, codes: Sequence[CodeType]) -> LayerPath:
        """Return the path of an equation, a step for each call around it, from the states and codes of these calls."""
        calls = zip(states, zip_longest(codes, codes[1:]), strict=True)  # the last one has no callee
        steps = [self._step_of_call(state, code, callee) for state, (code, callee) in calls]
        steps = self._with_scopes_outside(steps, states)
        steps = self._with_recursions(steps, states)
        for n in range(1, len(steps)):
            steps[n] = replace(steps[n], tells_apart=self._tells_apart(states[n - 1].run, states[n].run, steps[n]))
        return LayerPath(tuple(steps), self._blocks.numbered(states, plain_scopes))

    def _step_of_call(self, state: RunState, code: CodeType, callee: CodeType | None) -> Step:
        """Return the part of a layer's path that one call is, with the numbers that calls inside it get.

        They are the iterations of its loops, then the calling place, if the function calls `callee` on several lines.

        Args:
            state: run of the called function, at the time of an equation in it.
            code: code of that function.
            callee: code of the function that it calls next; None for the innermost.
        """
        # Loops around the place, but for those whose iterations have scopes of their own; and their iterations.
        runs = [(run, loop) for run, loop in _runs_of_loops(state) if run not in self._named_by_scopes]
        numbers = tuple(state.iterations.get(loop, 0) for _, loop in runs)
        depth = len(self._scopes_of_run[state.run])  # number of scopes around all of the function
        places = None if callee is None else self._places.get((state.run, callee))
        place_numbers = () if places is None else (places.index(state.offset),)
        step = Step(code, (*numbers, *place_numbers), depth)
        if not runs:
            return step
        # Numbers of iterations go to a scope: the last one around the iteration, if the loop opens it.
        innermost_run, _ = runs[-1]
        around = self._scopes_of_iteration.get((innermost_run, numbers[-1]))
        if around is None:
            return step
        opens_scope = bool(self._blocks_in_loop[innermost_run]) and bool(around)
        return replace(step, around_loop=len(around) - opens_scope, opens_scope=opens_scope)

    def _tells_apart(self, caller: FunctionRun, run: FunctionRun, step: Step) -> bool:
        """True for a run with equations outside of scopes, whose caller has scopes outside of the run."""
        is_named = not step.is_of_library and self._with_scopes[run, False] > 0
        return is_named and self._with_scopes[caller, True] > self._with_scopes[run, True]

    def _with_recursions(self, steps: Sequence[Step], states: RunStates) -> list[Step]:
        """Return the steps of a path, numbered where a function of the user's calls one that calls itself.

        They are numbered if its depth differs between equations, and loops do not number them already. The number is
        the position of the depth among those of all equations, in the order of tracing.

        Args:
            steps: a step for each call around an equation, outermost first.
            states: run of each of these calls.
        """
        numbered = list(steps)
        for first, last in _neighbouring_calls([step.code for step in steps]):
            # Depths in the order of tracing; 0 if the function does not call itself. Steps `first` to `last` are calls
            # of one function by itself.
            depths = list(self._recursion_depths[states[first].run])
            is_plain = not any(step.numbers for step in steps[first:last])
            if len(depths) > 1 and first and is_plain and not steps[first - 1].is_of_library:
                for n in range(first, last + 1):
                    number = depths.index(n - first) if n - first in depths else None
                    numbered[n] = replace(numbered[n], recursion=number)
        return numbered

    def _with_scopes_outside(self, steps: Sequence[Step], states: RunStates) -> list[Step]:
        """Return the steps of a path with `scopes_outside`, the number of scopes around the call, and `has_scope`.

        A call has a scope if a library opens one around it. Both follow from the scopes that callers' `with` blocks
        open: those around a run, `depth`, do not tell, as the run may have opened some of them itself.

        Args:
            steps: a step for each call around an equation, outermost first.
            states: run of each of these calls.
        """
        result = list[Step]()
        outside = 0  # scopes around the call of the next step
        of_user = 0  # around the last call by a function of the user's
        for step, state in zip(steps, states, strict=True):
            outside = min(outside, step.depth)
            is_called_by_library = bool(result) and result[-1].is_of_library
            if not is_called_by_library:
                of_user = outside
            result.append(replace(step, scopes_outside=outside, has_scope=is_called_by_library and outside > of_user))
            outside = step.depth + self._blocks.num_opened(step.code, state, step.depth)
        return result


class _WithBlocks:
    """Numbers of `with` blocks of one function that open the same scope.

    A block is a key from `_blocks_of`; its prefix is the scopes that all equations inside it begin with.

    Args:
        codes: for the states and scopes of each equation the codes of its frames.
    """

    def __init__(self, codes: Mapping[tuple[RunStates, Scopes], Sequence[CodeType]]) -> None:
        """Find the `with` blocks around the calls of all equations, and those that only a number tells apart."""
        # By the calls around an equation: for each call that is within `with` blocks, its code and the keys of these
        # blocks, see `_blocks_of`. Calls of equal states have equal codes, as a run of a function is part of a state.
        self._blocks: dict[RunStates, list[tuple[CodeType, list[tuple[Hashable, ...]]]]] = {}
        # By block the scopes that all equations inside of it have in common: those around it, and the one it opens.
        self._prefixes: dict[tuple[Hashable, ...], Scopes] = {}
        for (states, scopes), functions in codes.items():
            if states not in self._blocks:
                pairs = zip(states, functions, strict=True)
                self._blocks[states] = [
                    (code, _blocks_of(state, code)) for state, code in pairs if with_blocks_around(code, state.offset)
                ]
            for _, blocks in self._blocks[states]:
                for block in blocks:
                    _narrow_prefix(self._prefixes, block, scopes)
        # Blocks that only a number tells apart, in the order of tracing: they differ in the offset in the code, which
        # is the last part of a key.
        self._numbers: dict[tuple[Hashable, Scopes], list[Hashable]] = defaultdict(list)
        for block, prefix in self._prefixes.items():
            self._numbers[block[:-1], prefix].append(block)

    def num_opened(self, code: CodeType, state: RunState, depth: int) -> int:
        """Return the number of `with` blocks around a place that open a scope inside of the first `depth` scopes."""
        return sum(len(self._prefixes[block]) > depth for block in _blocks_of(state, code))

    def numbered(self, states: RunStates, scopes: Scopes) -> Scopes:
        """Return the scopes of an equation, those numbered that several `with` blocks of one function open by one name.

        Args:
            states: run of each call around the equation, outermost first.
            scopes: its scopes, outermost first.
        """
        numbered = list(scopes)
        for code, blocks in self._blocks[states]:
            for depth, block in enumerate(blocks, 1):
                prefix = self._prefixes[block]
                alike = self._numbers[block[:-1], prefix]
                # A block that opens a scope adds one to its prefix, and names it by a constant of the function's code.
                # One that opens none, as `ipu.stage`, has the prefix of its surroundings.
                if len(alike) > 1 and len(prefix) >= depth and prefix[-1] in code.co_consts:
                    numbered[len(prefix) - 1] += f"[{alike.index(block)}]"
        return tuple(numbered)


def _blocks_of(state: RunState, code: CodeType) -> list[tuple[Hashable, ...]]:
    """Return the keys of the `with` blocks around a place, outermost first; each begins with that of the one around."""
    blocks = with_blocks_around(code, state.offset)
    iterations = tuple(state.iterations.get(loop, 0) for loop in state.loops)
    return [(state.run, iterations, *blocks[: n + 1]) for n in range(len(blocks))]


def _neighbouring_calls(codes: Sequence[CodeType]) -> list[tuple[int, int]]:
    """Return the numbers of the first and last of neighbouring calls of each function, also of a single call."""
    firsts = [n for n, code in enumerate(codes) if n == 0 or codes[n - 1] is not code]
    lasts = [n for n, code in enumerate(codes) if n + 1 == len(codes) or codes[n + 1] is not code]
    return list(zip(firsts, lasts, strict=True))


def _runs_of_loops(state: RunState) -> list[tuple[Hashable, Loop]]:
    """Return the loops around a call's place, each with a key of its run: the iterations of the loops around it."""
    loops = state.loops
    numbers = [state.iterations.get(loop, 0) for loop in loops]
    return [((state.run, loop, *numbers[:n]), loop) for n, loop in enumerate(loops)]


def _are_disjoint(sets: Collection[set[Scopes]]) -> bool:
    return sum(map(len, sets)) == len(set[Scopes]().union(*sets))


def _narrow_prefix(prefixes: dict[Any, Scopes], key: Hashable, scopes: Scopes) -> None:
    """Shorten the prefix of a key to the part that it has in common with `scopes`."""
    prefix = prefixes.setdefault(key, scopes)
    if prefix is not scopes and prefix != scopes[: len(prefix)]:
        length = min(len(prefix), len(scopes))
        prefixes[key] = prefix[: next((n for n in range(length) if prefix[n] != scopes[n]), length)]


def _is_layer(code: CodeType) -> bool:
    # Calls at several places are numbered for the user's functions, and for modules of libraries.
    return code.co_name == "__call__" or not (is_installed(code.co_filename) or code.co_name.startswith("<"))


@remembered_small
def _names_in_path(codes: tuple[CodeType, ...]) -> tuple[str, ...]:
    """Return for each call of an equation, outermost first, its name in the layer's path; "" for one that is left out.

    Functions of the user have one, but for lambdas; of libraries those that stand for a layer.
    """
    users = [n for n, code in enumerate(codes) if not is_installed(code.co_filename)]
    inside = range(users[-1] + 1 if users else 0, len(codes))
    in_path = {*users, *(n for n in inside if codes[n].co_name == "__call__")}
    updates = [n for n in inside if _UPDATE.search(codes[n].co_qualname)]
    public = [n for n in inside if not codes[n].co_name.startswith(("<", "_"))]
    # Without a module: an optimiser's update, else the innermost public function.
    if not in_path.intersection(inside):
        in_path.update(updates[-1:] or public[-1:])
    return tuple(_function_name(code) if n in in_path else "" for n, code in enumerate(codes))


def _function_name(code: CodeType) -> str:
    """Return the name of a function for the path of a layer; "" for a lambda or comprehension.

    Of the `__call__` of a module that is its class; of an optimiser's update, a closure, the function that makes it:
    `scale_by_adam` of `scale_by_adam.<locals>.update_fn`.
    """
    maker, _, inner = code.co_qualname.rpartition(".<locals>.")
    if inner.startswith("update") and maker and is_installed(code.co_filename):
        return maker.rpartition(".")[2]
    owner, _, name = inner.rpartition(".")
    if name == "__call__" and owner:
        return owner.rpartition(".")[2]
    return "" if name.startswith("<") else name
