"""Fitting a program into its tiles: a dearer byte for the planners, or values computed again for gradients.

Input: a program as planned first, and what plans it in another way. Output: the first that fits, compiled.

    price of a byte    planners weigh a byte on the fullest tile against cycles; it climbs along `BYTE_PRICES`
    recomputation      of what is kept for gradients, "auto" keeps as much less as the fullest tile lacks

What is cheaper for the bytes that are lacking comes first: a price of p frees bytes for at most p cycles each, what
recomputation takes is in its plans. Where it took more than the prices left are expected to, these are tried too, and
what takes fewest cycles stays. A dearer byte may take memory elsewhere: if nothing fits, recomputation goes on at the
first price, as if that were given. A price that is given stays, and so does the first where nothing has to fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Generic, Literal, NoReturn, Protocol, TypeVar

import numpy as np

from ipujax.lowering.pipelining import Cuts
from ipujax.lowering.recomputation import ChainTrade, Recomputation
from ipujax.runtime.compile import Executable, compile
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.graph import BYTE_PRICE_CYCLES, Graph, Program
from ipujax.runtime.logs import INFO, Log, attempt as numbered_attempt, compilation_name
from ipujax.runtime.memory import MemoryReport, check_memory, fits
from ipujax.runtime.options import Options

_LOG = Log("fit")
BYTE_PRICES = (BYTE_PRICE_CYCLES, 1.0, 2.0, 4.0, 8.0, 16.0)
_MOST_TIGHTENED = 6  # times that less is kept
_MOST_MARGIN = 2.0
_HOPELESS = 4  # assumed: no price helps tiles that lack so many times what they have, if the first did little
_FULLEST = 4.0  # assumed: of what is kept the fullest tile has at most so many times what there is on average
_MARGIN = 1.05  # bytes freed for each that lacks: plans take values to be evenly spread, if that can be enough


@dataclass(frozen=True, slots=True)
class Choice:
    """How a program is planned.

    Args:
        price: cycles that a byte on the fullest tile is worth.
        recomputation: what gradients compute again.
        cuts: for each pipeline whose stages are to be found, those to start from; none where all are to be weighed.
    """

    price: float
    recomputation: Recomputation
    cuts: tuple[Cuts, ...] = ()


@dataclass(frozen=True, slots=True)
class Untried:
    """What a program has that could make it smaller, and its user has not asked for.

    Args:
        recompute: gradients that would run in another way with `Options(recompute="auto")`.
        pipelines: gradients of pipelines that name another way themselves.
        offload: arguments on the chip that may lie in streaming memory.
        io_tiles: how many tiles only move data.
    """

    recompute: bool
    pipelines: bool
    offload: bool
    io_tiles: int


class Planned(Protocol):
    """A graph and its program, what recomputation would save and cost, and what is untried."""

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
    """How a program is planned first."""
    price = BYTE_PRICES[0] if options.byte_price is None else options.byte_price
    return Choice(price, Recomputation(options.recompute))


def compile_fitting(first: P, plan: Callable[[Choice], P], options: Options) -> tuple[P, Executable]:
    """Compiles a program in the first way in which it fits.

    Args:
        first: the program as `first_choice` has it.
        plan: plans it in another way.
        options: what the user chose.

    Returns:
        The program as it is planned, and compiled.

    Raises:
        TileMemoryError: if it fits in no way; that of the first whose fullest tile is smallest.
    """
    if options.allow_out_of_memory or (options.byte_price is not None and not first.trades):
        return first, compile(first.graph, first.program, options=options, check=partial(_check, first))
    start = time.perf_counter()
    with numbered_attempt(_LOG, 1, first.choice.price):
        executable = compile(first.graph, first.program, options=options, check=fits)
    _log_attempt(1, first.choice, executable)
    if fits(executable.memory):
        return first, executable
    attempts = {first.choice: _Attempt(first, executable)}

    def attempted(choice: Choice) -> _Attempt[P]:
        if choice not in attempts:
            seconds, number = time.perf_counter() - start, len(attempts) + 1
            with numbered_attempt(_LOG, number, choice.price):
                planned = plan(choice)
                executable = compile(planned.graph, planned.program, options=options, check=fits)
            _log_attempt(number, choice, executable)
            attempts[choice] = _Attempt(planned, executable, seconds)
        return attempts[choice]

    for prices in (BYTE_PRICES, ()) if options.byte_price is None else ((),):
        search = _Search(attempts[first.choice], prices)
        while (choice := search.next()) is not None:
            attempt = attempted(choice)
            if fits(attempt.executable.memory):
                while prices and (dearer := _dearer(attempt, list(attempts.values()))) is not None:
                    attempt = min(attempt, attempted(dearer), key=_fitting_cycles)
                _log_share_of_past(attempt, list(attempts.values()), time.perf_counter() - start)
                return attempt.planned, _described(attempt, list(attempts.values()))
            search.add(attempt)
    _refuse(list(attempts.values()))


def _log_attempt(number: int, choice: Choice, executable: Executable) -> None:
    """Says whether a program fits, and what its fullest tile needs."""
    if _LOG.is_on(INFO):
        report, do_fit = executable.memory, fits(executable.memory)
        needed = report.max_tile_bytes if do_fit else int(report.least_bytes.max())
        what = "fits, the fullest tile has" if do_fit else "does not fit, the fullest tile needs at least"
        found = f"{what} {needed:,} of {executable.target.bytes_per_tile:,} bytes"
        _LOG.info("%s: attempt %d at %g cycles per byte %s", compilation_name(), number, choice.price, found)


def _log_share_of_past(taken: _Attempt[P], attempts: Sequence[_Attempt[P]], seconds: float) -> None:
    """Says which attempt is taken, and the share of the time that the others took.

    Args:
        taken: what fits.
        attempts: all, in order.
        seconds: from the start of the first compilation to now.
    """
    starts = [each.seconds for each in attempts]
    number = attempts.index(taken)
    alone = [*starts, seconds][number + 1] - starts[number]
    past = 100 * (1 - alone / seconds)
    what = "%s: attempt %d of %d is taken; the others took %.0f%% of %.1f s"
    _LOG.info(what, compilation_name(), number + 1, len(attempts), past, seconds)


def _dearer(found: _Attempt[P], attempts: Sequence[_Attempt[P]]) -> Choice | None:
    """The next price that may do without recomputation, in fewer cycles than what was found takes with it."""
    first = attempts[0]
    recomputation = first.planned.choice.recomputation
    if found.planned.choice.recomputation == recomputation:
        return None
    without = [attempt for attempt in attempts if attempt.planned.choice.recomputation == recomputation]
    best = min(without, key=lambda attempt: int(attempt.lacking.max()))
    highest = max(attempt.planned.choice.price for attempt in without)
    left, lacking = [price for price in BYTE_PRICES if price > highest], int(best.lacking.max())
    is_enough = bool(left) and lacking <= first.freed(best) * len(left)
    if not is_enough or left[0] * lacking >= best.more_cycles(found):
        return None
    return replace(best.planned.choice, price=left[0])


def _fitting_cycles(attempt: _Attempt[P]) -> float:
    """Cycles of what fits, endless for what does not."""
    return float(attempt.cycles or 0) if fits(attempt.executable.memory) else np.inf


def _described(attempt: _Attempt[P], attempts: Sequence[_Attempt[P]]) -> Executable:
    """What fits, with the prices that were tried and what its own costs, and the time before it."""
    tried, price = (other.planned.choice.price for other in attempts), attempt.planned.choice.price
    cycles, first_cycles, executable = attempt.cycles, attempts[0].cycles, attempt.executable
    return replace(
        executable,
        byte_prices=(*dict.fromkeys(each for each in tried if each != price), price),
        byte_price_cost_cycles=None if cycles is None or first_cycles is None else cycles - first_cycles,
        timings=MappingProxyType({"prices": attempt.seconds, **executable.timings}),
    )


class _Attempt(Generic[P]):
    """A program as planned in some way.

    Args:
        planned: the program.
        executable: compiled.
        seconds: spent on others before it.
    """

    def __init__(self, planned: P, executable: Executable, seconds: float = 0.0) -> None:
        self.planned, self.executable, self.seconds = planned, executable, seconds

    @cached_property
    def cycles(self) -> int | None:
        """Cycles of one run; None where loops run as often as their data says."""
        try:
            return self.executable.timeline_of(None).cycles
        except ProfileError:
            return None

    @cached_property
    def lacking(self) -> np.ndarray:
        """Bytes that the fullest tile of each IPU lacks, int64[IPUs]; before packing if it lacks some then already."""
        target, memory = self.executable.graph.target, self.executable.memory
        short = np.maximum(memory.least_bytes - target.bytes_per_tile, 0)
        if not short.any():
            short = memory.lacking().get("memory", short)
        return np.asarray(short.reshape(-1, target.tiles_per_ipu).max(1), np.int64)

    @cached_property
    def fullest(self) -> np.ndarray:
        """Bytes that the fullest tile of each IPU needs at least, int64[IPUs]."""
        tiles = self.executable.graph.target.tiles_per_ipu
        return np.asarray(self.executable.memory.least_bytes.reshape(-1, tiles).max(1), np.int64)

    @property
    def kept(self) -> float:
        """Of the bytes that it takes to keep all for a gradient, the share that is planned, the least of all."""
        return min((trade.planned.peak_bytes / max(1, trade.all_bytes) for trade in self.planned.trades), default=1.0)

    def more_cycles(self, other: _Attempt[P]) -> int:
        """The cycles that another attempt takes more."""
        return (other.cycles or 0) - (self.cycles or 0)

    def freed(self, other: _Attempt[P]) -> int:
        """The bytes that the fullest tile lacks less in another attempt."""
        return int(self.lacking.max()) - int(other.lacking.max())


@dataclass(frozen=True, slots=True)
class _Tighter:
    """Less to keep, such that nothing is lacking, and the cycles it is planned to take; endless if it will not do."""

    recomputation: Recomputation
    cycles: float


class _Search(Generic[P]):
    """Ways to plan a program, one after the other, each from the best so far.

    A price that takes more cycles for the bytes it frees than recomputation would is not kept. As long as recomputation
    is enough, no other is tried then, nor if those left would not do if each freed as much. Where recomputation frees
    less than planned, more is asked of it the next time. Where stages are looked for again, as many bytes are kept on
    each IPU as before, not that share of what the new stages could keep.
    """

    def __init__(self, first: _Attempt[P], prices: Sequence[float]) -> None:
        self.attempts, self._at, self._prices = [first], first, list(prices)
        self._tightened, self._margin = 0, _MARGIN
        self._prices_pay = True
        self._is_anew = False  # whether stages have been looked for again
        self._alternative: _Tighter | None = None
        self._asked: Literal["price", "less", "stages"] = "price"  # what the last way changes
        self._recomputation = first.planned.choice.recomputation  # to go on with

    def next(self) -> Choice | None:
        """The next way, None if there is none."""
        choice, lacking = (
            replace(self._at.planned.choice, recomputation=self._recomputation),
            int(self._at.lacking.max()),
        )
        self._prices = [price for price in self._prices if price > choice.price]
        self._alternative = tighter = self._tighter() if self._tightened < _MOST_TIGHTENED else None
        if self._is_time_for_other_stages(choice, tighter):
            self._is_anew, self._asked = True, "stages"
            less = choice.recomputation if tighter is None else tighter.recomputation
            return replace(choice, recomputation=less, cuts=())
        if tighter is None and not self._prices_pay and lacking > _HOPELESS * self._at.executable.target.bytes_per_tile:
            return None
        if self._prices and (tighter is None or self._expected_cycles(self._prices[0], lacking) < tighter.cycles):
            self._asked = "price"
            return replace(choice, price=self._prices[0])
        self._asked = "less"
        return None if tighter is None else replace(choice, recomputation=tighter.recomputation)

    def _is_time_for_other_stages(self, choice: Choice, tighter: _Tighter | None) -> bool:
        """Whether stages are looked for once more: no less that is kept would do, and the price is not the first."""
        is_known = bool(choice.cuts and choice.recomputation.shares)
        is_dearer = choice.price > self.attempts[0].planned.choice.price or not self._prices
        will_not_do = tighter is None or tighter.cycles == np.inf
        return is_known and is_dearer and will_not_do and not self._is_anew

    def _expected_cycles(self, price: float, lacking: int) -> float:
        """The cycles of a dearer price: as many as it is worth, or, once one did not pay, more than any plan's."""
        return price * lacking if self._prices_pay else np.inf

    def add(self, attempt: _Attempt[P]) -> None:
        """Goes on from an attempt that does not fit either, if it was worth it."""
        self.attempts.append(attempt)
        freed, lacking, choice = self._at.freed(attempt), int(self._at.lacking.max()), attempt.planned.choice
        if self._asked == "stages":
            self._recomputation = self._keeping_as_much(attempt)
            self._at = attempt
            return
        if self._asked == "less":
            self._tightened += 1
            self._margin *= min(_MOST_MARGIN, max(1.0, lacking / max(1, freed)))
            self._at, self._recomputation = attempt, choice.recomputation
            return
        more, left = self._at.more_cycles(attempt), [price for price in self._prices if price > choice.price]
        if freed * (1 + len(left)) < lacking:  # nor will those left be enough, if each frees as much
            self._prices_pay = False
        if self._alternative is None or (freed > 0 and more * lacking <= self._alternative.cycles * freed):
            self._at = attempt
        else:
            self._prices_pay = False
            self._prices.remove(choice.price)

    def _keeping_as_much(self, attempt: _Attempt[P]) -> Recomputation:
        """Shares with which stages that were found anew keep as many bytes on each IPU as was planned before."""
        shares = []
        for ipu in range(len(attempt.lacking)):
            before = sum(trade.planned.peak_bytes for trade in _of_ipu(self._at.planned.trades, ipu))
            could = sum(trade.all_bytes for trade in _of_ipu(attempt.planned.trades, ipu))
            shares.append(min(1.0, before / max(1, could)))
        return replace(attempt.planned.choice.recomputation, shares=tuple(shares))

    def _tighter(self) -> _Tighter | None:
        """Less kept on the IPUs whose tiles lack memory; None where nothing less can be, or nothing is lacking."""
        at, target, first = self._at, self._at.executable.graph.target, self.attempts[0]
        before, is_enough = self._recomputation, True
        shares = [before.share(ipu) for ipu in range(len(at.lacking))]
        for ipu in np.flatnonzero(at.lacking).tolist():
            own = _of_ipu(at.planned.trades, ipu)
            planned, least = sum(t.planned.peak_bytes for t in own), sum(t.least_bytes for t in own)
            if planned <= least:
                return None
            wanted = planned - self._margin * float(at.lacking[ipu]) * target.tiles_per_ipu
            if wanted < least:  # as the fullest tile holds more of it than others
                wanted = planned * (1 - _MARGIN * float(at.lacking[ipu] / at.fullest[ipu]))
            shares[ipu] = max(0.0, wanted / sum(t.all_bytes for t in own))
            is_enough &= float(at.lacking[ipu]) * target.tiles_per_ipu <= _FULLEST * (planned - least)
        if not at.lacking.any():
            return None
        # The slowest IPU sets the pace.
        work = [_of_ipu(at.planned.trades, ipu) for ipu in range(len(shares))]
        all_kept = max(sum(t.plans.keep_all().cycles for t in own) for own in work)
        now = max(sum(t.planned.cycles for t in own) for own in work)
        then = max(sum(t.cycles_with(share) for t in own) for own, share in zip(work, shares, strict=True))
        cycles = (first.cycles or 0) * (then - now) / max(1, all_kept)
        return _Tighter(replace(before, shares=tuple(shares)), cycles if is_enough else np.inf)


