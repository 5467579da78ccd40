"""How sure the cycles of a run are: their interval, and the sources of the constants on which they rest.

Input: an executable, the program, the recording and the runs of its steps. Output: `Certainty`. Both are of machines
that differ from the executable's in one constant, which are costed in one pass.

The shares of kinds of sources are of the busy cycles of the limiting IPU. The cycles of a phase of a step are divided
among constants in proportion to the size of their elasticity to each, a central difference of ±0.1 %; those that no
constant changes, as cycles that a codelet of a user declares, rest on `NO_CONSTANT`.
Limits: constants that programs are made for, such as tiles and workers, count for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.causes.variants import is_beside, whole_work
from ipujax.runtime.compile import Executable
from ipujax.runtime.graph import Program
from ipujax.runtime.target import perturbed_constants
from ipujax.runtime.timeline import Recording
from ipujax.runtime.uncertainty.changed_work import Ends, changed_ends, interval_ends, works_of_constants
from ipujax.runtime.uncertainty.interval_of_run import Interval, interval_of_run


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


NO_CONSTANT = "no constant"
_STEP = 1e-3  # relative change of a constant, each way
FACTORS = (1 - _STEP, 1 + _STEP)


class Coverage:
    """The kinds of sources of a run's cycles, while constants are added.

    Args:
        executable: the compiled program.
        runs: number of runs of each step.
        limiting_ipu: the IPU whose busy cycles are divided.
    """

    def __init__(self, executable: Executable, runs: Mapping[Program, int], limiting_ipu: int) -> None:
        self._sources = executable.target.sources
        self._limiting_ipu = limiting_ipu
        runs_of_steps = np.array([runs.get(node, 0) for node in executable.steps]) * ~is_beside(executable)
        self._cycles = executable.once(whole_work)[:, limiting_ipu] * runs_of_steps[:, None]  # [steps, phases]
        self._sizes: dict[str, np.ndarray] = {}

    def add(self, constant: str, smaller: np.ndarray, larger: np.ndarray) -> None:
        """Add a constant, of which these are the work of all steps at `FACTORS`, float[steps, num_ipus, 5]."""
        self._sizes[constant] = np.abs(larger[:, self._limiting_ipu] - smaller[:, self._limiting_ipu])

    def shares(self) -> dict[str, float]:
        """Return the share of cycles by kind of source, largest first; the shares add up to 1, and are none without."""
        if not self._cycles.any():
            return {}
        size = np.stack(list(self._sizes.values()), -1)
        total = size.sum(-1)
        of_constants = (self._cycles[..., None] * size / np.where(total > 0, total, 1)[..., None]).sum((0, 1))
        by_kind: dict[str, float] = {NO_CONSTANT: float(self._cycles[total == 0].sum())}
        for name, share in zip(self._sizes, of_constants.tolist(), strict=True):
            kind = self._sources[name].kind
            by_kind[kind] = by_kind.get(kind, 0.0) + share
        all_cycles = float(self._cycles.sum())
        shares = {kind: share / all_cycles for kind, share in by_kind.items() if share > 0}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))
