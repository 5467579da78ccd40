"""The memory of a profile as text: the fullest tile, bytes by category, how many tiles are how full, what is live when.

Input: a `Profile`. Output: text. Source: Poplar & PopLibs user guide, "Profile summary output".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ipujax.runtime.memory.live_items import LiveItem
from ipujax.runtime.profile.ids import Numbering
from ipujax.runtime.profile.liveness import LiveNode, liveness_tree
from ipujax.runtime.profile.text import share, size, table

if TYPE_CHECKING:
    from ipujax.runtime.profile.profile import Profile

_BARS = 40  # characters of the longest bar of the histogram
_BINS = 8
_WORST = 3  # tiles named when they are out of memory
_REGIONS = {"ordinary": "nonInterleaved", "interleaved": "interleaved", "overflowed": "overflowed"}


def memory_totals(profile: Profile) -> str:
    """How full the tiles are; gaps count where nothing else is said."""
    memory, have, regions = profile.memory, profile.executable.target.bytes_per_tile, profile.region_bytes
    worst, over = memory.worst_tile, memory.overflowed_bytes
    used, free = memory.max_tile_bytes, have - memory.max_tile_bytes
    gaps = int(memory.gap_bytes.sum())
    rows = [
        ("Fullest tile", f"{worst}, {size(used)} of {size(have)} ({share(used, have).strip()})"),
        ("Free on it", f"{size(free)}" if free >= 0 else f"none, {size(-free)} too much"),
        ("Mean", size(float(memory.tile_bytes.mean()))),
        ("All tiles", f"{size(memory.total_bytes)}, {size(memory.total_bytes - gaps)} without gaps"),
        ("Regions", ", ".join(f"{size(int(regions[name].sum()))} {label}" for label, name in _REGIONS.items())),
        ("Peak at", memory.peak_step),
    ]
    if over.any():
        fullest = ", ".join(f"tile {tile} by {size(int(over[tile]))}" for tile in _most(over))
        count = np.count_nonzero(over)
        rows.append(("Out of memory", f"{count:,} tile{'s' if count > 1 else ''}, worst {fullest}"))
    return table("Memory", rows)


def _most(over: np.ndarray) -> list[int]:
    """The tiles that lack most, the worst first."""
    ordered = np.argsort(-over, kind="stable")[:_WORST]
    return [int(tile) for tile in ordered if over[tile] > 0]


def memory_by_category(profile: Profile) -> str:
    """What the bytes are for."""
    worst = profile.memory.worst_tile
    rows = [
        (name, f"{size(int(layer[worst])):>12}  {size(int(layer.sum())):>12}")
        for name, layer in profile.memory.by_category.items()
        if layer.any()
    ]
    return table("Memory by category, fullest tile and all tiles", rows)


def memory_histogram(profile: Profile) -> str:
    """How many tiles hold how much."""
    tile_bytes = profile.memory.tile_bytes
    low, high = int(tile_bytes.min()), int(tile_bytes.max())
    edges = np.unique(np.linspace(low, high + 1, _BINS + 1).astype(np.int64))
    counts, edges = np.histogram(tile_bytes, edges)
    lines = ["Memory by tile, number of tiles:"]
    for start, stop, number in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "*" * -(-int(number) * _BARS // max(1, int(counts.max())))
        lines.append(f"  {int(start):>10,} to {int(stop) - 1:>10,} B  {bar:<{_BARS}}  {int(number):,}")
    return "\n".join(lines)


def largest_on_fullest_tile(profile: Profile) -> str:
    """What takes most of the fullest tile when it is fullest."""
    lines = ["Largest on the fullest tile at its peak:"]
    return "\n".join(lines + [f"  {item}" for item in profile.memory.largest[:5]])


def memory_by_ipu(profile: Profile) -> str:
    """How full the tiles of each IPU are."""
    rows = []
    for number, tiles in enumerate(profile.memory.tile_bytes.reshape(profile.executable.target.num_ipus, -1)):
        rows.append((f"IPU {number}", f"{int(tiles.sum()):,} B in all, {int(tiles.max()):,} B on its fullest tile"))
    return table("Memory by IPU", rows)


def variable_storage(profile: Profile) -> str:
    """What is live at every step of the program, on all tiles together."""
    tree = liveness_tree(profile.executable)
    lines = ["Variable storage liveness, all tiles:", f"  Always-live bytes: {tree.always_bytes:,}"]
    lines += ["  Always-live variables:", *_items(tree.always, "    ")]
    lines += [f"  Maximum live bytes (including always-live): {tree.max_bytes:,}"]
    return "\n".join([*lines, *_live(tree.root, profile.numbering, "  ")])


def _live(node: LiveNode, ids: Numbering, indent: str) -> Iterator[str]:
    if not ids.programs_of(node.program):
        return
    yield f"{indent}{ids.type_of(node.program)}" + (f": {node.name}" if node.name else "")
    if node.live_bytes is not None:
        yield f"{indent}  Live Bytes (excluding always-live): {node.live_bytes:,}"
        yield f"{indent}  Live Vars (excluding always-live):"
        yield from _items(node.live, f"{indent}    ")
    for child in node.children:
        yield from _live(child, ids, f"{indent}  ")


def _items(items: tuple[LiveItem, ...], indent: str) -> list[str]:
    width = max((len(item.name) for item in items), default=0)
    return [f"{indent}{item.name:<{width}}  {item.num_bytes:>15,}" for item in items]
