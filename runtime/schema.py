"""Schema of saved profiles: their fields, which are the annotations of `Figures`, and the relations between them.

Input: figures, or data as a file has them. Output: the data, or a `FieldError`. Every view works on a profile from data
that pass. To add a field: a `figure` of `Figures` or `MemoryReport`, or a field of a row of one; the version of files
follows from them, so that files of other fields are refused by their version.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from ipujax.runtime.errors import ProfileError, TargetError
from ipujax.runtime.files import FieldError, FileKind, Section
from ipujax.runtime.files.figure_kinds import Either, Nullable, sum_of_runs
from ipujax.runtime.files.figure_records import field_type
from ipujax.runtime.files.kinds import Anything, Lengths, Record, Text
from ipujax.runtime.graph import of_replicas
from ipujax.runtime.memory import MemoryReport
from ipujax.runtime.profile import ExecutionTrace, Figures, slices
from ipujax.runtime.profile.primary_figures import RUN
from ipujax.runtime.sections.ids import Json
from ipujax.runtime.sections.section_fields import TARGET
from ipujax.runtime.target import Target

_TEXT_OR_NULL = Nullable(Text())
_NO_RUN = Record(
    {"unknown": Record({"what": Text()} | dict.fromkeys(("where", "expected", "got", "hint"), _TEXT_OR_NULL))}
)
PROFILE = Record(
    Figures.figure_kinds()
    | {
        "memory": Record(MemoryReport.figure_kinds()),
        RUN: Either("unknown", _NO_RUN, Record(Figures.figure_kinds(RUN))),
    }
)


def saved_data(figures: Figures) -> Json:
    """Return figures as JSON-able data."""
    return figures.figures_as_data() | {"memory": figures.memory.figures_as_data(), RUN: _run_data(figures)}


def _run_data(figures: Figures) -> Json:
    """Return the figures of the run; without a trip count, the parts of the error of a missing one."""
    try:
        return figures.figures_as_data(RUN)
    except ProfileError as error:
        where, expected, got = (None if x is None else str(x) for x in (error.where, error.expected, error.got))
        return {"unknown": {"what": error.what, "where": where, "expected": expected, "got": got, "hint": error.hint}}


# --- relations between fields ---


def _date(data: Any) -> bool:
    text = data["identity"]["date"]
    try:
        return not text or bool(date.fromisoformat(text).isoformat() == text)
    except ValueError:
        return False


def _phases(data: Any) -> bool:
    run = data["run"]
    return all(sum(phases.values()) == run["cycles"] for phases in run["ipu_phase_cycles"])


def _clocks(data: Any) -> bool:
    return bool(max(data["run"]["execution_trace"]["clocks"]) == data["run"]["cycles"])


def _spans(data: Any) -> bool:
    trace = field_type(ExecutionTrace).from_data(data["run"]["execution_trace"])
    cut = slices(trace)
    is_ordered = bool((np.diff(trace.ipu) >= 0).all())
    ends = cut.start + cut.cycles
    return is_ordered and bool((cut.cycles > 0).all() and (ends <= trace.clocks[cut.ipu]).all())


def _stages(data: Any) -> bool:
    run = data["run"]
    sums = dict[int, int]()  # by IPU
    for row in run["stages"]:
        sums[row["ipu"]] = sums.get(row["ipu"], 0) + sum(row["phases"].values())
    return set(sums.values()) <= {run["cycles"]}


def _tasks(data: Any) -> bool:
    """Return whether stages of tasks exist, and tasks are as long as their work, and end within the run."""
    tasks = data["run"]["tasks"]
    stages = [len(pipeline["ipus"]) for pipeline in tasks["pipelines"]]
    exist = all(stage < stages[n] for n, stage in zip(tasks["pipeline"], tasks["stage"], strict=True))
    columns = zip(*(tasks[name] for name in ("start", "end", "busy")), strict=True)
    return exist and all(busy <= end - start and end <= data["run"]["cycles"] for start, end, busy in columns)


def _program_ids(data: Any) -> bool:
    """Return whether no program is inside itself, by its children and the functions that it calls."""
    programs = data["graph"]["programs"]
    functions = data["graph"]["functionPrograms"]
    # Views walk programs by id: a program inside itself would make them walk for ever.
    inside = {number: entry.get("children", ()) for number, entry in enumerate(programs)}
    called = {number: [functions[entry["target"]]] for number, entry in enumerate(programs) if "target" in entry}
    try:
        TopologicalSorter(inside | called).prepare()
    except CycleError:
        return False
    return True


def _rising(data: Any) -> bool:
    tiles, rows = (np.array(data["memory"]["contents"][name], np.int64) for name in ("tiles", "tile"))
    return bool((np.diff(tiles) > 0).all() and (np.diff(rows) >= 0).all())


def _roles(data: Any) -> bool:
    memory = data["memory"]
    return sum_of_runs(memory["by_role"].values()) == sum_of_runs(memory["by_category"].values())


def _breakdown(data: Any) -> bool:
    """Return whether the items at the peak add up to the bytes of the fullest tile and of all tiles."""
    report = MemoryReport.from_data(Target.from_data(data["target"]), data["memory"])
    breakdown = report.breakdown
    num_bytes = sum(item.num_bytes for item in breakdown.items)
    everywhere = sum(item.total_bytes for item in breakdown.items)
    tiles = breakdown.tile, breakdown.num_tiles
    are_tiles = tiles == (report.worst_tile, len(report.tile_bytes))
    return are_tiles and (num_bytes, everywhere) == (report.max_tile_bytes, report.total_bytes)


def _shared(data: Any) -> bool:
    """Return whether the bytes of the categories of each tile add up to its shared bytes and those in use always."""
    report = MemoryReport.from_data(Target.from_data(data["target"]), data["memory"])
    return bool((report.tile_bytes == sum(report.by_category.values())).all())


def _machines(data: Any) -> bool:
    try:
        of_replicas(Target.from_data(data["target"]), data["replicas"])
    except TargetError:
        return False
    return True


# Path of a field → description of its relation to others, and the function that checks it if the field exists.
RELATIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "replicas": ("so many that a machine can have them all", _machines),
    "identity.date": ("a day, such as 2026-11-25, or nothing", _date),
    "run.ipu_phase_cycles": ("cycles of each IPU that add up to run.cycles", _phases),
    "run.execution_trace.clocks": ("ends of IPUs, of which the last is run.cycles", _clocks),
    "run.execution_trace.work": ("phases that pass one after the other inside their spans, by IPU and time", _spans),
    "run.stages": ("phases of the stages of each IPU that add up to run.cycles", _stages),
    "run.tasks": ("tasks of stages of their pipelines, as long as their work, in the run", _tasks),
    "graph.programs": ("programs in programs, none inside itself", _program_ids),
    "memory.shared_bytes": ("bytes that add up on each tile, with those in use always, to memory.by_category", _shared),
    "memory.by_role": ("bytes that add up on each tile to those of memory.by_category", _roles),
    "memory.breakdown": ("items that add up to the bytes of the fullest tile, and of all tiles", _breakdown),
    "memory.contents.tile": ("tiles in rising order, as those of memory.contents.tiles", _rising),
}


def check_profile(data: Any) -> None:
    """Refuse data that are not a result of `saved_data`, with the first wrong field."""
    lengths = Lengths()
    # The target first: its tiles and IPUs are the lengths of most lists.
    target = Record({"target": TARGET}, dict.fromkeys(PROFILE.names, Anything()))
    target.check(data, "", lengths)
    _set_sizes(data["target"], lengths)
    PROFILE.check(data, "", lengths)
    lengths.check_indices()
    # Relations last: their functions rely on the kinds of fields.
    for path, (expected, holds) in RELATIONS.items():
        if _has(data, path) and not holds(data):
            raise FieldError(path, expected, "other values")


# A saved profile: its data, and how they belong together.
DATA = "profile"
PROFILE_SECTION = Section(repr((PROFILE, [(path, text) for path, (text, _) in RELATIONS.items()])), check_profile)
PROFILE_FILE = FileKind("profile", {DATA: PROFILE_SECTION})


def _set_sizes(target: Any, lengths: Lengths) -> None:
    """Record the lengths of lists by tile and by IPU."""
    try:
        machine = Target.from_data(target)
    except TargetError as error:
        raise FieldError("target", str(error.expected), f"{error.got}: {error.what}") from error
    lengths.add("tiles", "the tiles of target", machine.num_tiles)
    lengths.add("tiles of an IPU", "target.tiles_per_ipu", machine.tiles_per_ipu)
    lengths.add("IPUs", "target.num_ipus", machine.num_ipus)


def _has(data: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(data, dict) or name not in data:
            return False
        data = data[name]
    return True
