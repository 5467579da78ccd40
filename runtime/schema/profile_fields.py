"""The fields of a saved profile, as one table, and the relations between them.

Input: the data of `saved_data`, as a file has them. Output: nothing, or a `FieldError`. Every view works on a profile
from data that pass. To add a field: a line in its record; the version of the files follows from the table, so that
files of other fields are refused by their version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from datetime import date
from graphlib import CycleError, TopologicalSorter
from typing import Any, get_args

import numpy as np

from ipujax.runtime.errors import TargetError
from ipujax.runtime.files import FieldError, FileKind, Section
from ipujax.runtime.files.figure_kinds import Either, Nullable, Real, Row, Runs, Tagged, Tree, sum_of_runs
from ipujax.runtime.files.kinds import EXACT, Anything, Flag, Integer, Kind, Lengths, List, Map, Record, Text
from ipujax.runtime.graph import TASK_KINDS, of_replicas
from ipujax.runtime.memory import FIXED, LIVE, ROLES
from ipujax.runtime.profile import TRACE_PHASES, ExecutionTrace, slices
from ipujax.runtime.profile.stage_figures import STAGE_PHASES
from ipujax.runtime.target.target import GlobalExchange, SyncPattern, Target
from ipujax.runtime.timeline import PHASES

MAX_DEPTH = 160  # of the tree of a program; readers of JSON, and Python, go some 1,000 objects deep
_SMALLEST = 1e-30  # of constants of a machine that are above 0: quotients by them stay finite

TEXT = Text()
INTEGER = Integer()
REAL = Real()
FLAG = Flag()
LARGE = Integer(maximum=2**100)  # sums over all tiles and runs, which no array holds
BYTES = Integer(maximum=2**48, total=EXACT)  # of one tile
SIGNED = Integer(minimum=-EXACT)
TEXTS = List(TEXT)
BY_TILE = Runs(INTEGER, "tiles")
BYTES_BY_TILE = Runs(BYTES, "tiles")


def _index(name: str) -> Integer:
    return Integer(below=name)


def _records(kind: Kind, *names: str) -> dict[str, Kind]:
    return dict.fromkeys(names, kind)


# --- the machine, and lines of source ---


def _constant(kind: str, zero_ok: bool) -> Kind:
    """Return the kind of a constant of `Target` by its annotation; `Target` checks the rest itself."""
    kinds: dict[str, Kind] = {"int": Integer(0 if zero_ok else 1), "float": Real(0 if zero_ok else _SMALLEST)}
    kinds |= {"GlobalExchange": Text(get_args(GlobalExchange)), "SyncPattern": Text(get_args(SyncPattern))}
    return (kinds | {"str": TEXT, "frozenset[str]": TEXTS})[kind]


TARGET = Record(
    {item.name: _constant(str(item.type), item.metadata["zero_ok"]) for item in fields(Target) if item.metadata}
    | {"sources": Map(Row((TEXT, TEXT)))}
)
PLACE = Row((TEXT, TEXT, TEXT))
ORIGIN = Record(_records(TEXT, "line", "path", "library", "file", "layer", "part") | {"callers": TEXTS})
_FALLBACK = _records(TEXT, "operation", "name") | {"cycles": INTEGER, "borrowed_tiles": INTEGER, "origin": ORIGIN}
_PLACES = Text(("tiles", "host"))
_UNPRICED = {"operation": TEXT, "place": _PLACES, "runs": Nullable(INTEGER)}
_UNMET = {"name": TEXT, "bound_bytes": INTEGER, "needed_bytes": INTEGER, "origin": ORIGIN}
HOST = Record(
    {"batches": INTEGER, "preparedSeconds": Real(-1e30), "waitedSeconds": Real(-1e30), "isAhead": FLAG}
    | {"batchesPerCall": Integer(1)}
)

# --- memory by tile ---

_CONTENTS = Record(
    {"items": List(Row((TEXT, TEXT, TEXT)), "named items"), "steps": List(TEXT, "peak steps")}
    | {"tiles": List(_index("tiles"), "listed tiles"), "peak": List(_index("peak steps"), "listed tiles")}
    | {"tile": List(_index("tiles"), "rows of tiles"), "item": List(_index("named items"), "rows of tiles")}
    | {"num_bytes": List(BYTES, "rows of tiles")}
)
_LIVE_BYTES = Record(
    {"steps": List(TEXT, "steps of the fullest tile"), "bytes": List(BYTES, "steps of the fullest tile")}
    | {"always": BYTES, "shownOf": INTEGER}
)
MEMORY = Record(
    {"byCategory": Record(_records(BYTES_BY_TILE, *FIXED, *LIVE, "gap")), "shared": BYTES_BY_TILE}
    | {"isFromTop": List(_index("tiles")), "peak": Record({"step": TEXT, "origin": PLACE})}
    | {"items": List(Row((TEXT, BYTES, TEXT, PLACE)), "items on the fullest tile")}
    | {"borrowed": List(Row((TEXT, _index("tiles"), INTEGER, INTEGER, PLACE)))}
    | {"contents": _CONTENTS, "byRole": Map(BYTES_BY_TILE, Text(ROLES), minimum=1), "liveBytes": _LIVE_BYTES}
    | _records(List(TEXT, "items on the fullest tile"), "roles", "layers")
    | {"wholeBytes": List(INTEGER, "items on the fullest tile")}
)

# --- a run ---

_PHASE = Text(PHASES)
_STEP_COST = Record(
    {"origin": ORIGIN, "name": TEXT, "cycles": INTEGER, "moved_bytes": LARGE, "variable_bytes": INTEGER}
    | {"exchange_code_bytes": INTEGER, "flops": LARGE, "precision": Text(("float16", "float32"))}
    | {"tile_balance": Nullable(REAL), "always_bytes": INTEGER, "peak_bytes": INTEGER}
    | {"limiting_cycles": INTEGER, "phases": Map(INTEGER, _PHASE)}
)
_TILE_CYCLES = Record(
    _records(LARGE, "activeCompute", "compute", "copySharedStructure", "doExchange", "globalExchange", "streamCopy")
    | {"sync": LARGE}
)
_STEP = {"type": TEXT, "program": _index("programs"), "tileBalance": REAL, "activeTiles": INTEGER}
_STEP |= {"activeTileBalance": REAL, "cycles": INTEGER, "cyclesFrom": INTEGER, "cyclesTo": INTEGER, "repeats": INTEGER}
_MOVES: dict[str, Kind] = _STEP | {"totalData": LARGE, "dataBalance": REAL}
_COMPUTES: dict[str, Kind] = {"computeSet": _index("compute sets"), "threadBalance": REAL, "cyclesOverlapped": INTEGER}
_EXCHANGES: dict[str, Kind] = {"exchange": _index("exchanges"), "cyclesOverlapped": INTEGER}
_NAME: dict[str, Kind] = {"name": TEXT}
_PLACE = _NAME | _records(TEXT, "line", "layer", "part")
_SYNC = Record({"type": TEXT, "syncType": TEXT})
STEP = Tagged(
    "type",
    {
        "Sync": _SYNC,
        "OnTileExecute": Record(_STEP | _COMPUTES, _PLACE),
        "DoExchange": Record(_MOVES | _EXCHANGES, _PLACE),
        "GlobalExchange": Record(_MOVES | {"externalExchange": _index("external exchanges")}, _PLACE),
        "StreamCopy": Record(_MOVES | {"hostExchange": _index("host exchanges")}, _PLACE),
    },
)
_SIMULATION = Record({"cycles": INTEGER, "tileCycles": _TILE_CYCLES, "steps": List(STEP)})
EXECUTION = Record(
    {"profilerMode": TEXT, "programTrace": List(_index("programs")), "programTraceLength": LARGE}
    | {"simulation": _SIMULATION},
    {"hostData": HOST, "unpriced": List(Record(_UNPRICED | {"location": TEXT}))},
)
_SPANS = "spans of the trace"
_STEPS = "steps of the trace"
TRACE = Record(
    {"names": List(TEXT, "names of the trace"), "lines": List(TEXT, "lines of the trace")}
    | {"clocks": List(INTEGER, "IPUs")}
    | {"name": List(_index("names of the trace"), _STEPS), "line": List(_index("lines of the trace"), _STEPS)}
    | _records(List(Integer(1), _STEPS), "iterations", "joined")
    | {
        "live_bytes": List(Integer(-1), _STEPS),
        "step": List(_index(_STEPS), _SPANS),
        "ipu": List(_index("IPUs"), _SPANS),
    }
    | _records(List(INTEGER, _SPANS), "start", "end", "moved")
    | {"work": List(Row((INTEGER,) * len(PHASES)), _SPANS), "after": List(Row((INTEGER, INTEGER)), _SPANS)}
    | {"row_sets": List(List(_index("operations")), "sets of rows"), "rows": List(_index("sets of rows"), _STEPS)}
)
_KIND = Text(TASK_KINDS)
_PIPELINE = Record(
    {"name": TEXT, "schedule": TEXT, "ipus": List(_index("IPUs"), minimum=1), "micro_batches": Integer(1)}
    | {"tasks": List(Row((INTEGER, _KIND))), "links": List(Row((INTEGER, _KIND, INTEGER, _KIND)))}
)
TASKS = Record(
    {"pipelines": List(_PIPELINE, "pipelines")}
    | _records(List(INTEGER, "pipelines"), "pipeline_start", "pipeline_end")
    | {"pipeline": List(_index("pipelines"), "tasks"), "kind": List(Integer(maximum=len(TASK_KINDS) - 1), "tasks")}
    | _records(List(INTEGER, "tasks"), "stage", "micro_batch", "start", "end", "busy", "waited")
)
_STAGE = Record(
    {"pipeline": _index("pipelines"), "stage": INTEGER, "ipu": _index("IPUs")}
    | {"phases": Record(_records(INTEGER, *STAGE_PHASES))}
    | _records(INTEGER, "fill_cycles", "steady_cycles", "drain_cycles", "waits_for_cycles", "slow_excess_cycles")
    | {
        "waits_for": Integer(-1),
        "slow_micro_batch": Integer(-1),
        "slow_kind": Text(("", *TASK_KINDS)),
        "slow_ratio": REAL,
    }
)
_PIPELINE_COST = Record(
    {"name": TEXT, "schedule": TEXT, "ideal_share": REAL, "slowest_stage": INTEGER}
    | _records(Integer(1), "num_stages", "num_ipus", "micro_batches")
    | _records(INTEGER, "cycles", "bubble_cycles")
    | {"is_traced": FLAG}
)
_PHASES = Record(_records(INTEGER, *TRACE_PHASES))
_NODE = Row((TEXT, TEXT, TEXT, LARGE, LARGE, List(Anything())))
_RUN = Record(
    {"cycles": INTEGER}
    | {"overlapped_cycles": INTEGER, "total_worker_cycles": LARGE, "tile_cycles": _TILE_CYCLES, "tile_balance": REAL}
    | {"vertex_type_cycles": Map(Row((LARGE, LARGE))), "step_costs": List(_STEP_COST, "operations")}
    | {"execution": EXECUTION, "tasks": TASKS, "stages": List(_STAGE), "pipelines": List(_PIPELINE_COST, "pipelines")}
    | {"ipu_phase_cycles": List(_PHASES, "IPUs"), "trace": TRACE, "programs": Tree(_NODE, 5, MAX_DEPTH)}
)
_NO_RUN = Record({"unknown": Record({"what": TEXT} | _records(Nullable(TEXT), "where", "expected", "got", "hint"))})

# --- the graph profile, under Poplar's names ---


def _exchanges(name: str, cycles: str) -> Record:
    return Record(_records(List(BY_TILE, name), "bytesReceivedByTile", "bytesSentByTile", cycles))


def _vertex_bytes(name: str) -> Record:
    return Record(_records(List(BYTES_BY_TILE, name), "codeBytes", "vertexDataBytes", "totalBytes"))


_MACHINE = Record(
    {"type": TEXT, "clockFrequency": REAL, "relativeSyncDelayByTile": List(INTEGER, "tiles of an IPU")}
    | _records(INTEGER, "bytesPerIPU", "bytesPerTile", "numIPUs", "tilesPerIPU", "numTiles", "totalMemory")
    | _records(INTEGER, "numReplicas", "minSyncDelay")
)
_COMPUTE_SETS = Record(
    {"names": List(TEXT, "compute sets"), "vertexCounts": List(List(INTEGER, "vertices[]"), "compute sets")}
    | {"vertexTypes": List(List(_index("vertex types"), "vertices[]"), "compute sets")}
    | {
        "cycleEstimates": Record(
            _records(List(BY_TILE, "compute sets"), "activeCyclesByTile", "cyclesByTile")
            | {"activeCyclesByVertexType": List(List(LARGE, "vertex types"), "compute sets")}
        )
    }
)
_INSIDE: dict[str, Kind] = {"type": TEXT, "children": List(_index("programs"))}
PROGRAM = Tagged(
    "type",
    dict.fromkeys(("If", "IfElse", "RepeatWhile", "Switch"), Record(_INSIDE))
    | dict.fromkeys(("SetLocalConsensusFromVar", "WriteUndef"), Record({"type": TEXT}))
    | {
        "Sequence": Record(_INSIDE, _NAME),
        "Repeat": Record(_INSIDE | {"count": INTEGER}),
        "Call": Record({"type": TEXT, "name": TEXT, "target": _index("functions")}),
        "Sync": _SYNC,
        "OnTileExecute": Record({"type": TEXT, "name": TEXT, "computeSet": _index("compute sets")}),
        "DoExchange": Record(
            {"type": TEXT, "name": TEXT, "exchange": _index("exchanges")}
            | {"memoryByInstruction": Record(_records(SIGNED, "send", "other", "total"))}
        ),
        "GlobalExchange": Record({"type": TEXT, "name": TEXT, "exchange": _index("external exchanges")}),
        "StreamCopy": Record({"type": TEXT, "name": TEXT, "exchange": _index("host exchanges")}),
    },
)
_ITEM = Record(_records(TEXT, "name", "category", "origin") | {"bytes": INTEGER})
_LIVE_NODE = Record(
    {"type": TEXT, "programs": List(_index("programs"))},
    {"name": TEXT, "liveBytes": INTEGER, "liveVariables": List(_index("live variables")), "children": List(Anything())},
    together=("liveBytes", "liveVariables"),
)
LIVENESS = Record(
    {"worstTile": _index("tiles"), "peakStep": TEXT, "variables": List(_ITEM), "alwaysLiveBytes": INTEGER}
    | {"alwaysLiveVariables": List(_ITEM), "maxLiveBytes": INTEGER, "programs": Tree(_LIVE_NODE, "children", MAX_DEPTH)}
    | {"notAlwaysLiveVariables": List(_ITEM, "live variables")}
)
_REGIONS = ("interleaved", "nonInterleaved", "overflowed", "total")
_REGION = Record(_records(BYTES_BY_TILE, "overlapped", "nonOverlapped"))
_CATEGORY = Record(_records(_REGION, *_REGIONS[:3]) | {"total": BYTES_BY_TILE})
GRAPH = Record(
    {"target": _MACHINE, "optimizationInfo": Map(REAL)}
    | {"byteCost": Record({"tried": List(REAL, minimum=1)}, {"addedCycles": SIGNED})}
    | {"graph": Record(_records(LARGE, "numComputeSets", "numEdges", "numVars", "numVertices"))}
    | {
        "vertexTypes": Record(
            {"names": List(TEXT, "vertex types"), "sizes": List(INTEGER, "vertex types")}
            | {"languages": List(Text(("assembly", "C++")), "vertex types")}
        )
    }
    | {"computeSets": _COMPUTE_SETS, "exchanges": _exchanges("exchanges", "cyclesByTile")}
    | {"externalExchanges": _exchanges("external exchanges", "estimatedCyclesByTile")}
    | {"hostExchanges": _exchanges("host exchanges", "estimatedCyclesByTile")}
    | {"programs": List(PROGRAM, "programs"), "controlPrograms": List(_index("programs"))}
    | {"functionPrograms": List(_index("programs"), "functions")}
    | {
        "memory": Record(
            {"byTile": Record(_records(BYTES_BY_TILE, *_REGIONS, *(f"{name}IncludingGaps" for name in _REGIONS)))}
            | {"byCategory": Record(_records(_CATEGORY, *FIXED, *LIVE)), "liveness": LIVENESS}
            | {"byComputeSet": _vertex_bytes("compute sets"), "byVertexType": _vertex_bytes("vertex types")}
        ),
        "streamingMemory": Record({"bytes": LARGE}),
    }
)
IDENTITY = Record(_records(TEXT, "function", "file", "label", "date"))
PROFILE = Record(
    {
        "target": TARGET,
        "replicas": Integer(1),
        "memory": MEMORY,
        "fallbacks": List(Record(_FALLBACK)),
        "unpriced": List(Record(_UNPRICED | {"origin": ORIGIN})),
        "run": Either("unknown", _NO_RUN, _RUN),
    }
    | {"emulated": List(Record({"dtype": TEXT, "operations": TEXTS, "cycles": INTEGER, "origin": ORIGIN}))}
    | {"unmet_bounds": List(Record(_UNMET)), "graph": GRAPH}
    | {"host": Nullable(HOST), "identity": IDENTITY, "waysToFit": TEXTS, "sources": Map(TEXTS)}
)


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
    return bool(max(data["run"]["trace"]["clocks"]) == data["run"]["cycles"])


def _spans(data: Any) -> bool:
    trace = ExecutionTrace.of_data(data["run"]["trace"])
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
    return sum_of_runs(memory["byRole"].values()) == sum_of_runs(memory["byCategory"].values())


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
    "run.trace.clocks": ("ends of IPUs, of which the last is run.cycles", _clocks),
    "run.trace.work": ("phases that pass one after the other inside their spans, by IPU and time", _spans),
    "run.stages": ("phases of the stages of each IPU that add up to run.cycles", _stages),
    "run.tasks": ("tasks of stages of their pipelines, as long as their work, in the run", _tasks),
    "graph.programs": ("programs in programs, none inside itself", _program_ids),
    "memory.byRole": ("bytes that add up on each tile to those of memory.byCategory", _roles),
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