def _of_ipu(trades: Sequence[ChainTrade], ipu: int) -> list[ChainTrade]:
    """What is traded on an IPU."""
    return [trade for trade in trades if trade.ipu in (ipu, None)]


def _check(planned: Planned, report: MemoryReport) -> None:
    """Refuses a program that is planned in one way only, and does not fit."""
    if report.lacking():
        check_memory(report, ways=_ways(planned.untried))


def _ways(of: Untried) -> dict[str, str]:
    """What may make a program fit that is planned already."""
    less, tables = "which keeps less of what gradients need", "the state of an optimiser, large tables"
    ways = (
        (of.recompute, "recompute", f'Options(recompute="auto"), {less}'),
        (of.pipelines, "pipelines", f'recompute="auto" of ipu.pipeline, {less}'),
        (of.offload, "offload", f"offload_argnums of ipu.jit, for what may lie in streaming memory: {tables}"),
        (
            of.io_tiles > 0,
            "io_tiles",
            f"Options(io_tiles=…) of fewer than {of.io_tiles}: I/O tiles take memory from what computes",
        ),
        (True, "advise", "ipu.advise(fun, *args), which compiles such ways and compares them"),
    )
    return {name: way for is_untried, name, way in ways if is_untried}


def _refuse(attempts: Sequence[_Attempt[P]]) -> NoReturn:
    """Raises the error of the program whose fullest tile is smallest, the first of equals."""
    reports = [attempt.executable.memory for attempt in attempts]
    choices = [attempt.planned.choice for attempt in attempts]
    prices = tuple(dict.fromkeys(choice.price for choice in choices))
    shares = [attempt.kept for attempt in attempts]
    best = _smallest(reports)
    kept, ways = tuple(dict.fromkeys(shares)), _ways(attempts[best].planned.untried)
    check_memory(reports[best], prices, choices[best].price, kept, shares[best], ways)
    raise AssertionError("it does not fit")


def _smallest(reports: Sequence[MemoryReport]) -> int:
    """The number of the report whose fullest tile is smallest, the first of equals; as few as can be are packed."""
    least = [int(report.least_bytes.max()) for report in reports]
    first, *others = sorted(range(len(reports)), key=least.__getitem__)
    best = reports[first].max_tile_bytes, first
    for number in others:
        if least[number] > best[0]:
            break
        best = min(best, (reports[number].max_tile_bytes, number))
    return best[1]
