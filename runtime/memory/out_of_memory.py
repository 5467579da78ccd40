"""Programs that do not fit: the error, with the tiles, their largest items and suggestions in numbers, and tried plans.

Input: a `MemoryReport`, and the parameters and figures of each plan that was compiled until one fitted. Output:
`TileMemoryError`, or nothing; `Attempt`s, which profiles list too.
A suggestion is made only where its numbers are enough on the worst tile, and names its assumption.
Limits: the dependence on the batch size is not known here; computed values are assumed to scale with it, arguments not.
Bytes of attempts are without gaps, since plans that clearly do not fit are not packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import numpy as np

from ipujax.runtime.errors import TileMemoryError
from ipujax.runtime.files.figure_kinds import Bytes, Large, Real
from ipujax.runtime.memory.always_live import CODE
from ipujax.runtime.memory.live_item import LiveItem
from ipujax.runtime.memory.report import MemoryReport
from ipujax.runtime.tensor import Origin, is_key_dtype

_KIB = 1024
_LISTED_ATTEMPTS = 6
_LISTED = 5  # largest items on the worst tile, and worst tiles


def fits(report: MemoryReport) -> bool:
    """Return whether a program fits its tiles."""
    # Lower bounds first: they cost no packing, and are enough to refuse most programs.
    lower_bounds = {"memory": report.least_bytes, "memory for code": report.code_bytes}
    return all((lower_bounds[kind] <= limit).all() for kind, limit in report.limits.items()) and not report.lacking()


def check_memory(
    report: MemoryReport,
    attempts: Sequence[Attempt] = (),
    ways: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise an error if a program does not fit.

    Args:
        report: memory report of the program.
        attempts: all plans that were tried without fitting; the report is of the one in use.
        ways: further suggestions, by the setting that each changes.

    Raises:
        TileMemoryError: the program does not fit; names the worst tiles, the bytes that they lack, their largest items
            and the step of the peak.
    """
    lacking = report.lacking()
    if not lacking:
        return
    kind, worst = _worst(lacking)
    short = lacking[kind]
    need = report.needed(kind)
    step, origin, items = _at_peak(report, kind, worst)
    # Code is in memory at every step, so no step is to blame.
    during = "" if kind == "memory for code" else f", while running {step}"
    code = int(report.code_bytes[worst])
    lines = [
        f"out of {kind} on {np.count_nonzero(short):,} of {len(short):,} tiles, worst on tile {worst}, "
        f"by {short[worst]:,} bytes{during}",
        f"  data and code on that tile: {int(report.tile_bytes[worst]) - code:,} and {code:,} bytes",
        "  largest on that tile:",
        *_largest(report, kind, items),
        f"  on the mean tile: {float(report.mean_tile_bytes):,.1f} bytes",
    ]
    next_worst = [int(tile) for tile in np.argsort(-short, kind="stable")[1:_LISTED] if short[tile]]
    if next_worst:
        lines.append("  next: " + ", ".join(f"tile {tile} by {short[tile]:,} bytes" for tile in next_worst))
    lines += ["  plans that were tried, gaps not counted:"] * (len(attempts) > 1)
    lines += [f"    {line}" for line in attempt_lines(attempts)]
    allow = "Options(allow_out_of_memory=True) for the profile of a program that does not fit"
    raise TileMemoryError(
        "\n".join(lines),
        where=origin if origin != Origin() else None,
        expected=f"at most {int(need[worst] - short[worst]):,} bytes a tile",
        got=f"{need[worst]:,} bytes",
        ways={**dict(_suggestions(report)), **ways, "machine": _larger_machine(report), "allow": allow},
        needed_bytes=int(report.max_tile_bytes),
    )


def _largest(report: MemoryReport, kind: str, items: Sequence[LiveItem]) -> list[str]:
    """Return a line for each of the largest items of the fullest tile; of all memory also the others and the sum."""
    if kind == "memory for code":
        return [f"    {item}" for item in items[:_LISTED]]
    rows = report.breakdown.largest(_LISTED)
    return [f"    {row.fullest_bytes:>12,} B  {row.description}" for row in rows]


