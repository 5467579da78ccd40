"""The refusal of a program that does not fit: which tiles, what fills them, when, and what would help, in numbers.

Input: a `MemoryReport`. Output: `TileMemoryError`, or nothing.
A suggestion is made only where its numbers are enough on the worst tile; each says what it assumes.
Limits: what scales with the batch is not known here; all that is computed is taken to, and arguments not to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ipujax.runtime.errors import TileMemoryError
from ipujax.runtime.memory.always_live import CODE
from ipujax.runtime.memory.live_item import LiveItem
from ipujax.runtime.memory.report import MemoryReport
from ipujax.runtime.tensor import Origin, is_key_dtype

_LISTED = 5  # largest things on the worst tile, and worst tiles


def fits(report: MemoryReport) -> bool:
    """Whether a program fits; nothing is packed to find out that it does not where its peak is too much already.

    Args:
        report: what every tile needs.
    """
    least = {"memory": report.least_bytes, "memory for code": report.code_bytes}
    return all((least[kind] <= limit).all() for kind, limit in report.limits.items()) and not report.lacking()


def check_memory(
    report: MemoryReport,
    prices: Sequence[float] = (),
    price: float = 0,
    shares: Sequence[float] = (),
    share: float = 1,
    ways: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuses a program that does not fit.

    Args:
        report: what every tile needs.
        prices: cycles of a byte at which it was planned, and did not fit either, if there are several.
        price: the one of them that the report is of.
        shares: of the bytes that it takes to keep all for gradients, those it was planned with, if there are several.
        share: the one of them that the report is of.
        ways: what else would help, by what each changes.

    Raises:
        TileMemoryError: naming the worst tiles, how many bytes they lack, what is largest there and when.
    """
    lacking = report.lacking()
    if not lacking:
        return
    kind, worst = _worst(lacking)
    short, need = lacking[kind], report.needed(kind)
    step, origin, items = _at_peak(report, kind, worst)
    when = "" if kind == "memory for code" else f", while running {step}"
    code = int(report.code_bytes[worst])
    lines = [
        f"out of {kind} on {np.count_nonzero(short):,} of {len(short):,} tiles, worst on tile {worst}, "
        f"by {short[worst]:,} bytes{when}",
        f"  data and code on that tile: {int(report.tile_bytes[worst]) - code:,} and {code:,} bytes",
        "  largest on that tile:",
        *(f"    {item}" for item in items[:_LISTED]),
    ]
    others = [int(tile) for tile in np.argsort(-short, kind="stable")[1:_LISTED] if short[tile]]
    if others:
        lines.append("  next: " + ", ".join(f"tile {tile} by {short[tile]:,} bytes" for tile in others))
    if len(shares) > 1:
        tried = ", ".join(dict.fromkeys(f"{100 * each:.0f}" for each in shares))
        lines.append(
            f"  keeping {tried} % of what gradients need, the rest computed again: {100 * share:.0f} % as shown"
        )
    if prices:
        tried = ", ".join(f"{each:g}" for each in prices)
        lines.append(f"  planned with a byte worth {tried} cycles: its fullest tile is smallest at {price:g}, as shown")
    allow = "Options(allow_out_of_memory=True) for the profile of a program that does not fit"
    raise TileMemoryError(
        "\n".join(lines),
        where=origin if origin != Origin() else None,
        expected=f"at most {int(need[worst] - short[worst]):,} bytes a tile",
        got=f"{need[worst]:,} bytes",
        ways={**dict(_helps(report)), **ways, "machine": _larger_machine(report), "allow": allow},
        needed_bytes=int(report.max_tile_bytes),
    )


def ways_to_fit(report: MemoryReport) -> tuple[str, ...]:
    """What would make a program fit, those ways first whose numbers are enough; nothing where it fits.

    Args:
        report: what every tile needs.
    """
    if not report.lacking():
        return ()
    return *dict(_helps(report)).values(), _larger_machine(report)


