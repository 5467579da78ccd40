"""Search for a plan that fits the tiles: a higher cost per byte, or recomputation of values for gradients.

Input: a program as planned first, and a function that plans it otherwise. Output: the first plan that fits, compiled.

    cost per byte    cycles that planners add for each byte of the fullest tile; raised along `BYTE_COSTS`
    recomputation    "auto" stores fewer bytes for gradients, by as many as the fullest tile lacks

The cheaper of the two for the missing bytes comes first: a cost of c frees bytes for at most c cycles each, the cycles
of recomputation are in its plans. Where recomputation took more than the remaining costs are expected to, these are
tried as well, and the fewest cycles win. A higher cost per byte may take memory elsewhere: if nothing fits, the search
continues with recomputation at the first cost, as if the user had fixed it. A cost per byte from the user is never
changed, nor the first where nothing has to fit.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Generic, Literal, NoReturn, Protocol, TypeVar

import numpy as np

from ipujax.lowering.pipelining import Cuts
from ipujax.lowering.recomputation import ChainTrade, Recomputation
from ipujax.runtime.compile import Executable, compile
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.graph import BYTE_COST_CYCLES, Graph, Program
from ipujax.runtime.logs import INFO, Log, attempt as numbered_attempt, compilation_name
from ipujax.runtime.memory import MemoryReport, check_memory, fits
from ipujax.runtime.options import Options

_LOG = Log("fit")
BYTE_COSTS = (BYTE_COST_CYCLES, 1.0, 2.0, 4.0, 8.0, 16.0)
_MAX_TIGHTENINGS = 6  # reductions of the bytes stored for gradients in one search
_MAX_MARGIN = 2.0
_HOPELESS_RATIO = 4  # assumed: no cost per byte frees so many times a tile's memory if the second freed little
_MAX_TILE_RATIO = 4.0  # assumed: bytes for gradients on the fullest tile, to their mean over tiles
_MARGIN = 1.05  # bytes freed for each missing one: plans assume values that are spread evenly over tiles


@dataclass(frozen=True, slots=True)
class Choice:
    """Parameters of a plan.

    Args:
        byte_cost: cost per byte on the fullest tile, in cycles.
        recomputation: values that gradients compute again.
        cuts: for each pipeline with open stages, the cuts to start the search from; empty for a full search.
    """

    byte_cost: float
    recomputation: Recomputation
    cuts: tuple[Cuts, ...] = ()


@dataclass(frozen=True, slots=True)
class Untried:
    """Options that could make a program smaller, and that its user has not set.

    Args:
        recompute: has gradients that `Options(recompute="auto")` would change.
        pipelines: has gradients of pipelines with another `recompute` of their own.
        offload: has arguments on the chip that can be offloaded to streaming memory.
        io_tiles: number of I/O tiles.
    """

    recompute: bool
    pipelines: bool
    offload: bool
    io_tiles: int


class Planned(Protocol):
    """A graph and its program, with trade-offs of recomputation and untried options."""

    @property
    def graph(self) -> Graph: ...
    @property
    def program(self) -> Program: ...
    @property
    def choice(self) -> Choice: ...
    @property
    def trades(self) -> Sequence[ChainTrade]: ...
    @property
    def untried(self) -> Untried: ...


P = TypeVar("P", bound=Planned)


def first_choice(options: Options) -> Choice:
    """Return the parameters of the first plan of a program."""
    byte_cost = BYTE_COSTS[0] if options.byte_cost is None else options.byte_cost
    return Choice(byte_cost, Recomputation(options.recompute))


def compile_fitting(first: P, plan: Callable[[Choice], P], options: Options) -> tuple[P, Executable]:
    """Compile plans of a program, `first` that of `first_choice`, until one fits; return it and its executable."""
    # If no plan fits, the error is that of the first plan whose fullest tile is smallest.
    if options.allow_out_of_memory or (options.byte_cost is not None and not first.trades):
        return first, compile(first.graph, first.program, options=options, check=partial(_check, first))
    start = time.perf_counter()
    with numbered_attempt(_LOG, 1, first.choice.byte_cost):
        executable = compile(first.graph, first.program, options=options, check=fits)
    _log_attempt(1, first.choice, executable)
    if fits(executable.memory):
        return first, executable
    attempts = {first.choice: _Attempt(first, executable)}

    def attempted(choice: Choice) -> _Attempt[P]:
        if choice not in attempts:
            seconds = time.perf_counter() - start
            number = len(attempts) + 1
            with numbered_attempt(_LOG, number, choice.byte_cost):
                planned = plan(choice)
                executable = compile(planned.graph, planned.program, options=options, check=fits)
            _log_attempt(number, choice, executable)
            attempts[choice] = _Attempt(planned, executable, seconds)
        return attempts[choice]

    # The second search has a fixed cost per byte: a higher one may need memory that recomputation has freed.
    for byte_costs in (BYTE_COSTS, ()) if options.byte_cost is None else ((),):
        search = _Search(attempts[first.choice], byte_costs)
        while (choice := search.next()) is not None:
            attempt = attempted(choice)
            if fits(attempt.executable.memory):
                while byte_costs and (higher := _with_higher_cost(attempt, list(attempts.values()))) is not None:
                    attempt = min(attempt, attempted(higher), key=_fitting_cycles)
                _log_best(attempt, list(attempts.values()), time.perf_counter() - start)
                return attempt.planned, _with_history(attempt, list(attempts.values()))
            search.add(attempt)
    _refuse(list(attempts.values()))


def _log_attempt(number: int, choice: Choice, executable: Executable) -> None:
    if _LOG.is_on(INFO):
        report = executable.memory
        does_fit = fits(report)
        needed_bytes = report.max_tile_bytes if does_fit else int(report.least_bytes.max())
        outcome = "fits, the fullest tile has" if does_fit else "does not fit, the fullest tile needs at least"
        outcome += f" {needed_bytes:,} of {executable.target.bytes_per_tile:,} bytes"
        _LOG.info("%s: attempt %d at %g cycles per byte %s", compilation_name(), number, choice.byte_cost, outcome)


def _log_best(best: _Attempt[P], attempts: Sequence[_Attempt[P]], seconds: float) -> None:
    """Log the number of the best attempt, and the share of all `seconds` that the others took."""
    starts = [attempt.seconds for attempt in attempts]
    number = attempts.index(best)
    best_seconds = [*starts, seconds][number + 1] - starts[number]
    others_percent = 100 * (1 - best_seconds / seconds)
    text = "%s: attempt %d of %d is used; the others took %.0f%% of %.1f s"
    _LOG.info(text, compilation_name(), number + 1, len(attempts), others_percent, seconds)


def _with_higher_cost(fitting: _Attempt[P], attempts: Sequence[_Attempt[P]]) -> Choice | None:
    """Return the next cost per byte that may fit without further recomputation, in fewer cycles than `fitting`."""
    first = attempts[0]
    recomputation = first.planned.choice.recomputation
    if fitting.planned.choice.recomputation == recomputation:
        return None
    without = [attempt for attempt in attempts if attempt.planned.choice.recomputation == recomputation]
    best = min(without, key=lambda attempt: attempt.max_missing_bytes)
    highest = max(attempt.planned.choice.byte_cost for attempt in without)
    higher = [byte_cost for byte_cost in BYTE_COSTS if byte_cost > highest]
    is_enough = bool(higher) and best.max_missing_bytes <= first.freed_bytes(best) * len(higher)
    if not is_enough or higher[0] * best.max_missing_bytes >= best.extra_cycles(fitting):
        return None
    return replace(best.planned.choice, byte_cost=higher[0])


def _fitting_cycles(attempt: _Attempt[P]) -> float:
    """Return the cycles of an attempt, infinite where it does not fit."""
    return float(attempt.cycles or 0) if fits(attempt.executable.memory) else np.inf


def _with_history(attempt: _Attempt[P], attempts: Sequence[_Attempt[P]]) -> Executable:
    """Return an attempt's executable with all costs per byte, the cycles added to the first, and the time before."""
    byte_cost = attempt.planned.choice.byte_cost
    all_costs = (other.planned.choice.byte_cost for other in attempts)
    cycles = attempt.cycles
    first_cycles = attempts[0].cycles
    executable = attempt.executable
    return replace(
        executable,
        byte_costs=(*dict.fromkeys(cost for cost in all_costs if cost != byte_cost), byte_cost),
        byte_cost_added_cycles=None if cycles is None or first_cycles is None else cycles - first_cycles,
        timings=MappingProxyType({"attempts": attempt.seconds, **executable.timings}),
    )


