"""Fields of the sections of profiles, under Poplar's names, and of their target.

Input: none. Output: the kinds of what `graph_report`, with runs in place of lists by tile, and `execution_report` make,
and of `Target.to_data`, for the schema of files. `Target` itself checks the range of each constant.
"""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from ipujax.runtime.files.figure_kinds import BYTES, LARGE, SIGNED, Nullable, Real, Row, Runs, Tagged, Tree
from ipujax.runtime.files.kinds import Anything, Flag, Integer, Kind, List, Map, Record, Text
from ipujax.runtime.memory import FIXED, LIVE
from ipujax.runtime.target import GlobalExchange, SyncPattern, Target

MAX_DEPTH = 160  # of the tree of live variables; readers of JSON, and Python, go some 1,000 objects deep

TEXT = Text()
INTEGER = Integer()
REAL = Real()
FLAG = Flag()
BY_TILE = Runs(INTEGER, "tiles")
BYTES_BY_TILE = Runs(BYTES, "tiles")


def _index(name: str) -> Integer:
    return Integer(below=name)


def _records(kind: Kind, *names: str) -> dict[str, Kind]:
    return dict.fromkeys(names, kind)


HOST = Record(
    {"batches": INTEGER, "preparedSeconds": Real(-1e30), "waitedSeconds": Real(-1e30), "isAhead": FLAG}
    | {"batchesPerCall": Integer(1)}
)

# --- the execution profile ---

_UNPRICED = Record({"operation": TEXT, "place": Text(("tiles", "host")), "runs": Nullable(INTEGER), "location": TEXT})
TILE_CYCLES = Record(
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
_SIMULATION = Record({"cycles": INTEGER, "tileCycles": TILE_CYCLES, "steps": List(STEP)})
EXECUTION = Record(
    {"profilerMode": TEXT, "programTrace": List(_index("programs")), "programTraceLength": LARGE}
    | {"simulation": _SIMULATION},
    {"unpriced": List(_UNPRICED)},
)

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


# --- the target ---

_SMALLEST = 1e-30  # of constants of a machine that are above 0: quotients by them stay finite


def _constant(kind: str, zero_ok: bool) -> Kind:
    """Return the kind of a constant of `Target` by its annotation; `Target` checks the rest itself."""
    kinds: dict[str, Kind] = {"int": Integer(0 if zero_ok else 1), "float": Real(0 if zero_ok else _SMALLEST)}
    kinds |= {"GlobalExchange": Text(get_args(GlobalExchange)), "SyncPattern": Text(get_args(SyncPattern))}
    return (kinds | {"str": Text(), "frozenset[str]": List(Text())})[kind]


TARGET = Record(
    {item.name: _constant(str(item.type), item.metadata["zero_ok"]) for item in fields(Target) if item.metadata}
    | {"sources": Map(Row((Text(), Text(), Real(_SMALLEST, 1), Real(1))))}
)
