"""`ipu.advise`: changes that make a program fit, or faster, each compiled and compared.

Input: a function of `ipu.jit`, and the shapes of its arguments. Output: `Advice`, a table, best first, as plain data,
text, HTML and comma-separated values; nothing is run.

    change                                       cycles            saves  worst tile
    options=ipu.Options(recompute="auto")     5,694,825                -  428.6 KiB
    half of the batch, twice                  5,811,020                -  391.0 KiB
    as it is                                          -                -  640.2 KiB, does not fit

Limits: changes of the function itself are hints, and not tried: stages in a function without any, phases,
`jax.checkpoint`, a scan over layers, other sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ipujax.advice.changed_functions import (
    Variant,
    as_code,
    donating,
    halved,
    has_gradient,
    in_half_precision,
    kept_arguments,
    offloading,
    padded,
    recomputing,
    repipelined,
    with_more_ipus,
)
from ipujax.arguments import as_numbers
from ipujax.jit import IpuFunction, jitted
from ipujax.runtime.causes import AdviceRow as AdviceRow, Cause
from ipujax.runtime.causes.removals import RETURNED, STREAMING
from ipujax.runtime.errors import ArgumentError, IpuError, TileMemoryError
from ipujax.runtime.markup import table
from ipujax.runtime.options import RECOMPUTATIONS
from ipujax.runtime.report import Profile, write_csv
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.tensor import Origin
from ipujax.runtime.views import verdict

_HEAD = ("Change", "Cycles", "Saves", "Worst tile", "Saves", "")


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes of a function, best first; its text is a table.

    Args:
        rows: those that fit by cycles, then the others by memory of the fullest tile.
        hints: changes that need an edit of the function, and so are not tried; most cycles to save first.
        profile: of the program as it is, with the rows and hints as `profile.advice`: its summary and its page show
            them. None if it cannot be compiled.
    """

    rows: tuple[AdviceRow, ...]
    hints: tuple[AdviceRow, ...] = ()
    profile: Profile | None = field(default=None, compare=False)

    def best(self) -> AdviceRow:
        """Return the row of fewest cycles that fits.

        Raises:
            ArgumentError: if none does.
        """
        first = self.rows[0]
        if first.refused is not None:
            raise ArgumentError("no change that was tried can be compiled", got=first.refused)
        if not first.fits:
            got = f"{first.worst_tile_bytes:,} bytes on the fullest tile"
            raise ArgumentError(
                "no change that was tried fits the machine", got=got, hint="more IPUs with ipu.stage(i)"
            )
        return first

    def __iter__(self) -> Iterator[AdviceRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        width = max(len(row.change) for row in self.rows)
        lines = [f"{'change':<{width}}  {'cycles':>15}  {'saves':>15}  worst tile"]
        for row in self.rows:
            if row.refused is not None:
                lines.append(f"{row.change:<{width}}  {row.refused}")
                continue
            cycles, saved, memory, _ = _cells(row)
            lines.append(f"{row.change:<{width}}  {cycles:>15}  {saved:>15}  {memory}")
        if self.hints:
            lines += ["", "not tried, for they need an edit of the function:"]
            lines += [f"  {hint.change}; at most {hint.saved_cycles:,} cycles" for hint in self.hints]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = [(row.change, *_cells(row), row.refused or "") for row in self.rows]
        rows += [(hint.change, "", f"at most {hint.saved_cycles:,}", "", "", "not tried") for hint in self.hints]
        return table(_HEAD, rows, "Changes that were compiled")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write rows and hints as comma-separated values, with a head; None is an empty cell.

        Raises:
            ArgumentError: the path cannot be written.
        """
        columns = [each.name for each in fields(AdviceRow)]
        write_csv(path, columns, map(asdict, (*self.rows, *self.hints)))


def _cells(row: AdviceRow) -> tuple[str, str, str, str]:
    """Return cycles, cycles saved, memory and bytes saved of a row that could be compiled."""
    if row.refused is not None:
        return "", "", "", ""
    note = f", without {row.unpriced} unpriced" if row.unpriced and row.fits else ""
    memory = f"{row.worst_tile_bytes / 1024:,.1f} KiB{'' if row.fits else ', does not fit'}{note}"
    saved_cycles = f"{row.saved_cycles:+,}" if row.saved_cycles else "-"
    return f"{row.cycles:,}" if row.fits else "-", saved_cycles, memory, f"{row.saved_bytes:+,}"


_BY_OPTIONS = frozenset((RETURNED, STREAMING))  # causes that options remove, which are compiled


@checking_calls("ipu.advise")
def advise(
    fun: IpuFunction[Any, Any],
    *args: Any,
    batch_argnums: int | Sequence[int] = (),
    show: bool = True,
) -> Advice:
    """Compile a function with several changes and compare the results.

    Tried are its present options, of gradients each recomputation, donation of arguments that come back, arguments in
    streaming memory (all donated ones but the first, which often are the state of an optimiser; then all; and each of
    the two largest others), padded rows where rows take slow paths, float16 arguments in the place of float32 ones, for
    pipelines over stages the other schedules, and twice and half as many micro-batches of the same batch, twice the
    IPUs for pipelines with automatic stages, and with `batch_argnums` half of the batch, twice. Arguments that a call
    of a training step reads and does not update, and those of `batch_argnums`, are other ones in each call: they are
    neither donated nor offloaded. If none of these fits, recomputation "auto" is combined with each of the others. All
    but the first must fit, also with `allow_out_of_memory`. What needs an edit of the function is a hint, not tried.

    Args:
        fun: function that `ipu.jit` returned.
        args: its arguments, or their shapes.
        batch_argnums: positional arguments whose first axis is the batch.
        show: whether to print the table.

    Returns:
        A row for each change, best first.

    Raises:
        ArgumentError: `fun` is not a function of `ipu.jit`, or the size of the batch is odd.
        ProfileError: a trip count is data, and not in `Options(trip_counts=)`.
    """
    if not isinstance(getattr(fun, "__func__", fun), IpuFunction):
        raise ArgumentError("ipu.advise needs a function of ipu.jit", expected="ipu.jit(fun, ...)", got=repr(fun))
    fun, args = jitted(fun, args)
    numbers = as_numbers("batch_argnums", batch_argnums, "ipu.advise")
    half_batch = halved(args, numbers) if numbers else None
    traced = fun.trace(*args)
    if traced.reads_transformation:
        traced.lower()  # raises the error, which no option avoids
    # The user's function with its options unchanged, which may allow it to exceed the memory.
    present, profile = _compiled(Variant("as it is", fun, args))
    cycles = None if profile is None else profile.cycles  # None: the program does not fit
    modes = [mode for mode in RECOMPUTATIONS if mode != fun.options.recompute] if has_gradient(fun, args) else []
    recomputed = [recomputing(fun, mode) for mode in modes]
    variants = [Variant(as_code(other.options), other, args) for other in recomputed]
    kept = kept_arguments(fun, args, numbers)
    further = [*donating(fun, args, kept), *offloading(fun, args, kept, cycles)]
    further += [*repipelined(fun, args), *with_more_ipus(fun, args)]
    if profile is not None and profile.slow_paths and not fun.options.pad_rows:
        further += padded(fun, args)
    further += in_half_precision(fun, args)
    if half_batch is not None:
        further.append(Variant("half of the batch, twice", fun, half_batch, times=2))
    rows = [present, *(_compiled(variant)[0] for variant in (*variants, *further))]
    # Pairs are compiled only where no single change is enough: each compilation may take minutes.
    if "auto" in modes and not any(row.fits for row in rows):
        code = as_code(recomputed[modes.index("auto")].options)
        combined = [replace(x, change=f"{x.change}, {code}", fun=recomputing(x.fun, "auto")) for x in further]
        rows += [_compiled(variant)[0] for variant in combined]
    advice = _advice([_beside(row, present) for row in rows], profile)
    if show:
        print(advice)
    return advice


def _advice(rows: Sequence[AdviceRow], profile: Profile | None) -> Advice:
    """Return rows in order, with the hints of the program as it is."""
    ranked = tuple(sorted(rows, key=_rank))
    if profile is None:
        return Advice(ranked)
    hints = _edits(profile)
    return Advice(ranked, hints, profile.replaced(advice=(*ranked, *hints)))


def _edits(profile: Profile) -> tuple[AdviceRow, ...]:
    """Return the changes of the user's function that its causes suggest, most cycles to save first, none compiled."""
    result = verdict(profile)
    return tuple(
        AdviceRow(_edit(cause, remedy), saved_cycles=gain, tried=False)
        for cause, gain, remedy in zip(result.causes, result.gains, result.remedies, strict=True)
        if cause.name not in _BY_OPTIONS
    )


def _edit(cause: Cause, remedy: str) -> str:
    """Return what to change, with the line of most of the cycles."""
    return remedy if cause.origin == Origin() else f"{cause.origin}: {remedy}"


def _beside(row: AdviceRow, present: AdviceRow) -> AdviceRow:
    """Return a row with what it saves of the program as it is."""
    if row is present or row.refused is not None or present.refused is not None:
        return row
    saved_cycles = present.cycles - row.cycles if row.fits and present.fits else 0
    return replace(row, saved_cycles=saved_cycles, saved_bytes=present.worst_tile_bytes - row.worst_tile_bytes)


def _rank(row: AdviceRow) -> tuple[bool, bool, int]:
    return row.refused is not None, not row.fits, row.cycles if row.fits else row.worst_tile_bytes


def _compiled(variant: Variant) -> tuple[AdviceRow, Profile | None]:
    """Compile a variant, and return its row and its profile; None for the profile if it does not fit."""
    change = variant.change
    try:
        if not variant.is_changed:
            return AdviceRow(change, refused="a function of jax.jit around the pipeline keeps its settings"), None
        profile = variant.fun.lower(*variant.args).compile().profile
    except TileMemoryError as error:
        return AdviceRow(change, worst_tile_bytes=error.needed_bytes), None
    except IpuError as error:
        return AdviceRow(change, refused=error.what), None
    fits = not profile.memory.lacking()  # only the first variant may be compiled without fitting
    cycles = variant.times * profile.cycles if fits else 0
    row = AdviceRow(change, cycles, int(profile.memory.max_tile_bytes), fits, unpriced=len(profile.unpriced))
    return row, profile
