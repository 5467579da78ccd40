"""`ipu.advise`: changes of options that make a program fit, or faster, each compiled and compared.

Input: a function of `ipu.jit`, and the shapes of its arguments. Output: `Advice`, a table, best first; nothing is run.

    change                                       cycles    worst tile
    options=ipu.Options(recompute="auto")     5,694,825      428.6 KiB
    half of the batch, twice                  5,811,020      391.0 KiB
    as it is                                          -      640.2 KiB, does not fit

Limits: changes of the function itself are not tried: stages in a function without any, phases, other dtypes,
`jax.checkpoint`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np

from ipujax.arguments import as_numbers
from ipujax.device import IPUModel
from ipujax.jit import IpuFunction
from ipujax.lowering.jaxpr import PIPELINE, equations
from ipujax.runtime.errors import ArgumentError, IpuError, TileMemoryError
from ipujax.runtime.options import RECOMPUTATIONS, Options, Recompute
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import Arch, Target

_DEFAULT = Options()


@dataclass(frozen=True, slots=True)
class AdviceRow:
    """Result of compiling a function with one change.

    Args:
        change: the change, ready to paste where it is code.
        cycles: cycles of the whole batch; 0 if the program does not fit.
        worst_tile_bytes: memory of the fullest tile.
        fits: whether the program fits all tiles.
        refused: text of the error if it cannot be compiled, else None.
        unpriced: number of operations that `cycles` does not count, see `Profile.unpriced`.
    """

    change: str
    cycles: int = 0
    worst_tile_bytes: int = 0
    fits: bool = False
    refused: str | None = None
    unpriced: int = 0


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes of a function's options, best first; its text is a table.

    Args:
        rows: those that fit by cycles, then the others by memory of the fullest tile.
    """

    rows: tuple[AdviceRow, ...]

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
        lines = [f"{'change':<{width}}  {'cycles':>15}  worst tile"]
        for row in self.rows:
            if row.refused is not None:
                lines.append(f"{row.change:<{width}}  {row.refused}")
                continue
            cycles = f"{row.cycles:,}" if row.fits else "-"
            memory = f"{row.worst_tile_bytes / 1024:,.1f} KiB{'' if row.fits else ', does not fit'}"
            note = f", without {row.unpriced} unpriced" if row.unpriced and row.fits else ""
            lines.append(f"{row.change:<{width}}  {cycles:>15}  {memory}{note}")
        return "\n".join(lines)


@checking_calls("ipu.advise")
def advise(
    fun: IpuFunction[Any, Any],
    *args: Any,
    batch_argnums: int | Sequence[int] = (),
    show: bool = True,
) -> Advice:
    """Compile a function with several options and compare the results.

    Tried are its present options, each recomputation, donation of the arguments whose arrays come back, donated
    arguments in streaming memory (all but the first, which often are the state of an optimiser; then all), twice the
    IPUs for pipelines with automatic stages, and with `batch_argnums` half of the batch, twice. If none of these
    fits, recomputation "auto" is combined with each of the others. All but the first must fit, also with
    `allow_out_of_memory`.

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
    if not isinstance(fun, IpuFunction):
        raise ArgumentError("ipu.advise needs a function of ipu.jit", expected="ipu.jit(fun, ...)", got=repr(fun))
    numbers = as_numbers("batch_argnums", batch_argnums, "ipu.advise")
    halved = _halved(args, numbers) if numbers else None
    traced = fun.trace(*args)
    if traced.closes_over_tracers:
        traced.lower()  # raises the error, which no option avoids
    present = fun.options.recompute
    # The user's function with its options unchanged, which may allow it to exceed the memory.
    rows = [_row(_Variant("as it is", fun, args))]
    recomputing = {mode: _recomputing(fun, mode) for mode in RECOMPUTATIONS if mode != present}
    variants = [_Variant(_as_code(other.options), other, args) for other in recomputing.values()]
    further = [*_donating(fun, args), *_offloading(fun, args), *_with_more_ipus(fun, args)]
    if halved is not None:
        further.append(_Variant("half of the batch, twice", fun, halved, times=2))
    rows += [_row(variant) for variant in (*variants, *further)]
    # Pairs are compiled only where no single change is enough: each compilation may take minutes.
    if present != "auto" and not any(row.fits for row in rows):
        code = _as_code(recomputing["auto"].options)
        combined = [replace(x, change=f"{x.change}, {code}", fun=_recomputing(x.fun, "auto")) for x in further]
        rows += [_row(variant) for variant in combined]
    advice = Advice(tuple(sorted(rows, key=_rank)))
    if show:
        print(advice)
    return advice


@dataclass(frozen=True, slots=True)
class _Variant:
    """A function to compile, its change from the user's, and the number of calls for the whole batch."""

    change: str
    fun: IpuFunction[Any, Any]
    args: Sequence[Any]
    times: int = 1


