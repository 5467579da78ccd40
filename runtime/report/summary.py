"""Sections of the profile as text: target, graph, memory of the tiles, time of a run, and findings.

Input: `Figures`. Output: one section of text a function, empty where it has no lines. Sections are those of Poplar's
profile summary: target, graph, memory, variable storage, execution, cycles by vertex type, steps. Added are the
costliest lines of source, time of the host for batches, fallbacks, arithmetic in dtypes that the machine lacks, and
plans that exceed the memory proportion.
Source: Poplar & PopLibs user guide, "Profile summary output".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import numpy as np

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.memory import attempt_lines
from ipujax.runtime.memory.live_item import readable_item
from ipujax.runtime.profile import NO_LAYER, Figures, Operation, out_of_memory
from ipujax.runtime.profile.figures import Lines
from ipujax.runtime.profile.text import duration, section, share, size, table
from ipujax.runtime.report.limit_sections import verdict_text
from ipujax.runtime.sections.ids import Json
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import readable_name
from ipujax.runtime.views import answers, certainty, tree_of
from ipujax.runtime.views.part_views import PART_LABELS, PARTS

Vertices = dict[str, tuple[int, int]]  # of a compute set: by type, number of vertices and their active cycles
_LABELS = {"global_exchange": "global exchange", "host_exchange": "host exchange"}
_NUM_TYPES = 10  # vertex types that are listed; the others are one row
_TILE_CYCLES = (  # labels of Poplar's summary, by the names of its execution profile
    ("Compute, idle threads included", "compute"),
    ("Compute, idle threads excluded", "activeCompute"),
    ("Exchange", "doExchange"),
    ("Global exchange", "globalExchange"),
    ("Host exchange", "streamCopy"),
    ("Shared structure copy", "copySharedStructure"),
    ("Sync", "sync"),
)


def headline(profile: Figures) -> str:
    """Return the title of the profile, below the lack of memory and its remedies where the program does not fit."""
    identity = profile.identity
    overflow = out_of_memory(profile.memory)
    title = profile.title if identity.function or identity.label else ""
    remedies = [f"  {'or' if number else 'try'}: {way}" for number, way in enumerate(profile.ways_to_fit)]
    return "\n".join(filter(None, (f"Out of memory: {overflow}" if overflow else "", *remedies, title)))


def target(profile: Figures) -> str:
    """List the figures of the target."""
    target = profile.target
    per_replica = f", {target.num_ipus:,} a replica" if profile.replicas > 1 and not profile.mesh else ""
    rows = [
        ("Name", target.name),
        profile.copies if profile.replicas > 1 else ("Replicas", ""),
        ("IPUs", f"{profile.num_ipus:,}{per_replica}"),
        ("Tiles per IPU", f"{target.tiles_per_ipu:,}"),
        ("Tiles", f"{target.num_tiles:,}" if target.num_ipus > 1 else ""),
        ("Memory per tile", size(target.bytes_per_tile)),
        ("Total memory", size(target.total_memory_bytes)),
        ("Clock", f"{target.clock_hz / 1e6:,.0f} MHz"),
    ]
    return table("Target", [row for row in rows if row[1]])


def graph(profile: Figures) -> str:
    """Count the vertices, edges, variables and compute sets of the graph."""
    counts = profile.graph_counts
    names = {"Vertices": "numVertices", "Edges": "numEdges", "Variables": "numVars", "Compute sets": "numComputeSets"}
    return table("Graph", [(label, f"{counts[name]:,}") for label, name in names.items()])


def optimizations(profile: Figures) -> str:
    """List the seconds of each step of the compilation."""
    return table("Compilation", [(name, f"{value:.6g}") for name, value in profile.optimization_info.items()])


def memory_by_type(profile: Figures) -> str:
    """List the bytes of state and code of vertices by vertex type, largest first."""
    ordered = sorted(profile.vertex_type_bytes.items(), key=lambda item: (-item[1], item[0]))
    return _list_types(
        "Memory by vertex type, state and code on all tiles", [(name, "", n) for name, n in ordered], "B"
    )


def _list_types(title: str, rows: list[tuple[str, str, int]], unit: str) -> str:
    """List rows of (vertex type, note, figure); those after the first ten become one row with their sum."""
    if len(tail := rows[_NUM_TYPES:]) > 1:  # a single one takes no more room than its sum
        rows = [*rows[:_NUM_TYPES], (f"{len(tail)} other types", "", sum(figure for _, _, figure in tail))]
    width, notes = (max(map(len, column), default=0) for column in ([row[0] for row in rows], [row[1] for row in rows]))
    return section(title, (f"{name:<{width}}  {note:>{notes}}  {figure:>15,} {unit}" for name, note, figure in rows))


def _join_first(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def execution(profile: Figures, operations: int, lines: Lines) -> str:
    """List cycles of a run, phases by IPU, cycles of all tiles, and the costliest vertex types and source lines."""
    try:
        cycles = profile.cycles
    except ProfileError as error:  # a trip count is data; the rest of the summary needs no cycles
        return table("Execution", [("Cycles", f"unknown: {error.what}"), ("Try", str(error.hint))])
    note = f", {profile.cycles_note}" if profile.cycles_note else ""
    rows = [("Cycles", f"{cycles:,}{note}"), ("Estimated time", duration(profile.seconds))]
    if profile.device_cycles < cycles:
        on_device = profile.device_cycles
        seconds = on_device / profile.target.clock_hz
        rows.append(("On the device", f"{on_device:,} cycles, {duration(seconds)}, without host exchange"))
    rows += certainty(profile)
    rows += [(name, f"{metric.total:,.6g}, a metric of yours") for name, metric in profile.metrics.items()]
    if profile.target.num_ipus > 1:
        rows.append(("Phases of", f"IPU {profile.limiting_ipu}, which is busy for most cycles"))
    for phase, phase_cycles in profile.phase_cycles.items():
        rows.append((_LABELS.get(phase, phase).capitalize(), f"{phase_cycles:>15,}  {share(phase_cycles, cycles)}"))
    if profile.overlapped_cycles:
        rows.append(
            ("I/O tiles meanwhile", f"{profile.overlapped_cycles:>15,}  {share(profile.overlapped_cycles, cycles)}")
        )
    types = profile.vertex_type_cycles
    languages = {name: f", {language}" for name, language in profile.vertex_type_languages.items()}
    by_type = [
        (name, f"({count:,} instances{languages.get(name, '')})", active) for name, (count, active) in types.items()
    ]
    sections = (
        table("Execution", rows),
        _phases_by_ipu(profile),
        _tile_cycles(profile),
        _list_types("Active cycles by vertex type, all tiles", by_type, "cycles"),
        _cycles_by_language(profile.language_cycles, profile.language_ranges),
        _list_operations(profile.operations(operations, lines=lines), profile),
    )
    return "\n\n".join(filter(None, sections))


def _cycles_by_language(cycles: dict[str, int], ranges: dict[str, tuple[int, int]]) -> str:
    """List the active cycles of vertices by language, with the range that compilers may give."""
    total = sum(cycles.values())
    rows = []
    for name, active in cycles.items():
        low, high = ranges[name]
        note = f"  {low:,} to {high:,} by compiler" if low < high else ""
        rows.append((f"estimated for {name}", f"{active:>15,}  {share(active, total)}{note}"))
    return table("Active cycles by language, all tiles", rows) if total else ""


def _phases_by_ipu(profile: Figures) -> str:
    """List each phase's share of the run, for every IPU and on average; "" for one IPU."""
    ipus = profile.ipu_phase_cycles
    if len(ipus) == 1:
        return ""
    names = list(ipus[0])
    cycles = max(1, profile.cycles)  # a program without steps takes none
    rows = [(f"IPU {ipu}", [phases[name] / cycles for name in names]) for ipu, phases in enumerate(ipus)]
    rows.append(("Mean", np.mean([shares for _, shares in rows], 0).tolist()))
    widths = [max(len(_LABELS.get(name, name)), 7) for name in names]
    head = "  ".join(f"{_LABELS.get(name, name):>{width}}" for name, width in zip(names, widths, strict=True))
    lines = [
        f"{label:<8}  " + "  ".join(f"{share:>{width}.1%}" for share, width in zip(shares, widths, strict=True))
        for label, shares in rows
    ]
    return section("Phases by IPU", [f"{'':<8}  {head}", *lines])


