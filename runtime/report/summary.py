"""Sections of the profile as text: machine, graph, memory of the tiles, time of a run, and what to look at.

Input: `Figures`. Output: one section of text a function, empty where there is nothing to say. Sections are those of
Poplar's profile summary: target, graph, memory, variable storage, execution, cycles by vertex type, steps. Added are
the costliest lines of source, what the host took for batches, what runs on one tile only, arithmetic in dtypes that the
machine lacks, and plans that exceed the memory proportion.
Source: Poplar & PopLibs user guide, "Profile summary output".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise

import numpy as np

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile import NO_LAYER, Figures, Operation, out_of_memory
from ipujax.runtime.profile.text import duration, share, size, table
from ipujax.runtime.sections.ids import Json
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import readable_name
from ipujax.runtime.views import answers, tree_of
from ipujax.runtime.views.layer_view import PART_LABELS, PARTS

Vertices = dict[str, tuple[int, int]]  # of a compute set: how many of each type, and their active cycles
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


def headline(profile: Figures) -> str:
    """What does not fit, and what was profiled; nothing for a program without a function that fits."""
    identity, over = profile.identity, out_of_memory(profile.memory)
    title = profile.title if identity.function or identity.label else ""
    ways = [f"  {'or' if number else 'try'}: {way}" for number, way in enumerate(profile.ways_to_fit)]
    return "\n".join(filter(None, (f"Out of memory: {over}" if over else "", *ways, title)))


def target(profile: Figures) -> str:
    """The machine."""
    one, replicas = profile.target, profile.replicas
    rows = [
        ("Name", one.name),
        ("Replicas", f"{replicas:,}; figures are per replica" if replicas > 1 else ""),
        ("IPUs", f"{one.num_ipus:,}"),
        ("Tiles per IPU", f"{one.tiles_per_ipu:,}"),
        ("Tiles", f"{one.num_tiles:,}" if one.num_ipus > 1 else ""),
        ("Memory per tile", size(one.bytes_per_tile)),
        ("Total memory", size(one.total_memory_bytes)),
        ("Clock", f"{one.clock_hz / 1e6:,.0f} MHz"),
    ]
    return table("Target", [row for row in rows if row[1]])


def graph(profile: Figures) -> str:
    """How many vertices, edges, variables and compute sets there are."""
    counts = profile.graph_counts
    names = {"Vertices": "numVertices", "Edges": "numEdges", "Variables": "numVars", "Compute sets": "numComputeSets"}
    return table("Graph", [(label, f"{counts[name]:,}") for label, name in names.items()])


def optimizations(profile: Figures) -> str:
    """What compilation measured of itself."""
    return table("Compilation", [(name, f"{value:.6g}") for name, value in profile.optimization_info.items()])


def memory_by_type(profile: Figures) -> str:
    """State and code of vertices, by their type."""
    ordered = sorted(profile.vertex_type_bytes.items(), key=lambda item: (-item[1], item[0]))
    return _by_type("Memory by vertex type, state and code on all tiles", [(name, "", n) for name, n in ordered], "B")


def _by_type(title: str, rows: list[tuple[str, str, int]], unit: str) -> str:
    """The most expensive vertex types, and the others together: name, note, figure."""
    if len(others := rows[_TYPES:]) > 1:
        rows = [*rows[:_TYPES], (f"{len(others)} other types", "", sum(figure for _, _, figure in others))]
    width, notes = (max(map(len, column), default=0) for column in ([row[0] for row in rows], [row[1] for row in rows]))
    return _listed(title, (f"{name:<{width}}  {note:>{notes}}  {figure:>15,} {unit}" for name, note, figure in rows))


def _listed(title: str, lines: Iterable[object]) -> str:
    """A heading and lines under it; nothing without lines."""
    indented = [f"  {line}" for line in lines]
    return "\n".join([f"{title}:", *indented]) if indented else ""


def _first(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def execution(profile: Figures, operations: int, lines: str) -> str:
    """How long a run takes, what tiles do meanwhile, and the most expensive vertex types and lines of source."""
    try:
        cycles = profile.cycles
    except ProfileError as unknown:
        # Memory is known even so; the text says what is missing instead of time.
        return table("Execution", [("Cycles", f"unknown: {unknown.what}"), ("Try", str(unknown.hint))])
    rows = [("Cycles", f"{cycles:,}"), ("Estimated time", duration(profile.seconds))]
    if profile.target.num_ipus > 1:
        rows.append(("Phases of", f"IPU {profile.limiting_ipu}, which is busy for most cycles"))
    for phase, spent in profile.phase_cycles.items():
        rows.append((_LABELS.get(phase, phase).capitalize(), f"{spent:>15,}  {share(spent, cycles)}"))
    if profile.overlapped_cycles:
        rows.append(
            ("I/O tiles meanwhile", f"{profile.overlapped_cycles:>15,}  {share(profile.overlapped_cycles, cycles)}")
        )
    types = profile.vertex_type_cycles
    by_type = [(name, f"({count:,} instances)", active) for name, (count, active) in types.items()]
    sections = (
        table("Execution", rows),
        _phases_by_ipu(profile),
        _all_tiles(profile),
        _by_type("Active cycles by vertex type, all tiles", by_type, "cycles"),
        _operations(profile.operations(operations, lines=lines), profile),
    )
    return "\n\n".join(filter(None, sections))


def _phases_by_ipu(profile: Figures) -> str:
    """Shares of the run of each phase, for every IPU and on average; nothing for one IPU."""
    try:
        ipus = profile.ipu_phase_cycles
    except ProfileError as error:  # saved by a version that kept one IPU
        return table("Phases by IPU", [("Not known", error.what)])
    if len(ipus) == 1:
        return ""
    names, whole = list(ipus[0]), max(1, profile.cycles)
    rows = [(f"IPU {ipu}", [phases[name] / whole for name in names]) for ipu, phases in enumerate(ipus)]
    rows.append(("Mean", np.mean([shares for _, shares in rows], 0).tolist()))
    widths = [max(len(_LABELS.get(name, name)), 7) for name in names]
    head = "  ".join(f"{_LABELS.get(name, name):>{width}}" for name, width in zip(names, widths, strict=True))
    lines = [
        f"{label:<8}  " + "  ".join(f"{share:>{width}.1%}" for share, width in zip(shares, widths, strict=True))
        for label, shares in rows
    ]
    return _listed("Phases by IPU", [f"{'':<8}  {head}", *lines])


def _all_tiles(profile: Figures) -> str:
    spent = profile.tile_cycles
    rows = [(label, f"{spent[name]:>15,}") for label, name in _TILE_CYCLES]
    whole = profile.cycles * profile.target.num_tiles
    balance = (
        f"{profile.tile_balance:.0%} of tile cycles of compute phases, {_ratio(spent['compute'], whole):.0%} of all"
    )
    threads = f"{_ratio(spent['activeCompute'], spent['compute']):.0%} of worker cycles of computing tiles"
    return table("Cycles of all tiles", [*rows, ("Tile balance", balance), ("Thread balance", threads)])


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _operations(rows: tuple[Operation, ...], profile: Figures) -> str:
    several = profile.target.num_ipus > 1 and all(row.limiting_cycles is not None for row in rows)
    of_limiting = f"  {f'IPU {profile.limiting_ipu}':>15}" if several else ""
    head = [f"{'cycles':>15}{of_limiting}  {'share':>6}  {'mostly':<15}  where"] if rows else []
    lines = (
        f"{row.cycles:>15,}{f'  {row.limiting_cycles:>15,}' if several else ''}  {row.share:>6.1%}"
        f"  {_LABELS.get(row.dominant, row.dominant):<15}  {row.origin}{_called_from(row)}  [{_first(row.names)}]"
        for row in rows
    )
    title = "Most expensive lines, busy cycles of all IPUs" if several else "Most expensive lines"
    return _listed(title, [*head, *lines])


def _called_from(row: Operation) -> str:
    """The line that most of the cycles of a line are called from, if it is called from several."""
    if len(row.callers) < 2:
        return ""
    caller, cycles = next(iter(row.callers.items()))
    return f", called from {caller}: {share(cycles, row.cycles).strip()}"


def layers(profile: Figures, most: int) -> str:
    """The layers as a tree with their busy cycles by part of training, FLOPs and bytes.

    Args:
        profile: of a run.
        most: layers to list, the most expensive.
    """
    try:
        root = tree_of(profile)
    except ProfileError as error:
        return table("Layers", [("Not known", error.what)])
    if root.children.keys() <= {NO_LAYER}:
        return ""
    parts = [part for part in PARTS if root.parts[part]]
    shown = sorted((node for node in root.walk() if node.path), key=lambda node: -node.cycles)[:most]
    paths, total = {node.path for node in shown}, max(1, root.cycles)
    columns = [f"{PART_LABELS.get(part, part):>10}" for part in parts] if len(parts) > 1 else []
    head = "  ".join(
        [f"{'cycles':>15}", f"{'share':>6}", *columns, f"{'FLOP':>9}", f"{'peak':>10}", f"{'always':>10}", "layer"]
    )
    rows = []
    for node in root.walk():
        if node.path in paths:
            by_part = [f"{node.parts[part] / total:>10.1%}" for part in parts] if columns else []
            sizes = f"{size(node.peak_bytes):>10}", f"{size(node.always_bytes):>10}"
            indent = "  " * node.path.count("/")
            figures = (f"{node.cycles:>15,}", f"{node.cycles / total:>6.1%}", *by_part, f"{node.flops:>9.2e}", *sizes)
            rows.append("  ".join([*figures, f"{indent}{node.name}"]))
    rest = sum(1 for _ in root.walk()) - 1 - len(rows)
    tail = [f"… and {rest:,} more layers"] if rest > 0 else []
    return _listed("Layers, those inside them included", [head, *rows, *tail]) if rows else ""


def first_screen(profile: Figures) -> str:
    """The answers to what limits the program, a line each; nothing of a Poplar program, whose text is Poplar's."""
    if not profile.identity.function:
        return ""
    return _listed("What limits this program", (f"{a.question} {a.sentence}" for a in answers(profile)))


