"""Search for runs of equations that a jaxpr repeats, nearly in linear time.

Input: a jaxpr, and the groups of equations that runs may join. Output: disjoint equal windows, in order of gain.
Candidate lengths come from windows of 4, 8, 16, … equations: where many consecutive windows have their next equal
at one distance, the jaxpr is periodic (layers) with that period, or a run of that many equations occurs twice. All
starts are tried for a length, so that a period is cut where fewest values cross.
Limits: of very many lengths those that save most equations are tried.

Equations are arrays, in which equal windows have one number, independent of the values they read. Two windows are equal
if, equation by equation, their numbers are equal and so is the dataflow: a variable is identified by the distance to,
and the position in, the equation that mentioned it last. A variable last mentioned before the window may be any value,
but one value in a window is one value in its equals. The number of a window is a polynomial, modulo 2^64: a few
additions of arrays for all windows of a length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from ipujax.lowering.jax_compat import DropVar, Jaxpr, JaxprEqn, Literal, Var
from ipujax.lowering.jaxpr import EquationNumbers, Work, elements_of, value_bytes, work_of_equation
from ipujax.lowering.outlining.function_call import CallCosts, Copied, gain, gain_of
from ipujax.lowering.primitives import record_of
from ipujax.runtime.tensor import element_bytes

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse


@dataclass(frozen=True, slots=True)
class Windows:
    """All windows of one length, in order of their starts."""

    length: int  # equations of a window
    numbers: np.ndarray  # one number for equal windows, uint64[starts]
    code: np.ndarray  # bytes of a window's code, see `Work`, float64[starts]
    # Lower bound of the values that differ between equal windows: operands with no other reader, and results read
    # behind the window, int64[starts]
    copies: np.ndarray
    elements: np.ndarray  # elements of all operands of a window and of its results read behind it, int64[starts]


class _Mention(NamedTuple):
    """A mention of a variable by an equation, or a column of each figure of all mentions.

    Args:
        equation: number of the equation.
        position: position of the variable among its operands and results.
        last_equation: equation of the mention before, −1 without one.
        last_position: position there.
        elements: elements of the variable.
        num_bytes: bytes of it.
        variable: its number.
        is_read: whether it is an operand.
    """

    equation: Any
    position: Any
    last_equation: Any = -1
    last_position: Any = 0
    elements: Any = 0
    num_bytes: Any = 0
    variable: Any = -1
    is_read: Any = False


_NOT_MENTIONED = _Mention(equation=-1, position=0)


class Dataflow:
    """Equations of a jaxpr and their mentions of variables; `numbers` gives equal equations one number."""

    def __init__(self, jaxpr: Jaxpr, numbers: EquationNumbers) -> None:
        """Prepares arrays from which the numbers, code and copies of all windows of a length take a few additions."""
        self.count = len(jaxpr.eqns)
        self._symbols = _mixed_bits(np.array([numbers.of(eqn) for eqn in jaxpr.eqns], np.uint64))
        works = [work_of_equation(eqn) for eqn in jaxpr.eqns]
        table = np.array([[0, 0], *([work.code, work.elements] for work in works)], np.float64)
        self._works = np.cumsum(table, 0)  # sums of the equations before each one: (bytes of code, elements)
        # The number of a window is a polynomial of `_BASE` modulo 2^64, a rolling hash of its equations.
        self._powers = _powers(_BASE, self.count + 1)
        self._inverse_powers = _powers(pow(_BASE, -1, 1 << 64), self.count + 1)
        mentions, definitions = _mentions_of(jaxpr)
        self._set_columns(mentions, definitions, jaxpr)

    def _set_columns(self, mentions: Sequence[_Mention], definitions: Mapping[Var, int], jaxpr: Jaxpr) -> None:
        """Sets the arrays that `windows` and `copied` read, with an element for each mention of a variable, in order.

        A mention is an operand or result of an equation.

        Args:
            mentions: the mentions, see `_mentions_of`.
            definitions: for each variable the number of the mention that defines it.
            jaxpr: the jaxpr.
        """
        columns = _Mention(*np.array(mentions, np.int64).reshape(-1, len(_Mention._fields)).T)
        self._equations = columns.equation  # number of the equation
        self._last_equations = columns.last_equation  # that of the variable's mention before; −1 without
        self._elements = columns.elements  # of the variable
        self._num_bytes = columns.num_bytes
        self._variables = columns.variable  # number of the variable
        self._is_read = columns.is_read.astype(bool)  # an operand, not a result
        reads = np.bincount(self._variables[self._is_read], minlength=self._variables.max(initial=-1) + 1)
        self._is_only_read = (reads[self._variables] == 1).astype(np.int64)
        # The first mention in each equation, and behind the last one.
        self._first_mentions = np.searchsorted(self._equations, np.arange(self.count + 1))
        # Equal windows have equal numbers, whatever the variables: a mention whose variable the window has mentioned
        # before adds a link, by how many equations back that was, and by both positions.
        distance = (self._equations - self._last_equations).astype(np.uint64)
        both_positions = (columns.last_position << 20 | columns.position).astype(np.uint64)
        self._links = _mixed_bits(_mixed_bits(distance) + both_positions) * self._powers[self._equations]
        last_reads = last_uses(jaxpr)
        self._definitions = np.array(list(definitions.values()), np.int64)
        # The last equation that needs what a mention defines; −1 for a mention that defines nothing.
        self._last_needs = np.full(len(mentions), -1)
        self._last_needs[self._definitions] = [last_reads.get(var, -1) for var in definitions]

    def windows(self, length: int) -> Windows:
        """All windows (consecutive equations) of one length, with figures of each; time does not grow with the length.

        A window's number, equal for equal windows, is a sum modulo 2^64 of a term for each equation and one for each
        mention of a variable that the window has mentioned before. So all figures are differences of cumulative sums.

        Args:
            length: number of equations of a window.
        """
        starts = max(0, self.count - length + 1)  # number of windows
        total = np.concatenate([[np.uint64(0)], np.cumsum(self._symbols * self._powers[:-1])])
        numbers = total[length:] - total[:starts]
        # A mention counts in the windows that contain both it and the last one.
        numbers += _over_starts(self._equations - length + 1, self._last_equations, self._links, starts)
        earliest = np.maximum(self._last_equations, self._equations - length) + 1
        # First and last start of the windows in which a read is the first mention: its value is an operand.
        read_range = earliest[self._is_read], self._equations[self._is_read]
        defined_at = self._equations[self._definitions]
        # First and last start of those that contain the definition of a value but not its last read.
        live_out = defined_at - length + 1, np.minimum(defined_at, self._last_needs[self._definitions] - length)
        code_before = self._works[:, 0]  # bytes of code of the equations before each
        code = code_before[length:] - code_before[:starts]
        # Equal windows certainly differ in an operand that is read once in the jaxpr: the other windows must have their
        # own, so a call copies it. An operand of several readers may be the same one for all windows, as a mask is.
        copies = _over_starts(*read_range, self._is_only_read[self._is_read], starts)
        copies += _over_starts(*live_out, values=1, starts=starts)
        elements = _over_starts(*read_range, self._elements[self._is_read], starts)
        elements += _over_starts(*live_out, self._elements[self._definitions], starts)
        # Dividing by the power of the start makes the number independent of the position.
        return Windows(length, numbers * self._inverse_powers[:starts], code, copies, elements)

    def work(self, start: int, length: int) -> Work:
        code, elements = (self._works[start + length] - self._works[start]).tolist()
        return Work(int(code), elements)

    def copied(self, starts: Sequence[int], length: int) -> Copied:
        """Values that a call in the place of equal windows copies.

        These are operands that differ between the windows, and results that equations behind a window read.

        Args:
            starts: first equation of each window.
            length: number of equations of a window.
        """
        first = self._first_mentions[list(starts)]
        # Row n has the mentions of window n; equal windows have as many, and the first stands for all.
        mentions = first[:, None] + np.arange(self._first_mentions[starts[0] + length] - first[0])
        first_mentions = mentions[0]
        variables = self._variables[mentions]
        is_operand = self._is_read[first_mentions] & (self._last_equations[first_mentions] < starts[0])
        differs = (variables != variables[0]).any(0)
        is_live_out = (self._last_needs[mentions] >= np.array(starts)[:, None] + length).any(0)
        copied_mentions = first_mentions[(is_operand & differs) | is_live_out]
        return Copied(self._elements[copied_mentions].tolist(), int(self._num_bytes[copied_mentions].sum()))


def _mentions_of(jaxpr: Jaxpr) -> tuple[list[_Mention], dict[Var, int]]:
    """Mentions of variables, operands and results of equations, in order; each knows the one before of its variable.

    Returns:
        The mentions; and for each variable the number of the mention that defines it, but for results that are
        computed again behind a call, see `is_repeated_behind`.
    """
    last_mention: dict[Var, _Mention] = {}
    definitions: dict[Var, int] = {}
    variable_numbers: dict[Var, int] = {}
    mentions: list[_Mention] = []
    for n, eqn in enumerate(jaxpr.eqns):
        for position, atom in enumerate((*eqn.invars, *eqn.outvars)):
            if isinstance(atom, Literal | DropVar):
                continue
            if position >= len(eqn.invars) and not is_repeated_behind(eqn):
                definitions[atom] = len(mentions)
            variable = variable_numbers.setdefault(atom, len(variable_numbers))
            last = last_mention.get(atom, _NOT_MENTIONED)
            last_mention[atom] = _Mention(
                equation=n,
                position=position,
                last_equation=last.equation,
                last_position=last.position,
                elements=elements_of(atom),
                num_bytes=value_bytes(atom.aval),
                variable=variable,
                is_read=position < len(eqn.invars),
            )
            mentions.append(last_mention[atom])
    return mentions, definitions


def last_uses(jaxpr: Jaxpr) -> dict[Var, int]:
    """Number of the last equation that needs each variable; for results of the jaxpr one behind the last equation.

    An equation that is repeated behind a call (see `is_repeated_behind`) needs its operands as long as its own result
    is needed.
    """
    uses = {atom: len(jaxpr.eqns) for atom in jaxpr.outvars if isinstance(atom, Var)}
    for n, eqn in reversed(list(enumerate(jaxpr.eqns))):
        through = max((uses.get(var, n) for var in eqn.outvars), default=n) if is_repeated_behind(eqn) else n
        for atom in eqn.invars:
            if isinstance(atom, Var):
                uses[atom] = max(uses.get(atom, n), through)
    return uses


def is_repeated_behind(eqn: JaxprEqn) -> bool:
    """True if a call need not return an equation's result, because it can return the operands instead.

    That is a view with as many elements as its operands, or a cast to more bytes an element.
    """
    if widening_bytes(eqn) > 0:
        return True
    if record_of(eqn).cost != "view":
        return False
    return sum(elements_of(atom) for atom in eqn.invars if isinstance(atom, Var)) <= elements_of(eqn.outvars[0])


def widening_bytes(eqn: JaxprEqn) -> int:
    """Bytes an element that the result of a cast has more than its operand; 0 for another equation."""
    operand = eqn.invars[0] if eqn.primitive.name == "convert_element_type" else None
    if not isinstance(operand, Var):
        return 0
    avals: tuple[Any, Any] = operand.aval, eqn.outvars[0].aval
    return element_bytes(avals[1].dtype) - element_bytes(avals[0].dtype)


def _over_starts(first: np.ndarray, last: np.ndarray, values: np.ndarray | int, starts: int) -> np.ndarray:
    """For each start of a window, 0 … starts − 1, the sum of the values whose range of starts contains it.

    Args:
        first: first start of the range of each value.
        last: last start of it; a range is empty where that is smaller.
        values: the values, or one for all.
        starts: number of starts.
    """
    first = np.maximum(first, 0)
    last = np.minimum(last, starts - 1)
    values = np.broadcast_to(values, first.shape)
    is_counted = first <= last
    # Differences first, then one cumulative sum: linear in the ranges.
    change = np.zeros(starts + 1, values.dtype)
    np.add.at(change, first[is_counted], values[is_counted])
    np.subtract.at(change, last[is_counted] + 1, values[is_counted])
    return np.cumsum(change)[:starts]


def _mixed_bits(x: np.ndarray) -> np.ndarray:
    """Pseudo-random numbers of numbers, uint64 (splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _powers(base: int, count: int) -> np.ndarray:
    """Powers 0, 1, … modulo 2^64, uint64[count]."""
    return np.cumprod(np.concatenate([[np.uint64(1)], np.full(count - 1, base, np.uint64)]), dtype=np.uint64)


_SHORTEST = 4  # equations of a run
_MAX_LENGTHS = 48  # candidate lengths of one jaxpr
_MAX_TRIED = 256  # equal windows of a length in one search for the best
_SHORT_PERIOD = 32  # equations; several shorter periods may be one run


@dataclass(frozen=True, slots=True)
class Repeat:
    """Equal windows that do not overlap."""

    length: int  # equations of each window
    starts: tuple[int, ...]  # first equation of each, in order


def find_repeats(flow: Dataflow, groups: np.ndarray, costs: CallCosts) -> list[Repeat]:
    """Repeats that do not overlap each other; a run has equations of one number in `groups`, none below 0."""
    return list(_Search(flow, groups, costs).best_first())


class _Candidate(NamedTuple):
    """Equal windows that do not overlap; candidates sort by falling gain."""

    negated_gain: float
    length: int
    starts: tuple[int, ...]

    @property
    def gain(self) -> float:
        """Cycles that a function saves."""
        return -self.negated_gain


class _Stretch(NamedTuple):
    """Consecutive equations that equal those at a distance: the distance, and their number."""

    distance: int
    equations: int


class _Search:
    """Search for repeats, the best first.

    Args:
        flow: all equations.
        groups: number of the group of each equation, below 0 for one that is in no run.
        costs: of code and of copies.
    """

    def __init__(self, flow: Dataflow, groups: np.ndarray, costs: CallCosts) -> None:
        self._flow = flow
        self._groups = groups.copy()
        self._costs = costs
        self._refused: set[tuple[int, int]] = set()  # (length, window number) without a gain
        self._windows: dict[int, Windows] = {}
        self._find_room()

    def _find_room(self) -> None:
        """Sets the number of equations that a run from each start can have."""
        count = self._flow.count
        changes = np.flatnonzero(np.diff(self._groups)) + 1
        starts = np.arange(count)
        group_ends = np.append(changes, count)[np.searchsorted(changes, starts, "right")]
        self._room = np.where(self._groups < 0, 0, group_ends - starts)

    def best_first(self) -> Iterator[Repeat]:
        """Yields repeats (equal windows that do not overlap) that save cycles as a function, the best first.

        Each takes its equations away from those that follow.
        """
        # A heap with the best repeat of each length.
        waiting = [best for length in self._lengths_to_try() if (best := self._best_of_length(length)) is not None]
        heapify(waiting)
        while waiting:
            _, length, starts = heappop(waiting)
            # No other repeat has taken any of its equations, so it is still the best.
            if (self._room[list(starts)] >= length).all():
                yield Repeat(length, starts)
                for start in starts:
                    self._groups[start : start + length] = -1
                self._find_room()
            next_best = self._best_of_length(length)
            if next_best is not None:
                heappush(waiting, next_best)

    def _windows_of(self, length: int) -> Windows:
        if length not in self._windows:
            self._windows[length] = self._flow.windows(length)
        return self._windows[length]

    def _lengths_to_try(self) -> list[int]:
        """Lengths (numbers of equations) of repeats to try, those that may save most equations first.

        All lengths would take too long. Where windows of a few equations have equals at one distance again and again,
        lengths that fit that distance may repeat.
        """
        most_saved: dict[int, int] = {}  # upper bound of equations that repeats of a length save
        size = _SHORTEST
        while size < self._flow.count:  # the number of all equations
            saved = Counter[int]()  # likewise, by windows of this size
            for stretch in self._stretches_of_equal_windows(size):
                for length in _lengths_of(stretch):
                    saved[length] += stretch.equations
            most_saved |= {length: max(count, most_saved.get(length, 0)) for length, count in saved.items()}
            size *= 2
        return sorted(most_saved, key=lambda length: (-most_saved[length], length))[:_MAX_LENGTHS]

    def _stretches_of_equal_windows(self, size: int) -> Iterator[_Stretch]:
        """Yield each stretch of consecutive windows whose next equal window is at one distance: a period, as of layers.

        Args:
            size: number of equations of a window.
        """
        starts = np.flatnonzero(self._room >= size)
        starts = starts[starts + size <= self._flow.count]
        numbers = self._windows_of(size).numbers[starts]
        order = np.argsort(numbers, kind="stable")  # equal windows become neighbours, in order
        has_next = numbers[order[1:]] == numbers[order[:-1]]
        first = starts[order[:-1]][has_next]
        next_equal = starts[order[1:]][has_next]
        by_start = np.argsort(first)
        distances = (next_equal - first)[by_start]
        first = first[by_start]
        if not len(first):
            return
        # A stretch ends where starts are not consecutive or the distance changes.
        breaks = np.flatnonzero((np.diff(first) != 1) | (np.diff(distances) != 0)) + 1
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(first)], strict=True):
            yield _Stretch(int(distances[begin]), end - begin + size - 1)

    def _best_of_length(self, length: int) -> _Candidate | None:
        """Equal windows of a length that save most cycles as calls of one function; None if none saves any.

        Args:
            length: number of equations of a window.
        """
        windows = self._windows_of(length)
        starts = np.flatnonzero(self._room[: len(windows.numbers)] >= length)
        if not len(starts):
            return None
        # A kind is all windows of one number, which are equal; arrays from `begins` on have one element a kind.
        by_kind = starts[np.argsort(windows.numbers[starts], kind="stable")]
        sorted_numbers = windows.numbers[by_kind]
        begins = np.flatnonzero(np.append(True, sorted_numbers[1:] != sorted_numbers[:-1]))
        kind_ends = np.append(begins[1:], len(by_kind))
        numbers = sorted_numbers[begins]
        first = by_kind[begins]
        counts = kind_ends - begins
        upper_bounds = gain(windows.code[first], windows.copies[first], counts, self._costs.byte_cost)
        best = _Candidate(negated_gain=0.0, length=length, starts=())
        num_tried = 0
        # By falling upper bound; the real gain needs the elements that calls copy.
        for kind in np.lexsort((first, windows.elements[first], -upper_bounds)).tolist():
            if upper_bounds[kind] <= best.gain or num_tried == _MAX_TRIED:
                break
            key = length, int(numbers[kind])
            if counts[kind] < 2 or key in self._refused:
                continue
            disjoint = _disjoint_starts(by_kind[begins[kind] : kind_ends[kind]].tolist(), length)
            num_tried += 1
            copied = self._flow.copied(disjoint, length)
            cycles_saved = gain_of(self._flow.work(disjoint[0], length), copied, len(disjoint), self._costs)
            if cycles_saved <= 0:
                self._refused.add(key)
            elif cycles_saved > best.gain:
                best = _Candidate(-cycles_saved, length, tuple(disjoint))
        return best if best.starts else None


def _disjoint_starts(starts: Sequence[int], length: int) -> list[int]:
    """Starts, from ascending ones, whose windows do not overlap."""
    disjoint: list[int] = []
    for start in starts:
        if not disjoint or start >= disjoint[-1] + length:
            disjoint.append(start)
    return disjoint


def _lengths_of(stretch: _Stretch) -> Iterator[int]:
    """Yields candidate lengths (numbers of equations) of repeats in equations that equal those at a distance.

    Fewer equations than the distance occur twice. More are periodic: their period is a length, or several of them if it
    is short.
    """
    distance, equations = stretch
    if distance > equations:
        yield equations
        return
    length = distance
    while length <= max(distance, min(_SHORT_PERIOD, equations)):
        if length >= _SHORTEST:
            yield length
        length *= 2