def _tile_cycles(profile: Figures) -> str:
    cycles = profile.tile_cycles
    rows = [(label, f"{cycles[name]:>15,}") for label, name in _TILE_CYCLES]
    computing = _ratio(cycles["compute"], profile.cycles * profile.target.num_tiles)
    balance = f"{profile.tile_balance:.0%} of tile cycles of compute phases, {computing:.0%} of all"
    threads = f"{_ratio(cycles['activeCompute'], cycles['compute']):.0%} of worker cycles of computing tiles"
    return table("Cycles of all tiles", [*rows, ("Tile balance", balance), ("Thread balance", threads)])


def _ratio(part: int, total: int) -> float:
    return part / total if total else 1.0  # no cycle is lost of none


def _list_operations(rows: tuple[Operation, ...], profile: Figures) -> str:
    """List lines of source with their busy cycles; of several IPUs those of the limiting one too."""
    has_limiting = profile.target.num_ipus > 1
    of_limiting = f"  {f'IPU {profile.limiting_ipu}':>15}" if has_limiting else ""
    head = [f"{'cycles':>15}{of_limiting}  {'share':>6}  {'mostly':<15}  where"] if rows else []
    lines = (
        f"{row.cycles:>15,}{f'  {row.limiting_cycles:>15,}' if has_limiting else ''}  {row.share:>6.1%}"
        f"  {_LABELS.get(row.dominant, row.dominant):<15}  {row.origin}{_main_caller(row)}  [{_join_first(row.names)}]"
        for row in rows
    )
    title = "Most expensive lines, busy cycles of all IPUs" if has_limiting else "Most expensive lines"
    return section(title, [*head, *lines])


