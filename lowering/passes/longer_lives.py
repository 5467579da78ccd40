"""Live bytes of a body, and by how much their peak rises if an equation is replaced by an equal earlier one.

Input: a body whose equations run in order. Output: bytes, which change as equations are replaced. A view takes none,
but what it views lives as long as it is read. Arguments and constants stay in memory, and count nothing.
Limits: entire values; a value whose last reader was a view counts until then, if that view is read no more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ipujax.lowering.jax_compat import Jaxpr, Var, is_token
from ipujax.lowering.jaxpr import value_bytes, variables, variables_read
from ipujax.lowering.primitives import record_of


class _Change(NamedTuple):
    """Bytes more that are live from equation `start` to before equation `stop`; less if negative."""

    start: int
    stop: int
    num_bytes: int


class LiveBytes:
    """Bytes that are live at each equation of a body, whose equations are known by number."""

    def __init__(self, body: Jaxpr) -> None:
        """Finds where each value is read last, and sums the bytes of the values that are live at each equation."""
        self._eqns = body.eqns
        self._definition = {var: n for n, eqn in enumerate(body.eqns) for var in eqn.outvars}
        self._readers: dict[Var, list[int]] = {}  # in order; results are read behind the last equation
        for number, eqn in enumerate(body.eqns):
            for var in dict.fromkeys(variables_read(eqn)):
                self._readers.setdefault(var, []).append(number)
        for var in dict.fromkeys(variables(body.outvars)):
            self._readers.setdefault(var, []).append(len(body.eqns))
        self._last: dict[Var, int] = {}  # last equation that reads a value, or a view of it
        for number in reversed(range(len(body.eqns))):  # views before what they view
            for var in body.eqns[number].outvars:
                self._last[var] = self._last_of(var, self._readers.get(var, ()))
        change = np.zeros(len(body.eqns) + 2, np.int64)  # bytes that begin to live, less those that end
        for var, number in self._definition.items():
            change[number] += self._bytes(var)
            change[self._last[var] + 1] -= self._bytes(var)
        self._live = np.cumsum(change)
        self._peak = int(self._live.max(initial=0))

    def growth(self, number: int, first: int) -> int:
        """Bytes by which the peak rises if readers of an equation read the results of an equal earlier one, `first`."""
        changes = list(self._changes(number, first))
        start = min((change.start for change in changes), default=number)
        stop = max((change.stop for change in changes), default=number)
        live = self._live[start:stop].copy()
        for change in changes:
            live[change.start - start : change.stop - start] += change.num_bytes
        return max(0, int(live.max(initial=0)) - self._peak)

    def replace(self, number: int, first: int) -> None:
        """Updates the live bytes for equation `number`, which is dropped as `first` is an equal earlier one.

        The readers of its results read those of `first`, which live longer, and its operands live shorter. The peak
        stays that of the body as it was, so that `growth` limits all replacements together.
        """
        for change in list(self._changes(number, first)):
            self._live[change.start : change.stop] += change.num_bytes
        for var in dict.fromkeys(variables_read(self._eqns[number])):
            self._readers[var].remove(number)
            if var in self._definition:
                self._last[var] = self._last_of(var, self._readers[var])
        for surviving, var in zip(self._eqns[first].outvars, self._eqns[number].outvars, strict=True):
            readers = self._readers.setdefault(surviving, [])  # stay in order, each once
            for reader in self._readers.pop(var, []):
                place = bisect_left(readers, reader)
                if readers[place : place + 1] != [reader]:
                    readers.insert(place, reader)
            for longer in self._living_longer(surviving, self._last[var]):
                self._last[longer] = self._last[var]

    def begin_earlier(self, number: int, start: int, small_bytes: int) -> bool:
        """Updates the live bytes for an equation that would run earlier, unless large results of it raise the peak.

        Args:
            number: number of the equation.
            start: number of the earlier one before which it would run, so that its results live from there on.
            small_bytes: results of up to so many bytes may raise the peak.

        Returns:
            Whether it may move; if not, nothing is updated.
        """
        num_bytes = sum(map(self._bytes, self._eqns[number].outvars))
        peak = int(self._live[start:number].max(initial=0)) + num_bytes
        if peak > self._peak and num_bytes > small_bytes:
            return False
        self._live[start:number] += num_bytes
        return True

    def _changes(self, number: int, first: int) -> Iterator[_Change]:
        """Yields how live bytes change if equation `number` is dropped, as `first` is an equal earlier one.

        The results of `first` live longer, until the last reader of the dropped ones; those vanish, and operands of the
        equation may live shorter.
        """
        for surviving, var in zip(self._eqns[first].outvars, self._eqns[number].outvars, strict=True):
            last = self._last[var]
            for longer in self._living_longer(surviving, last):
                yield _Change(self._last[longer] + 1, last + 1, self._bytes(longer))
            yield _Change(number, last + 1, -self._bytes(var))
        for var in dict.fromkeys(variables_read(self._eqns[number])):
            if var in self._definition:
                new_last = self._last_of(var, (reader for reader in self._readers[var] if reader != number))
                yield _Change(new_last + 1, self._last[var] + 1, -self._bytes(var))

    def _living_longer(self, var: Var, last: int) -> list[Var]:
        """Values that live longer if `var` is read until equation `last`: itself, and those that it is a view of."""
        longer = list[Var]()
        waiting = [var]
        while waiting:
            viewed = waiting.pop()
            if viewed in self._definition and self._last[viewed] < last:
                longer.append(viewed)
                number = self._definition[viewed]
                waiting += variables_read(self._eqns[number]) if self._is_view(number) else []
        return list(dict.fromkeys(longer))

    def _last_of(self, var: Var, readers: Iterable[int]) -> int:
        """Last equation in which a value with some readers is read; the one that defines it if none does."""
        return max((self._last_through(reader) for reader in readers), default=self._definition[var])

    def _last_through(self, reader: int) -> int:
        """Last equation that needs what `reader` reads: itself, or of a view the last that reads that."""
        if reader == len(self._eqns) or not self._is_view(reader):
            return reader
        return max(reader, *(self._last[var] for var in self._eqns[reader].outvars))

    def _is_view(self, number: int) -> bool:
        return record_of(self._eqns[number]).cost in ("view", "part", "joined")

    def _bytes(self, var: Var) -> int:
        return 0 if is_token(var.aval) or self._is_view(self._definition[var]) else value_bytes(var.aval)
