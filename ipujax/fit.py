"""Search for a plan that fits the tiles: an ordered list of attempts, equal for tiles of all sizes.

Input: a program as planned first, and a function that plans it otherwise. Output: of the attempts that fit the one of
fewest cycles, compiled.

    cost per byte    cycles that planners add for each byte of the fullest tile
    tile bytes       memory of a tile that planners assume, of which an operation may use a share
                     where it is less than the largest, loops keep products that could be computed before them
    recomputation    "auto" stores fewer bytes for gradients

The memory of the target's tiles does not change an attempt, only whether it fits. A program that fits therefore fits
larger tiles too, in as few cycles. Two rules save attempts:

    the first attempt fits, or another in hardly more cycles    it is used: the first is planned for speed alone
    the first attempt needs several times a tile's memory       the last is next; if it does not fit, none does

Loops whose rows may stay in the host's memory are tried so too, once no plan without fits in its first attempt.
With recomputation, attempts that need fewer bytes or fewer cycles than all before are then repeated with fewer stored
bytes, along another fixed list, until they fit. If none fits, stages are searched again with recomputation.
Limits: a later attempt that is faster than the first is not found where the first fits. Recomputation that fits less
memory in fewer cycles is not found where more is stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, takewhile
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np

from ipujax.lowering.choice import Choice
from ipujax.lowering.recomputation import ChainTrade, Recomputation
from ipujax.runtime.compile import Executable, compile
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.graph import BYTE_COST_CYCLES, Graph, Program
from ipujax.runtime.logs import INFO, Log, attempt as numbered_attempt, compilation_name
from ipujax.runtime.memory import Attempt, MemoryReport, check_memory, fits
from ipujax.runtime.not_copied import ReadOnlyMapping
from ipujax.runtime.options import Options

_LOG = Log("fit")
BYTE_COSTS = (BYTE_COST_CYCLES, 1.0, 2.0, 4.0, 8.0, 16.0)
TILE_BYTES = tuple(kib * 1024 for kib in (624, 312, 156, 78, 39))  # published: 624 KiB of Mk2; then halves
_LOW_AND_HIGH = (4.0, 16.0)  # costs per byte at the smaller sizes; others hardly add better plans (measured)
ATTEMPTS = (
    *((byte_cost, TILE_BYTES[0]) for byte_cost in BYTE_COSTS),
    *((byte_cost, tile_bytes) for tile_bytes in TILE_BYTES[1:] for byte_cost in _LOW_AND_HIGH),
)
# Bytes of a tile that recomputation aims at: 64 in each octave, from 16 MiB to 2 KiB.
_LEVELS = tuple(int(2 ** (11 + step / 64)) for step in range(64 * 13, -1, -1))
# Numbers of the levels below a tile's memory that are aimed at: ever larger steps, as an estimate was too low.
_STEPS = tuple(dict.fromkeys(int(1.3**power) - 1 for power in range(26)))
_HARDLY_MORE = 1.005  # assumed: ratio of cycles at which no further attempt is worth its compilation
_SMALLEST_SHARE = 1 / 8  # assumed: operations planned for so small a part of the program's fullest tile free nothing
_HOPELESS_RATIO = 5  # assumed: no attempt frees as many times a tile's memory if the last did not
_MARGIN = 1.05  # bytes freed for each missing one: plans assume values that are spread evenly over tiles


@dataclass(frozen=True, slots=True)
class Untried:
    """Options that could make a program smaller, and that its user has not set.

    Args:
        recompute: has gradients that `Options(recompute="auto")` would change.
        pipelines: has gradients of pipelines with another `recompute` of their own.
        offload: has arguments on the chip that can be offloaded to streaming memory.
        io_tiles: number of I/O tiles.
        stream_loops: has loops whose rows could stay in the host's memory.
    """

    recompute: bool
    pipelines: bool
    offload: bool
    io_tiles: int
    stream_loops: bool


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
    @property
    def may_stream_loops(self) -> bool: ...


P = TypeVar("P", bound=Planned)


def first_choice(options: Options, argument_bytes: float = 0) -> Choice:
    """Return the parameters of the first plan of a program.

    Args:
        options: the user's.
        argument_bytes: mean bytes of arguments on a tile. Where they are more than the largest of `TILE_BYTES`, the
            program is planned for tiles twice, four times… as large.
    """
    byte_cost = BYTE_COSTS[0] if options.byte_cost is None else options.byte_cost
    tile_bytes = next(size for power in count() if (size := TILE_BYTES[0] << power) >= argument_bytes)
    return Choice(byte_cost, tile_bytes, Recomputation(options.recompute), stream_loops=options.stream_loops is True)


def later_choices(first: Choice, byte_cost: float | None) -> tuple[Choice, ...]:
    """Return the parameters after the first, in order: those of `ATTEMPTS`, or all sizes at a fixed cost per byte."""
    attempts = ATTEMPTS if byte_cost is None else tuple((byte_cost, tile_bytes) for tile_bytes in TILE_BYTES)
    choices = (replace(first, byte_cost=cost, tile_bytes=tile_bytes) for cost, tile_bytes in attempts)
    return tuple(choice for choice in choices if choice != first)


def compile_fitting(first: P, plan: Callable[[Choice], P], options: Options) -> tuple[P, Executable]:
    """Compile plans of a program, `first` that of `first_choice`; return the fastest that fits and its executable."""
    # If no plan fits, the error is that of the first plan whose fullest tile is smallest.
    if options.allow_out_of_memory:
        return first, compile(first.graph, first.program, options=options, check=partial(_check, first))
    start = time.perf_counter()
    attempts: dict[Choice, _Attempt[P]] = {}

    def attempted(choice: Choice) -> _Attempt[P]:
        if choice not in attempts:
            seconds = time.perf_counter() - start
            number = len(attempts) + 1
            with numbered_attempt(_LOG, number, choice.byte_cost):
                planned = plan(choice) if attempts else first
                executable = compile(planned.graph, planned.program, options=options, check=fits)
            attempts[choice] = _Attempt(planned, executable, seconds)
            _log_attempt(number, choice, attempts[choice])
        return attempts[choice]

    origin = attempted(first.choice)
    if origin.fits:
        return first, origin.executable
    fitting = _fitting(origin, later_choices(first.choice, options.byte_cost), attempted)
    if options.stream_loops == "auto" and first.may_stream_loops:
        fitting = _with_streams(first.choice, fitting, options.byte_cost, attempted)
    if fitting is None:
        _raise_out_of_memory(list(attempts.values()))
    _log_best(fitting, list(attempts.values()), time.perf_counter() - start)
    return fitting.planned, _with_history(fitting, list(attempts.values()))


def _with_streams(
    first: Choice, fitting: _Attempt[P] | None, byte_cost: float | None, attempted: Callable[[Choice], _Attempt[P]]
) -> _Attempt[P] | None:
    """Return the fastest that fits of an attempt without streams, if any, and those with streams of loops."""
    choice = replace(first, stream_loops=True)
    origin = attempted(choice)
    if origin.fits:
        return origin if fitting is None else _fastest([fitting, origin])
    return fitting or _fitting(origin, later_choices(choice, byte_cost), attempted)


def _fitting(
    origin: _Attempt[P], choices: Sequence[Choice], attempted: Callable[[Choice], _Attempt[P]]
) -> _Attempt[P] | None:
    """Return the attempt of fewest cycles that fits, the first of equals; None if none fits."""
    later = [choice for choice in choices if choice.tile_bytes >= _SMALLEST_SHARE * origin.fullest_bytes]
    if later and origin.is_hopeless and not origin.planned.trades and attempted(later[-1]).is_hopeless:
        return None
    attempts = [origin]
    fitting = list[_Attempt[P]]()
    for choice in later:
        attempt = attempted(choice)
        attempts.append(attempt)
        if attempt.fits:
            fitting.append(attempt)
            if attempt.known_cycles <= _HARDLY_MORE * origin.known_cycles:
                return attempt
    if not origin.planned.trades:
        return _fastest(fitting)
    for base in _undominated(attempts):
        if all(base.known_cycles < best.known_cycles for best in fitting):
            fitting += _with_recomputation(base, attempted)
    if not fitting and origin.planned.choice.cuts and later:
        fitting += _with_new_stages(attempts, attempted)
    return _fastest(fitting)


def _fastest(fitting: Sequence[_Attempt[P]]) -> _Attempt[P] | None:
    return min(fitting, key=lambda attempt: attempt.known_cycles, default=None)


def _undominated(attempts: Sequence[_Attempt[P]]) -> list[_Attempt[P]]:
    """Return the attempts that need fewer bytes or fewer cycles than each one before."""
    return [
        attempt
        for number, attempt in enumerate(attempts)
        if all(
            attempt.fullest_bytes < earlier.fullest_bytes or attempt.known_cycles < earlier.known_cycles
            for earlier in attempts[:number]
        )
    ]


def _with_recomputation(base: _Attempt[P], attempted: Callable[[Choice], _Attempt[P]]) -> list[_Attempt[P]]:
    """Return the attempt that fits and stores most for gradients, if there is one."""
    attempts = (attempted(choice) for choice in _with_less_stored(base))
    return next(([attempt] for attempt in attempts if attempt.fits), [])


def _with_less_stored(base: _Attempt[P]) -> Iterator[Choice]:
    """Yield choices with fewer and fewer bytes stored for gradients, in growing steps, down to the fewest."""
    levels = [level for level in _LEVELS if level <= base.executable.target.bytes_per_tile]
    attempted_bytes = {base.stored_bytes(base.planned.choice.recomputation)}
    for number in takewhile(lambda number: number < len(levels), _STEPS):
        recomputation = base.storing(levels[number])
        if recomputation is None:
            return
        if (stored_bytes := base.stored_bytes(recomputation)) not in attempted_bytes:
            attempted_bytes.add(stored_bytes)
            yield replace(base.planned.choice, recomputation=recomputation)


def _with_new_stages(attempts: Sequence[_Attempt[P]], attempted: Callable[[Choice], _Attempt[P]]) -> list[_Attempt[P]]:
    """Return the first attempt that fits in stages that are searched again with recomputation, if there is one."""
    # From the second attempt on whole layers are recomputed, so other cuts are good.
    base = attempts[1]
    recomputation = next(_with_less_stored(base), base.planned.choice).recomputation
    with_new_cuts = attempted(replace(base.planned.choice, recomputation=recomputation, cuts=()))
    if with_new_cuts.fits:
        return [with_new_cuts]
    bases = (attempted(replace(each.planned.choice, cuts=with_new_cuts.planned.choice.cuts)) for each in attempts)
    return next((fitting for each in bases if (fitting := _with_recomputation(each, attempted))), [])


def _log_attempt(number: int, choice: Choice, attempt: _Attempt[Any]) -> None:
    if _LOG.is_on(INFO):
        report = attempt.executable.memory
        needed_bytes = report.max_tile_bytes if attempt.fits else attempt.fullest_bytes
        outcome = "fits, the fullest tile has" if attempt.fits else "does not fit, the fullest tile needs at least"
        outcome += f" {needed_bytes:,} of {attempt.executable.target.bytes_per_tile:,} bytes"
        text = "%s: attempt %d at %g cycles per byte %s, planned for tiles of %d KiB"
        _LOG.info(text, compilation_name(), number, choice.byte_cost, outcome, choice.tile_bytes // 1024)


def _log_best(best: _Attempt[P], attempts: Sequence[_Attempt[P]], seconds: float) -> None:
    """Log the number of the best attempt, and the share of all `seconds` that the others took."""
    starts = [attempt.seconds for attempt in attempts]
    number = attempts.index(best)
    best_seconds = [*starts, seconds][number + 1] - starts[number]
    others_percent = 100 * (1 - best_seconds / seconds)
    text = "%s: attempt %d of %d is used; the others took %.0f%% of %.1f s"
    _LOG.info(text, compilation_name(), number + 1, len(attempts), others_percent, seconds)


def _with_history(attempt: _Attempt[P], attempts: Sequence[_Attempt[P]]) -> Executable:
    """Return an attempt's executable with the figures of all attempts, and the time of those before."""
    executable = attempt.executable
    timings = ReadOnlyMapping({"attempts": attempt.seconds, **executable.timings})
    # The search knows the cycles of those that fit: a timeline of each other one would take time.
    timed = [each for number, each in enumerate(attempts) if not number or each.fits]
    return replace(executable, attempts=_records(attempts, attempt, timed), timings=timings)