def _worst(lacking: Mapping[str, np.ndarray]) -> tuple[str, int]:
    """The kind of memory that is short by most, and the tile."""
    kind = max(lacking, key=lambda name: int(lacking[name].max()))
    return kind, int(lacking[kind].argmax())


def _at_peak(report: MemoryReport, kind: str, tile: int) -> tuple[str, Origin, tuple[LiveItem, ...]]:
    step, origin, items = report.at_peak(tile)
    if kind == "memory for code":
        items = tuple(item for item in items if item.category in CODE)
    return step, origin, items


def _helps(report: MemoryReport) -> Iterator[tuple[str, str]]:
    """What makes what the worst tile lacks smaller, by what it changes."""
    lacking = report.lacking()
    kind, worst = _worst(lacking)
    if kind == "memory for code":
        return _for_code(report)
    return _for_memory(report, worst, _at_peak(report, kind, worst)[2], int(lacking[kind][worst]))


def _larger_machine(report: MemoryReport) -> str:
    settings = [f"{name}={value}" for name, value in _settings(report, report.lacking())]
    return (
        f"a machine with {' and '.join(settings)}, which would hold the program as it is planned now; "
        "planners use more where there is more, so add about a tenth"
    )


def _settings(report: MemoryReport, lacking: Mapping[str, np.ndarray]) -> Iterator[tuple[str, int]]:
    """Constants of the target with which this very program would fit."""
    if "memory" in lacking:
        yield "bytes_per_tile", report.max_tile_bytes
    if "memory for code" in lacking:
        yield "interleaved_offset_bytes", int(report.code_bytes.max())


def _for_code(report: MemoryReport) -> Iterator[tuple[str, str]]:
    """What makes code smaller."""
    sizes = {name: int(report.by_category[name].max()) for name in CODE}
    name = max(sizes, key=lambda name: sizes[name])
    yield (
        "code",
        f"fewer different steps, as in a loop (jax.lax.scan) in place of a repetition: most of the code is "
        f"{name}, up to {sizes[name]:,} bytes a tile",
    )


def _for_memory(report: MemoryReport, tile: int, items: tuple[LiveItem, ...], short: int) -> Iterator[tuple[str, str]]:
    """What makes the data on a tile smaller by at least `short` bytes."""
    target = report.target
    total, capacity = report.total_bytes, target.total_memory_bytes
    if total > capacity:
        ipus = -(-total // (capacity // target.num_ipus))
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
    kept = sum(item.num_bytes for item in computed if item.variable is not None)
    if kept > short:
        waiting = f"{short:,} of the {kept:,} bytes of computed values there wait for a backward pass"
        yield "checkpoint", f"jax.checkpoint, if {waiting}"
    halved = sum(item.num_bytes for item in items if item.variable is not None and _is_float32(item)) // 2
    if halved >= short:
        yield "float16", f"float16 in place of float32, which would save up to {halved:,} bytes there"


def _better_spread(report: MemoryReport, items: tuple[LiveItem, ...], short: int) -> Iterator[tuple[str, str]]:
    """What lies on too few tiles."""
    tiles = report.target.num_tiles
    share = 100 * report.total_bytes / report.target.total_memory_bytes
    for item in items:
        if item.variable is not None and item.num_bytes - -(-item.variable.num_bytes // tiles) >= short:
            yield (
                "mapping",
                f"{item.name} on more tiles, if you map it yourself: {item.num_bytes:,} of its "
                f"{item.variable.num_bytes:,} bytes are on that tile, and all tiles together need only {share:.0f} % "
                "of their memory",
            )
            return


def _is_computed(report: MemoryReport, item: LiveItem) -> bool:
    """Whether something is neither an argument nor there during the whole program."""
    if item.variable is not None:
        return item.category == "variable" and item.variable not in report.arguments
    return item.category in ("message", "rearrangement", "outputEdge", "borrowed")


def _is_float32(item: LiveItem) -> bool:
    variable = item.variable
    return variable is not None and not is_key_dtype(variable.dtype) and np.dtype(variable.dtype) == np.float32