def host_data(profile: Figures) -> str:
    """What the host took for the batches of a call, and whether IPUs would wait for them."""
    host = profile.host
    if host is None:
        return ""
    how = "prepared ahead" if host.is_ahead else "none prepared ahead"
    prepared = host.prepared_seconds_per_call
    rows = [
        ("Batches", f"{host.batches:,}, {host.batches_per_call:,} a call, {how}"),
        ("Prepared in", f"{duration(prepared)} a call, on this machine"),
        ("Waited for", f"{duration(host.waited_seconds_per_call)} a call, on this machine"),
    ]
    try:
        seconds = profile.seconds
    except ProfileError:  # a loop runs as often as its data says
        return table("Host data", rows)
    idle = host.idle_seconds(seconds)
    rows.append(("IPUs would wait", f"{duration(idle)} a call, {share(idle, idle + seconds).strip()} of the time"))
    slower = f"host: IPUs take {duration(seconds)} a call" if host.is_slower_than(seconds) else "device"
    return table("Host data", [*rows, ("Bound by", slower)])


def unmet_bounds(profile: Figures) -> str:
    """Plans that exceed the memory proportion."""
    lines = (f"{item}, {item.origin}" for item in profile.unmet_bounds)
    return _listed("Planned with more memory than the available proportion", lines)


