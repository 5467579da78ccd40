"""`ipu.advise`: what would make a program fit, or faster, each way compiled and measured.

Input: a function of `ipu.jit`, and the shapes of its arguments. Output: `Advice`, a table, best first; nothing is run.

    change                                       cycles    worst tile
    options=ipu.Options(recompute="auto")     5,694,825      428.6 KiB
    half of the batch, twice                  5,811,020      391.0 KiB
    as it is                                          -      640.2 KiB, does not fit

Limits: ways that need another function are not tried: more stages, other dtypes, `jax.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ipujax.calls import as_numbers
from ipujax.jit import IpuFunction
from ipujax.runtime.errors import ArgumentError, IpuError, TileMemoryError
from ipujax.runtime.options import RECOMPUTATIONS, Options
from ipujax.runtime.signatures import checking_calls

_DEFAULT = Options()


@dataclass(frozen=True, slots=True)
class AdviceRow:
    """One way to compile a function.

    Args:
        change: what to change, ready to paste where it is code.
        cycles: for the whole batch; 0 for what does not fit.
        worst_tile_bytes: memory of the fullest tile.
        fits: whether all tiles hold what they need.
        refused: why it cannot be compiled; None if it can.
    """

    change: str
    cycles: int = 0
    worst_tile_bytes: int = 0
    fits: bool = False
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """Ways to compile a function, best first; printed, it is a table.

    Args:
        rows: those that fit by cycles, then the others by the memory of the fullest tile.
    """

    rows: tuple[AdviceRow, ...]

    def best(self) -> AdviceRow:
        """The row of fewest cycles that fits.

        Raises:
            ArgumentError: if none does.
        """
        first = self.rows[0]
        if first.refused is not None:
            raise ArgumentError("no way that was tried can be compiled", got=first.refused)
        if not first.fits:
            what, got = (
                "no way that was tried fits the machine",
                f"{first.worst_tile_bytes:,} bytes on the fullest tile",
            )
            raise ArgumentError(what, got=got, hint="more IPUs with ipu.stage(i)")
        return first

    def __iter__(self) -> Iterator[AdviceRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        width = max(len(row.change) for row in self.rows)
        lines = [f"{'change':<{width}}  {'cycles':>15}  worst tile"]
        for row in self.rows:
            if row.refused is not None:
                lines.append(f"{row.change:<{width}}  {row.refused}")
                continue
            cycles = f"{row.cycles:,}" if row.fits else "-"
            memory = f"{row.worst_tile_bytes / 1024:,.1f} KiB{'' if row.fits else ', does not fit'}"
            lines.append(f"{row.change:<{width}}  {cycles:>15}  {memory}")
        return "\n".join(lines)


@checking_calls("ipu.advise")
def advise(
    fun: IpuFunction[Any, Any],
    *args: Any,
    batch_argnums: int | Sequence[int] = (),
    show: bool = True,
) -> Advice:
    """Compiles a function in several ways and compares them.

    Tried are the options it has, each way of recomputation, and with `batch_argnums` half of the batch, twice, with and
    without recomputation. What is tried besides the function as it is has to fit, also with `allow_out_of_memory`.

    Args:
        fun: a function that `ipu.jit` returned.
        args: its arguments, or their shapes.
        batch_argnums: positional arguments whose first axis is the batch.
        show: whether to print.

    Returns:
        A row for each way, best first.

    Raises:
        ArgumentError: for what is no function of `ipu.jit`, or a batch that has no half.
        ProfileError: for loops that run as often as their data says, without `Options(trip_counts=)`.
    """
    if not isinstance(fun, IpuFunction):
        raise ArgumentError("ipu.advise needs a function of ipu.jit", expected="ipu.jit(fun, ...)", got=repr(fun))
    numbers = as_numbers("batch_argnums", batch_argnums, "ipu.advise")
    halved = _halved(args, numbers) if numbers else None
    own = fun.options.recompute
    rows = [_row(fun, args, "as it is", 1)]
    others = {mode: _recomputing(fun, mode) for mode in RECOMPUTATIONS if mode != own}
    rows += [_row(other, args, _written(other.options), 1) for other in others.values()]
    if halved is not None:
        rows.append(_row(fun, halved, "half of the batch, twice", 2))
        if own != "auto":
            change = f"half of the batch, twice, {_written(others['auto'].options)}"
            rows.append(_row(others["auto"], halved, change, 2))
    advice = Advice(tuple(sorted(rows, key=_rank)))
    if show:
        print(advice)
    return advice


def _recomputing(fun: IpuFunction[Any, Any], mode: str) -> IpuFunction[Any, Any]:
    return fun.with_options(replace(fun.options, recompute=mode, allow_out_of_memory=False))


def _written(options: Options) -> str:
    """Options as they are given to `ipu.jit`: the recomputation, and those of the user that are not the default."""
    values = {name: getattr(options, name) for name in Options.__slots__ if name != "recompute"}
    values["trip_counts"] = dict(options.trip_counts)
    given = [f"{name}={value!r}" for name, value in values.items() if value != getattr(_DEFAULT, name)]
    given.append(f'recompute="{options.recompute}"')
    return f"options=ipu.Options({', '.join(given)})"


def _rank(row: AdviceRow) -> tuple[bool, bool, int]:
    return row.refused is not None, not row.fits, row.cycles if row.fits else row.worst_tile_bytes


def _row(fun: IpuFunction[Any, Any], args: Sequence[Any], change: str, times: int) -> AdviceRow:
    try:
        profile = fun.lower(*args).compile().profile
    except TileMemoryError as error:
        return AdviceRow(change, worst_tile_bytes=error.needed_bytes)
    except IpuError as error:
        return AdviceRow(change, refused=error.what)
    fits, cycles = not profile.memory.lacking(), times * profile.cycles
    return AdviceRow(change, cycles if fits else 0, int(profile.memory.max_tile_bytes), fits)


def _halved(args: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """The arguments as shapes, those of the batch with half of their first axis."""
    halved: list[Any] = list(args)
    for number in numbers:
        if not -len(args) <= number < len(args):
            what = "batch_argnums of ipu.advise names an argument that the call lacks"
            raise ArgumentError(what, expected=f"positions of {len(args)} arguments", got=number)
        halved[number] = jax.tree.map(_half, args[number])
    return halved


def _half(x: Any) -> jax.ShapeDtypeStruct:
    shape = np.shape(x)
    if not shape or shape[0] % 2:
        what = "the batch given to ipu.advise has no half"
        raise ArgumentError(what, expected="arrays with an even first axis", got=f"an array of shape {list(shape)}")
    return jax.ShapeDtypeStruct((shape[0] // 2, *shape[1:]), x.dtype)
