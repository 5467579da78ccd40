"""Frames of the calls that JAX leaves out where it evaluates a jaxpr in the place of a call.

    y = jax.checkpoint(layer)(p, x)     the gradient has a call:     remat2        loss@12 > body@4
                                        and the forward equations:   dot_general   layer@42

Input: a jaxpr before inlining, and all jaxprs of the program. Output: for each equation the call that its function was
traced in, if its frames begin in a function that something in the jaxpr calls, or a jaxpr of the same function does,
as the gradient of a scan's body. Of several calls it is the one that reads the same values; else the order tells, which
is the reverse in a gradient; if neither does, all that the calls have in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType

from ipujax.lowering.jax_compat import CALLEES, Jaxpr, JaxprEqn, Var, closed, jaxprs_in_params, raw_frames
from ipujax.lowering.jaxpr.activations import Call, Frames, Place
from ipujax.lowering.source_info import shown_calls, traced_from
from ipujax.runtime.errors import is_of_user

Root = tuple[str, str]  # the function a jaxpr was traced from: name, `file:line`


@dataclass(frozen=True, eq=False, slots=True)
class OmittedCall:
    """A call that equations of its callee have no frames of.

    Args:
        frames: of the call, within the function of the jaxpr that holds the equations.
        lines: the user's lines in them, innermost first.
        operands: what it reads in that jaxpr.
        is_reversed: whether it is of a gradient, whose calls come in reverse order.
        number: of the call; 0 for several at one place that nothing tells apart.
    """

    frames: Frames
    lines: tuple[str, ...] = ()
    operands: frozenset[Var] = frozenset()
    is_reversed: bool = False
    number: int = 0

    @property
    def runs(self) -> Hashable:
        """Places and numbers of the calls."""
        return self.frames.runs, self.number


_MOST_READERS = 64  # of a value, beyond which it tells no calls apart: a mask of all layers, a constant


class OmittedCalls:
    """The calls of all jaxprs of one program, found as they are asked for."""

    def __init__(self, program: Jaxpr) -> None:
        self._program = program
        self._jaxprs: dict[Root, list[Jaxpr]] | None = None
        self._calls: dict[int, dict[Root, list[OmittedCall]]] = {}
        self._number = 0  # of calls

    def of(self, jaxpr: Jaxpr) -> dict[int, OmittedCall]:
        """The omitted call of those equations of a jaxpr that have one, by number."""
        omitted: dict[Root, list[int]] = defaultdict(list)
        root = traced_from(jaxpr)
        for number, eqn in enumerate(jaxpr.eqns):
            outermost = _outermost(eqn)
            if outermost is not None and (function := root_of(outermost[0])) != root:
                omitted[function].append(number)
        calls = dict[int, OmittedCall]()
        for function, numbers in omitted.items():
            eqns = [jaxpr.eqns[n] for n in numbers]
            calls.update(zip(numbers, self._matched(jaxpr, function, eqns), strict=False))  # none for other functions
        return calls

    def _matched(self, jaxpr: Jaxpr, function: Root, eqns: Sequence[JaxprEqn]) -> list[OmittedCall]:
        candidates = self._calls_in(jaxpr).get(function, [])
        if candidates:
            return _by_values(eqns, candidates)
        for other in self._traced_from(traced_from(jaxpr)):
            candidates = self._calls_in(other).get(function, [])
            if candidates:
                return _by_order(eqns, candidates)
        return []

    def _traced_from(self, root: Root) -> list[Jaxpr]:
        if self._jaxprs is None:
            self._jaxprs = defaultdict(list)
            for jaxpr in _all_jaxprs(self._program):
                self._jaxprs[traced_from(jaxpr)].append(jaxpr)
        return self._jaxprs[root]

    def _calls_in(self, jaxpr: Jaxpr) -> dict[Root, list[OmittedCall]]:
        """The calls of functions in a jaxpr, and in what it calls."""
        if id(jaxpr) not in self._calls:
            calls: dict[Root, list[OmittedCall]] = defaultdict(list)
            for eqn in jaxpr.eqns:
                param = CALLEES.get(eqn.primitive.name)
                if param is None or _outermost(eqn) is None:
                    continue
                callee = closed(eqn.params[param]).jaxpr
                self._number += 1
                call = _call(eqn, self._number)
                calls[traced_from(callee)].append(call)
                for function, inner in self._calls_in(callee).items():
                    calls[function] += _distinct([_inside(call, item) for item in inner])
            self._calls[id(jaxpr)] = calls
        return self._calls[id(jaxpr)]


def root_of(code: CodeType) -> Root:
    """The name and place of a function, as jaxprs have those of the function they were traced from."""
    return code.co_name, f"{code.co_filename}:{code.co_firstlineno}"


def frames_of(eqn: JaxprEqn, before: Frames, is_shown: Callable[[CodeType], bool], run: int = 0) -> Frames:
    """The frames of an equation behind those of the call that it is in.

    Args:
        eqn: the equation.
        before: frames of the call.
        is_shown: whether frames of a function are not JAX's or ours.
        run: number of the call, see `Call`.
    """
    calls = list(before.calls)
    between = list(before.tail)
    for place in reversed(raw_frames(eqn)):
        if is_shown(place[0]):
            calls.append(Call(place, tuple(between), run))
            between = []
            run = 0
        else:
            between.append(place)
    return Frames(tuple(calls), tuple(between))


def _is_user_code(code: CodeType) -> bool:
    return is_of_user(code.co_filename)


def _outermost(eqn: JaxprEqn) -> Place | None:
    """The outermost frame of an equation that is not JAX's or ours."""
    return next((place for place in reversed(raw_frames(eqn)) if _is_user_code(place[0])), None)


