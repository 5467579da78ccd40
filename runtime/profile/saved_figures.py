"""A profile as data, and figures from such data.

Input: `Figures`, as JSON-able data of `saved_data`. Output: `SavedFigures`, with the same figures. The figures
themselves are saved: both reports, memory by tile, and the rows of the texts.
Lists by tile are runs of equal numbers, in the data and in memory, until a view asks for them.
Limits: the executable and the steps of the timeline, which hold the program, are not saved.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from functools import cached_property, reduce
from operator import getitem
from typing import Any, NoReturn, TypeVar

from ipujax.runtime.compile import Executable, Identity
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.files import numbers_of_runs, total_of_runs
from ipujax.runtime.graph import UnmetBound
from ipujax.runtime.host import HostData
from ipujax.runtime.memory import MemoryReport, SavedMemory, memory_data
from ipujax.runtime.profile.breakdown import LayerCost, layer_costs
from ipujax.runtime.profile.emulated import Emulated
from ipujax.runtime.profile.execution_trace import ExecutionTrace
from ipujax.runtime.profile.figures import Fallback, Figures
from ipujax.runtime.profile.program_costs import ProgramNode
from ipujax.runtime.profile.stage_figures import PipelineCost, StageCost
from ipujax.runtime.profile.step_costs import StepCost
from ipujax.runtime.profile.task_trace import TaskTrace
from ipujax.runtime.profile.unpriced import Unpriced
from ipujax.runtime.sections.ids import Json, Numbering
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import Timeline

Row = TypeVar("Row")


def saved_data(figures: Figures) -> Json:
    """Return figures as JSON-able data, which `SavedFigures` reads."""
    return {
        "target": figures.target.to_data(),
        "replicas": figures.replicas,
        "identity": dataclasses.asdict(figures.identity),
        "memory": memory_data(figures.memory),
        "waysToFit": list(figures.ways_to_fit),
        **{name: _rows(getattr(figures, name)) for name in _LISTS},
        "host": None if figures.host is None else figures.host.to_data(),
        "run": _run_data(figures),
        "graph": figures.graph_of_runs(),
        "sources": dict(figures.sources),
    }


# Sections of the graph profile that have runs by tile, and no other texts.
_BY_TILE = (
    *(("computeSets", "cycleEstimates", name) for name in ("activeCyclesByTile", "cyclesByTile")),
    *((name,) for name in ("exchanges", "externalExchanges", "hostExchanges")),
    *(("memory", name) for name in ("byTile", "byCategory", "byComputeSet", "byVertexType")),
)


def _expanded(section: Any) -> Any:
    if isinstance(section, str):
        return numbers_of_runs(section).tolist()
    if isinstance(section, dict):
        return {name: _expanded(each) for name, each in section.items()}
    return [_expanded(each) for each in section]


_LISTS = ("fallbacks", "unpriced", "emulated", "unmet_bounds")
_RUN = (
    "cycles",
    "ipu_phase_cycles",
    "overlapped_cycles",
    "total_worker_cycles",
    "tile_cycles",
    "tile_balance",
)


def _rows(rows: Iterable[Any]) -> list[Json]:
    data = [dataclasses.asdict(row) for row in rows]
    for row in data:
        row.get("origin", {}).pop("names", None)  # names are of calls of functions: no row of a profile has them
    return data


def _run_data(figures: Figures) -> Json:
    """Return the figures of the run; without a trip count, the parts of the error of a missing one."""
    try:
        return {
            **{name: getattr(figures, name) for name in _RUN},
            "vertex_type_cycles": figures.vertex_type_cycles,
            "step_costs": _rows(figures.step_costs),
            "tasks": figures.tasks.data(),
            "stages": _rows(figures.stages),
            "pipelines": _rows(figures.pipelines),
            "execution": figures.execution(),
            "trace": figures.execution_trace.data(),
            "programs": figures.program_costs.data(),
        }
    except ProfileError as error:
        where, expected, got = (None if x is None else str(x) for x in (error.where, error.expected, error.got))
        return {"unknown": {"what": error.what, "where": where, "expected": expected, "got": got, "hint": error.hint}}


def _row(kind: type[Row], data: Mapping[str, Any]) -> Row:
    """Return a row from its data, with tuples for lists."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    origin = {**data["origin"], "callers": tuple(data["origin"]["callers"])}
    return kind(**{**values, "origin": Origin(**origin)})