class _Attempt(Generic[P]):
    """A plan of a program and its executable; `seconds` were spent on attempts before it."""

    def __init__(self, planned: P, executable: Executable, seconds: float = 0.0) -> None:
        self.planned = planned
        self.executable = executable
        self.seconds = seconds

    @cached_property
    def cycles(self) -> int | None:
        """Cycles of one run; None where trip counts are data."""
        try:
            return self.executable.timeline_of(None).cycles
        except ProfileError:
            return None

    @cached_property
    def missing_bytes(self) -> np.ndarray:
        """Bytes that the fullest tile of each IPU lacks, int64[IPUs]."""
        target = self.executable.graph.target
        memory = self.executable.memory
        missing_bytes = np.maximum(memory.least_bytes - target.bytes_per_tile, 0)
        if not missing_bytes.any():  # only where the lower bound fits is packing, which is slow, of interest
            missing_bytes = memory.lacking().get("memory", missing_bytes)
        return np.asarray(missing_bytes.reshape(-1, target.tiles_per_ipu).max(1), np.int64)

    @property
    def max_missing_bytes(self) -> int:
        return int(self.missing_bytes.max())

    @cached_property
    def max_tile_bytes(self) -> np.ndarray:
        """Lower bound of the bytes on the fullest tile of each IPU, int64[IPUs]."""
        tiles = self.executable.graph.target.tiles_per_ipu
        return np.asarray(self.executable.memory.least_bytes.reshape(-1, tiles).max(1), np.int64)

    @property
    def stored_share(self) -> float:
        """Smallest share, over gradients, of the bytes stored to those stored without recomputation."""
        return min((trade.planned.peak_bytes / max(1, trade.all_bytes) for trade in self.planned.trades), default=1.0)

    def extra_cycles(self, other: _Attempt[P]) -> int:
        """Return the cycles of another attempt beyond those of this one."""
        return (other.cycles or 0) - (self.cycles or 0)

    def freed_bytes(self, other: _Attempt[P]) -> int:
        """Return the missing bytes of this attempt beyond those of another one."""
        return self.max_missing_bytes - other.max_missing_bytes


