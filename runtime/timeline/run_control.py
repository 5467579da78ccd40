"""Data-dependent control in a run: the trip counts and choices that a walk over a program comes to, beside its clocks.

Input: a program, assumed trip counts by the names of loops, and a recording of a run. Output: the count or the choice
of the current run of each loop and branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.graph import Loop, Program, fold, while_names
from ipujax.runtime.timeline.clocks import Sums

# Choices of each data-dependent node in a run, in order: iterations of a loop, 1 or 0 of an If, the case of a Switch
# (the number of cases for its default).
Recording = Mapping[Program, Sequence[int]]


@dataclass(slots=True, eq=False)
class Clocks:
    """Clocks at a point of a walk, which advances them.

    Args:
        state: of IPUs and slots, see `clocks`, int64[IPUs + slots, k] cycles.
        sums: over the steps up to here.
        choices: of each recorded node, those that the walk has not come to yet.
        task_ipu: IPU of the task that is walked, None outside of tasks.
        begin: its clock when its first work in the task began, int64[k]; None before.
    """

    state: np.ndarray
    sums: Sums
    choices: Mapping[Program, Iterator[int]] = field(default_factory=dict)
    task_ipu: int | None = None
    begin: np.ndarray | None = None

    @property
    def of_ipus(self) -> np.ndarray:
        """Clock of each IPU, int64[num_ipus], a view."""
        return self.state[: len(self.sums.work), 0]


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """What decides data-dependent control.

    Args:
        loop_names: names of each loop whose trip count is data.
        trip_counts: assumed iterations of loops, by name.
        recording: choices of data-dependent control in a run; they take precedence over `trip_counts`.
        is_recorded: returns whether control in a node was recorded, so that its runs may differ.
    """

    loop_names: Mapping[Loop, tuple[str, ...]]
    trip_counts: Mapping[str, int]
    recording: Recording
    is_recorded: Callable[[Program], bool]

    @classmethod
    def of(cls, program: Program, trip_counts: Mapping[str, int], recording: Recording) -> Control:
        """Return the control of a program in a run."""
        is_recorded = fold(lambda node, children: node in recording or any(children))
        return cls(while_names(program), trip_counts, recording, is_recorded)

    def trip_count(self, loop: Loop, clocks: Clocks) -> int:
        """Return the iterations of the current run of a loop."""
        if loop.trips is not None:
            return loop.trips
        names = self.loop_names[loop]
        if loop in self.recording:
            return next_choice(clocks, loop, names[0])
        counts = [self.trip_counts[name] for name in names if name in self.trip_counts]
        if not counts:
            raise ProfileError(
                f"the trip count of loop {names[-1]!r} is data, so its cycles are not known before it runs",
                where=loop.origin,
                expected=f"a trip count for one of the names {', '.join(map(repr, names))}",
                hint=f"Options(trip_counts={{{names[-1]!r}: n}}), or profile a call",
            )
        return counts[0]


def next_choice(clocks: Clocks, node: Program, name: object) -> int:
    """Return the recorded choice of the current run of a node, which is named in the error where there is none."""
    for choice in clocks.choices[node]:
        return int(choice)
    raise ProfileError(f"the recording ends before {name} runs for the last time")