def _main_caller(row: Operation) -> str:
    if len(row.callers) < 2:
        return ""
    caller, cycles = next(iter(row.callers.items()))  # ordered by cycles
    return f", called from {caller}: {share(cycles, row.cycles).strip()}"


def layers(profile: Figures, max_layers: int) -> str:
    """List the most expensive layers as a tree, with busy cycles by part of training, FLOPs and bytes."""
    try:
        root = tree_of(profile)
    except ProfileError as error:
        return table("Layers", [("Not known", error.what)])
    if root.children.keys() <= {NO_LAYER}:
        return ""
    parts = [part for part in PARTS if root.parts[part]]
    # A layer has at least the cycles of any layer inside it, so that parents of listed layers are listed too.
    nodes = sorted((node for node in root.walk() if node.path), key=lambda node: -node.cycles)[:max_layers]
    paths = {node.path for node in nodes}
    total = max(1, root.cycles)
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
    num_omitted = sum(1 for _ in root.walk()) - 1 - len(rows)
    tail = [f"… and {num_omitted:,} more layers"] if num_omitted > 0 else []
    return section("Layers, those inside them included", [head, *rows, *tail]) if rows else ""


def first_screen(profile: Figures) -> str:
    """Give the verdict, and list the answers on limits of the program.

    It is "" for a Poplar program, whose summary has Poplar's sections alone.
    """
    if not profile.identity.function:
        return ""
    limits = section("What limits this program", (f"{a.question} {a.sentence}" for a in answers(profile)))
    return "\n\n".join(filter(None, (verdict_text(profile), limits)))


def host_data(profile: Figures) -> str:
    """List the host's seconds for the batches of a call, and the cycles that IPUs would wait for them."""
    host = profile.host
    if host is None:
        return ""
    mode = "prepared ahead" if host.is_ahead else "none prepared ahead"
    rows = [
        ("Batches", f"{host.batches:,}, {host.batches_per_call:,} a call, {mode}"),
        ("Prepared in", f"{duration(host.prepared_seconds_per_call)} a call, on this machine"),
        ("Waited for", f"{duration(host.waited_seconds_per_call)} a call, on this machine"),
    ]
    try:
        seconds = profile.seconds
    except ProfileError:  # a trip count is data: the section on execution names the loop
        return table("Host data", rows)
    idle = host.idle_seconds(seconds)
    rows.append(("IPUs would wait", f"{duration(idle)} a call, {share(idle, idle + seconds).strip()} of the time"))
    slower = f"host: IPUs take {duration(seconds)} a call" if host.is_slower_than(seconds) else "device"
    return table("Host data", [*rows, ("Bound by", slower)])