@dataclass(frozen=True, slots=True)
class _Tightening:
    """Recomputation that frees the missing bytes, and its estimated cycles; infinite if it cannot free enough."""

    recomputation: Recomputation
    cycles: float


class _Search(Generic[P]):
    """Iterate over plans of a program, each from the best so far.

    A cost per byte that adds more cycles for each byte it frees than recomputation would is dropped. From then on only
    recomputation is tried, as long as it is enough; so it is if the remaining costs could not free enough at the rate
    of the last one. Where recomputation frees less than planned, the next one aims at more. Where stages are searched
    again, each IPU stores as many bytes as before, not the same share of what the new stages could store.
    """

    def __init__(self, first: _Attempt[P], byte_costs: Sequence[float]) -> None:
        self.attempts = [first]
        self._base = first  # the attempt that the next one changes
        self._byte_costs = list(byte_costs)
        self._tightenings = 0
        self._margin = _MARGIN
        self._byte_costs_pay = True
        self._has_new_stages = False
        self._alternative: _Tightening | None = None
        self._changed: Literal["byte_cost", "recomputation", "stages"] = "byte_cost"  # by the last call of `next`
        self._recomputation = first.planned.choice.recomputation  # of the next attempt

    def next(self) -> Choice | None:
        """Return the parameters of the next plan, None at the end of the search."""
        choice = replace(self._base.planned.choice, recomputation=self._recomputation)
        missing_bytes = self._base.max_missing_bytes
        self._byte_costs = [byte_cost for byte_cost in self._byte_costs if byte_cost > choice.byte_cost]
        tighter = self._alternative = self._tighten() if self._tightenings < _MAX_TIGHTENINGS else None
        if self._needs_new_stages(choice, tighter):
            self._has_new_stages = True
            self._changed = "stages"
            recomputation = choice.recomputation if tighter is None else tighter.recomputation
            return replace(choice, recomputation=recomputation, cuts=())
        if tighter is None and not self._byte_costs_pay and self._is_hopeless(missing_bytes):
            return None
        if self._byte_costs and (
            tighter is None or self._expected_cycles(self._byte_costs[0], missing_bytes) < tighter.cycles
        ):
            self._changed = "byte_cost"
            return replace(choice, byte_cost=self._byte_costs[0])
        self._changed = "recomputation"
        return None if tighter is None else replace(choice, recomputation=tighter.recomputation)

    def _is_hopeless(self, missing_bytes: int) -> bool:
        return missing_bytes > _HOPELESS_RATIO * self._base.executable.target.bytes_per_tile

    def _needs_new_stages(self, choice: Choice, tighter: _Tightening | None) -> bool:
        """Return whether to search stages again, once: after the first cost per byte, if no tightening is enough."""
        has_stages = bool(choice.cuts and choice.recomputation.shares)
        is_past_first_cost = choice.byte_cost > self.attempts[0].planned.choice.byte_cost or not self._byte_costs
        is_not_enough = tighter is None or tighter.cycles == np.inf
        return has_stages and is_past_first_cost and is_not_enough and not self._has_new_stages

    def _expected_cycles(self, byte_cost: float, missing_bytes: int) -> float:
        # Planners add at most `byte_cost` cycles for a byte freed; infinite puts recomputation first.
        return byte_cost * missing_bytes if self._byte_costs_pay else np.inf

    def add(self, attempt: _Attempt[P]) -> None:
        """Continue from an attempt that does not fit either, unless its bytes cost more than recomputation."""
        self.attempts.append(attempt)
        freed_bytes = self._base.freed_bytes(attempt)
        missing_bytes = self._base.max_missing_bytes
        choice = attempt.planned.choice
        if self._changed == "stages":
            self._recomputation = self._shares_of_equal_bytes(attempt)
            self._base = attempt
            return
        if self._changed == "recomputation":
            self._tightenings += 1
            self._margin *= min(_MAX_MARGIN, max(1.0, missing_bytes / max(1, freed_bytes)))
            self._base = attempt
            self._recomputation = choice.recomputation
            return
        extra_cycles = self._base.extra_cycles(attempt)
        num_higher = sum(byte_cost > choice.byte_cost for byte_cost in self._byte_costs)
        if freed_bytes * (1 + num_higher) < missing_bytes:  # too few even if each higher cost frees as many
            self._byte_costs_pay = False
        if self._alternative is None or (
            freed_bytes > 0 and extra_cycles * missing_bytes <= self._alternative.cycles * freed_bytes
        ):
            self._base = attempt
        else:
            self._byte_costs_pay = False
            self._byte_costs.remove(choice.byte_cost)

    def _shares_of_equal_bytes(self, attempt: _Attempt[P]) -> Recomputation:
        """Return the recomputation with which new stages store as many bytes on each IPU as planned before."""
        shares = []
        for ipu in range(len(attempt.missing_bytes)):
            stored_bytes = sum(trade.planned.peak_bytes for trade in _of_ipu(self._base.planned.trades, ipu))
            all_bytes = sum(trade.all_bytes for trade in _of_ipu(attempt.planned.trades, ipu))
            shares.append(min(1.0, stored_bytes / max(1, all_bytes)))
        return replace(attempt.planned.choice.recomputation, shares=tuple(shares))

    def _tighten(self) -> _Tightening | None:
        """Return recomputation that stores less on IPUs that lack memory; None if none does, or nothing is left."""
        base = self._base
        missing_bytes = base.missing_bytes
        tiles_per_ipu = base.executable.graph.target.tiles_per_ipu
        is_enough = True
        shares = [self._recomputation.share(ipu) for ipu in range(len(missing_bytes))]
        for ipu in np.flatnonzero(missing_bytes).tolist():
            trades = _of_ipu(base.planned.trades, ipu)
            stored_bytes = sum(t.planned.peak_bytes for t in trades)
            min_bytes = sum(t.least_bytes for t in trades)
            if stored_bytes <= min_bytes:
                return None
            goal_bytes = stored_bytes - self._margin * float(missing_bytes[ipu]) * tiles_per_ipu
            if goal_bytes < min_bytes:  # the fullest tile has more than the mean: shrink by its share instead
                goal_bytes = stored_bytes * (1 - _MARGIN * float(missing_bytes[ipu] / base.max_tile_bytes[ipu]))
            shares[ipu] = max(0.0, goal_bytes / sum(t.all_bytes for t in trades))
            is_enough &= float(missing_bytes[ipu]) * tiles_per_ipu <= _MAX_TILE_RATIO * (stored_bytes - min_bytes)
        if not missing_bytes.any():
            return None
        # The slowest IPU sets the pace.
        by_ipu = [_of_ipu(base.planned.trades, ipu) for ipu in range(len(shares))]
        all_stored = max(sum(t.plans.keep_all().cycles for t in trades) for trades in by_ipu)
        before = max(sum(t.planned.cycles for t in trades) for trades in by_ipu)
        after = max(sum(t.cycles_with(share) for t in trades) for trades, share in zip(by_ipu, shares, strict=True))
        # Plans count cycles of gradients alone: their ratio is scaled to the cycles of the program.
        cycles = (self.attempts[0].cycles or 0) * (after - before) / max(1, all_stored)
        return _Tightening(replace(self._recomputation, shares=tuple(shares)), cycles if is_enough else np.inf)


