"""How sure the cycles of a run are: their 90 % interval, and the sources of the constants on which they rest.

Input: an executable, the program, the recording and the runs of its steps. Output: `Certainty`, and `Energy` from its
interval. Both parts are of machines that differ from the executable's in one constant, which are costed in one pass.

For the interval each constant, and each mechanism, is moved to either end of its own interval, and the run is timed
again with the plan held. The changes below and those above the run's cycles are each added as independent errors are,
as the root of the sum of their squares.

The shares of kinds of sources are of the busy cycles of the limiting IPU. The cycles of a phase of a step are divided
among constants in proportion to the size of their elasticity to each, a central difference of ±0.1 %; those that no
constant changes, as cycles that a codelet of a user declares, rest on `NO_CONSTANT`.

Source: `spreads` for mechanisms; `Target.sources` for constants, see `target.presets`.
Limits: constants that a program is made for, such as tiles and workers, are taken as exact and count for nothing, and
the plan is taken as that of the hardware's software. Two errors at once may add up to more than either where the
slowest tile or IPU changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import ceil, floor, hypot
from typing import Annotated

import numpy as np

from ipujax.runtime.causes.variants import Run, is_beside, whole_work
from ipujax.runtime.compile import Executable
from ipujax.runtime.files.kinds import Integer
from ipujax.runtime.graph import Program
from ipujax.runtime.target import Target, perturbed_constants
from ipujax.runtime.timeline import PHASES, Recording
from ipujax.runtime.uncertainty.changed_work import (
    Ends,
    MechanismWork,
    changed_ends,
    ends_of_constants,
    interval_ends,
    works_of_constants,
)

NO_CONSTANT = "no constant"
_STEP = 1e-3  # relative change of a constant, each way
_FACTORS = (1 - _STEP, 1 + _STEP)


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """A constant or a mechanism, and the cycles that its own interval takes from a run or adds to it.

    Args:
        name: the constant of `Target`, or the mechanism, see `spreads.SPREADS`.
        low: cycles of the run at one end, below those of the run.
        high: cycles at the other end, above them.
    """

    name: str
    low: Annotated[int, Integer()]
    high: Annotated[int, Integer()]


@dataclass(frozen=True, slots=True)
class Interval:
    """The 90 % interval of the cycles of a run.

    Args:
        cycles: cycles of the run.
        low: lower end, in cycles.
        high: upper end; None where the run has operations without a price, which may take any time.
        uncertainties: the constants and mechanisms that it follows from, widest first.
    """

    cycles: int
    low: Annotated[int, Integer()]
    high: Annotated[int, Integer()] | None
    uncertainties: tuple[Uncertainty, ...]

    def __contains__(self, cycles: float) -> bool:
        return self.low <= cycles and (self.high is None or cycles <= self.high)


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy of a run: its time at the published power of the machine, whatever the program computes.

    Args:
        joules: energy of all IPUs of all replicas.
        low: lower end of its 90 % interval, in joules.
        high: upper end; None where that of the cycles is open.
    """

    joules: float
    low: float
    high: float | None


def energy_of_run(interval: Interval, target: Target, num_ipus: int) -> Energy:
    """Return the energy of a run on so many IPUs; errors of cycles, clock and power are independent."""
    joules = target.seconds(interval.cycles) * target.ipu_watts * num_ipus
    clock, power = (target.sources[name] for name in ("clock_hz", "ipu_watts"))
    cycles = max(1, interval.cycles)
    relative = hypot(1 - interval.low / cycles, 1 - power.low, 1 - 1 / clock.high) if joules else 0.0
    low = max(0.0, joules * (1 - relative))
    if interval.high is None:
        return Energy(joules, low, None)
    return Energy(joules, low, joules * (1 + hypot(interval.high / cycles - 1, power.high - 1, 1 / clock.low - 1)))


def interval_of_run(
    executable: Executable,
    program: Program,
    recording: Recording | None,
    *,
    is_open: bool = False,
    phases: Collection[str] = PHASES,
    constants: Iterable[Ends] | None = None,
) -> Interval:
    """Return the interval of the cycles of a run.

    Args:
        executable: the compiled program.
        program: the control tree that ran, of its steps.
        recording: choices of data-dependent control in a run; None for the static run.
        is_open: whether there is no upper end.
        phases: of which the cycles are; others take none.
        constants: work of all steps at both ends of each constant; `ends_of_constants` when None.

    Raises:
        ProfileError: a trip count is data.
    """
    if not executable.steps:
        return Interval(0, 0, None if is_open else 0, ())
    run = Run(executable, program, recording)
    omitted_phases = [number for number, phase in enumerate(PHASES) if phase not in phases]
    names: list[str] = []

    def works() -> Iterator[np.ndarray]:
        """Yield the work as it is, then that at both ends of each uncertainty."""
        mechanisms = MechanismWork(executable)
        yield _without(mechanisms.whole, omitted_phases)
        of_constants = ends_of_constants(executable) if constants is None else constants
        for name, *works_at_ends in chain(mechanisms.ends(), of_constants):
            names.append(name)
            yield from (_without(work, omitted_phases) for work in works_at_ends)

    cycles, *changed = run.cycles(works())
    pairs = zip(changed[::2], changed[1::2], strict=True)
    rows = [
        Uncertainty(name, cycles - min(cycles, *pair), max(cycles, *pair) - cycles)
        for name, pair in zip(names, pairs, strict=True)
    ]
    rows = sorted((each for each in rows if each.low or each.high), key=lambda each: -(each.low + each.high))
    low = max(0, floor(cycles - hypot(*(each.low for each in rows))))
    high = None if is_open else ceil(cycles + hypot(*(each.high for each in rows)))
    return Interval(cycles, low, high, tuple(rows))


def _without(work: np.ndarray, phases: list[int]) -> np.ndarray:
    if not phases:
        return work
    work = work.copy()
    work[..., phases] = 0
    return work


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
    coverage = _Coverage(executable, runs, limiting_ipu)
    constants = _constant_ends(executable, coverage)
    interval = interval_of_run(executable, program, recording, is_open=is_open, constants=constants)
    return Certainty(interval, coverage.shares())


def _constant_ends(executable: Executable, coverage: _Coverage) -> Iterator[Ends]:
    """Yield the ends of uncertain constants, and add all constants to the coverage."""
    intervals = interval_ends(executable.target)
    factors = {name: (*_FACTORS, *intervals.get(name, ())) for name in perturbed_constants(executable.target)}
    for name, work, changed in works_of_constants(executable, factors):
        coverage.add(name, changed[0], changed[1])
        if name in intervals:
            yield changed_ends(executable, name, work, changed[2:])


class _Coverage:
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
        """Add a constant, of which these are the work of all steps at `_FACTORS`, float[steps, num_ipus, 5]."""
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
