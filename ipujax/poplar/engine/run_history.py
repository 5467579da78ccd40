"""Record of an engine's runs: the programs in order, and their data-dependent control flow.

Input: runs, one by one. Output: their profile, as a sequence of programs. Consecutive runs of one program are only
counted, so that many of them take no memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from ipujax.runtime.compile import Executable
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.graph import Program, Repeat, Sequence, data_loops
from ipujax.runtime.report import Profile


class Runs:
    """Runs of an engine since the last reset."""

    def __init__(self) -> None:
        self._order: list[list[int]] = []  # pairs: index of a program, number of consecutive runs
        self._choices: dict[Program, list[int]] = {}  # trip counts and branches by node, in the order of execution

    def start(self, index: int) -> None:
        """Record the start of a program."""
        if self._order and self._order[-1][0] == index:
            self._order[-1][1] += 1
        else:
            self._order.append([index, 1])

    def record(self, node: Program, choice: Any) -> None:
        """Record a trip count or a branch of a node of data-dependent control flow; see `StateFunction`."""
        self._choices.setdefault(node, []).append(int(choice))

    def reset(self) -> None:
        """Discard all records."""
        self._order.clear()
        self._choices.clear()

    def profile(self, executable: Executable, programs: Items[Program], *, is_recorded: bool) -> Profile:
        """Return the profile of all runs; raises ProfileError for an unrecorded loop of data-dependent trip count."""
        executed = {programs[index] for index, _ in self._order}
        if not is_recorded:
            for loop in (loop for program in executed for loop in data_loops(program)):
                message = "the trip count of a loop that ran was not recorded"
                raise ProfileError(message, where=loop.origin, hint='Engine(…, {"debug.instrument": "true"})')
        steps = [programs[i] if count == 1 else Repeat(count, programs[i]) for i, count in self._order]
        return Profile(executable, dict(self._choices) if is_recorded else None, Sequence(*steps))