def _donating(fun: IpuFunction[Any, Any], args: Sequence[Any]) -> list[_Variant]:
    """Return a variant that donates the arguments whose arrays all come back with their shapes; none without any.

    As in `jax.jit` each result takes the place of one array. Functions with static arguments are left as they are.
    """
    traced = fun.trace(*args)
    free = Counter(_type_of(result) for result in jax.tree.leaves(traced.out_info))
    infos, keywords = traced.args_info
    if keywords or len(infos) != len(args):
        return []
    leaves = [jax.tree.leaves(info) for info in infos]
    free.subtract(_type_of(leaf) for of_argument in leaves for leaf in of_argument if leaf.donated)
    donated = []
    for number, of_argument in enumerate(leaves):
        needed = Counter(map(_type_of, of_argument))
        if needed and not any(leaf.donated for leaf in of_argument) and needed <= free:
            free -= needed
            donated.append(number)
    if not donated:
        return []
    numbers = tuple(sorted((*fun.donate_argnums, *donated)))
    changed = fun.with_options(_fitting(fun.options), donate_argnums=numbers)
    return [_Variant(f"donate_argnums={numbers}", changed, args)]


def _type_of(array: Any) -> tuple[tuple[int, ...], str]:
    return tuple(array.shape), str(array.dtype)


def _offloading(fun: IpuFunction[Any, Any], args: Sequence[Any]) -> list[_Variant]:
    """Return variants with donated arguments in streaming memory, which the present ones are part of."""
    if not args:
        return []
    donated = tuple(sorted(number % len(args) for number in fun.donate_argnums if -len(args) <= number < len(args)))
    candidates = dict.fromkeys(numbers for numbers in (donated[1:], donated) if numbers)
    # Only supersets of the present setting: a change must not bring arguments back to the chip.
    offloaded = {number % len(args) for number in fun.offload_argnums}
    return [
        _Variant(f"offload_argnums={numbers}", fun.with_options(_fitting(fun.options), offload_argnums=numbers), args)
        for numbers in candidates
        if offloaded < set(numbers)
    ]


def _with_more_ipus(fun: IpuFunction[Any, Any], args: Sequence[Any]) -> list[_Variant]:
    """Return a variant with twice the IPUs, if a pipeline has automatic stages."""
    specs = (eqn.params["spec"] for eqn in equations(fun.trace(*args).jaxpr.jaxpr) if eqn.primitive.name == PIPELINE)
    if not any(spec.stages == "auto" for spec in specs):
        return []
    target = fun.target
    device = IPUModel(2 * target.num_ipus, cast(Arch, target.name), **target.changes())
    return [_Variant(f"device={_device_as_code(target)}", fun.with_options(_fitting(fun.options), device=device), args)]


def _device_as_code(target: Target) -> str:
    changes = "".join(f", {name}={value!r}" for name, value in target.changes().items())
    return f'ipu.IPUModel(num_ipus={2 * target.num_ipus}, arch="{target.name}"{changes})'


def _fitting(options: Options) -> Options:
    return replace(options, allow_out_of_memory=False)


def _recomputing(fun: IpuFunction[Any, Any], mode: Recompute) -> IpuFunction[Any, Any]:
    return fun.with_options(replace(_fitting(fun.options), recompute=mode))


def _as_code(options: Options) -> str:
    """Return code of the options: the recomputation, and those that are not the default."""
    values = {name: getattr(options, name) for name in Options.__slots__ if name != "recompute"}
    values["trip_counts"] = dict(options.trip_counts)
    arguments = [f"{name}={value!r}" for name, value in values.items() if value != getattr(_DEFAULT, name)]
    arguments.append(f'recompute="{options.recompute}"')
    return f"options=ipu.Options({', '.join(arguments)})"


def _rank(row: AdviceRow) -> tuple[bool, bool, int]:
    return row.refused is not None, not row.fits, row.cycles if row.fits else row.worst_tile_bytes


def _row(variant: _Variant) -> AdviceRow:
    change = variant.change
    try:
        profile = variant.fun.lower(*variant.args).compile().profile
    except TileMemoryError as error:
        return AdviceRow(change, worst_tile_bytes=error.needed_bytes)
    except IpuError as error:
        return AdviceRow(change, refused=error.what)
    fits = not profile.memory.lacking()  # only the first variant may be compiled without fitting
    cycles = variant.times * profile.cycles if fits else 0
    return AdviceRow(change, cycles, int(profile.memory.max_tile_bytes), fits, unpriced=len(profile.unpriced))


def _halved(args: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """Return the arguments, those of the batch as shapes with half of their first axis."""
    halved: list[Any] = list(args)
    for number in numbers:
        if not -len(args) <= number < len(args):
            problem = "batch_argnums of ipu.advise names an argument that the call lacks"
            raise ArgumentError(problem, expected=f"positions of {len(args)} arguments", got=number)
        halved[number] = jax.tree.map(_half, args[number])
    return halved


def _half(x: Any) -> jax.ShapeDtypeStruct:
    shape = np.shape(x)
    if not shape or shape[0] % 2:
        problem = "the batch of ipu.advise must have an even size"
        raise ArgumentError(problem, expected="arrays with an even first axis", got=f"an array of shape {list(shape)}")
    return jax.ShapeDtypeStruct((shape[0] // 2, *shape[1:]), x.dtype)