def _call(eqn: JaxprEqn, number: int) -> OmittedCall:
    operands = frozenset(atom for atom in eqn.invars if isinstance(atom, Var))
    frames = frames_of(eqn, Frames(), _is_user_code)
    is_reversed = bool(eqn.params.get("differentiated", False))
    return OmittedCall(frames, tuple(shown_calls(eqn)), operands, is_reversed, number)


def _inside(call: OmittedCall, inner: OmittedCall) -> OmittedCall:
    """A call in the callee of another."""
    first, *others = inner.frames.calls
    first = replace(first, before=(*call.frames.tail, *first.before), run=call.number)
    frames = Frames((*call.frames.calls, first, *others), inner.frames.tail)
    return replace(call, frames=frames, lines=(*inner.lines, *call.lines), number=0)


def _distinct(calls: Sequence[OmittedCall]) -> list[OmittedCall]:
    """The calls, one of those that nothing tells apart."""
    return list({call.runs: call for call in calls}.values())


def _all_jaxprs(program: Jaxpr) -> Iterator[Jaxpr]:
    """A jaxpr and all inside of it, each once."""
    known, stack = {id(program)}, [program]
    while stack:
        jaxpr = stack.pop()
        yield jaxpr
        for eqn in jaxpr.eqns:
            for inner in jaxprs_in_params(eqn.params):
                nested = closed(inner).jaxpr
                if id(nested) not in known:
                    known.add(id(nested))
                    stack.append(nested)


def _by_values(eqns: Sequence[JaxprEqn], calls: Sequence[OmittedCall]) -> list[OmittedCall]:
    """For each equation the call that reads the same values; those between go with the equations before them.

    An equation at the place where the callee begins goes with those behind it.
    """
    readers: dict[Var, set[int]] = defaultdict(set)
    for number, call in enumerate(calls):
        for var in call.operands:
            readers[var].add(number)
    start = raw_frames(eqns[0])
    chosen = list[OmittedCall]()
    pending = 0  # equations whose call is that of the next one that is known
    for eqn in eqns:
        reading = _reader(eqn, readers, calls)
        if reading is not None:
            chosen += [reading] * (pending + 1)
            pending = 0
        elif pending or not chosen or raw_frames(eqn) == start:
            pending += 1
        else:
            chosen.append(chosen[-1])
    rest = chosen[-1] if chosen else _in_common(calls)
    return chosen + [rest] * pending


def _reader(eqn: JaxprEqn, readers: dict[Var, set[int]], calls: Sequence[OmittedCall]) -> OmittedCall | None:
    """The one call that reads what an equation reads."""
    common = set[int]()
    for var in eqn.invars:
        known = readers.get(var, set()) if isinstance(var, Var) else set[int]()
        if 0 < len(known) <= _MOST_READERS:
            common = common & known or common or known
    return calls[min(common)] if len({calls[n].runs for n in common}) == 1 else None


def _by_order(eqns: Sequence[JaxprEqn], calls: Sequence[OmittedCall]) -> list[OmittedCall]:
    """For each equation the call of its number, if as many equal runs of equations follow each other as calls."""
    count, period = len(calls), len(eqns) // len(calls)
    does = [(raw_frames(eqn), eqn.primitive.name) for eqn in eqns]
    if period * count != len(eqns) or does[period:] != does[: len(eqns) - period]:
        return [_in_common(calls)] * len(eqns)
    ordered = calls[::-1] if calls[0].is_reversed else calls
    return [ordered[n // period] for n in range(len(eqns))]


def _in_common(calls: Sequence[OmittedCall]) -> OmittedCall:
    """The calls as one: frames of all of them, and last the function that holds them, at no one place of it."""
    if len({call.frames.places for call in calls}) == 1:
        return OmittedCall(calls[0].frames, calls[0].lines)
    common = list(calls[0].frames.calls)
    for call in calls[1:]:
        other = call.frames.calls
        least = min(len(common), len(other))
        same = next((n for n in range(least) if common[n].place != other[n].place), least)
        is_one = same < least and common[same].place[0] is other[same].place[0]
        common[same:] = [Call((common[same].place[0], -1))] if is_one else []
    return OmittedCall(Frames(tuple(common)))
