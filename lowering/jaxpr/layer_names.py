"""The layer of each equation, as one path of names: scopes, or the functions of the call stack, numbered in loops.

Input: the equations of a jaxpr after inlining, in the order of tracing, with the frames each was traced in. Output: a
path for each, `encoder/block[3]/dense`.

A path has the scopes of the name stack; without any the user's functions, outermost first, then a library's. Functions
that a Python loop or several lines of a function call are numbered, and named where there are scopes too, at the place
among them that all equations of a call agree on. Forward equations are in the order of tracing, see `activations`.
Those of a gradient, and those that a checkpoint computes again, have the frames of the forward equations they are made
of: they belong to equations that read or make the same values at the same place; if none does, the order decides, which
is the reverse.
Limits: where neither tells, a function has no number.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from sys import maxsize
from types import CodeType
from typing import Any

from ipujax.lowering.jax_compat import JaxprEqn, Var
from ipujax.lowering.jaxpr.activations import Activation, Call, Frames, Moments, Place, follow
from ipujax.lowering.jaxpr.gradient_bodies import GradientBody
from ipujax.lowering.jaxpr.loops_of_code import Loop
from ipujax.lowering.jaxpr.stage_names import is_transposed, read_name
from ipujax.lowering.source_info import name_stack, scopes_of
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.errors import is_installed

_MOST_READERS = 64  # of a value, beyond which it tells no iterations apart: a mask of all layers, a constant
_UPDATE = re.compile(r"\.<locals>\.update\w*$")  # the function of an optimiser that its maker returns
_NUMBER = re.compile(r"(\[\d+\])+$")


@dataclass(frozen=True, slots=True)
class Repetition:
    """A call in a gradient that computes again what a checkpoint has not kept.

    Args:
        number: of the call.
        depth: number of the frames around it.
    """

    number: int
    depth: int


@dataclass(frozen=True, slots=True)
class Traced:
    """An equation with what is known of its tracing.

    Args:
        eqn: the equation, inlined.
        frames: those it was traced in.
        repetition: the innermost one it is in; None outside of such.
    """

    eqn: JaxprEqn
    frames: Frames
    repetition: Repetition | None = None

    @property
    def variables(self) -> Iterable[Var]:
        """What it reads and makes."""
        return (x for x in (*self.eqn.invars, *self.eqn.outvars) if isinstance(x, Var))


@dataclass(eq=False, slots=True)
class _Place:
    """Forward equations of one place in one iteration: path of the layer, order of the last, runs of functions."""

    layer: str
    order: int
    moments: Moments


_Key = tuple[tuple[Place, ...], tuple[str, ...]]  # what forward and backward equations share: frames and scopes


class LayerNames:
    """The layers of the equations of one jaxpr.

    Args:
        equations: all of it.
        gradient: of a body of a gradient, which has no forward equations, the bodies it is made of.
    """

    def __init__(self, equations: Sequence[Traced], gradient: GradientBody[LayerNames] | None = None) -> None:
        self._equations = equations
        self._scopes = [_scopes_of(x) for x in equations]
        self._places: dict[_Key, dict[str, _Place]] = defaultdict(dict)
        self._users: dict[Var, list[tuple[_Key, _Place]]] = defaultdict(list)
        self._makers: dict[Var, tuple[_Key, _Place]] = {}  # of what is made of forward equations
        self._forward: list[tuple[int, Moments, list[tuple[int, ...]], list[int]]] = []  # number, run, see `_path`
        self._repeated: dict[Repetition, Activation] = {}  # the run of a function that is computed again
        self.layers = [""] * len(equations)
        forward, again, backward = self._parts(gradient is not None)
        self._name_forward(forward)
        self._sources = gradient.forward if gradient is not None else ()
        if gradient is not None:
            self._read_forward(gradient)
        self._find_repeated([*chain(*again), *backward])
        for group in again:
            self._name_made_of_forward(group, is_reversed=False)
        for var, place in self._makers.items():  # a gradient reads them as it does forward values
            self._users[var].append(place)
        self._name_made_of_forward(backward, is_reversed=True)

    def _read_forward(self, gradient: GradientBody[LayerNames]) -> None:
        """Takes the places of forward equations from the bodies that a gradient is made of."""
        for source in gradient.forward:
            self._places.update((key, dict(places)) for key, places in source._places.items())
        for var, values in gradient.values.items():
            self._users[var] = [user for source, inside in values for user in source._users.get(inside, ())]

    def _parts(self, is_gradient: bool) -> tuple[list[int], list[list[int]], list[int]]:
        """Numbers of equations that are forward, computed again by each call, or backward."""
        forward = list[int]()
        again = dict[Repetition | None, list[int]]()
        backward = list[int]()
        for n, item in enumerate(self._equations):
            stack = name_stack(item.eqn)
            if read_name(stack).is_recomputed and not is_transposed(stack):
                again.setdefault(item.repetition, []).append(n)
            elif is_gradient or is_transposed(stack):
                backward.append(n)
            else:
                forward.append(n)
        return forward, list(again.values()), backward

    def _key(self, number: int) -> _Key:
        return self._equations[number].frames.places, self._scopes[number]

    # --- forward ---

    def _name_forward(self, numbers: Sequence[int]) -> None:
        items = [self._equations[n] for n in numbers]
        all_moments = follow([item.frames for item in items], lambda n: _does(items[n].eqn))
        pairs = [(moments, self._scopes[n]) for n, moments in zip(numbers, all_moments, strict=True)]
        common = _CommonScopes({pair: item.frames.codes for pair, item in zip(pairs, items, strict=True)})
        known: dict[tuple[Moments, tuple[str, ...]], tuple[str, list[tuple[int, ...]], list[int]]] = {}
        for order, (n, pair) in enumerate(zip(numbers, pairs, strict=True)):
            if pair not in known:
                indices, depths = common.of(pair[0], items[order].frames.codes)
                known[pair] = _path(items[order].frames.calls, indices, depths, pair[1]), indices, depths
            self.layers[n], indices, depths = known[pair]
            self._forward.append((n, pair[0], indices, depths))
            self._add(self._key(n), self.layers[n], n, order)

    def _add(self, key: _Key, layer: str, number: int, order: int) -> None:
        """Adds a forward equation to those of a place."""
        place = self._places[key].setdefault(layer, _Place(layer, order, ()))
        place.order = order
        place.moments = self._forward[order][1]
        for var in self._equations[number].variables:
            self._users[var].append((key, place))

    def _know_inside(self, key: _Key) -> None:
        """Where nothing forward has the frames of a gradient, as in those by `custom_vjp`: what has more frames."""
        for source in self._sources:
            source._know_inside(key)
            self._places[key].update(source._places.get(key, {}))
        calls, scopes = key
        count, around = len(calls), dict[int, tuple[str, str]]()
        for order, (n, _, indices, depths) in enumerate(self._forward):
            if self._scopes[n] == scopes and self._equations[n].frames.places[:count] == calls:
                outer = _path(self._equations[n].frames.calls[:count], indices[:count], depths[:count], scopes)
                around[order] = outer, self.layers[n]
        inner: dict[str, set[str]] = defaultdict(set)
        for outer, layer in around.values():
            inner[outer].add(layer)
        for order, (outer, layer) in around.items():
            self._add(key, layer if len(inner[outer]) == 1 else outer, self._forward[order][0], order)

    # --- what is made of forward equations ---

    def _find_repeated(self, numbers: Sequence[int]) -> None:
        """Finds the runs of functions that are computed again: most equations whose place is known tell."""
        for key in {self._key(n) for n in numbers}.difference(self._places):
            self._know_inside(key)
        votes: dict[Repetition, Counter[Activation]] = defaultdict(Counter)
        for n in numbers:
            repetition = self._equations[n].repetition
            if repetition is not None:
                runs = {run for x in self._with_same_values(n).values() if (run := _run(x, repetition)) is not None}
                votes[repetition].update(runs if len(runs) == 1 else ())
        self._repeated = {repetition: runs.most_common(1)[0][0] for repetition, runs in votes.items() if runs}

    def _in_repeated(self, number: int, options: list[_Place]) -> list[_Place]:
        """Those places of an equation that are in the run of the function that it computes again."""
        repetition = self._equations[number].repetition
        run = self._repeated.get(repetition) if repetition is not None else None
        if repetition is None or run is None:
            return options
        return [x for x in options if _run(x, repetition) is run] or options

    def _name_made_of_forward(self, numbers: Sequence[int], is_reversed: bool) -> None:
        """Names equations that follow the forward ones in the same or in reverse order."""
        users = [self._with_same_values(n) for n in numbers]
        limit = -1 if is_reversed else maxsize
        following = list[int]()  # the order of the next equation that is known
        for known in reversed(users):
            following.append(limit)
            limit = next(iter(known.values())).order if len(known) == 1 else limit
        last = maxsize if is_reversed else -1  # the order of the last equation that is known
        for n, known, limit in zip(numbers, users, reversed(following), strict=True):
            least, most = min(last, limit), max(last, limit)
            options = list((known or self._places.get(self._key(n), {})).values())
            options = self._in_repeated(n, options)
            if len(options) > 1 and self._equations[n].eqn.primitive.name == "add_any":
                summed = {place.layer for _, place in self._operands_makers(n)}.intersection(x.layer for x in options)
                options = [x for x in options if x.layer in summed] if len(summed) == 1 else options
            if len(options) > 1:
                options = [x for x in options if least <= x.order <= most] or options
            if len(options) > 1:
                options = self._made_by_same(n, options, is_reversed)
            if len(options) == 1:
                last = options[0].order
                self._makers.update((var, (self._key(n), options[0])) for var in self._equations[n].eqn.outvars)
            self.layers[n] = _agreed([x.layer for x in options]) if options else self._unnumbered(n)

    def _made_by_same(self, number: int, options: list[_Place], is_reversed: bool) -> list[_Place]:
        """The place that makes an operand; or, in the order of forward equations, the one in that run of a function."""
        makers = list(self._operands_makers(number))
        if is_reversed:
            same = [x for x in options if any(place is x for key, place in makers if key == self._key(number))]
        else:
            runs = {place.moments[-1].activation for _, place in makers if place.moments}
            same = [x for x in options if x.moments and x.moments[-1].activation in runs]
        return same if len(same) == 1 else options

    def _operands_makers(self, number: int) -> Iterable[tuple[_Key, _Place]]:
        operands = (x for x in self._equations[number].eqn.invars if isinstance(x, Var))
        return (self._makers[x] for x in operands if x in self._makers)

    def _with_same_values(self, number: int) -> dict[str, _Place]:
        """The forward equations at the place of one that read or make what it reads or makes, by layer."""
        key, known = self._key(number), dict[str, _Place]()
        for var in self._equations[number].variables:
            users = self._users.get(var, ())
            if len(users) > _MOST_READERS:
                continue
            found = {place.layer: place for other, place in users if other == key}
            common = {layer: place for layer, place in found.items() if layer in known}
            known = common or known or found
        return known

    def _unnumbered(self, number: int) -> str:
        calls = self._equations[number].frames.calls
        return _path(calls, [()] * len(calls), [0] * len(calls), self._scopes[number])


def _run(place: _Place, repetition: Repetition) -> Activation | None:
    """The run of the function that a repetition calls."""
    return place.moments[repetition.depth].activation if repetition.depth < len(place.moments) else None


def _does(eqn: JaxprEqn) -> Hashable:
    return eqn.primitive.name, *(var.aval for var in eqn.outvars)


def _scopes_of(item: Traced) -> tuple[str, ...]:
    """The scopes of an equation; what a checkpoint repeats may have those around it twice, as Flax's does."""
    scopes = scopes_of(item.eqn)
    if item.repetition is None:
        return scopes
    twice = (n for n in range(len(scopes) // 2, 0, -1) if scopes[:n] == scopes[n : 2 * n])
    return scopes[next(twice, 0) :]


class _CommonScopes:
    """The scopes around runs of functions and around iterations: those that all equations in them agree on."""

    def __init__(self, pairs: Mapping[tuple[Moments, tuple[str, ...]], Sequence[CodeType]]) -> None:
        self._around: dict[Activation, tuple[str, ...]] = {}
        iterations: dict[tuple[Activation, Loop], dict[int, tuple[str, ...]]] = defaultdict(dict)
        calls: dict[tuple[Activation, CodeType], dict[int, tuple[str, ...]]] = defaultdict(dict)
        for (moments, scopes), codes in pairs.items():
            for moment in moments:
                _narrow(self._around, moment.activation, scopes)
                for loop in moment.loops:
                    _narrow(iterations[moment.activation, loop], moment.iterations.get(loop, 0), scopes)
            for moment, callee in zip(moments, codes[1:], strict=False):
                if _is_layer(callee):
                    _narrow(calls[moment.activation, callee], moment.place, scopes)
        self._named = {key for key, known in iterations.items() if len(set(known.values())) == len(known)}
        # The places at which a run of a function calls another, in order, where no scope tells them apart.
        self._places = {key: list(known) for key, known in calls.items() if len(set(known.values())) < len(known)}

    def of(self, moments: Moments, codes: Sequence[CodeType]) -> tuple[list[tuple[int, ...]], list[int]]:
        """For each call the numbers that no scope tells, of iterations and of what it calls; and the scopes around."""
        indices = [
            tuple(x.iterations.get(loop, 0) for loop in x.loops if (x.activation, loop) not in self._named)
            for x in moments
        ]
        for n, (moment, callee) in enumerate(zip(moments, codes[1:], strict=False)):
            if (places := self._places.get((moment.activation, callee))) is not None:
                indices[n] += (places.index(moment.place),)
        return indices, [len(self._around[x.activation]) for x in moments]


def _narrow(known: dict[Any, tuple[str, ...]], key: Hashable, scopes: tuple[str, ...]) -> None:
    """Keeps what scopes have in common with those known."""
    before = known.setdefault(key, scopes)
    if before is not scopes and before != scopes[: len(before)]:
        least = min(len(before), len(scopes))
        known[key] = before[: next((n for n in range(least) if before[n] != scopes[n]), least)]


def _path(
    calls: Sequence[Call], indices: Sequence[tuple[int, ...]], depths: Sequence[int], scopes: Sequence[str]
) -> str:
    """The path of a layer.

    Args:
        calls: the frames, outermost first.
        indices: for each frame the numbers of the iterations of its loops, which number what it calls.
        depths: for each frame the number of scopes around it.
        scopes: names of the name stack, outermost first.
    """
    names, used, pending = list[str](), 0, ""
    codes = tuple(call.place[0] for call in calls)
    shown = _shown_functions(codes)
    called = [n for n in range(1, len(codes)) if not depths[n] and _numbered(codes, indices, n - 1)]
    last_outside = max(called, default=-1)  # the last numbered function that no scope is around
    for n, (name, numbers, depth) in enumerate(zip(shown, indices, depths, strict=True)):
        if name and (pending or not scopes or n <= last_outside):
            names += scopes[used:depth]
            used = max(depth, used)
            if depth and names and names[-1].rpartition(".")[2] == name:  # the scope of the function itself
                name = names.pop()
            names.append(name + pending)
        if name:
            pending = ""
        if _numbered(codes, indices, n):
            pending += "".join(f"[{number}]" for number in numbers)
    names += scopes[used:]
    if pending and used < len(scopes):
        names[-1] += pending
    elif pending:
        names.append(f"loop{pending}")
    return "/".join(names)


def _numbered(codes: Sequence[CodeType], indices: Sequence[tuple[int, ...]], number: int) -> bool:
    """Whether loops of a function number what it calls: the user's do, a library's only modules."""
    if not indices[number]:
        return False
    inside = codes[number + 1].co_name if number + 1 < len(codes) else ""
    return inside == "__call__" or not is_installed(codes[number].co_filename)


def _is_layer(code: CodeType) -> bool:
    """Whether calls of a function at several places are numbered: those of the user's functions, and of modules."""
    return code.co_name == "__call__" or not (is_installed(code.co_filename) or code.co_name.startswith("<"))


@remembered_small
def _shown_functions(codes: tuple[CodeType, ...]) -> tuple[str, ...]:
    """The names of functions as parts of a path, "" for those left out: nameless ones, helpers of libraries."""
    users = [n for n, code in enumerate(codes) if not is_installed(code.co_filename)]
    inside = range(users[-1] + 1 if users else 0, len(codes))
    kept = {*users, *(n for n in inside if codes[n].co_name == "__call__")}
    makers = [n for n in inside if _UPDATE.search(codes[n].co_qualname)]
    named = [n for n in inside if not codes[n].co_name.startswith(("<", "_"))]
    if not kept.intersection(inside):
        kept.update(makers[-1:] or named[-1:])
    return tuple(_function_name(code) if n in kept else "" for n, code in enumerate(codes))


def _function_name(code: CodeType) -> str:
    """`block`, the class of a `__call__`, the maker of an optimiser's update; "" for a lambda or a comprehension."""
    maker, _, inner = code.co_qualname.rpartition(".<locals>.")
    if inner.startswith("update") and maker and is_installed(code.co_filename):
        return maker.rpartition(".")[2]
    owner, _, name = inner.rpartition(".")
    if name == "__call__" and owner:
        return owner.rpartition(".")[2]
    return "" if name.startswith("<") else name


def _agreed(layers: Sequence[str]) -> str:
    """A layer without the numbers in which several possible ones differ."""
    paths = [layer.split("/") for layer in layers]
    if len({len(path) for path in paths}) > 1:
        return "/".join(_NUMBER.sub("", name) for name in min(paths, key=len))
    places = zip(*paths, strict=True)
    return "/".join(names[0] if len(set(names)) == 1 else _NUMBER.sub("", names[0]) for names in places)