def _of_ipu(trades: Sequence[ChainTrade], ipu: int) -> list[ChainTrade]:
    """Return the trade-offs of one IPU; those without an IPU concern all."""
    return [trade for trade in trades if trade.ipu in (ipu, None)]


def _check(planned: Planned, report: MemoryReport) -> None:
    """Refuse a program that has one plan only, and does not fit."""
    if report.lacking():
        check_memory(report, ways=_remedies(planned.untried))


def _remedies(untried: Untried) -> dict[str, str]:
    """Return options that may make a planned program fit, by name."""
    fewer_bytes = "which stores fewer values for gradients"
    examples = "the state of an optimiser, large tables"
    remedies = (
        (untried.recompute, "recompute", f'Options(recompute="auto"), {fewer_bytes}'),
        (untried.pipelines, "pipelines", f'recompute="auto" of ipu.pipeline, {fewer_bytes}'),
        (untried.offload, "offload", f"offload_argnums of ipu.jit, for arguments in streaming memory: {examples}"),
        (
            untried.io_tiles > 0,
            "io_tiles",
            f"Options(io_tiles=…) of fewer than {untried.io_tiles}: I/O tiles leave fewer tiles that compute",
        ),
        (True, "advise", "ipu.advise(fun, *args), which compiles with such options and compares the profiles"),
    )
    return {name: remedy for is_untried, name, remedy in remedies if is_untried}


