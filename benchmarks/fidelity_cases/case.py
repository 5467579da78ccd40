"""A published case: measured and simulated figures, and the largest difference that is allowed."""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from ipujax import poplar
from ipujax.poplar.program import Program
from ipujax.runtime.cost.compute_set import ComputeSetCost
from ipujax.runtime.report import Profile
from ipujax.runtime.timeline import PHASES
from ipujax.runtime.uncertainty import interval_of_run

Ends = tuple[float, ...]  # lower and upper end
_MEASURING = {"debug.allowOutOfMemory": "true"}  # a published case ran, so it fitted
DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
EARLIER = "3bd7578"  # commit whose errors stand beside today's


@dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        name: name of the figure.
        measured: the published figure.
        simulated: the figure of the simulated machine.
        bar: largest error that is allowed; None where a bar is set for many rows together, see `Bar`.
        unit: unit of both figures.
        interval: 90 % interval of the simulated figure, over it; None where it is not of a run.
        is_of_measured_program: whether the simulated program is the measured one, as far as that is published. Another
            one has another mapping of operands, or a plan for more memory where one fits.
    """

    name: str
    measured: float
    simulated: float
    bar: float | None = None
    unit: str = "cycles"
    interval: Ends | None = None
    is_of_measured_program: bool = True

    @property
    def error(self) -> float:
        """Simulated against measured: above 0 is too much."""
        return self.simulated / self.measured - 1

    @property
    def is_met(self) -> bool:
        """True if the error is within the row's bar, or the row has none."""
        return self.bar is None or abs(self.error) <= self.bar

    @property
    def ends(self) -> Ends | None:
        """The interval of the simulated figure, in its unit."""
        return None if self.interval is None else tuple(end * self.simulated for end in self.interval)

    @property
    def is_inside(self) -> bool:
        """True if the measured figure is in the interval; one of `measured` 100 and interval 0.9 to 1.1 of 95 is."""
        return self.ends is not None and self.ends[0] <= self.measured <= self.ends[1]


@dataclass(frozen=True)
class Bar:
    """A bar for a figure of many rows.

    Args:
        name: name of the figure.
        value: the figure, a ratio.
        bar: largest value that is allowed, or smallest.
        at_least: the value must reach the bar, instead of staying within it.
    """

    name: str
    value: float
    bar: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """True if the value is on the right side of the bar."""
        return self.value >= self.bar if self.at_least else self.value <= self.bar


@dataclass(frozen=True)
class Family:
    """Cases of one source.

    Args:
        title: title of its section.
        source: publication of the figures.
        how: the program of the case, and the figures that are compared.
        rows: the figures.
        bars: bars for many rows together.
    """

    title: str
    source: str
    how: str
    rows: Sequence[Row]
    bars: Sequence[Bar] = field(default=())

    @property
    def is_met(self) -> bool:
        """True if every bar is met."""
        return all(figure.is_met for figure in (*self.rows, *self.bars))

    def markdown(self) -> str:
        """The section of the page."""
        lines = [f"## {self.title}\n", f"Source: {self.source}\n", f"{self.how}\n"]
        earlier = f"error at {EARLIER}"
        lines += [
            f"| case | measured | simulated | error | {earlier} | 90 % interval | bar |",
            "| --- | ---: | ---: | ---: | ---: | --- | ---: |",
        ]
        for row in self.rows:
            bar = "" if row.bar is None else f"{_verdict(row.is_met)} {_within(row.bar)}"
            figures = (_figure(value, row.unit) for value in (row.measured, row.simulated))
            before = _earlier().get((self.title, row.name))
            signed = [_signed(error) for error in (row.error, None if before is None else before / row.measured - 1)]
            lines.append(f"| {row.name} | {' | '.join([*figures, *signed])} | {_interval(row)} | {bar} |")
        for figure in self.bars:
            sign = "≥" if figure.at_least else "≤"
            verdict = f"{_verdict(figure.is_met)} {sign} {100 * figure.bar:.3g} %"
            lines.append(f"| **{figure.name}** | | | {100 * figure.value:.2f} % | | | {verdict} |")
        return "\n".join(lines) + "\n"


@cache
def _earlier() -> dict[tuple[str, str], float]:
    """Simulated figure of each case at the earlier commit, by section and name."""
    with (DATA / f"fidelity_{EARLIER}.csv").open(encoding="utf-8") as file:
        return {(row["section"], row["case"]): float(row["simulated"]) for row in csv.DictReader(file)}


def _signed(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"


def _verdict(is_met: bool) -> str:
    return "met:" if is_met else "**missed**:"


def _within(bar: float) -> str:
    return "exact" if bar == 0 else f"± {100 * bar:.3g} %"


def _interval(row: Row) -> str:
    if row.ends is None:
        return ""
    text = " to ".join(_figure(end, "cycles") for end in row.ends)
    if not row.is_of_measured_program:
        return f"({text})"
    return text if row.is_inside else f"{text}, **outside**"


def _figure(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if value == int(value) or value >= 1e4 else f"{value:,.1f}"
    return f"{number} {unit}" if unit != "cycles" else number


def errors(rows: Sequence[Row]) -> np.ndarray:
    """The size of each row's error."""
    return np.abs([row.error for row in rows])


def interval_of(profile: Profile, phases: Collection[str] = PHASES) -> Ends:
    """The 90 % interval of the cycles of some phases of a program, over these cycles."""
    executable = profile.executable
    interval = interval_of_run(executable, executable.program, None, phases=phases)
    assert interval.high is not None
    return interval.low / interval.cycles, interval.high / interval.cycles


def of_rate(interval: Ends) -> Ends:
    """The interval of a rate, from that of the cycles that it is over."""
    return 1 / interval[1], 1 / interval[0]


def profile_of(graph: poplar.Graph, program: Program) -> Profile:
    """The profile of a program on the simulated machine, without running it."""
    return poplar.Engine(graph, program, _MEASURING).profile


def phase_cycles(graph: poplar.Graph, program: Program) -> dict[str, int]:
    """Cycles of each phase of a program on the simulated machine, without running it."""
    return profile_of(graph, program).phase_cycles


def compute_set_costs(graph: poplar.Graph, program: Program) -> list[ComputeSetCost]:
    """Cost of each compute set of a program, tile by tile, in the order in which they run."""
    costs = profile_of(graph, program).executable.costs
    return [cost for cost in costs.values() if isinstance(cost, ComputeSetCost)]
