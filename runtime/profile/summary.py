"""The profile as text: the machine, the graph, how full the tiles are, how long a run takes and why, what to look at.

Input: a `Profile`. Output: text with the sections of Poplar's profile summary, in its order: target, graph, memory,
variable storage, execution, cycles by vertex type, steps. Added are the costliest lines of source, what runs on one
tile only, arithmetic in dtypes that the machine lacks, and what was planned with more memory than planners may use.
Source: Poplar & PopLibs user guide, "Profile summary output".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile.execution import tile_cycles, vertex_type_cycles
from ipujax.runtime.profile.memory import vertex_type_bytes
from ipujax.runtime.profile.text import coloured, duration, share, size, table, wants_colours

if TYPE_CHECKING:
    from ipujax.runtime.graph.graph import UnmetBound
    from ipujax.runtime.profile.emulated import Emulated
    from ipujax.runtime.profile.profile import Fallback, Operation, Profile


from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ipujax.runtime.memory import LiveItem
from ipujax.runtime.profile.ids import Numbering
from ipujax.runtime.profile.liveness import LiveNode, liveness_tree

if TYPE_CHECKING:
    from ipujax.runtime.profile.profile import Profile


from typing import TYPE_CHECKING

from ipujax.runtime.profile.ids import ComputeSetRow, Json

if TYPE_CHECKING:
    from ipujax.runtime.profile.profile import Profile

_LABELS = {"global_exchange": "global exchange", "host_exchange": "host exchange"}
_TYPES = 10  # vertex types that are listed; the others are one row
_TILE_CYCLES = (
    ("Compute, idle threads included", "compute"),
    ("Compute, idle threads excluded", "activeCompute"),
    ("Exchange", "doExchange"),
    ("Global exchange", "globalExchange"),
    ("Host exchange", "streamCopy"),
    ("Shared structure copy", "copySharedStructure"),
    ("Sync", "sync"),
)


def summary(
    profile: Profile,
    operations: int = 5,
    *,
    lines: str = "user",
    show_execution_steps: bool = False,
    show_var_storage: bool = False,
    show_optimizations: bool = False,
    show_per_ipu_memory_usage: bool = False,
    colours: bool | None = None,
) -> str:
    """The profile as text for people; see `Profile.summary`."""
    sections = [_target(profile), _graph(profile)]
    sections += [_optimizations(profile)] if show_optimizations else []
    sections += [memory_totals(profile), memory_by_category(profile), _type_bytes(profile)]
    sections += [memory_histogram(profile), largest_on_fullest_tile(profile)]
    sections += [memory_by_ipu(profile)] if show_per_ipu_memory_usage else []
    sections += [variable_storage(profile)] if show_var_storage else []
    sections += [*_execution(profile, operations, lines), _fallbacks(profile.fallbacks)]
    sections += [_emulated(profile.emulated), _bounds(profile.unmet_bounds)]
    sections += [execution_steps(profile)] if show_execution_steps else []
    text = "\n\n".join(section for section in sections if section) + "\n"
    return coloured(text) if wants_colours(colours, is_terminal=False) else text


def _target(profile: Profile) -> str:
    target, replicas = profile.executable.target, profile.executable.graph.replication_factor
    replicated = [("Replicas", f"{replicas:,}; figures are per replica")]
    several = [("Tiles", f"{target.num_tiles:,}")]
    return table(
        "Target",
        [
            ("Name", target.name),
            *(replicated if replicas > 1 else []),
            ("IPUs", f"{target.num_ipus:,}"),
            ("Tiles per IPU", f"{target.tiles_per_ipu:,}"),
            *(several if target.num_ipus > 1 else []),
            ("Memory per tile", size(target.bytes_per_tile)),
            ("Total memory", size(target.total_memory_bytes)),
            ("Clock", f"{target.clock_hz / 1e6:,.0f} MHz"),
        ],
    )


def _graph(profile: Profile) -> str:
    counts = profile.graph_counts
    names = {"Vertices": "numVertices", "Edges": "numEdges", "Variables": "numVars", "Compute sets": "numComputeSets"}
    return table("Graph", [(label, f"{counts[name]:,}") for label, name in names.items()])


def _optimizations(profile: Profile) -> str:
    """What compilation measured of itself."""
    return table("Compilation", [(name, f"{value:.6g}") for name, value in profile.optimization_info.items()])


def _type_bytes(profile: Profile) -> str:
    used = vertex_type_bytes(profile.executable, profile.numbering)
    ordered = sorted(used.items(), key=lambda item: (-item[1], item[0]))
    return _by_type("Memory by vertex type, state and code on all tiles", [(name, "", n) for name, n in ordered], "B")


def _by_type(title: str, rows: list[tuple[str, str, int]], unit: str) -> str:
    """The dearest vertex types, and the others together: name, note, figure."""
    if not rows:
        return ""
    kept, others = rows[:_TYPES], rows[_TYPES:]
    if len(others) > 1:
        kept = [*kept, (f"{len(others)} other types", "", sum(figure for _, _, figure in others))]
    else:
        kept = rows
    width, notes = max(len(name) for name, _, _ in kept), max(len(note) for _, note, _ in kept)
    lines = [f"  {name:<{width}}  {note:>{notes}}  {figure:>15,} {unit}" for name, note, figure in kept]
    return "\n".join([f"{title}:", *lines])


def _execution(profile: Profile, operations: int, lines: str) -> list[str]:
    try:
        cycles = profile.cycles
    except ProfileError as unknown:
        # Memory is known even so; the text says what is missing instead of time.
        return [table("Execution", [("Cycles", f"unknown: {unknown.what}"), ("Try", str(unknown.hint))])]
    rows = [("Cycles", f"{cycles:,}"), ("Estimated time", duration(profile.seconds))]
    if profile.executable.target.num_ipus > 1:
        rows.append(("Critical IPU", str(profile.timeline.critical_ipu)))
    for phase, spent in profile.phase_cycles.items():
        rows.append((_LABELS.get(phase, phase).capitalize(), f"{spent:>15,}  {share(spent, cycles)}"))
    types = vertex_type_cycles(profile.numbering, profile.timeline)
    by_type = [(name, f"({count:,} instances)", active) for name, (count, active) in types.items()]
    return [
        table("Execution", rows),
        _all_tiles(profile),
        _by_type("Active cycles by vertex type, all tiles", by_type, "cycles"),
        _operations(profile.operations(operations, lines=lines)),
    ]


def _all_tiles(profile: Profile) -> str:
    spent = tile_cycles(profile.executable, profile.numbering, profile.timeline)
    rows = [(label, f"{spent[name]:>15,}") for label, name in _TILE_CYCLES]
    whole = profile.cycles * profile.executable.target.num_tiles
    balance = (
        f"{tile_balance(profile):.0%} of tile cycles of compute phases, {_ratio(spent['compute'], whole):.0%} of all"
    )
    threads = f"{_ratio(spent['activeCompute'], spent['compute']):.0%} of worker cycles of computing tiles"
    return table("Cycles of all tiles", [*rows, ("Tile balance", balance), ("Thread balance", threads)])


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def tile_balance(profile: Profile) -> float:
    """Mean share of compute phases in which a tile of the IPUs taking part computes; 1 is best."""
    tiles, used, spent = profile.executable.target.tiles_per_ipu, 0, 0
    for leaf, cost in profile.executable.costs.items():
        compute = getattr(cost, "compute_cycles", None)
        if compute is not None:
            runs = profile.timeline.executions.get(leaf, 0)
            used += int(compute.sum()) * runs
            spent += int(compute.reshape(-1, tiles).max(1).sum()) * tiles * runs
    return _ratio(used, spent)


def _operations(rows: tuple[Operation, ...]) -> str:
    if not rows:
        return ""
    lines = ["Most expensive lines:", f"  {'cycles':>15}  {'share':>6}  {'mostly':<15}  where"]
    for row in rows:
        mostly = _LABELS.get(row.dominant, row.dominant)
        names = ", ".join(row.names[:3]) + (", …" if len(row.names) > 3 else "")
        lines.append(f"  {row.cycles:>15,}  {row.share:>6.1%}  {mostly:<15}  {row.origin}  [{names}]")
    return "\n".join(lines)


def _bounds(unmet: tuple[UnmetBound, ...]) -> str:
    if not unmet:
        return ""
    lines = ["Planned with more memory than the available proportion:"]
    return "\n".join([*lines, *(f"  {item}, {item.origin}" for item in unmet)])


def _emulated(rows: tuple[Emulated, ...]) -> str:
    if not rows:
        return ""
    lines = ["Arithmetic in dtypes that the machine does not have:"]
    for row in rows:
        names = ", ".join(row.operations[:3]) + (", …" if len(row.operations) > 3 else "")
        lines.append(f"  {row.cycles:>15,} cycles  {row.dtype} ({names}), {row.origin}")
    return "\n".join(lines)


def _fallbacks(fallbacks: tuple[Fallback, ...]) -> str:
    if not fallbacks:
        return ""
    lines = ["Operations on one tile only, for want of a parallel rule:"]
    for item in fallbacks:
        borrowed = f", memory of {item.borrowed_tiles:,} tiles" if item.borrowed_tiles > 1 else ""
        lines.append(f"  {item.cycles:>15,} cycles  {item.operation} ({item.name}), {item.origin}{borrowed}")
    return "\n".join(lines)


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


def execution_steps(profile: Profile) -> str:
    """All steps of a run, in order; nothing when its loops are not known."""
    try:
        steps = profile.execution()["simulation"]["steps"]
    except ProfileError:
        return ""  # which the section on execution says
    lines = ["Steps:"]
    for step in steps:
        if step["type"] == "Sync":
            lines.append(f"  --- {step['syncType']} Sync ---")
        else:
            lines.extend(_step(step, profile))
    return "\n".join(lines)


def _step(step: Json, profile: Profile) -> Iterator[str]:
    name = f": {step['name']}" if step.get("name") else ""
    repeats = f", {step['repeats']:,} times" if step["repeats"] > 1 else ""
    overlapped = f" ({step['cyclesOverlapped']:,} overlapped with previous)" if "cyclesOverlapped" in step else ""
    yield f"  {step['type']} (cycles {step['cyclesFrom']:,} - {step['cyclesTo']:,}{repeats}){name}"
    yield f"    Cycles:               {step['cycles']:,}{overlapped}"
    yield f"    Active Tiles:         {step['activeTiles']:,} / {profile.executable.target.num_tiles:,}"
    if "threadBalance" in step:
        yield f"    Thread Balance:       {step['threadBalance']:.1%}"
    yield f"    Tile Balance:         {step['tileBalance']:.1%}"
    yield f"    Active Tile Balance:  {step['activeTileBalance']:.1%}"
    if "totalData" in step:
        yield f"    Total Data:           {step['totalData']:,}"
        yield f"    Data Balance (mean / max data per tile): {step['dataBalance']:.1%}"
    if "computeSet" in step:
        yield from _vertices(profile.numbering.compute_sets[step["computeSet"]])


def _vertices(row: ComputeSetRow) -> Iterator[str]:
    """Instances and active cycles of each vertex type of one compute set."""
    if not row.vertices:
        return
    yield "    By vertex type:"
    width = max(map(len, row.vertices))
    for name, count in sorted(row.vertices.items(), key=lambda item: -row.active_by_type.get(item[0], 0)):
        yield f"      {name:<{width}}  ({count:,} instances):  {row.active_by_type.get(name, 0):>12,}"
