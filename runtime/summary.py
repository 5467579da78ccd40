"""The profile as text: how long a run takes and why, how full the tiles are, and what to look at first.

Input: a `Profile`. Output: text, in the manner of Poplar's profile summary.
Source: Poplar & PopLibs user guide, "Profile summary output".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ipujax.runtime.errors import ProfileError

if TYPE_CHECKING:
    from ipujax.runtime.profile import Fallback, Operation, Profile

_LABELS = {"global_exchange": "global exchange", "host_exchange": "host exchange"}
_BARS = 40  # characters of the longest bar of the histogram
_BINS = 8


def summary(profile: Profile, operations: int) -> str:
    """The profile as text for people.

    Args:
        profile: what to tell of.
        operations: how many lines of source to list.
    """
    sections = [_target(profile), _time(profile, operations), _memory(profile), _fallbacks(profile.fallbacks)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(label) for label, _ in rows) + 1
    return "\n".join([f"{title}:", *(f"  {label + ':':<{width}}  {value}" for label, value in rows)])


def _target(profile: Profile) -> str:
    target, graph = profile.executable.target, profile.executable.graph
    vertices = sum(group.num_vertices for groups in graph.groups.values() for group in groups)
    replicas = [("Replicas", f"{graph.replication_factor:,}, of which one is told of")]
    return _table(
        "Target",
        [
            ("Name", target.name),
            *(replicas if graph.replication_factor > 1 else []),
            ("IPUs", f"{target.num_ipus:,}"),
            ("Tiles per IPU", f"{target.tiles_per_ipu:,}"),
            ("Memory per tile", _bytes(target.bytes_per_tile)),
            ("Clock", f"{target.clock_hz / 1e6:,.0f} MHz"),
            ("Variables", f"{len(graph.variables):,}"),
            ("Compute sets", f"{len(graph.groups):,}"),
            ("Vertices", f"{vertices:,}"),
        ],
    )


def _time(profile: Profile, operations: int) -> str:
    try:
        cycles = profile.cycles
    except ProfileError as unknown:
        # Memory is known even so; the text says what is missing instead of time.
        return _table("Time", [("Cycles", f"unknown: {unknown.what}"), ("Try", str(unknown.hint))])
    rows = [("Cycles", f"{cycles:,}"), ("Estimated time", _seconds(profile.seconds))]
    if profile.executable.target.num_ipus > 1:
        rows.append(("Critical IPU", str(profile.timeline.critical_ipu)))
    for phase, spent in profile.phase_cycles.items():
        rows.append((_LABELS.get(phase, phase).capitalize(), f"{spent:>15,}  {_percent(spent, cycles)}"))
    rows.append(("Tile balance", f"{tile_balance(profile):.0%} of tile cycles of compute phases"))
    rows.append(("Worker cycles", f"{profile.total_worker_cycles:,}"))
    listed = profile.operations(operations)
    return "\n\n".join([_table("Time", rows), *([_operations(listed)] if listed else [])])


def tile_balance(profile: Profile) -> float:
    """Mean share of compute phases in which a tile of the IPUs taking part computes; 1 is best."""
    tiles, used, spent = profile.executable.target.tiles_per_ipu, 0, 0
    for leaf, cost in profile.executable.costs.items():
        compute = getattr(cost, "compute_cycles", None)
        if compute is not None:
            runs = profile.timeline.executions.get(leaf, 0)
            used += int(compute.sum()) * runs
            spent += int(compute.reshape(-1, tiles).max(1).sum()) * tiles * runs
    return used / spent if spent else 1.0


def _operations(rows: tuple[Operation, ...]) -> str:
    lines = ["Most expensive lines:", f"  {'cycles':>15}  {'share':>6}  {'mostly':<15}  where"]
    for row in rows:
        mostly = _LABELS.get(row.dominant, row.dominant)
        names = ", ".join(row.names[:3]) + (", …" if len(row.names) > 3 else "")
        lines.append(f"  {row.cycles:>15,}  {row.share:>6.1%}  {mostly:<15}  {row.origin}  [{names}]")
    return "\n".join(lines)


def _memory(profile: Profile) -> str:
    memory, have = profile.memory, profile.executable.target.bytes_per_tile
    mean, worst = float(memory.tile_bytes.mean()), memory.max_tile_bytes
    free = have - worst
    rows = [
        ("Fullest tile", f"{memory.worst_tile}, {_bytes(worst)} of {_bytes(have)} ({_percent(worst, have).strip()})"),
        ("Free on it", f"{_bytes(free)}" if free >= 0 else f"none, {_bytes(-free)} too much"),
        ("Mean", _bytes(mean)),
        ("All tiles", _bytes(memory.total_bytes)),
        ("Peak at", memory.peak_step),
    ]
    overflowing = int((memory.tile_bytes > have).sum())
    if overflowing:
        rows.append(("Out of memory", f"{overflowing:,} tiles"))
    parts = [_table("Memory", rows), _categories(profile), _histogram(memory.tile_bytes), _largest(profile)]
    return "\n\n".join(parts)


def _categories(profile: Profile) -> str:
    worst = profile.memory.worst_tile
    rows = [
        (name, f"{_bytes(int(layer[worst])):>12}  {_bytes(int(layer.sum())):>12}")
        for name, layer in profile.memory.by_category.items()
        if layer.any()
    ]
    return _table("Memory by category, fullest tile and all tiles", rows)


def _histogram(tile_bytes: np.ndarray) -> str:
    low, high = int(tile_bytes.min()), int(tile_bytes.max())
    edges = np.unique(np.linspace(low, high + 1, _BINS + 1).astype(np.int64))
    counts, edges = np.histogram(tile_bytes, edges)
    lines = ["Memory by tile, number of tiles:"]
    for start, stop, number in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "*" * -(-int(number) * _BARS // max(1, int(counts.max())))
        lines.append(f"  {int(start):>10,} to {int(stop) - 1:>10,} B  {bar:<{_BARS}}  {int(number):,}")
    return "\n".join(lines)


def _largest(profile: Profile) -> str:
    lines = ["Largest on the fullest tile at its peak:"]
    return "\n".join(lines + [f"  {item}" for item in profile.memory.largest[:5]])


def _fallbacks(fallbacks: tuple[Fallback, ...]) -> str:
    if not fallbacks:
        return ""
    lines = ["Operations on one tile only, for want of a parallel rule:"]
    for item in fallbacks:
        borrowed = f", memory of {item.borrowed_tiles:,} tiles" if item.borrowed_tiles > 1 else ""
        lines.append(f"  {item.cycles:>15,} cycles  {item.operation} ({item.name}), {item.origin}{borrowed}")
    return "\n".join(lines)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:5.1f} %"


def _bytes(size: float) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} B"


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:,.3f} {unit}"
    return f"{seconds / 1e-9:,.1f} ns"