def emulated(profile: Figures) -> str:
    """Arithmetic in dtypes that the machine lacks."""
    lines = (
        f"{row.cycles:>15,} cycles  {row.dtype} ({_first(row.operations)}), {row.origin}" for row in profile.emulated
    )
    return _listed("Arithmetic in dtypes that the machine does not have", lines)


def fallbacks(profile: Figures) -> str:
    """What runs on one tile only."""
    lines = (
        f"{item.cycles:>15,} cycles  {item.operation} ({item.name}), {item.origin}"
        + (f", memory of {item.borrowed_tiles:,} tiles" if item.borrowed_tiles > 1 else "")
        for item in profile.fallbacks
    )
    return _listed("Operations on one tile only, for want of a parallel rule", lines)


_BARS = 40  # characters of the longest bar of the histogram
_BINS = 8
_WORST = 3  # tiles named when they are out of memory
_REGIONS = {"ordinary": "nonInterleaved", "interleaved": "interleaved", "overflowed": "overflowed"}


def memory_totals(profile: Figures) -> str:
    """How full the tiles are; gaps count where nothing else is said."""
    memory, have, regions = profile.memory, profile.target.bytes_per_tile, profile.region_bytes
    worst, over = memory.worst_tile, memory.overflowed_bytes
    used, free = memory.max_tile_bytes, have - memory.max_tile_bytes
    gaps = int(memory.gap_bytes.sum())
    rows = [
        ("Fullest tile", f"{worst}, {size(used)} of {size(have)} ({share(used, have).strip()})"),
        ("Free on it", f"{size(free)}" if free >= 0 else f"none, {size(-free)} too much"),
        *_largest_variable(profile),
        ("Mean", size(float(memory.tile_bytes.mean()))),
        ("All tiles", f"{size(memory.total_bytes)}, {size(memory.total_bytes - gaps)} without gaps"),
        ("Regions", ", ".join(f"{size(int(regions[name].sum()))} {label}" for label, name in _REGIONS.items())),
        ("Peak at", readable_name(memory.peak_step)),
    ]
    if profile.streaming_memory_bytes:
        have_there = profile.target.streaming_memory_bytes * profile.target.num_ipus
        rows.append(("Streaming memory", f"{size(profile.streaming_memory_bytes)} of {size(have_there)}"))
    if len(profile.byte_prices) > 1:
        rows.append(("Cost per byte", _byte_price(profile)))
    lacking = np.flatnonzero(over)
    if len(lacking):
        most = lacking[np.argsort(-over[lacking], kind="stable")][:_WORST]
        fullest = ", ".join(f"tile {tile} by {size(int(over[tile]))}" for tile in most)
        rows.append(("Out of memory", f"{len(lacking):,} tile{'s' if len(lacking) > 1 else ''}, worst {fullest}"))
    return table("Memory", rows)


