"""Frames of the calls that JAX leaves out where it evaluates a jaxpr in the place of a call.

    y = jax.checkpoint(layer)(p, x)     the gradient has a call:     remat2        loss@12 > body@4
                                        and the forward equations:   dot_general   layer@42

Input: a jaxpr before inlining, and all jaxprs of the program. Output: for each equation the frames of the call in which
its function was traced, if its own frames begin in a function that an equation of this jaxpr calls, or of another jaxpr
of the same function, such as the gradient of a scan's body. Among several calls it is the one that reads the same
values; else the order of calls decides, which is the reverse in a gradient; if neither does, the result is the frames
that all calls have in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import CodeType

from ipujax.lowering.jax_compat import CALLEES, ClosedJaxpr, Jaxpr, JaxprEqn, Var, closed, raw_frames
from ipujax.lowering.jaxpr.function_runs import Call, Frames, Place
from ipujax.lowering.jaxpr.nested import distinct_jaxprs
from ipujax.lowering.source_info import shown_calls, traced_from
from ipujax.runtime.errors import is_of_user

Root = tuple[str, str]  # the function a jaxpr was traced from: name, `file:line`


@dataclass(frozen=True, eq=False, slots=True)
class OmittedCall:
    """Call that the frames of its callee's equations leave out.

    Args:
        frames: frames of the call, within the function of the jaxpr that has the equations.
        lines: the user's lines in these frames, innermost first.
        operands: variables of that jaxpr that the call reads.
        is_reversed: True for a call of a gradient, where calls are in reverse order.
        number: number of the call; 0 for several at one place that cannot be distinguished.
    """

    frames: Frames
    lines: tuple[str, ...] = ()
    operands: frozenset[Var] = frozenset()
    is_reversed: bool = False
    number: int = 0

    @property
    def identity(self) -> Hashable:
        """Places and numbers of the calls: equal for calls that cannot be distinguished."""
        return self.frames.numbered_places, self.number


_MAX_READERS = 64  # a value with more distinguishes no calls: a mask of all layers, a constant


class OmittedCalls:
    """Calls in all jaxprs of one program, searched on demand."""

    def __init__(self, program: ClosedJaxpr) -> None:
        self._program = program
        self._jaxprs: dict[Root, list[Jaxpr]] | None = None
        self._calls: dict[int, dict[Root, list[OmittedCall]]] = {}
        self._number = 0  # of calls

    def of(self, jaxpr: Jaxpr) -> dict[int, OmittedCall]:
        """Return by number of the equation the call that its Python frames leave out, for equations that have one.

        JAX records frames from the innermost traced function on. An equation has an omitted call if its frames begin in
        another function than that of the jaxpr, of which a call is found.
        """
        omitted: dict[Root, list[int]] = defaultdict(list)
        root = traced_from(jaxpr)
        for number, eqn in enumerate(jaxpr.eqns):
            function = _outermost_function(eqn)
            if function is not None and function != root:
                omitted[function].append(number)
        calls = dict[int, OmittedCall]()
        for function, numbers in omitted.items():
            eqns = [jaxpr.eqns[n] for n in numbers]
            matched = self._match_calls(jaxpr, function, eqns)
            calls.update(zip(numbers, matched, strict=False))  # `matched` is empty if no call is found
        return calls

    def _match_calls(self, jaxpr: Jaxpr, function: Root, eqns: Sequence[JaxprEqn]) -> list[OmittedCall]:
        """Return for each equation the call of a function that it was traced in: one of those that the program has.

        Args:
            jaxpr: jaxpr of the equations.
            function: the function.
            eqns: equations whose Python frames have this function as the outermost, so that its caller is unknown.

        Returns:
            A call for each equation; empty if no call of the function is found.
        """
        candidates = self._calls_in(jaxpr).get(function, [])
        if candidates:
            return _match_by_values(eqns, candidates)
        # A gradient's body calls nothing itself, but the forward body traced from the same function does.
        for other in self._jaxprs_of(traced_from(jaxpr)):
            candidates = self._calls_in(other).get(function, [])
            if candidates:
                return _match_by_order(eqns, candidates)
        return []

    def _jaxprs_of(self, root: Root) -> list[Jaxpr]:
        if self._jaxprs is None:
            self._jaxprs = defaultdict(list)
            for body in distinct_jaxprs(self._program):
                self._jaxprs[traced_from(body.jaxpr)].append(body.jaxpr)
        return self._jaxprs[root]

    def _calls_in(self, jaxpr: Jaxpr) -> dict[Root, list[OmittedCall]]:
        """Return by called function all calls in a jaxpr and in its callees, found once for each jaxpr.

        A call in a callee has the frames from the jaxpr down to it.
        """
        if id(jaxpr) not in self._calls:
            calls: dict[Root, list[OmittedCall]] = defaultdict(list)
            for eqn in jaxpr.eqns:
                param = CALLEES.get(eqn.primitive.name)
                if param is None or _outermost_frame(eqn) is None:
                    continue
                callee = closed(eqn.params[param]).jaxpr
                self._number += 1
                call = _make_call(eqn, self._number)
                calls[traced_from(callee)].append(call)
                for function, inner in self._calls_in(callee).items():
                    calls[function] += _remove_duplicates([_nest_call(call, item) for item in inner])
            self._calls[id(jaxpr)] = calls
        return self._calls[id(jaxpr)]


def root_of(code: CodeType) -> Root:
    """Return the name and first line of a function, in the form that jaxprs have them."""
    return code.co_name, f"{code.co_filename}:{code.co_firstlineno}"


def frames_of(eqn: JaxprEqn, before: Frames, is_shown: Callable[[CodeType], bool], number: int = 0) -> Frames:
    """Return all Python frames of an equation: those of the call around it, then its own.

    Args:
        eqn: the equation.
        before: frames of the call.
        is_shown: whether code is the user's; places in other code are noted with the next call of the user's.
        number: number of the call, which its callee, the outermost frame that is shown, gets.
    """
    calls = list(before.calls)
    between = list(before.tail)
    for place in reversed(raw_frames(eqn)):
        if is_shown(place[0]):
            calls.append(Call(place, tuple(between), number))
            between = []
            number = 0
        else:
            between.append(place)
    return Frames(tuple(calls), tuple(between))


def _is_user_code(code: CodeType) -> bool:
    return is_of_user(code.co_filename)


def _outermost_frame(eqn: JaxprEqn) -> Place | None:
    # Of those that are neither JAX's nor ipujax's; `raw_frames` are innermost first.
    return next((place for place in reversed(raw_frames(eqn)) if _is_user_code(place[0])), None)


def _outermost_function(eqn: JaxprEqn) -> Root | None:
    """Return the function that the frames of an equation begin in; for a call without frames, the called function."""
    outermost = _outermost_frame(eqn)
    if outermost is not None:
        return root_of(outermost[0])
    param = CALLEES.get(eqn.primitive.name)
    return None if param is None else traced_from(closed(eqn.params[param]).jaxpr)


def _make_call(eqn: JaxprEqn, number: int) -> OmittedCall:
    operands = frozenset(atom for atom in eqn.invars if isinstance(atom, Var))
    frames = frames_of(eqn, Frames(), _is_user_code)
    is_reversed = bool(eqn.params.get("differentiated", False))
    return OmittedCall(frames, tuple(shown_calls(eqn)), operands, is_reversed, number)


def _nest_call(call: OmittedCall, inner: OmittedCall) -> OmittedCall:
    """Return a call of a callee as a call of the jaxpr that calls the callee."""
    first, *further = inner.frames.calls
    first = replace(first, before=(*call.frames.tail, *first.before), number=call.number)
    frames = Frames((*call.frames.calls, first, *further), inner.frames.tail)
    return replace(call, frames=frames, lines=(*inner.lines, *call.lines), number=0)


def _remove_duplicates(calls: Sequence[OmittedCall]) -> list[OmittedCall]:
    # One of each set of calls that cannot be distinguished.
    return list({call.identity: call for call in calls}.values())


def _match_by_values(eqns: Sequence[JaxprEqn], calls: Sequence[OmittedCall]) -> list[OmittedCall]:
    """Return for each equation the call that it was traced in: the one that reads the same values.

    Equations that share no value with a call belong to that of the equations before them; those from where the callee
    begins on to that of the equations after them.

    Args:
        eqns: equations that were traced in one function, in order.
        calls: calls of that function.
    """
    readers: dict[Var, set[int]] = defaultdict(set)
    for number, call in enumerate(calls):
        for var in call.operands:
            readers[var].add(number)
    start = raw_frames(eqns[0])
    chosen = list[OmittedCall]()
    pending = 0  # number of last equations that belong to the next call
    for eqn in eqns:
        reading = _find_reader(eqn, readers, calls)
        if reading is not None:
            chosen += [reading] * (pending + 1)
            pending = 0
        elif pending or not chosen or raw_frames(eqn) == start:
            pending += 1
        else:
            chosen.append(chosen[-1])
    rest = chosen[-1] if chosen else _common_call(calls)
    return chosen + [rest] * pending


def _find_reader(eqn: JaxprEqn, readers: dict[Var, set[int]], calls: Sequence[OmittedCall]) -> OmittedCall | None:
    """Return the call that reads the same operands as an equation; None if none or several do.

    Args:
        eqn: the equation.
        readers: numbers of the calls that read each value.
        calls: the calls; those with equal `identity` count as one.
    """
    common = set[int]()
    for var in eqn.invars:
        numbers = readers.get(var, set()) if isinstance(var, Var) else set[int]()
        # Each operand narrows the calls; one that contradicts the others is ignored.
        if 0 < len(numbers) <= _MAX_READERS:
            common = common & numbers or common or numbers
    return calls[min(common)] if len({calls[n].identity for n in common}) == 1 else None


def _match_by_order(eqns: Sequence[JaxprEqn], calls: Sequence[OmittedCall]) -> list[OmittedCall]:
    """Return the call that each equation is of: equations 0 … n − 1 of the first call, the next n of the second.

    If they are not the same sequence once for each call, all get a call that stands for all of them, `_common_call`.
    """
    period = len(eqns) // len(calls)
    signatures = [(raw_frames(eqn), eqn.primitive.name) for eqn in eqns]
    if period * len(calls) != len(eqns) or signatures[period:] != signatures[: len(eqns) - period]:
        return [_common_call(calls)] * len(eqns)
    ordered = calls[::-1] if calls[0].is_reversed else calls
    return [ordered[n // period] for n in range(len(eqns))]


def _common_call(calls: Sequence[OmittedCall]) -> OmittedCall:
    """Return a call that stands for several that cannot be told apart: its frames are the outer ones that all have.

    Where they differ only in the place in a function, its frame is the last, at no place (-1).
    """
    if len({call.frames.places for call in calls}) == 1:
        return OmittedCall(calls[0].frames, calls[0].lines)
    common = list(calls[0].frames.calls)
    for call in calls[1:]:
        frames = call.frames.calls
        length = min(len(common), len(frames))
        same = next((n for n in range(length) if common[n].place != frames[n].place), length)
        is_one_function = same < length and common[same].code is frames[same].code
        common[same:] = [Call((common[same].code, -1))] if is_one_function else []
    return OmittedCall(Frames(tuple(common)))