def _records(attempts: Sequence[_Attempt[P]], used: _Attempt[P], timed: Sequence[_Attempt[P]]) -> tuple[Attempt, ...]:
    """Return the figures of attempts, with the cycles of those in `timed`."""
    first = attempts[0].planned.choice
    return tuple(each.record(first, each.cycles if each in timed else None, is_used=each is used) for each in attempts)


class _Attempt(Generic[P]):
    """A plan of a program and its executable; `seconds` were spent on attempts before it."""

    def __init__(self, planned: P, executable: Executable, seconds: float = 0.0) -> None:
        self.planned = planned
        self.executable = executable
        self.seconds = seconds

    @cached_property
    def fits(self) -> bool:
        return fits(self.executable.memory)

    @cached_property
    def cycles(self) -> int | None:
        """Cycles of one run; None where trip counts are data."""
        try:
            return self.executable.timeline_of(None).cycles
        except ProfileError:
            return None

    @property
    def known_cycles(self) -> int:
        """Cycles of one run, 0 where trip counts are data: the first that fits is then as good as any."""
        return self.cycles or 0

    @cached_property
    def ipu_bytes(self) -> np.ndarray:
        """Lower bound of the bytes on the fullest tile of each IPU, int64[IPUs]."""
        tiles = self.executable.graph.target.tiles_per_ipu
        return np.asarray(self.executable.memory.least_bytes.reshape(-1, tiles).max(1), np.int64)

    @property
    def fullest_bytes(self) -> int:
        """Lower bound of the bytes on the fullest tile."""
        return int(self.ipu_bytes.max())

    @property
    def is_hopeless(self) -> bool:
        return self.fullest_bytes > _HOPELESS_RATIO * self.executable.target.bytes_per_tile

    @property
    def stored_share(self) -> float:
        """Smallest share, over gradients, of the bytes stored to those stored without recomputation."""
        return min((trade.planned.peak_bytes / max(1, trade.all_bytes) for trade in self.planned.trades), default=1.0)

    def record(self, first: Choice, cycles: int | None, *, is_used: bool) -> Attempt:
        """Return the figures of the attempt, as profiles and errors list them; `first` is that of the first."""
        choice = self.planned.choice
        kept_share = min(1.0, self.stored_share)
        plan = choice.byte_cost, choice.tile_bytes, kept_share, choice.stream_loops, choice.cuts != first.cuts
        return Attempt(*plan, self.fullest_bytes, cycles, self.fits, is_used)

    def stored_bytes(self, recomputation: Recomputation) -> tuple[int, ...]:
        """Return the bytes that each gradient would store."""
        return tuple(trade.bytes_with(recomputation.share(trade.ipu)) for trade in self.planned.trades)

    def storing(self, level: int) -> Recomputation | None:
        """Return recomputation with which no fullest tile of an IPU is expected to need more than `level` bytes.

        None if an IPU that needs more stores nothing that can be recomputed.
        """
        recomputation = self.planned.choice.recomputation
        tiles_per_ipu = self.executable.graph.target.tiles_per_ipu
        shares = [recomputation.share(ipu) for ipu in range(len(self.ipu_bytes))]
        excess_bytes = np.maximum(self.ipu_bytes - level, 0)
        for ipu in np.flatnonzero(excess_bytes).tolist():
            trades = [trade for trade in self.planned.trades if trade.ipu in (ipu, None)]
            stored_bytes = sum(trade.planned.peak_bytes for trade in trades)
            min_bytes = sum(trade.least_bytes for trade in trades)
            if stored_bytes <= min_bytes:
                return None
            goal_bytes = stored_bytes - _MARGIN * float(excess_bytes[ipu]) * tiles_per_ipu
            if goal_bytes < min_bytes:  # the fullest tile has more than the mean: shrink by its share instead
                goal_bytes = stored_bytes * (1 - _MARGIN * float(excess_bytes[ipu] / self.ipu_bytes[ipu]))
            shares[ipu] = max(0.0, goal_bytes / sum(trade.all_bytes for trade in trades))
        return replace(recomputation, shares=tuple(shares))


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
        (untried.stream_loops, "stream_loops", "Options(stream_loops=True), with rows of loops in the host's memory"),
        (
            untried.io_tiles > 0,
            "io_tiles",
            f"Options(io_tiles=…) of fewer than {untried.io_tiles}: I/O tiles leave fewer tiles that compute",
        ),
        (True, "advise", "ipu.advise(fun, *args), which compiles with such options and compares the profiles"),
    )
    return {name: remedy for is_untried, name, remedy in remedies if is_untried}


def _raise_out_of_memory(attempts: Sequence[_Attempt[P]]) -> NoReturn:
    """Raise the error of the plan whose fullest tile is smallest, the first of equals."""
    reports = [attempt.executable.memory for attempt in attempts]
    best = attempts[_smallest(reports)]
    check_memory(best.executable.memory, _records(attempts, best, attempts), _remedies(best.planned.untried))
    raise AssertionError("check_memory raises for a program that does not fit")


def _smallest(reports: Sequence[MemoryReport]) -> int:
    """Return the index of the report whose fullest tile is smallest, the first of equals."""
    lower_bounds = [int(report.least_bytes.max()) for report in reports]
    first, *later = sorted(range(len(reports)), key=lower_bounds.__getitem__)
    best = reports[first].max_tile_bytes, first  # packs the variables: slow, so only where a lower bound allows it
    for number in later:
        if lower_bounds[number] > best[0]:
            break
        best = min(best, (reports[number].max_tile_bytes, number))
    return best[1]
