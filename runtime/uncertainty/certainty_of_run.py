"""How sure the cycles of a run are: their interval, and the sources of the constants on which they rest.

Input: an executable, the program, the recording and the runs of its steps. Output: `Certainty`. Both are of machines
that differ from the executable's in one constant, which are costed in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ipujax.runtime.compile import Executable
from ipujax.runtime.graph import Program
from ipujax.runtime.target import perturbed_constants
from ipujax.runtime.timeline import Recording
from ipujax.runtime.uncertainty.constant_work import interval_ends, works_of_constants
from ipujax.runtime.uncertainty.coverage_of_run import FACTORS, Coverage
from ipujax.runtime.uncertainty.interval_of_run import Ends, Interval, changed_ends, interval_of_run


@dataclass(frozen=True, slots=True)
class Certainty:
    """How sure the cycles of a run are.

    Args:
        interval: of the cycles.
        coverage: share of the busy cycles of the limiting IPU by kind of source.
    """

    interval: Interval
    coverage: dict[str, float]


def certainty_of_run(
    executable: Executable,
    program: Program,
    recording: Recording | None,
    runs: Mapping[Program, int],
    limiting_ipu: int,
    *,
    is_open: bool,
) -> Certainty:
    """Return the interval of the cycles of a run, and the kinds of sources they rest on.

    Args:
        executable: the compiled program.
        program: the control tree that ran, of its steps.
        recording: choices of data-dependent control in a run; None for the static run.
        runs: number of runs of each step.
        limiting_ipu: the IPU whose busy cycles are divided among sources.
        is_open: whether the interval has no upper end.

    Raises:
        ProfileError: a trip count is data.
    """
    if not executable.steps:
        return Certainty(interval_of_run(executable, program, recording, is_open=is_open), {})
    coverage = Coverage(executable, runs, limiting_ipu)
    constants = _constant_ends(executable, coverage)
    interval = interval_of_run(executable, program, recording, is_open=is_open, constants=constants)
    return Certainty(interval, coverage.shares())


def _constant_ends(executable: Executable, coverage: Coverage) -> Iterator[Ends]:
    """Yield the ends of uncertain constants, and add all constants to the coverage."""
    intervals = interval_ends(executable.target)
    factors = {name: (*FACTORS, *intervals.get(name, ())) for name in perturbed_constants(executable.target)}
    for name, work, changed in works_of_constants(executable, factors):
        coverage.add(name, changed[0], changed[1])
        if name in intervals:
            yield changed_ends(executable, name, work, changed[2:])
