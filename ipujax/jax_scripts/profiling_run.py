"""`ipu.profiling`: every function that JAX compiles while some code runs, compiled for an IPU afterwards.

    with ipu.profiling(device=ipu.IPUModel(arch="bow")) as run:
        train()
    print(run)

Input: code that uses JAX. Output: a table of all that JAX ran, by cycles, and a profile of each function.

JAX computes every call, so numbers, speed and exceptions of the code are its own. Recorded is the trace of each
signature, which JAX makes anyway; IPU programs are compiled from these traces when the code has ended, in their order
of cost. Functions of few cycles stay JAX's, and so do operations outside of `jax.jit`: the table says how many and
where. No code runs twice, but functions with loops or branches on data, on copies of their arguments.
Limits: see `watched`; functions of other processes are not seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING

from ipujax.device import Device, IPUModel, check_device, current_device
from ipujax.jax_scripts.compiling import BatchSplit, profiles_of
from ipujax.jax_scripts.cycle_estimates import Estimate, estimate_of
from ipujax.jax_scripts.dispatch import watched
from ipujax.jax_scripts.places import defining_class
from ipujax.jax_scripts.recorder import FunctionRecord, Recorder
from ipujax.jax_scripts.run_table import (
    ProfiledCalls,
    SingleOperations,
    is_operation,
    run_lines,
    shown_name,
    single_operations,
)
from ipujax.runtime.errors import ArgumentError, IpuError, file_name
from ipujax.runtime.files import FilePath
from ipujax.runtime.logs import Log
from ipujax.runtime.not_copied import NotCopied
from ipujax.runtime.options import Options
from ipujax.runtime.signatures import checking_calls

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

_SHARE = 0.01  # of the estimated cycles of a run: at most a hundred functions, whatever the run


@dataclass(frozen=True, slots=True)
class Selection:
    """Rule that chooses functions.

    Args:
        every: choose all.
        min_cycles: choose those with so many estimated cycles a call; None for those that may have `_SHARE` of the
            cycles of the run.
        only: choose those of these names; empty for the other rules.
    """

    every: bool = False
    min_cycles: float | None = None
    only: tuple[str, ...] = ()

    @property
    def is_default(self) -> bool:
        """Whether no rule is given, so that the table should come soon."""
        return not self.every and self.min_cycles is None and not self.only

    def reason(self, record: FunctionRecord, estimate: Estimate, total: float) -> str:
        """Return the reason for which a function is not compiled, "" if it is.

        Args:
            record: the function.
            estimate: estimated cycles of a call.
            total: those of the run.
        """
        if record.reason:
            return record.reason
        if self.only:
            return "" if {record.name, record.inner_name} & set(self.only) else "not named by --only"
        if self.every:
            return ""
        if self.min_cycles is not None:
            return "" if estimate.most_cycles >= self.min_cycles else f"fewer than {self.min_cycles:,g} cycles a call"
        share = record.calls * estimate.most_cycles / total if total else 0.0
        bound = "at most " if estimate.most_cycles > estimate.cycles else ""
        return "" if share >= _SHARE else f"{bound}{100 * share:.1f} % of the run's cycles"

    def __str__(self) -> str:
        if self.only:
            return f"those named {', '.join(self.only)}"
        if self.every:
            return "all"
        if self.min_cycles is not None:
            return f"those with at least {self.min_cycles:,g} cycles a call, about"
        return (
            f"those with at least {100 * _SHARE:g} % of the run's cycles; --all, --min-cycles and --only choose others"
        )


# Of processor time for functions that depend on data, which are compiled for the IPU and by XLA, and run again.
_SHARE_OF_SECONDS = 0.5  # of those of the script
_LEAST_SECONDS = 10.0
_OUT_OF_TIME = "others that depend on data took half the time of the script; --all and --only compile it"
_LOG = Log("profiling")
_INTERRUPTED = "the compilation was interrupted"


class ProfilingRun(NotCopied):
    """All that JAX ran while some code ran; `ipu.profiling` yields it."""

    COPY_HINT = "its rows, run.functions, and their profiles can be copied and pickled"

    def __init__(self, device: IPUModel, selection: Selection, split: BatchSplit, options: Options) -> None:
        self.device = device
        self._selection = selection
        self._split = split
        self._options = options
        self._recorder = Recorder()
        self._used_trip_counts: set[str] = set()
        self._script_seconds = 0.0

    @cached_property
    def _estimates(self) -> list[tuple[FunctionRecord, Estimate]]:
        """Records of the run, with the estimate of a call."""
        if self._recorder.is_active:
            raise ArgumentError("functions of ipu.profiling are known when its block has ended")
        target = self.device.target
        records = (record.with_implementations() for record in self._recorder.records if record.calls)
        return [(each, Estimate() if each.jaxpr is None else estimate_of(each.jaxpr, target)) for each in records]

    @cached_property
    def operations(self) -> tuple[SingleOperations, ...]:
        """Operations that JAX ran one at a time, outside of its compiled functions, by line, the most expensive first.

        Raises:
            ArgumentError: the code is still running.
        """
        return single_operations([each for each in self._estimates if is_operation(*each)])

    @cached_property
    def functions(self) -> tuple[ProfiledCalls, ...]:
        """Functions by cycles of all calls, the most expensive first; then those that stay JAX's, by estimated cycles.

        Raises:
            ArgumentError: the code is still running.
        """
        functions = [each for each in self._estimates if not is_operation(*each)]
        functions.sort(key=lambda row: -row[0].calls * row[1].cycles)
        total = float(sum(row.estimated_cycles for row in self.operations))
        total += sum(record.calls * estimate.cycles for record, estimate in functions)
        rows: list[ProfiledCalls] = []
        is_interrupted = False
        # Cycles that depend on data are known when their functions are compiled; shares of the run are those of all.
        for depends_on_data in (True, False):
            latest = time.process_time() + max(_SHARE_OF_SECONDS * self._script_seconds, _LEAST_SECONDS)
            for record, estimate in functions:
                if record.depends_on_data != depends_on_data:
                    continue
                reason = self._selection.reason(record, estimate, total)
                if not reason and depends_on_data and self._selection.is_default and time.process_time() > latest:
                    reason = _OUT_OF_TIME
                try:
                    rows.append(self._row(record, estimate, reason or (_INTERRUPTED if is_interrupted else "")))
                except KeyboardInterrupt:  # by a user who does not wait for the rest
                    is_interrupted = True
                    rows.append(self._row(record, estimate, _INTERRUPTED))
            total += sum(row.total_cycles - row.calls * row.estimated_cycles for row in rows if row.total_cycles)
        return tuple(sorted(rows, key=_order))

    def _row(self, record: FunctionRecord, estimate: Estimate, reason: str) -> ProfiledCalls:
        """Return the row of a recorded function: compiled, or with the reason for which it stays JAX's."""
        path, line = record.definition
        row = ProfiledCalls(
            shown_name(record),
            record.calls,
            f"{file_name(path)}:{line}" if path else record.line,
            defining_class(path, line) if path else "",
            () if record.jaxpr is None else tuple(aval.str_short() for aval in record.jaxpr.in_avals),
            round(estimate.cycles),
            None,
            reason,
        )
        if reason:
            return row
        try:
            calls = profiles_of(record, self.device, self._options, self._split)
        except IpuError as error:  # of one function: the others are compiled, and its row says why it is not
            return replace(row, reason=error.what.partition("\n")[0])
        except Exception as error:  # outside of all steps of `profiles_of`, which name theirs
            _LOG.error("%s cannot be compiled: %r", record.name, error)
            return replace(row, reason=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        self._used_trip_counts |= calls.used_trip_counts
        return replace(
            row,
            profile=calls.profile,
            total_cycles=calls.total_cycles or 0,
            worst_cycles=calls.worst_cycles,
            sampled_calls=calls.sampled_calls,
            unrecorded=calls.unrecorded,
        )

    @property
    def unused_trip_counts(self) -> tuple[str, ...]:
        """Names of trip counts that no compiled function has a loop for."""
        assert self.functions is not None  # compiled
        return tuple(name for name in self._options.trip_counts if name not in self._used_trip_counts)

    @checking_calls("run.profile")
    def profile(self, name: str | None = None) -> Profile:
        """Return the profile of a function.

        Args:
            name: name of the function; None for that with most cycles of all calls.

        Raises:
            ArgumentError: no function of that name was compiled.
        """
        # By cycles, the most expensive first: the programs of one function, for other shapes, share its name.
        named = [(row.name, row.profile) for row in self.functions if row.profile is not None]
        if name is None and named:
            return named[0][1]
        most_expensive = dict(reversed(named))
        if name not in most_expensive:
            names = dict.fromkeys(row_name for row_name, _ in named)
            expected = ", ".join(names) or "at least one call of a function of jax.jit"
            raise ArgumentError("no such function was compiled", expected=expected, got=repr(name))
        return most_expensive[name]

    @checking_calls("run.to_html")
    def to_html(self, path: FilePath, name: str | None = None) -> None:
        """Write the page of a function, see `Profile.to_html`; `name` as of `profile`."""
        self.profile(name).to_html(path)

    def __str__(self) -> str:
        target = self.device.target
        split = f", {self._split}" if self._split.replicas > 1 else ""
        device = f"{target.num_ipus} × {target.name}{split}"
        lines = run_lines(device, str(self._selection), self.functions, self.operations)
        unused = self.unused_trip_counts
        return "\n".join([*lines, *(f"no loop of a compiled function is called {name}" for name in unused)])

    def __repr__(self) -> str:
        # Without compiling anything: a debugger shows it too.
        records = [record for record in self._recorder.records if record.calls]
        state = "running" if self._recorder.is_active else "print(run) compiles and lists them"
        target = self.device.target
        return f"ProfilingRun({len(records):,} functions and operations for {target.num_ipus} × {target.name}; {state})"

    def _repr_html_(self) -> str:
        """Return the table of all functions, which notebooks show; the functions are compiled for it."""
        return f"<pre>{escape(repr(self) if self._recorder.is_active else str(self))}</pre>"


def _order(row: ProfiledCalls) -> tuple[bool, float]:
    cycles = row.total_cycles or row.calls * row.estimated_cycles
    return row.profile is None, -cycles


@contextmanager
def profiling(
    device: Device | None = None,
    *,
    every: bool = False,
    min_cycles: float | None = None,
    only: str | tuple[str, ...] = (),
    replicas: int = 1,
    batch_size: int | None = None,
    trip_counts: Mapping[str, int] | None = None,
) -> Iterator[ProfilingRun]:
    """Record all that JAX runs inside, and compile the expensive functions for an IPU afterwards.

    Args:
        device: `IPUModel(...)`; the default device when None.
        every: compile every function; otherwise those with at least 1 % of the estimated cycles of the run.
        min_cycles: compile those with at least so many estimated cycles a call instead.
        only: compile those of this name, or of these, instead.
        replicas: number of replicas, a power of two, with an IPU each. Functions without shardings have their batch
            split over them: arguments and results with the rows of a batch. All else is whole on each replica.
        batch_size: rows of a batch. None for those of the arguments that have no result of their own shape and dtype,
            if these have equally many rows; other functions are not compiled, and their rows say why.
        trip_counts: iterations of loops whose count is data, see `Options.trip_counts`, in place of those of the calls.

    Yields:
        A `ProfilingRun`: a table of all functions and operations, and profiles, once the block has ended.

    Raises:
        ArgumentError: no device with a machine model, more than one rule, replicas that are no power of two, or
            `batch_size` without them.
    """
    target = current_device() if device is None else device
    check_device(target, "ipu.profiling")
    if not isinstance(target, IPUModel):
        raise ArgumentError("ipu.CPU() has no machine model to profile", expected="ipu.IPUModel(...)")
    names = (only,) if isinstance(only, str) else tuple(only)
    if every + (min_cycles is not None) + bool(names) > 1:
        problem = "ipu.profiling takes one rule that chooses functions"
        got = f"every={every}, min_cycles={min_cycles}, only={names}"
        expected = "every (--all), min_cycles (--min-cycles) or only (--only)"
        raise ArgumentError(problem, expected=expected, got=got)
    if replicas < 1 or replicas & (replicas - 1):
        raise ArgumentError("replicas of ipu.profiling", expected="a power of two, as IPUs of a Pod are", got=replicas)
    if batch_size is not None and replicas == 1:
        problem = "batch_size of ipu.profiling has no effect without replicas"
        raise ArgumentError(problem, expected="replicas=2 or more, --replicas", got=f"batch_size={batch_size}")
    # One plan, whether it fits or not: a search for one that does would take several times as long as the script.
    options = Options(allow_out_of_memory=True, trip_counts=trip_counts or {})
    run = ProfilingRun(target, Selection(every, min_cycles, names), BatchSplit(replicas, batch_size), options)
    start = time.process_time()
    try:
        with watched(run._recorder):
            yield run
    finally:
        run._recorder.is_active = False
        run._script_seconds = time.process_time() - start