def _largest_variable(profile: Figures) -> list[tuple[str, str]]:
    """What takes most of the fullest tile among variables; nothing where none is there."""
    items = (item for item in profile.memory.largest if item.category in ("variable", "constant"))
    return [("Largest on it", str(item).strip()) for item in islice(items, 1)]


def _byte_price(profile: Figures) -> str:
    """The price at which the program fits, and what it costs."""
    first = profile.byte_prices[0]
    try:
        cost = f"{profile.byte_price_cost_cycles:+,} cycles"
    except ProfileError:
        cost = "cycles depend on trip counts"
    return f"{profile.byte_price:g} cycles; at {first:g} it does not fit ({cost} since)"


def memory_by_category(profile: Figures) -> str:
    """What the bytes are for."""
    worst = profile.memory.worst_tile
    rows = [
        (name, f"{size(int(layer[worst])):>12}  {size(int(layer.sum())):>12}")
        for name, layer in profile.memory.by_category.items()
        if layer.any()
    ]
    return table("Memory by category, fullest tile and all tiles", rows)


def memory_by_role(profile: Figures) -> str:
    """What values the bytes hold: weights, gradients, activations, code…"""
    memory, title = profile.memory, "Memory by role, fullest tile and all tiles"
    worst = memory.worst_tile
    try:
        roles = memory.by_role
    except ProfileError as error:  # saved by an older version
        return table(title, [("Not known", error.what)])
    rows = sorted(((int(values[worst]), int(values.sum()), role) for role, values in roles.items()), reverse=True)
    return table(title, [(role, f"{size(here):>12}  {size(everywhere):>12}") for here, everywhere, role in rows])


def memory_histogram(profile: Figures) -> str:
    """How many tiles hold how much."""
    tile_bytes = profile.memory.tile_bytes
    low, high = int(tile_bytes.min()), int(tile_bytes.max())
    edges = np.unique(np.linspace(low, high + 1, _BINS + 1).astype(np.int64))
    counts, edges = np.histogram(tile_bytes, edges)
    most = max(1, int(counts.max()))
    lines = (
        f"{start:>10,} to {stop - 1:>10,} B  {'*' * -(-number * _BARS // most):<{_BARS}}  {number:,}"
        for (start, stop), number in zip(pairwise(edges.tolist()), counts.tolist(), strict=True)
    )
    return _listed("Memory by tile, number of tiles", lines)


