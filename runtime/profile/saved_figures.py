"""A profile as data, and figures from such data.

Input: `Figures`, as JSON-able data of `saved_data`. Output: `SavedFigures`, which answer as the original does. What is
kept are the answers themselves: both reports, memory by tile, and the rows of the texts.
Limits: the executable and the steps of the timeline, which hold the program, are not kept. A file of an older version
lacks some answers; asking for one says so.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from ipujax.runtime.compile import Executable, Identity
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.graph import UnmetBound
from ipujax.runtime.host import HostData
from ipujax.runtime.memory import MemoryReport, SavedMemory, memory_data
from ipujax.runtime.profile.breakdown import LayerCost, Operation, layer_costs
from ipujax.runtime.profile.emulated import Emulated
from ipujax.runtime.profile.execution_trace import ExecutionTrace, phase_cycles_of_ipus
from ipujax.runtime.profile.figures import Fallback, Figures
from ipujax.runtime.profile.program_costs import ProgramNode
from ipujax.runtime.profile.stage_figures import PipelineCost, StageCost
from ipujax.runtime.profile.step_costs import StepCost
from ipujax.runtime.profile.task_trace import TaskTrace
from ipujax.runtime.sections.ids import Json, Numbering
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import Timeline

Row = TypeVar("Row")


def saved_data(figures: Figures) -> Json:
    """All that `SavedFigures` answer from."""
    return {
        "target": figures.target.to_data(),
        "replicas": figures.replicas,
        "identity": dataclasses.asdict(figures.identity),
        "memory": memory_data(figures.memory),
        "waysToFit": list(figures.ways_to_fit),
        **{name: _rows(getattr(figures, name)) for name in _LISTS},
        "host": None if figures.host is None else figures.host.to_data(),
        "run": _run(figures),
        "graph": figures.graph(),
        "sources": dict(figures.sources),
    }


_LISTS = ("fallbacks", "emulated", "unmet_bounds")
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
        row.get("origin", {}).pop("names", None)  # of calls of functions, which no row of a profile is
    return data


def _run(figures: Figures) -> Json:
    """What is known of the run; if a trip count is missing, the error that says so."""
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
    """A row of a profile again: lists are tuples."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    origin = {**data["origin"], "callers": tuple(data["origin"].get("callers", ()))}
    return kind(**{**values, "origin": Origin(**origin)})