def unmet_bounds(profile: Figures) -> str:
    """List the plans that exceed the memory proportion."""
    lines = (f"{item}, {item.origin}" for item in profile.unmet_bounds)
    return section("Planned with more memory than the available proportion", lines)


def computed_again(profile: Figures) -> str:
    """List the equal operations that are computed several times on purpose."""
    lines = (f"{row.count:>5,} × {row.operation} for {row.reason}, {row.origin}" for row in profile.computed_again)
    return section("Computed again on purpose", lines)


def emulated(profile: Figures) -> str:
    """List the arithmetic in dtypes that the machine lacks."""
    lines = (
        f"{row.cycles:>15,} cycles  {row.dtype} ({_join_first(row.operations)}), {row.origin}"
        for row in profile.emulated
    )
    return section("Arithmetic in dtypes that the machine does not have", lines)


def slow_paths(profile: Figures) -> str:
    """List the operations that take slower forms of code, most cycles first; the others are one row."""
    rows = profile.slow_paths
    lines = [f"{row.cycles:>15,} cycles  {row.operation}: {row.reason}, {row.origin}" for row in rows[:_NUM_TYPES]]
    omitted = rows[_NUM_TYPES:]
    lines += [f"{sum(row.cycles for row in omitted):>15,} cycles  {len(omitted):,} more"] if omitted else []
    return section("Slow paths, cycles of one run of each step", lines)


def padded_rows(profile: Figures) -> str:
    """List the rows that are padded to whole vectors."""
    lines = (
        f"{row.length} → {row.padded_length} elements: {row.saved_cycles:,} cycles fewer, "
        f"at most {size(row.added_bytes)} more on the fullest tile"
        for row in profile.padded_rows
    )
    return section("Rows padded to whole vectors", lines)


def fallbacks(profile: Figures) -> str:
    """List the fallbacks: operations that run on one tile."""
    lines = (
        f"{item.cycles:>15,} cycles  {item.operation} ({readable_name(item.name)}), {item.origin}"
        + (f", memory of {item.borrowed_tiles:,} tiles" if item.borrowed_tiles > 1 else "")
        for item in profile.fallbacks
    )
    return section("Operations on one tile only, for want of a parallel rule", lines)


def unpriced(profile: Figures) -> str:
    """List the operations that the cycles of the run do not count."""
    lines = (f"{item.operation} on the {item.place}, {_times(item.runs)}, {item.origin}" for item in profile.unpriced)
    return section("Unpriced operations, whose time no figure counts", lines)


def streamed_loops(profile: Figures) -> str:
    """List the loops whose rows are in the host's memory."""
    lines = (
        f"{x.iterations:>15,} iterations  {x.bytes_in:,} bytes in and {x.bytes_out:,} out in each, {x.origin}"
        for x in profile.streamed_loops
    )
    return section("Loops that stream rows from and to the host", lines)


def _times(runs: int | None) -> str:
    return "runs depend on data" if runs is None else f"{runs:,} run{'' if runs == 1 else 's'}"


_BAR_WIDTH = 40  # characters of the longest bar of the histogram
_NUM_BINS = 8
_NUM_OVERFLOWED = 3  # tiles that are named when they are out of memory
_REGIONS = {"ordinary": "nonInterleaved", "interleaved": "interleaved", "overflowed": "overflowed"}


