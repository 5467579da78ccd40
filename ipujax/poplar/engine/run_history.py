"""What an engine has run: the programs in order, and what their data-dependent control did.

Input: runs, as they happen. Output: the profile of all of them, as one program after the other. Runs of one program
that is the same every time are counted, so that many of them cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from ipujax.runtime.compile import Executable
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.graph import Program, Repeat, RepeatWhile, Sequence, distinct
from ipujax.runtime.profile import Profile


class Runs:
    """The runs of an engine since the last reset."""

    def __init__(self) -> None:
        self._order: list[list[int]] = []  # program and how often in a row
        self._choices: dict[Program, list[int]] = {}

    def start(self, index: int) -> None:
        """Notes that a program runs."""
        if self._order and self._order[-1][0] == index:
            self._order[-1][1] += 1
        else:
            self._order.append([index, 1])

    def record(self, node: Program, what: Any) -> None:
        """Notes what a node of data-dependent control did; see `engine_function`."""
        self._choices.setdefault(node, []).append(int(what))

    def reset(self) -> None:
        """Forgets everything."""
        self._order.clear()
        self._choices.clear()

    def profile(self, executable: Executable, programs: Items[Program], *, is_recorded: bool) -> Profile:
        """The profile of all runs.

        Args:
            executable: of all programs.
            programs: by number.
            is_recorded: whether data-dependent control was noted.

        Raises:
            ProfileError: a loop whose trip count is data ran without being noted.
        """
        ran = {programs[index] for index, _ in self._order}
        if not is_recorded:
            for loop in (node for program in ran for node in distinct(program) if isinstance(node, RepeatWhile)):
                what = "the trip count of a loop that ran was not noted"
                raise ProfileError(what, where=loop.origin, hint='Engine(…, {"debug.instrument": "true"})')
        steps = [programs[i] if count == 1 else Repeat(count, programs[i]) for i, count in self._order]
        return Profile(executable, dict(self._choices) if is_recorded else None, Sequence(*steps))