def _refuse(attempts: Sequence[_Attempt[P]]) -> NoReturn:
    """Raise the error of the plan whose fullest tile is smallest, the first of equals."""
    reports = [attempt.executable.memory for attempt in attempts]
    choices = [attempt.planned.choice for attempt in attempts]
    byte_costs = tuple(dict.fromkeys(choice.byte_cost for choice in choices))
    shares = [attempt.stored_share for attempt in attempts]
    best = _smallest(reports)
    remedies = _remedies(attempts[best].planned.untried)
    all_shares = tuple(dict.fromkeys(shares))
    check_memory(reports[best], byte_costs, choices[best].byte_cost, all_shares, shares[best], remedies)
    raise AssertionError("check_memory raises for a program that does not fit")


def _smallest(reports: Sequence[MemoryReport]) -> int:
    """Return the index of the report whose fullest tile is smallest, the first of equals."""
    lower_bounds = [int(report.least_bytes.max()) for report in reports]
    first, *others = sorted(range(len(reports)), key=lower_bounds.__getitem__)
    best = reports[first].max_tile_bytes, first  # packs the variables: slow, so only where a lower bound allows it
    for number in others:
        if lower_bounds[number] > best[0]:
            break
        best = min(best, (reports[number].max_tile_bytes, number))
    return best[1]


def __getattr__(name: str) -> Any:
    if name == "BYTE_PRICES":
        warnings.warn("ipujax.fit.BYTE_PRICES is now ipujax.fit.BYTE_COSTS", DeprecationWarning, stacklevel=2)
        return BYTE_COSTS
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
