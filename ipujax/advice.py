"""`ipu.advise`: what would make a program fit, or faster, each way compiled and measured.

Input: a function of `ipu.jit`, and the shapes of its arguments. Output: `Advice`, a table, best first; nothing is run.

    change                                       cycles    worst tile
    options=ipu.Options(recompute="auto")     5,694,825      428.6 KiB
    half of the batch, twice                  5,811,020      391.0 KiB
    as it is                                          -      640.2 KiB, does not fit

Limits: ways that need another function are not tried: stages where there are none, phases, other dtypes,
`jax.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ipujax.calls import as_numbers
from ipujax.device import IPUModel
from ipujax.jit import IpuFunction
from ipujax.lowering.jaxpr import PIPELINE, equations
from ipujax.runtime.errors import ArgumentError, IpuError, TileMemoryError
from ipujax.runtime.options import RECOMPUTATIONS, Options
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import Target

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

    Tried are the options it has, each way of recomputation, donated arguments in streaming memory (all but the first,
    as is the state of an optimiser; then all), twice the IPUs for pipelines with automatic stages, and with
    `batch_argnums` half of the batch, twice. If none of these fits, recomputation "auto" is tried with each of the
    others. What is tried besides the function as it is has to fit, also with `allow_out_of_memory`.

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
    traced = fun.trace(*args)
    if traced.closes_over_tracers:
        traced.lower()  # which says so: no way to run it would help
    own = fun.options.recompute
    rows = [_row(_Way("as it is", fun, args))]
    recomputing = {mode: _recomputing(fun, mode) for mode in RECOMPUTATIONS if mode != own}
    ways = [_Way(_written(other.options), other, args) for other in recomputing.values()]
    others = [*_offloading(fun, args), *_with_more_ipus(fun, args)]
    if halved is not None:
        others.append(_Way("half of the batch, twice", fun, halved, times=2))
    rows += [_row(way) for way in (*ways, *others)]
    if own != "auto" and not any(row.fits for row in rows):
        written = _written(recomputing["auto"].options)
        both = [replace(way, change=f"{way.change}, {written}", fun=_recomputing(way.fun, "auto")) for way in others]
        rows += [_row(way) for way in both]
    advice = Advice(tuple(sorted(rows, key=_rank)))
    if show:
        print(advice)
    return advice


@dataclass(frozen=True, slots=True)
class _Way:
    """A function to compile, and how it differs from the user's; it runs several times for the whole batch."""

    change: str
    fun: IpuFunction[Any, Any]
    args: Sequence[Any]
    times: int = 1


def _offloading(fun: IpuFunction[Any, Any], args: Sequence[Any]) -> list[_Way]:
    """Donated arguments in streaming memory."""
    if not args:
        return []
    donated = tuple(sorted(number % len(args) for number in fun.donate_argnums if -len(args) <= number < len(args)))
    wanted = dict.fromkeys(chosen for chosen in (donated[1:], donated) if chosen)
    already = {number % len(args) for number in fun.offload_argnums}
    return [
        _Way(f"offload_argnums={chosen}", fun.with_options(_fitting(fun.options), offload_argnums=chosen), args)
        for chosen in wanted
        if already < set(chosen)
    ]


def _with_more_ipus(fun: IpuFunction[Any, Any], args: Sequence[Any]) -> list[_Way]:
    """Twice the IPUs, if the stages of a pipeline are found automatically."""
    specs = (eqn.params["spec"] for eqn in equations(fun.trace(*args).jaxpr.jaxpr) if eqn.primitive.name == PIPELINE)
    if not any(spec.stages == "auto" for spec in specs):
        return []
    target = fun.target
    device = IPUModel(2 * target.num_ipus, target.name, **target.changes())
    return [_Way(f"device={_written_device(target)}", fun.with_options(_fitting(fun.options), device=device), args)]


def _written_device(target: Target) -> str:
    changes = "".join(f", {name}={value!r}" for name, value in target.changes().items())
    return f'ipu.IPUModel(num_ipus={2 * target.num_ipus}, arch="{target.name}"{changes})'


def _fitting(options: Options) -> Options:
    return replace(options, allow_out_of_memory=False)


def _recomputing(fun: IpuFunction[Any, Any], mode: str) -> IpuFunction[Any, Any]:
    return fun.with_options(replace(_fitting(fun.options), recompute=mode))


def _written(options: Options) -> str:
    """Options as they are given to `ipu.jit`: the recomputation, and those of the user that are not the default."""
    values = {name: getattr(options, name) for name in Options.__slots__ if name != "recompute"}
    values["trip_counts"] = dict(options.trip_counts)
    given = [f"{name}={value!r}" for name, value in values.items() if value != getattr(_DEFAULT, name)]
    given.append(f'recompute="{options.recompute}"')
    return f"options=ipu.Options({', '.join(given)})"


def _rank(row: AdviceRow) -> tuple[bool, bool, int]:
    return row.refused is not None, not row.fits, row.cycles if row.fits else row.worst_tile_bytes


def _row(way: _Way) -> AdviceRow:
    change = way.change
    try:
        profile = way.fun.lower(*way.args).compile().profile
    except TileMemoryError as error:
        return AdviceRow(change, worst_tile_bytes=error.needed_bytes)
    except IpuError as error:
        return AdviceRow(change, refused=error.what)
    fits, cycles = not profile.memory.lacking(), way.times * profile.cycles
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