def ways_to_fit(report: MemoryReport) -> tuple[str, ...]:
    """Return suggestions for a program that does not fit, the sufficient ones first; none where it fits."""
    if not report.lacking():
        return ()
    return *dict(_suggestions(report)).values(), _larger_machine(report)


def _worst(lacking: Mapping[str, np.ndarray]) -> tuple[str, int]:
    """Return the kind of memory that lacks most bytes on a tile, and that tile."""
    kind = max(lacking, key=lambda name: int(lacking[name].max()))
    return kind, int(lacking[kind].argmax())


def _at_peak(report: MemoryReport, kind: str, tile: int) -> tuple[str, Origin, tuple[LiveItem, ...]]:
    """Return the step at the peak of a tile, its origin, and the items there; of code alone if that is the problem."""
    step, origin, items = report.at_peak(tile)
    if kind == "memory for code":
        items = tuple(item for item in items if item.category in CODE)
    return step, origin, items


def _suggestions(report: MemoryReport) -> Iterator[tuple[str, str]]:
    """Return suggestions for the worst tile, with the setting that each changes."""
    lacking = report.lacking()
    kind, worst = _worst(lacking)
    if kind == "memory for code":
        return _for_code(report)
    _, _, items = _at_peak(report, kind, worst)
    return _for_memory(report, worst, items, int(lacking[kind][worst]))


def _larger_machine(report: MemoryReport) -> str:
    settings = [f"{name}={value}" for name, value in _settings(report, report.lacking())]
    return (
        f"a machine with {' and '.join(settings)}, which would hold the program as it is planned now; "
        "its interleaved memory may begin at another offset, so add about a tenth"
    )


def _settings(report: MemoryReport, lacking: Mapping[str, np.ndarray]) -> Iterator[tuple[str, int]]:
    """Yield constants of the target with which the program would fit as planned."""
    if "memory" in lacking:
        yield "bytes_per_tile", report.max_tile_bytes
    if "memory for code" in lacking:
        yield "interleaved_offset_bytes", int(report.code_bytes.max())


def _for_code(report: MemoryReport) -> Iterator[tuple[str, str]]:
    sizes = {name: int(report.by_category[name].max()) for name in CODE}
    largest = max(sizes, key=lambda name: sizes[name])
    yield (
        "code",
        f"fewer different steps, as in a loop (jax.lax.scan) in place of a repetition: most of the code is "
        f"{largest}, up to {sizes[largest]:,} bytes a tile",
    )