def memory_totals(profile: Figures) -> str:
    """List the bytes of the fullest tile and of all tiles; gaps between variables count as used."""
    memory = profile.memory
    regions = profile.region_bytes
    capacity_bytes = profile.target.bytes_per_tile
    used_bytes = memory.max_tile_bytes
    free_bytes = capacity_bytes - used_bytes
    gap_bytes = int(memory.gap_bytes.sum())
    used = f"{size(used_bytes)} of {size(capacity_bytes)} ({share(used_bytes, capacity_bytes).strip()})"
    rows = [
        ("Fullest tile", f"{memory.worst_tile}, {used}"),
        ("Free on it", f"{size(free_bytes)}" if free_bytes >= 0 else f"none, {size(-free_bytes)} too much"),
        *_largest_variable(profile),
        ("Mean", size(float(memory.tile_bytes.mean()))),
        ("All tiles", f"{size(memory.total_bytes)}, {size(memory.total_bytes - gap_bytes)} without gaps"),
        ("Regions", ", ".join(f"{size(int(regions[name].sum()))} {label}" for label, name in _REGIONS.items())),
        ("Peak at", readable_name(memory.peak_step)),
    ]
    if profile.streaming_memory_bytes:
        total_bytes = profile.target.streaming_memory_bytes * profile.target.num_ipus
        rows.append(("Streaming memory", f"{size(profile.streaming_memory_bytes)} of {size(total_bytes)}"))
    overflowed_bytes = memory.overflowed_bytes
    tiles = np.flatnonzero(overflowed_bytes)
    if len(tiles):
        worst = tiles[np.argsort(-overflowed_bytes[tiles], kind="stable")][:_NUM_OVERFLOWED]
        fullest = ", ".join(f"tile {tile} by {size(int(overflowed_bytes[tile]))}" for tile in worst)
        rows.append(("Out of memory", f"{len(tiles):,} tile{'s' if len(tiles) > 1 else ''}, worst {fullest}"))
    return table("Memory", rows)


def _largest_variable(profile: Figures) -> list[tuple[str, str]]:
    items = (item for item in profile.memory.largest if item.category in ("variable", "constant"))  # by bytes
    return [("Largest on it", str(item).strip()) for item in islice(items, 1)]


def attempts(profile: Figures) -> str:
    """List the plans that were tried until one fitted; "" where the first does."""
    return section("Plans that were tried, gaps not counted", attempt_lines(profile.attempts))


def memory_by_category(profile: Figures) -> str:
    """List the bytes of each category: variables, code, exchange code, stacks…"""
    worst = profile.memory.worst_tile
    rows = [
        (name, f"{size(int(layer[worst])):>12}  {size(int(layer.sum())):>12}")
        for name, layer in profile.memory.by_category.items()
        if layer.any()
    ]
    return table("Memory by category, fullest tile and all tiles", rows)


def memory_by_role(profile: Figures) -> str:
    """List the bytes of each role: weights, gradients, activations, code…"""
    memory = profile.memory
    title = "Memory by role, fullest tile and all tiles"
    worst = memory.worst_tile
    roles = memory.by_role.items()
    rows = sorted(((int(values[worst]), int(values.sum()), role) for role, values in roles), reverse=True)
    return table(title, [(role, f"{size(on_worst):>12}  {size(total):>12}") for on_worst, total, role in rows])


def memory_histogram(profile: Figures) -> str:
    """Count the tiles in each range of bytes."""
    tile_bytes = profile.memory.tile_bytes
    # Whole bytes, so that a bin can be written as "start to last"; unique, since few bytes make fewer bins.
    edges = np.unique(np.linspace(tile_bytes.min(), tile_bytes.max() + 1, _NUM_BINS + 1).astype(np.int64))
    counts, edges = np.histogram(tile_bytes, edges)
    largest = max(1, int(counts.max()))
    lines = (
        f"{start:>10,} to {stop - 1:>10,} B  {'*' * -(-number * _BAR_WIDTH // largest):<{_BAR_WIDTH}}  {number:,}"
        for (start, stop), number in zip(pairwise(edges.tolist()), counts.tolist(), strict=True)
    )
    return section("Memory by tile, number of tiles", lines)


def memory_breakdown(profile: Figures, max_rows: int | None) -> str:
    """List what is on the fullest tile and on the mean tile at the peak, by variable, role, category and line."""
    return section("Memory at the peak, fullest tile and mean tile", profile.memory.breakdown.lines(max_rows))