def largest_on_fullest_tile(profile: Figures) -> str:
    """What takes most of the fullest tile when it is fullest."""
    return _listed("Largest on the fullest tile at its peak", profile.memory.largest[:5])


def memory_by_ipu(profile: Figures) -> str:
    """How full the tiles of each IPU are."""
    by_ipu = profile.memory.tile_bytes.reshape(profile.target.num_ipus, -1)
    rows = [f"{tiles.sum():,} B in all, {tiles.max():,} B on its fullest tile" for tiles in by_ipu]
    return table("Memory by IPU", [(f"IPU {number}", row) for number, row in enumerate(rows)])


def variable_storage(profile: Figures) -> str:
    """What is live at every step of the program, on all tiles together."""
    live = profile.liveness
    lines = ["Variable storage liveness, all tiles:", f"  Always-live bytes: {live['alwaysLiveBytes']:,}"]
    lines += ["  Always-live variables:", *_items(live["alwaysLiveVariables"], "    ")]
    lines += [f"  Maximum live bytes (including always-live): {live['maxLiveBytes']:,}"]
    return "\n".join([*lines, *_live(live["programs"], live["notAlwaysLiveVariables"], "  ")])


def _live(node: Json, variables: Sequence[Json], indent: str) -> Iterator[str]:
    yield f"{indent}{node['type']}" + (f": {node['name']}" if "name" in node else "")
    if "liveBytes" in node:
        yield f"{indent}  Live Bytes (excluding always-live): {node['liveBytes']:,}"
        yield f"{indent}  Live Vars (excluding always-live):"
        yield from _items([variables[number] for number in node["liveVariables"]], f"{indent}    ")
    for child in node.get("children", ()):
        yield from _live(child, variables, f"{indent}  ")


def _items(items: Sequence[Json], indent: str) -> list[str]:
    width = max((len(item["name"]) for item in items), default=0)
    return [f"{indent}{item['name']:<{width}}  {item['bytes']:>15,}" for item in items]


def execution_steps(profile: Figures) -> str:
    """All steps of a run, in order; nothing when its loops are not known."""
    try:
        steps = profile.execution()["simulation"]["steps"]
    except ProfileError:
        return ""  # which the section on execution says
    lines, vertices = ["Steps:"], profile.compute_set_vertices
    for step in steps:
        if step["type"] == "Sync":
            lines.append(f"  --- {step['syncType']} Sync ---")
        else:
            lines.extend(_step(step, profile.target, vertices))
    return "\n".join(lines)


def _step(step: Json, one: Target, vertices: Sequence[Vertices]) -> Iterator[str]:
    name = f": {step['name']}" if step.get("name") else ""
    repeats = f", {step['repeats']:,} times" if step["repeats"] > 1 else ""
    overlapped = f" ({step['cyclesOverlapped']:,} overlapped with previous)" if "cyclesOverlapped" in step else ""
    yield f"  {step['type']} (cycles {step['cyclesFrom']:,} - {step['cyclesTo']:,}{repeats}){name}"
    yield f"    Cycles:               {step['cycles']:,}{overlapped}"
    yield f"    Active Tiles:         {step['activeTiles']:,} / {one.num_tiles:,}"
    if "threadBalance" in step:
        yield f"    Thread Balance:       {step['threadBalance']:.1%}"
    yield f"    Tile Balance:         {step['tileBalance']:.1%}"
    yield f"    Active Tile Balance:  {step['activeTileBalance']:.1%}"
    if "totalData" in step:
        yield f"    Total Data:           {step['totalData']:,}"
        yield f"    Data Balance (mean / max data per tile): {step['dataBalance']:.1%}"
    if "computeSet" in step:
        yield from _vertices(vertices[step["computeSet"]])


def _vertices(found: Vertices) -> Iterator[str]:
    """Instances and active cycles of each vertex type of one compute set."""
    if not found:
        return
    yield "    By vertex type:"
    width = max(map(len, found))
    for name, (count, active) in sorted(found.items(), key=lambda item: -item[1][1]):
        yield f"      {name:<{width}}  ({count:,} instances):  {active:>12,}"
