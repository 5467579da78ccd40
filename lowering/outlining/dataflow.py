"""A jaxpr's equations as arrays, in which equal windows are told by a number, whatever values they read.

A window of equations equals another if, equation by equation, their numbers are equal and so is what they read of one
another: a variable is told by how many equations back, and where in that equation, it was mentioned last. What was
mentioned last before the window comes from outside, and may be any value; what is one value in a window is one in its
equals.

The number of a window is a polynomial, modulo 2^64, of the numbers of its equations and of the mentions whose last one
is inside: a few additions of arrays for all windows of a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.lowering.jax_compat import DropVar, Jaxpr, JaxprEqn, Literal, Var
from ipujax.lowering.jaxpr import VIEWS, EquationNumbers, Work, elements_of, work_of_equation

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse


@dataclass(frozen=True, slots=True)
class Windows:
    """All windows of one length, in the order in which they begin.

    Args:
        length: equations of a window.
        numbers: the same for equal windows, uint64[starts].
        code: bytes of a window's code, see `Work`, float64[starts].
        copies: how many values at least differ between equal windows: those that nothing else reads, and those that
            are made for behind the window, int64[starts].
        elements: of all values that a window reads from outside and makes for behind, int64[starts].
    """

    length: int
    numbers: np.ndarray
    code: np.ndarray
    copies: np.ndarray
    elements: np.ndarray


class Dataflow:
    """The equations of a jaxpr, and where they mention variables.

    Args:
        jaxpr: the jaxpr.
        numbers: gives equations their numbers.
    """

    def __init__(self, jaxpr: Jaxpr, numbers: EquationNumbers) -> None:
        self.count = len(jaxpr.eqns)
        self._symbols = _mixed(np.array([numbers.of(eqn) for eqn in jaxpr.eqns], np.uint64))
        works = [work_of_equation(eqn) for eqn in jaxpr.eqns]
        table = np.array([[0, 0], *([work.code, work.elements] for work in works)], np.float64)
        self._works = np.cumsum(table, 0)  # before each equation
        self._powers = _powers(_BASE, self.count + 1)
        self._inverse_powers = _powers(pow(_BASE, -1, 1 << 64), self.count + 1)
        self._find_mentions(jaxpr)

    def _find_mentions(self, jaxpr: Jaxpr) -> None:
        """Lists mentions: equation, place in it, the same of the mention before, elements, variable, whether read."""
        before: dict[Var, tuple[int, int]] = {}
        makers: dict[Var, int] = {}  # the mention that makes a variable
        number: dict[Var, int] = {}
        rows: list[tuple[int, ...]] = []
        for n, eqn in enumerate(jaxpr.eqns):
            for place, atom in enumerate((*eqn.invars, *eqn.outvars)):
                if isinstance(atom, Literal | DropVar):
                    continue
                if place >= len(eqn.invars) and not is_view(eqn):
                    makers[atom] = len(rows)
                own = number.setdefault(atom, len(number))
                rows.append((n, place, *before.get(atom, (-1, 0)), elements_of(atom), own, place < len(eqn.invars)))
                before[atom] = n, place
        table = np.array(rows, np.int64).reshape(-1, 7).T
        self._at, self._last, self._sizes, self._variables = table[0], table[2], table[4], table[5]
        self._reads = table[6].astype(bool)
        reads = np.bincount(self._variables[self._reads], minlength=len(number))
        self._is_only_read = (reads[self._variables] == 1).astype(np.int64)
        self._first = np.searchsorted(self._at, np.arange(self.count + 1))  # the first mention in each equation
        distance = (self._at - self._last).astype(np.uint64)
        places = (table[3] << 20 | table[1]).astype(np.uint64)
        self._links = _mixed(_mixed(distance) + places) * self._powers[self._at]
        ends = last_uses(jaxpr)
        self._made = np.array(list(makers.values()), np.int64)
        self._end = np.full(len(rows), -1)
        self._end[self._made] = [ends.get(var, -1) for var in makers]

    def windows(self, length: int) -> Windows:
        """All windows of some equations, 1 or more."""
        starts = max(0, self.count - length + 1)
        total = np.concatenate([[np.uint64(0)], np.cumsum(self._symbols * self._powers[:-1])])
        numbers = total[length:] - total[:starts]
        numbers += _over_starts(self._at - length + 1, self._last, self._links, starts)
        earliest = np.maximum(self._last, self._at - length) + 1
        read = earliest[self._reads], self._at[self._reads]  # not mentioned in the window before
        made = self._at[self._made]
        left = made - length + 1, np.minimum(made, self._end[self._made] - length)  # read behind the window
        code = self._works[length:, 0] - self._works[:starts, 0]
        copies = _over_starts(*read, self._is_only_read[self._reads], starts) + _over_starts(*left, 1, starts)
        elements = _over_starts(*read, self._sizes[self._reads], starts)
        elements += _over_starts(*left, self._sizes[self._made], starts)
        return Windows(length, numbers * self._inverse_powers[:starts], code, copies, elements)

    def work(self, start: int, length: int) -> Work:
        """The work of a window."""
        code, elements = (self._works[start + length] - self._works[start]).tolist()
        return Work(int(code), elements)

    def copied(self, starts: Sequence[int], length: int) -> np.ndarray:
        """The elements of each value that differs between equal windows, and of each that one of them leaves, int64."""
        first = self._first[list(starts)]
        mentions = first[:, None] + np.arange(self._first[starts[0] + length] - first[0])
        one, variables = mentions[0], self._variables[mentions]
        from_outside = self._reads[one] & (self._last[one] < starts[0])
        differs = (variables != variables[0]).any(0)
        left = (self._end[mentions] >= np.array(starts)[:, None] + length).any(0)
        sizes: np.ndarray = self._sizes[one][(from_outside & differs) | left]
        return sizes


def last_uses(jaxpr: Jaxpr) -> dict[Var, int]:
    """The last equation that needs each variable, through views too; for results one behind the last."""
    uses = {atom: len(jaxpr.eqns) for atom in jaxpr.outvars if isinstance(atom, Var)}
    for n, eqn in reversed(list(enumerate(jaxpr.eqns))):
        through = max((uses.get(var, n) for var in eqn.outvars), default=n) if is_view(eqn) else n
        for atom in eqn.invars:
            if isinstance(atom, Var):
                uses[atom] = max(uses.get(atom, n), through)
    return uses


def is_view(eqn: JaxprEqn) -> bool:
    """Whether an equation views what is no larger: then its result need not be handed on."""
    if eqn.primitive.name not in VIEWS:
        return False
    return sum(elements_of(atom) for atom in eqn.invars if isinstance(atom, Var)) <= elements_of(eqn.outvars[0])


def _over_starts(first: np.ndarray, last: np.ndarray, values: np.ndarray | int, starts: int) -> np.ndarray:
    """For each of the starts 0 … starts − 1 the sum of the values whose first … last it is among."""
    first, last = np.maximum(first, 0), np.minimum(last, starts - 1)
    values, some = np.broadcast_to(values, first.shape), first <= last
    change = np.zeros(starts + 1, values.dtype)
    np.add.at(change, first[some], values[some])
    np.subtract.at(change, last[some] + 1, values[some])
    return np.cumsum(change)[:starts]


def _mixed(x: np.ndarray) -> np.ndarray:
    """Numbers that look random, uint64 (splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _powers(base: int, count: int) -> np.ndarray:
    """Powers 0, 1, … modulo 2^64, uint64[count]."""
    return np.cumprod(np.concatenate([[np.uint64(1)], np.full(count - 1, base, np.uint64)]), dtype=np.uint64)
