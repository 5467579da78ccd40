"""Causes of the cycles of a run: a waterfall down to the computation, and what each saves alone.

Input: an executable, and the recording of a run's data-dependent control. Output: a `Cause` for each cause that the run
has. A cause is removed by timing the same steps without its work, see `removals`; the waterfall adds up exactly to the
cycles of the run, as each cause is removed behind those before it.
Limits: the plan is held, so a remedy that changes the plan may save more or less. Cycles of IPUs of equal work are
rounded up step by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import numpy as np

from ipujax.runtime.causes.bound import Bound
from ipujax.runtime.causes.removals import (
    BETWEEN_IPUS,
    BETWEEN_TILES,
    CAUSES,
    COLLECTIVES,
    HOST,
    MOVES,
    OF_LOOKUPS,
    OF_PRODUCTS,
    RETURNED,
    STREAMING,
    SYNCS,
    UNEQUAL_IPUS,
    WAITS,
    Removals,
)
from ipujax.runtime.causes.variants import Run, is_beside
from ipujax.runtime.compile import Executable
from ipujax.runtime.files.kinds import Integer, Text
from ipujax.runtime.graph import HOST_LATENCY, Leaf, Program
from ipujax.runtime.tensor import OF_CALLER, Origin, compose
from ipujax.runtime.timeline import SYNC, Recording
from ipujax.runtime.timeline.clocks import HOST_EXCHANGE

_Change = Annotated[int, Integer(-(2**53) + 1)]  # below 0 where other steps wait longer without a cause
COMPUTATION = "computation"  # what no removal takes away: vertices, on all tiles alike


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of cycles of a run.

    Args:
        name: one of `removals.CAUSES`, or `COMPUTATION`.
        cycles: cycles that vanish when it is removed behind the causes before it; those of all causes add up to the
            cycles of the run.
        alone_cycles: cycles that vanish when it alone is removed.
        least_cycles: the part of `cycles` that every plan takes; those of all causes add up to `Bound.cycles`.
        origin: line, layer and part of the step that has most of them; `Origin()` of a cause that no step has.
    """

    name: Annotated[str, Text((*CAUSES, COMPUTATION))]
    cycles: _Change
    alone_cycles: _Change
    least_cycles: _Change
    origin: Origin


def causes_of_run(
    executable: Executable, program: Program, recording: Recording | None, runs: Mapping[Program, int], bound: Bound
) -> tuple[Cause, ...]:
    """Return the causes of the cycles of a run, those that save most first, the computation last.

    Args:
        executable: the compiled program.
        program: the control tree that ran, of its steps.
        recording: choices of data-dependent control in a run; None for the static run.
        runs: number of runs of each step.
        bound: least cycles of any plan.

    Raises:
        ProfileError: a trip count is data.
    """
    if not executable.steps:
        return (Cause(COMPUTATION, 0, 0, 0, Origin()),)
    removals = executable.once(Removals)
    totals = _Totals(np.array([runs.get(node, 0) for node in removals.nodes]), is_beside(executable))
    origins: dict[str, Origin] = {}
    run = Run(executable, program, recording)
    cycles = _cycles(run, removals, totals, _each_alone(removals, totals, origins))
    alone_cycles = {name: cycles[()] - cycles[name,] for name in origins}
    everything = tuple(origins)
    cycles |= _cycles(run, removals, totals, [(everything, removals.without(everything))])
    # What a change saves most of is removed first: so the waterfall begins with the cause that a verdict names.
    present = sorted(origins, key=lambda name: -removable_cycles(name, alone_cycles[name], cycles[everything]))
    waterfall = [*(tuple(present[:n]) for n in range(len(present))), everything]
    together = ((removed, removals.without(removed)) for removed in waterfall[2:-1])
    cycles |= _cycles(run, removals, totals, together)
    removed = {
        name: cycles[before] - cycles[after] for (before, after), name in zip(pairwise(waterfall), present, strict=True)
    }
    removed[COMPUTATION] = alone_cycles[COMPUTATION] = cycles[waterfall[-1]]
    origins[COMPUTATION] = Origin()
    least_cycles = _least_by_cause(removed, bound)
    return tuple(Cause(name, removed[name], alone_cycles[name], least_cycles[name], origins[name]) for name in removed)


def removable_cycles(name: str, alone_cycles: int, computing_cycles: int) -> int:
    """Return the cycles of a cause that a change of the program may save.

    What is computed together has to be moved together: plans and programs trade moving for computing. While data move
    for less time than is computed, no change saves all of it; fewer bytes, or more work for each, save about half. Rows
    that are looked up move in every program.

    Args:
        name: of the cause.
        alone_cycles: cycles that vanish when it alone is removed.
        computing_cycles: those of `COMPUTATION`.
    """
    is_needed = name == OF_LOOKUPS or (name in MOVES and alone_cycles < computing_cycles)
    return alone_cycles // 2 if is_needed else alone_cycles