class SavedFigures(Figures):
    """The figures of one run of an executable as they were saved; see `Figures` for the attributes.

    Args:
        data: result of `saved_data`; from a file, after the checks of `runtime.schema`.
    """

    _data: Json

    def __init__(self, data: Json) -> None:
        host = None if data["host"] is None else HostData.from_data(data["host"])
        self.__dict__.update(_data=data, host=host, renamed=Identity(**data["identity"]))  # figures are frozen

    @property
    def _run(self) -> Json:
        """The figures of the run.

        Raises:
            ProfileError: as the original, if its trip counts are data.
        """
        run: Json = self._data["run"]
        if "unknown" in run:
            raise ProfileError(**run["unknown"])
        return run

    def _refuse(self, figure: str) -> NoReturn:
        raise ProfileError(
            f"a saved profile has no {figure}", hint="the profile that was saved has it, before it is saved"
        )

    @property
    def executable(self) -> Executable:
        """Refuse: it is not saved."""
        self._refuse("executable")

    @property
    def timeline(self) -> Timeline:
        """Refuse: it is not saved; `execution()` has its steps."""
        self._refuse("timeline")

    @property
    def numbering(self) -> Numbering:
        """Refuse: the numbering is not saved; `graph()` has the ids."""
        self._refuse("numbering")

    @cached_property
    def target(self) -> Target:
        return Target.from_data(self._data["target"])

    @property
    def replicas(self) -> int:
        return int(self._data["replicas"])

    @cached_property
    def memory(self) -> MemoryReport:
        """Memory of every tile; only the fullest tile has all of its items."""
        return SavedMemory(self.target, self._data["memory"])

    @property
    def ways_to_fit(self) -> tuple[str, ...]:
        """Suggestions for a program that does not fit."""
        return tuple(self._data["waysToFit"])

    @property
    def byte_costs(self) -> tuple[float, ...]:
        return tuple(self._data["graph"]["byteCost"]["tried"])

    @property
    def streaming_memory_bytes(self) -> int:
        return int(self._data["graph"]["streamingMemory"]["bytes"])

    @property
    def overlapped_cycles(self) -> int:
        return int(self._run["overlapped_cycles"])

    @property
    def _byte_cost_added_cycles(self) -> int | None:
        cost: int | None = self._data["graph"]["byteCost"].get("addedCycles")
        return cost

    @property
    def cycles(self) -> int:
        return int(self._run["cycles"])

    @cached_property
    def ipu_phase_cycles(self) -> tuple[dict[str, int], ...]:
        """Cycles of each phase of every IPU."""
        return tuple(map(dict, self._run["ipu_phase_cycles"]))

    @property
    def total_worker_cycles(self) -> int:
        return int(self._run["total_worker_cycles"])

    @property
    def tile_cycles(self) -> dict[str, int]:
        return dict(self._run["tile_cycles"])

    @property
    def tile_balance(self) -> float:
        return float(self._run["tile_balance"])

    @property
    def vertex_type_cycles(self) -> dict[str, tuple[int, int]]:
        return {name: (count, cycles) for name, (count, cycles) in self._run["vertex_type_cycles"].items()}

    @cached_property
    def fallbacks(self) -> tuple[Fallback, ...]:
        return tuple(_row(Fallback, row) for row in self._data["fallbacks"])

    @cached_property
    def unpriced(self) -> tuple[Unpriced, ...]:
        return tuple(_row(Unpriced, row) for row in self._data["unpriced"])

    @cached_property
    def emulated(self) -> tuple[Emulated, ...]:
        return tuple(_row(Emulated, row) for row in self._data["emulated"])

    @cached_property
    def unmet_bounds(self) -> tuple[UnmetBound, ...]:
        return tuple(_row(UnmetBound, row) for row in self._data["unmet_bounds"])

    @cached_property
    def step_costs(self) -> tuple[StepCost, ...]:
        return tuple(_row(StepCost, row) for row in self._run["step_costs"])

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """`Figures.layers`."""
        return layer_costs(self.step_costs)

    @cached_property
    def execution_trace(self) -> ExecutionTrace:
        """`Figures.execution_trace`."""
        return ExecutionTrace.of_data(self._run["trace"])

    @cached_property
    def tasks(self) -> TaskTrace:
        """`Figures.tasks`."""
        return TaskTrace.of_data(self._run["tasks"])

    @cached_property
    def stages(self) -> tuple[StageCost, ...]:
        """`Figures.stages`."""
        return tuple(StageCost(**row) for row in self._run["stages"])

    @cached_property
    def pipelines(self) -> tuple[PipelineCost, ...]:
        """`Figures.pipelines`."""
        return tuple(PipelineCost(**row) for row in self._run["pipelines"])

    @cached_property
    def program_costs(self) -> ProgramNode:
        """`Figures.program_costs`."""
        return ProgramNode.of_data(self._run["programs"])

    @property
    def sources(self) -> Mapping[str, list[str]]:
        """Lines of the source files as they were when the profile was saved, by path."""
        texts: Mapping[str, list[str]] = self._data["sources"]
        return texts

    # --- figures that are parts of the graph profile ---

    @property
    def graph_counts(self) -> dict[str, int]:
        return dict(self._data["graph"]["graph"])

    @property
    def optimization_info(self) -> dict[str, float]:
        return dict(self._data["graph"]["optimizationInfo"])

    @property
    def vertex_type_bytes(self) -> dict[str, int]:
        graph = self._data["graph"]
        names = graph["vertexTypes"]["names"]
        rows = graph["memory"]["byVertexType"]["totalBytes"]
        return {name: total_of_runs(row) for name, row in zip(names, rows, strict=True)}

    @property
    def vertex_type_languages(self) -> dict[str, str]:
        types = self._data["graph"]["vertexTypes"]
        return dict(zip(types["names"], types["languages"], strict=True))

    @property
    def compute_set_vertices(self) -> list[dict[str, tuple[int, int]]]:
        graph = self._data["graph"]
        sets = graph["computeSets"]
        names = graph["vertexTypes"]["names"]
        # By compute set: numbers of its vertex types, and for each of these its vertices and its active cycles.
        columns = sets["vertexTypes"], sets["vertexCounts"], sets["cycleEstimates"]["activeCyclesByVertexType"]
        return [
            {names[n]: (count, active[n]) for n, count in zip(types, counts, strict=True)}
            for types, counts, active in zip(*columns, strict=True)
        ]

    @property
    def liveness(self) -> Json:
        return copy.deepcopy(self._data["graph"]["memory"]["liveness"])

    def graph(self) -> Json:
        graph = self.graph_of_runs()
        for *path, last in _BY_TILE:
            section = reduce(getitem, path, graph)
            section[last] = _expanded(section[last])
        return graph

    def graph_of_runs(self) -> Json:
        return copy.deepcopy(self._data["graph"])

    def execution(self) -> Json:
        """Return the execution profile as it was saved.

        Raises:
            ProfileError: as the original, if its trip counts are data.
        """
        return copy.deepcopy(self._run["execution"]) | self._host_report