def _for_memory(report: MemoryReport, tile: int, items: tuple[LiveItem, ...], short: int) -> Iterator[tuple[str, str]]:
    """Yield changes that take at least `short` bytes of data off a tile, with the setting of each."""
    total = report.total_bytes
    capacity = report.target.total_memory_bytes
    if total > capacity:
        ipus = -(-total // (capacity // report.target.num_ipus))  # systems have a power of two of them
        yield (
            "ipus",
            f"num_ipus={1 << (ipus - 1).bit_length()} or more, with the work spread over them (ipu.stage, replicas=): "
            f"all tiles together need {total:,} of {capacity:,} bytes",
        )
    else:
        yield from _better_spread(report, items, short)
    computed = [item for item in items if _is_computed(report, item)]
    size = sum(item.num_bytes for item in computed)
    if percent := 100 * max(size - short, 0) // max(size, 1):
        yield (
            "batch",
            f"a smaller batch, {percent} % of this one if all that is computed there "
            f"({size:,} bytes) scales with it: the rest ({int(report.tile_bytes[tile]) - size:,} bytes) does not",
        )
    variable_bytes = sum(item.num_bytes for item in computed if item.variable is not None)
    if variable_bytes > short:
        waiting = f"{short:,} of the {variable_bytes:,} bytes of computed values there wait for a backward pass"
        yield "checkpoint", f"jax.checkpoint, if {waiting}"
    halved = sum(item.num_bytes for item in items if item.variable is not None and _is_float32(item)) // 2
    if halved >= short:
        yield "float16", f"float16 in place of float32, which would save up to {halved:,} bytes there"


def _better_spread(report: MemoryReport, items: tuple[LiveItem, ...], short: int) -> Iterator[tuple[str, str]]:
    """Yield the largest variable that would free enough bytes if it were spread evenly over all tiles."""
    tiles = report.target.num_tiles
    percent = 100 * report.total_bytes / report.target.total_memory_bytes
    for item in items:
        if item.variable is not None and item.num_bytes - -(-item.variable.num_bytes // tiles) >= short:
            yield (
                "mapping",
                f"{item.name} on more tiles, if you map it yourself: {item.num_bytes:,} of its "
                f"{item.variable.num_bytes:,} bytes are on that tile, and all tiles together need only {percent:.0f} % "
                "of their memory",
            )
            return


def _is_computed(report: MemoryReport, item: LiveItem) -> bool:
    """Return whether an item is neither an argument nor in use during the whole program."""
    if item.variable is not None:
        return item.category == "variable" and item.variable not in report.arguments
    return item.category in ("message", "rearrangement", "outputEdge", "borrowed")


def _is_float32(item: LiveItem) -> bool:
    variable = item.variable
    return variable is not None and not is_key_dtype(variable.dtype) and np.dtype(variable.dtype) == np.float32


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan of a program, compiled.

    Args:
        byte_cost: cost per byte on the fullest tile, in cycles.
        planned_bytes: memory of a tile as planners knew it.
        kept_share: smallest share, over gradients, of the bytes that are kept for them; the rest is recomputed.
        streams_loops: whether rows of loops stay in the host's memory.
        other_stages: whether pipelines are cut into other stages than at first.
        live_bytes: peak live bytes of the fullest tile, code included, without gaps.
        cycles: of one run; None where trip counts are data, and of plans that do not fit while another one does.
        fits: whether the program fits its tiles so.
        is_used: whether the profile, or the error, is of this plan.
    """

    byte_cost: float
    planned_bytes: Bytes
    kept_share: Annotated[float, Real(maximum=1)]
    streams_loops: bool
    other_stages: bool
    live_bytes: Bytes
    cycles: Large | None
    fits: bool
    is_used: bool

    @property
    def changes(self) -> str:
        """The parameters of the plan, as text."""
        parts = [
            f"{self.byte_cost:g} cycle{'s' * (self.byte_cost != 1)} per byte",
            f"planned for tiles of {self.planned_bytes // _KIB:,} KiB",
        ]
        if self.kept_share < 1:
            parts.append(f"{100 * self.kept_share:.0f} % of what gradients need kept, the rest recomputed")
        if self.streams_loops:
            parts.append("loops stream")
        if self.other_stages:
            parts.append("other stages")
        return ", ".join(parts)

    def __str__(self) -> str:
        cycles = "unknown" if self.cycles is None else f"{self.cycles:,}"
        notes = ("" if self.fits else "does not fit", "as shown" if self.is_used else "")
        note = ", ".join(filter(None, notes))
        return f"{cycles:>15}  {self.live_bytes:>12,} B  {self.changes}" + (f" ({note})" if note else "")


def attempt_lines(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Yield a heading, and a line for each attempt worth a look, least bytes first; none where there is one only.

    These are the first, that in use, and some that take fewer cycles than all that need fewer bytes.
    """
    if len(attempts) < 2:
        return
    chosen = {id(each): each for each in (attempts[0], *(each for each in attempts if each.is_used))}
    cycles = float("inf")
    for each in sorted(attempts, key=_order):
        if each.cycles is not None and each.cycles < cycles and len(chosen) < _LISTED_ATTEMPTS:
            cycles = each.cycles
            chosen[id(each)] = each
    yield f"{'cycles':>15}  {'fullest tile':>14}  plan"
    yield from map(str, sorted(chosen.values(), key=_order))
    if num_others := len(attempts) - len(chosen):
        yield f"{'':>15}  {'':>14}  and {num_others:,} other{'s' * (num_others > 1)}"


def _order(attempt: Attempt) -> tuple[int, int]:
    return attempt.live_bytes, attempt.cycles or 0