class SavedFigures(Figures):
    """What one run of an executable cost when it was saved; see `Figures`.

    Args:
        data: of `saved_data`, which `runtime.schema` has checked if they are from a file.
    """

    _data: Json

    def __init__(self, data: Json) -> None:
        host = data.get("host")  # which those saved before it was measured lack
        renamed = Identity(**data.get("identity", {}))  # likewise
        host = None if host is None else HostData.from_data(host)
        self.__dict__.update(_data=data, host=host, renamed=renamed)  # figures are frozen

    @property
    def _known(self) -> Json:
        """What is known of the run.

        Raises:
            ProfileError: as the original, if its trip counts are data.
        """
        run: Json = self._data["run"]
        if "unknown" in run:
            raise ProfileError(**run["unknown"])
        return run

    def _lacks(self, what: str) -> NoReturn:
        raise ProfileError(
            f"a saved profile has no {what}", hint="the profile that was saved has it, before it is saved"
        )

    def _recent(self, section: Json, key: str, what: str) -> Any:
        """Part of a section that files of older versions lack."""
        if key not in section:
            hint = "save the profile again with this ipujax"
            raise ProfileError(f"the profile was saved by an older ipujax, without its {what}", hint=hint)
        return section[key]

    @property
    def executable(self) -> Executable:
        """Not kept.

        Raises:
            ProfileError: always.
        """
        self._lacks("executable")

    @property
    def timeline(self) -> Timeline:
        """Not kept; `execution()` has its steps.

        Raises:
            ProfileError: always.
        """
        self._lacks("timeline")

    @property
    def numbering(self) -> Numbering:
        """Not kept; `graph()` has the ids.

        Raises:
            ProfileError: always.
        """
        self._lacks("numbering")

    @cached_property
    def target(self) -> Target:
        """As `Figures.target`."""
        return Target.from_data(self._data["target"])

    @property
    def replicas(self) -> int:
        """As `Figures.replicas`."""
        return int(self._data["replicas"])

    @cached_property
    def memory(self) -> MemoryReport:
        """As `Figures.memory`; of other tiles than the fullest it is not known what they hold."""
        return SavedMemory(self.target, self._data["memory"])

    @property
    def ways_to_fit(self) -> tuple[str, ...]:
        """As `Figures.ways_to_fit`; none in files of versions that kept none."""
        return tuple(self._data.get("waysToFit", ()))

    @property
    def byte_costs(self) -> tuple[float, ...]:
        """As `Figures.byte_costs`."""
        return tuple(self._data["graph"]["bytePrice"]["tried"])

    @property
    def streaming_memory_bytes(self) -> int:
        """As `Figures.streaming_memory_bytes`."""
        return int(self._data["graph"]["streamingMemory"]["bytes"])

    @property
    def overlapped_cycles(self) -> int:
        """As `Figures.overlapped_cycles`."""
        return int(self._known["overlapped_cycles"])

    @property
    def _byte_cost_added_cycles(self) -> int | None:
        cost: int | None = self._data["graph"]["bytePrice"].get("costCycles")
        return cost

    @property
    def cycles(self) -> int:
        """As `Figures.cycles`."""
        return int(self._known["cycles"])

    @cached_property
    def ipu_phase_cycles(self) -> tuple[dict[str, int], ...]:
        """As `Figures.ipu_phase_cycles`.

        Raises:
            ProfileError: it was saved without, and without the trace that tells them.
        """
        run = self._known
        if "ipu_phase_cycles" in run:
            return tuple(map(dict, run["ipu_phase_cycles"]))
        return phase_cycles_of_ipus(self.execution_trace)

    @property
    def limiting_ipu(self) -> int:
        """As `Figures.limiting_ipu`; the IPU that ended last in files that know of no other."""
        return int(self._known["critical_ipu"]) if self._knows_one_ipu else super().limiting_ipu

    @property
    def phase_cycles(self) -> dict[str, int]:
        """As `Figures.phase_cycles`, of that IPU."""
        return dict(self._known["phase_cycles"]) if self._knows_one_ipu else super().phase_cycles

    @property
    def busy_cycles(self) -> int:
        """As `Figures.busy_cycles`, of that IPU."""
        return self.cycles - self.phase_cycles["idle"] if self._knows_one_ipu else super().busy_cycles

    @property
    def _knows_one_ipu(self) -> bool:
        """Whether it was saved by a version that kept the phases of one IPU alone."""
        return "ipu_phase_cycles" not in self._known and "trace" not in self._known

    @property
    def total_worker_cycles(self) -> int:
        """As `Figures.total_worker_cycles`."""
        return int(self._known["total_worker_cycles"])

    @property
    def tile_cycles(self) -> dict[str, int]:
        """As `Figures.tile_cycles`."""
        return dict(self._known["tile_cycles"])

    @property
    def tile_balance(self) -> float:
        """As `Figures.tile_balance`."""
        return float(self._known["tile_balance"])

    @property
    def vertex_type_cycles(self) -> dict[str, tuple[int, int]]:
        """As `Figures.vertex_type_cycles`."""
        return {name: (count, cycles) for name, (count, cycles) in self._known["vertex_type_cycles"].items()}

    @cached_property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """As `Figures.fallbacks`."""
        return tuple(_row(Fallback, row) for row in self._data["fallbacks"])

    @cached_property
    def emulated(self) -> tuple[Emulated, ...]:
        """As `Figures.emulated`."""
        return tuple(_row(Emulated, row) for row in self._data["emulated"])

    @cached_property
    def unmet_bounds(self) -> tuple[UnmetBound, ...]:
        """As `Figures.unmet_bounds`."""
        return tuple(_row(UnmetBound, row) for row in self._data["unmet_bounds"])

    @cached_property
    def step_costs(self) -> tuple[StepCost, ...]:
        """As `Figures.step_costs`."""
        return tuple(_row(StepCost, row) for row in self._known["step_costs"])

    def _operations(self, lines: str) -> tuple[Operation, ...]:
        if self._knows_layers:
            return super()._operations(lines)
        return tuple(_row(Operation, row) for row in self._known["operations"][lines])

    @property
    def _knows_layers(self) -> bool:
        """Whether its operations have layers and phases; older files list lines by themselves instead."""
        return "operations" not in self._known

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """As `Figures.layers`.

        Raises:
            ProfileError: it was saved by an older version; or as the original.
        """
        if not self._knows_layers:
            self._recent({}, "layers", "layers")
        return layer_costs(self.step_costs)

    # --- what files of older versions lack ---

    @cached_property
    def execution_trace(self) -> ExecutionTrace:
        """As `Figures.execution_trace`.

        Raises:
            ProfileError: it was saved by an older version; or as the original.
        """
        return ExecutionTrace.of_data(self._recent(self._known, "trace", "execution trace"))

    @cached_property
    def tasks(self) -> TaskTrace:
        """As `Figures.tasks`.

        Raises:
            ProfileError: it was saved by an older version; or as the original.
        """
        return TaskTrace.of_data(self._recent(self._known, "tasks", "tasks of pipelines"))

    @cached_property
    def stages(self) -> tuple[StageCost, ...]:
        """As `Figures.stages`.

        Raises:
            ProfileError: it was saved by an older version; or as the original.
        """
        return tuple(StageCost(**row) for row in self._recent(self._known, "stages", "stages of pipelines"))

    @cached_property
    def pipelines(self) -> tuple[PipelineCost, ...]:
        """As `Figures.pipelines`.

        Raises:
            ProfileError: it was saved by an older version; or as the original.
        """
        return tuple(PipelineCost(**row) for row in self._recent(self._known, "pipelines", "pipelines"))

    @cached_property
    def program_costs(self) -> ProgramNode:
        """As `Figures.program_costs`.

        Raises:
            ProfileError: it was saved by an older version; or as the original.
        """
        return ProgramNode.of_data(self._recent(self._known, "programs", "program tree"))

    @property
    def sources(self) -> Mapping[str, list[str]]:
        """As `Figures.sources`, as they were then.

        Raises:
            ProfileError: it was saved by an older version.
        """
        texts: Mapping[str, list[str]] = self._recent(self._data, "sources", "source files")
        return texts

    # --- what the graph profile says ---

    @property
    def graph_counts(self) -> dict[str, int]:
        """As `Figures.graph_counts`."""
        return dict(self._data["graph"]["graph"])

    @property
    def optimization_info(self) -> dict[str, float]:
        """As `Figures.optimization_info`."""
        return dict(self._data["graph"]["optimizationInfo"])

    @property
    def vertex_type_bytes(self) -> dict[str, int]:
        """As `Figures.vertex_type_bytes`."""
        graph = self._data["graph"]
        names, rows = graph["vertexTypes"]["names"], graph["memory"]["byVertexType"]["totalBytes"]
        return {name: sum(row) for name, row in zip(names, rows, strict=True)}

    @property
    def compute_set_vertices(self) -> list[dict[str, tuple[int, int]]]:
        """As `Figures.compute_set_vertices`."""
        graph = self._data["graph"]
        sets, names = graph["computeSets"], graph["vertexTypes"]["names"]
        columns = sets["vertexTypes"], sets["vertexCounts"], sets["cycleEstimates"]["activeCyclesByVertexType"]
        return [
            {names[n]: (count, active[n]) for n, count in zip(types, counts, strict=True)}
            for types, counts, active in zip(*columns, strict=True)
        ]

    @property
    def liveness(self) -> Json:
        """As `Figures.liveness`."""
        return copy.deepcopy(self._data["graph"]["memory"]["liveness"])

    def graph(self) -> Json:
        """As `Figures.graph`."""
        return copy.deepcopy(self._data["graph"])

    def execution(self) -> Json:
        """As `Figures.execution`.

        Raises:
            ProfileError: as the original, if its trip counts are data.
        """
        return copy.deepcopy(self._known["execution"]) | self._host_report
