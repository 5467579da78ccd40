"""`ipu.profiling`: every function that JAX compiles while some code runs, compiled for an IPU afterwards.

    with ipu.profiling(device=ipu.IPUModel(arch="bow")) as run:
        train()
    print(run)

Input: code that uses `jax.jit`, `flax.nnx.jit`, `equinox.filter_jit` or Keras. Output: a table of its functions by
cycles, and a profile of each.

Small functions, such as metrics, are not worth compiling for an IPU: they stay JAX's, and the table says why.

JAX computes every call, so numbers, speed and exceptions of the code are its own. Recorded is the trace of each
signature, which JAX makes anyway; IPU programs are compiled from these traces when the code has ended, in their order
of cost. No code runs twice.
Limits: see `replaced_names`; functions of other processes are not seen. Loops that depend on data are run once more, on
the arguments of their first call, unless they call Python functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ipujax.device import Device, IPUModel, check_device, current_device
from ipujax.jax_scripts.batch_split import BatchSplit
from ipujax.jax_scripts.compiling import profile_of
from ipujax.jax_scripts.recorder import FunctionRecord, Recorder
from ipujax.jax_scripts.replaced_names import replaced_names
from ipujax.runtime.errors import ArgumentError, IpuError, ProfileError
from ipujax.runtime.files import FilePath
from ipujax.runtime.logs import Log
from ipujax.runtime.not_copied import NotCopied
from ipujax.runtime.profile import Row, duration, size, text_table
from ipujax.runtime.signatures import checking_calls

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile


PROGRAM_HEAD: Row = ("cycles", "time", "fullest tile", "limited by")


def program_cells(profile: Profile) -> Row:
    """Return the cells of a program under `PROGRAM_HEAD`."""
    memory = profile.memory
    capacity_bytes = profile.target.bytes_per_tile
    fits = "" if memory.max_tile_bytes <= capacity_bytes else ", does not fit"
    tile = f"{size(memory.max_tile_bytes)} of {size(capacity_bytes)}, tile {memory.worst_tile}{fits}"
    try:
        cycles = f"{profile.cycles:,}"
        time = duration(profile.seconds)
        slowest = profile.operations(1)
    except ProfileError:  # a trip count is data
        return "depend on data", "", tile, "Options(trip_counts=…) makes them known"
    limit = [f"{op.dominant} of {op.names[0]}, {100 * op.share:.0f} %, {op.origin.line}" for op in slowest]
    return cycles, time, tile, "".join(limit).rstrip(", ")


_SHARE = 0.01  # of the floating-point operations of a run: at most a hundred functions, whatever the run


@dataclass(frozen=True, slots=True)
class Selection:
    """Rule that chooses functions.

    Args:
        every: choose all.
        min_flops: choose those with so many floating-point operations a call; None for `_SHARE` of those of the run.
        only: choose those of these names; empty for the other rules.
    """

    every: bool = False
    min_flops: float | None = None
    only: tuple[str, ...] = ()

    def reasons(self, records: Sequence[FunctionRecord]) -> list[str]:
        """Return for each record the reason for which it is not compiled, "" if it is."""
        total = sum(record.total_flops for record in records)
        return [record.reason or self._reason(record, total) for record in records]

    def _reason(self, record: FunctionRecord, total: int) -> str:
        if self.only:
            return "" if record.name in self.only else "not named by --only"
        if self.every:
            return ""
        if self.min_flops is not None:
            return "" if record.flops >= self.min_flops else f"fewer than {self.min_flops:,g} FLOPs a call"
        share = record.total_flops / total if total else 0.0
        return "" if share >= _SHARE else f"{100 * share:.1f} % of the run's FLOPs"

    def __str__(self) -> str:
        if self.only:
            return f"those named {', '.join(self.only)}"
        if self.every:
            return "all"
        if self.min_flops is not None:
            return f"those with at least {self.min_flops:,g} FLOPs a call"
        return f"those with at least {100 * _SHARE:g} % of the run's FLOPs; --all, --min-flops and --only choose others"


_LOG = Log("profiling")
_INTERRUPTED = "the compilation was interrupted"
_MOST_ROWS = 20  # of functions that stay JAX's, before the rest is counted


@dataclass(frozen=True, slots=True)
class ProfiledCalls:
    """A function with one signature, and its calls in a run.

    Args:
        name: name of the function.
        calls: number of calls.
        flops: floating-point operations of a call, from shapes.
        profile: profile of a call; None if the function stays JAX's.
        reason: reason for which it stays JAX's; "" if it is compiled.
        is_forward_alone: True if a transformation that JAX runs operation by operation called it: the profile has
            nothing of what the transformation adds, as a backward pass.
    """

    name: str
    calls: int
    flops: int
    profile: Profile | None = field(compare=False)  # equal only to itself
    reason: str = ""
    is_forward_alone: bool = False

    @property
    def total_cycles(self) -> int:
        """Cycles of all calls; 0 if unknown."""
        if self.profile is None:
            return 0
        try:
            return self.calls * self.profile.cycles
        except ProfileError:  # a trip count is data
            return 0


class ProfilingRun(NotCopied):
    """Functions that JAX compiled while some code ran; `ipu.profiling` yields it."""

    COPY_HINT = "its rows, run.functions, and their profiles can be copied and pickled"

    def __init__(self, device: IPUModel, selection: Selection, split: BatchSplit) -> None:
        self.device = device
        self._selection = selection
        self._split = split
        self._recorder = Recorder()

    @cached_property
    def functions(self) -> tuple[ProfiledCalls, ...]:
        """Functions by cycles of all calls, the most expensive first; then those that stay JAX's, by FLOPs.

        Raises:
            ArgumentError: the code is still running.
        """
        if self._recorder.is_active:
            raise ArgumentError("functions of ipu.profiling are known when its block has ended")
        records = [record for record in self._recorder.records if record.calls]
        reasons = self._selection.reasons(records)
        rows: list[ProfiledCalls] = []
        is_interrupted = False
        for record, reason in zip(records, reasons, strict=True):
            try:
                rows.append(self._row(record, reason or (_INTERRUPTED if is_interrupted else "")))
            except KeyboardInterrupt:  # by a user who does not wait for the rest
                is_interrupted = True
                rows.append(self._row(record, _INTERRUPTED))
        return tuple(sorted(rows, key=lambda row: (row.profile is None, -row.total_cycles, -row.calls * row.flops)))

    def _row(self, record: FunctionRecord, reason: str) -> ProfiledCalls:
        profile: Profile | None = None
        if not reason:
            try:
                profile = profile_of(record, self.device, self._split)
            except IpuError as error:  # of one function: the others are compiled, and its row says why it is not
                reason = error.what.partition("\n")[0]
            except Exception as error:  # outside of all steps of `profile_of`, which name theirs
                _LOG.error("%s cannot be compiled: %r", record.name, error)
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return ProfiledCalls(
            str(record.name), record.calls, record.flops, profile, reason, is_forward_alone=record.is_forward_alone
        )

    @checking_calls("run.profile")
    def profile(self, name: str | None = None) -> Profile:
        """Return the profile of a function.

        Args:
            name: name of the function; None for that with most cycles of all calls.

        Raises:
            ArgumentError: no function of that name was compiled.
        """
        profiles = {row.name: row.profile for row in reversed(self.functions) if row.profile is not None}
        if name is None and profiles:
            return list(profiles.values())[-1]
        if name not in profiles:
            expected = ", ".join(reversed(profiles)) or "at least one call of a function of jax.jit"
            raise ArgumentError("no such function was compiled", expected=expected, got=repr(name))
        return profiles[name]

    @checking_calls("run.to_html")
    def to_html(self, path: FilePath, name: str | None = None) -> None:
        """Write the page of a function, see `Profile.to_html`; `name` as of `profile`."""
        self.profile(name).to_html(path)

    def __str__(self) -> str:
        target = self.device.target
        compiled = [row for row in self.functions if row.profile is not None]
        others = [row for row in self.functions if row.profile is None]
        split = f", {self._split}" if self._split.replicas > 1 else ""
        lines = [f"Functions of JAX, compiled for {target.num_ipus} × {target.name}{split} ({self._selection}):"]
        head: Row = ("function", "calls", "cycles of all", *PROGRAM_HEAD)
        lines += text_table([head, *map(_cells, compiled)]) if compiled else ["  none"]
        if others:
            lines.append("Computed by JAX alone:")
            rows = [(row.name, f"{row.calls:,}", f"{row.flops:,}", row.reason) for row in others[:_MOST_ROWS]]
            lines += text_table([("function", "calls", "FLOPs a call", "reason"), *rows])
            lines += [f"  and {len(others) - _MOST_ROWS} more"] if len(others) > _MOST_ROWS else []
        parts = dict.fromkeys(row.name for row in compiled if row.is_forward_alone)
        lines += [f"{name}: forward alone, as part of a transformation outside of jax.jit" for name in parts]
        return "\n".join(lines)

    __repr__ = object.__repr__


def _cells(row: ProfiledCalls) -> Row:
    assert row.profile is not None
    return row.name, f"{row.calls:,}", f"{row.total_cycles:,}" if row.total_cycles else "", *program_cells(row.profile)


@contextmanager
def profiling(
    device: Device | None = None,
    *,
    every: bool = False,
    min_flops: float | None = None,
    only: str | tuple[str, ...] = (),
    replicas: int = 1,
    batch_size: int | None = None,
) -> Iterator[ProfilingRun]:
    """Record all calls of jitted functions inside, and compile the expensive ones for an IPU afterwards.

    Args:
        device: `IPUModel(...)`; the default device when None.
        every: compile every function; otherwise those with at least 1 % of the floating-point operations of the run.
        min_flops: compile those with at least so many floating-point operations a call instead.
        only: compile those of this name, or of these, instead.
        replicas: number of replicas, a power of two, with an IPU each. Functions without shardings have their batch
            split over them: arguments and results with the rows of a batch. All else is whole on each replica.
        batch_size: rows of a batch. None for those of the arguments that have no result of their own shape and dtype,
            if these have equally many rows; other functions are not compiled, and their rows say why.

    Yields:
        A `ProfilingRun`: a table of all functions, and profiles, once the block has ended.

    Raises:
        ArgumentError: no device with a machine model, more than one rule, or replicas that are no power of two.
    """
    target = current_device() if device is None else device
    check_device(target, "ipu.profiling")
    if not isinstance(target, IPUModel):
        raise ArgumentError("ipu.CPU() has no machine model to profile", expected="ipu.IPUModel(...)")
    names = (only,) if isinstance(only, str) else tuple(only)
    if every + (min_flops is not None) + bool(names) > 1:
        problem = "ipu.profiling takes one rule that chooses functions"
        got = f"every={every}, min_flops={min_flops}, only={names}"
        raise ArgumentError(problem, expected="every, min_flops or only", got=got)
    if replicas < 1 or replicas & (replicas - 1):
        raise ArgumentError("replicas of ipu.profiling", expected="a power of two, as IPUs of a Pod are", got=replicas)
    run = ProfilingRun(target, Selection(every, min_flops, names), BatchSplit(replicas, batch_size))
    with replaced_names(run._recorder):
        yield run