def memory_by_ipu(profile: Figures) -> str:
    """List the bytes of all tiles and of the fullest tile of each IPU."""
    by_ipu = profile.memory.tile_bytes.reshape(profile.target.num_ipus, -1)
    rows = [f"{tiles.sum():,} B in all, {tiles.max():,} B on its fullest tile" for tiles in by_ipu]
    return table("Memory by IPU", [(f"IPU {number}", row) for number, row in enumerate(rows)])


def variable_storage(profile: Figures) -> str:
    """List the live variables of every step of the program, bytes of all tiles together."""
    live = profile.liveness
    lines = ["Variable storage liveness, all tiles:", f"  Always-live bytes: {live['alwaysLiveBytes']:,}"]
    lines += ["  Always-live variables:", *_variable_lines(live["alwaysLiveVariables"], "    ")]
    lines += [f"  Maximum live bytes (including always-live): {live['maxLiveBytes']:,}"]
    return "\n".join([*lines, *_live_lines(live["programs"], live["notAlwaysLiveVariables"], "  ")])


def _live_lines(node: Json, variables: Sequence[Json], indent: str) -> Iterator[str]:
    yield f"{indent}{node['type']}" + (f": {readable_name(node['name'])}" if "name" in node else "")
    if "liveBytes" in node:
        yield f"{indent}  Live Bytes (excluding always-live): {node['liveBytes']:,}"
        yield f"{indent}  Live Vars (excluding always-live):"
        yield from _variable_lines([variables[number] for number in node["liveVariables"]], f"{indent}    ")
    for child in node.get("children", ()):
        yield from _live_lines(child, variables, f"{indent}  ")


def _variable_lines(items: Sequence[Json], indent: str) -> list[str]:
    names = [readable_item(item["name"]) for item in items]
    width = max(map(len, names), default=0)
    rows = zip(names, items, strict=True)
    return [f"{indent}{name:<{width}}  {item['bytes']:>15,}" for name, item in rows]


def execution_steps(profile: Figures) -> str:
    """List all steps of a run, in order; "" when a trip count is unknown."""
    try:
        steps = profile.execution()["simulation"]["steps"]
    except ProfileError:
        return ""  # the section on execution names the loop
    lines = ["Steps:"]
    vertices = profile.compute_set_vertices  # computed at each access
    for step in steps:
        if step["type"] == "Sync":
            lines.append(f"  --- {step['syncType']} Sync ---")
        else:
            lines.extend(_step_lines(step, profile.target, vertices))
    return "\n".join(lines)


def _step_lines(step: Json, target: Target, vertices: Sequence[Vertices]) -> Iterator[str]:
    """Yield the lines of a step of the section `execution`, in the form of Poplar's summary."""
    name = f": {readable_name(step['name'])}" if step.get("name") else ""
    repeats = f", {step['repeats']:,} times" if step["repeats"] > 1 else ""
    overlapped = f" ({step['cyclesOverlapped']:,} overlapped with previous)" if "cyclesOverlapped" in step else ""
    yield f"  {step['type']} (cycles {step['cyclesFrom']:,} - {step['cyclesTo']:,}{repeats}){name}"
    yield f"    Cycles:               {step['cycles']:,}{overlapped}"
    yield f"    Active Tiles:         {step['activeTiles']:,} / {target.num_tiles:,}"
    if "threadBalance" in step:
        yield f"    Thread Balance:       {step['threadBalance']:.1%}"
    yield f"    Tile Balance:         {step['tileBalance']:.1%}"
    yield f"    Active Tile Balance:  {step['activeTileBalance']:.1%}"
    if "totalData" in step:
        yield f"    Total Data:           {step['totalData']:,}"
        yield f"    Data Balance (mean / max data per tile): {step['dataBalance']:.1%}"
    if "computeSet" in step:
        yield from _vertex_lines(vertices[step["computeSet"]])


def _vertex_lines(vertices: Vertices) -> Iterator[str]:
    if not vertices:
        return
    yield "    By vertex type:"
    width = max(map(len, vertices))
    for name, (count, active_cycles) in sorted(vertices.items(), key=lambda item: -item[1][1]):
        yield f"      {name:<{width}}  ({count:,} instances):  {active_cycles:>12,}"