def _least_by_cause(cycles: Mapping[str, int], bound: Bound) -> Mapping[str, int]:
    """Divide a bound among causes, by phases: to those of a phase first, then to others from the last, while they last.

    Of a step that is removed as a whole, as one on a single tile, the sync is among the cycles of another cause.
    """
    least_cycles = dict.fromkeys(cycles, 0)
    for part, names in (
        (bound.host_cycles, (RETURNED, HOST, STREAMING)),
        (bound.exchange_cycles, (COLLECTIVES, BETWEEN_IPUS, BETWEEN_TILES, OF_PRODUCTS, OF_LOOKUPS)),
        (bound.sync_cycles, (SYNCS,)),
        (bound.compute_cycles, (COMPUTATION, SYNCS)),  # starts of vertices are among the latter
    ):
        remaining = part
        for name in (*(name for name in names if name in cycles), *reversed(list(cycles))):
            assigned = max(0, min(remaining, cycles[name] - least_cycles[name]))
            least_cycles[name] += assigned
            remaining -= assigned
        least_cycles[COMPUTATION] += remaining  # where a cause makes the run shorter
    return least_cycles


@dataclass(frozen=True, slots=True)
class _Totals:
    """Sums over a run: `runs` of each step, int64[steps]; `beside`: whether I/O tiles do it, bool[steps]."""

    runs: np.ndarray
    beside: np.ndarray

    def busy_cycles(self, work: np.ndarray) -> np.ndarray:
        """Return the cycles of all steps of each IPU, int64[num_ipus]."""
        busy: np.ndarray = (work.sum(2) * (self.runs * ~self.beside)[:, None]).sum(0)
        return busy


_Variant = tuple[tuple[str, ...], np.ndarray]  # causes, and the work of all steps without them


def _each_alone(removals: Removals, totals: _Totals, origins: dict[str, Origin]) -> Iterator[_Variant]:
    """Yield the work with all causes, then that without each that the run has; note origins of the causes."""
    yield (), removals.without(())
    for cause in CAUSES:
        if not removals.is_of(cause):
            continue
        work = removals.without((cause,))
        if cause in (UNEQUAL_IPUS, WAITS) or not np.array_equal(work, removals.whole):
            origins[cause] = _origin(removals, totals, work, cause)
            yield (cause,), work


def _cycles(run: Run, removals: Removals, totals: _Totals, variants: Iterable[_Variant]) -> dict[tuple[str, ...], int]:
    """Return the cycles of the run without each of several sets of causes."""
    cycles: dict[tuple[str, ...], int] = {}
    walked: list[tuple[str, ...]] = []

    def works() -> Iterator[np.ndarray]:
        """Yield the work of variants that are walked; without waits a run takes as long as its busiest IPU."""
        for removed, work in variants:
            if UNEQUAL_IPUS in removed:
                tasks = removals.tasks
                work[tasks] = _with_equal_ipus(work[tasks], totals.busy_cycles(work * tasks[:, None, None]))
            if WAITS in removed:
                cycles[removed] = int(totals.busy_cycles(work).max())
            else:
                walked.append(removed)
                yield work

    of_walked = run.cycles(works())
    return cycles | dict(zip(walked, of_walked, strict=True))


def _with_equal_ipus(work: np.ndarray, busy_cycles: np.ndarray) -> np.ndarray:
    """Return work of which each IPU that has any does the mean, syncs apart; `busy_cycles` are its sums by IPU."""
    is_busy = busy_cycles > 0
    scale = np.where(is_busy, busy_cycles[is_busy].mean() / np.maximum(busy_cycles, 1), 1.0)
    equal = np.ceil(work * scale[:, None]).astype(np.int64)
    equal[..., SYNC] = work[..., SYNC]
    return equal


def _origin(removals: Removals, totals: _Totals, work: np.ndarray, cause: str) -> Origin:
    """Return the origin of most of the cycles that vanish with a cause; `work` is that of steps without it."""
    saved = removals.whole - work
    latency = np.clip(saved[..., HOST_EXCHANGE], 0, removals.host_latency)  # of no single transfer
    saved[..., HOST_EXCHANGE] -= latency
    of_steps = saved.sum(2).max(1) * totals.runs
    by_origin = {HOST_LATENCY: int(latency.max(1) @ totals.runs)}
    step_of: dict[Origin, Program] = {}  # the first step of each origin
    for node, cycles in zip(removals.nodes, of_steps.tolist(), strict=True):
        if cycles > 0 and isinstance(node, Leaf):
            origin = removals.origin_in(node, cause)
            by_origin[origin] = by_origin.get(origin, 0) + cycles
            step_of.setdefault(origin, node)
    by_origin = {origin: cycles for origin, cycles in by_origin.items() if cycles > 0}
    most = max(by_origin, key=lambda origin: by_origin[origin], default=Origin())
    if not most.line.startswith(OF_CALLER):
        return most
    # Of a function that several layers call: the line is that of its first call.
    return compose(removals.calls[step_of[most]], most)
