"""A profile as data, and figures from such data.

Input: `Figures`, as JSON-able data of `saved_data`. Output: `SavedFigures`, with the same figures. The figures
themselves are saved: both reports, memory by tile, and the rows of the texts.
Limits: the executable and the steps of the timeline, which hold the program, are not saved. Files of older versions
lack some figures: reading one raises an error that says so.
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
    origin = {**data["origin"], "callers": tuple(data["origin"].get("callers", ()))}
    return kind(**{**values, "origin": Origin(**origin)})


class SavedFigures(Figures):
    """The figures of one run of an executable as they were saved; see `Figures` for the attributes.

    Args:
        data: result of `saved_data`; from a file, after the checks of `runtime.schema`.
    """

    _data: Json

    def __init__(self, data: Json) -> None:
        host = data.get("host")  # None in files from before it was measured
        renamed = Identity(**data.get("identity", {}))  # of files before there was one: empty
        host = None if host is None else HostData.from_data(host)
        self.__dict__.update(_data=data, host=host, renamed=renamed)  # figures are frozen

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

    def _require(self, section: Json, key: str, description: str) -> Any:
        """Return a part of a section, or raise an error for a file of an older version without it."""
        if key not in section:
            hint = "save the profile again with this ipujax"
            raise ProfileError(f"the profile was saved by an older ipujax, without its {description}", hint=hint)
        return section[key]

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
        """Suggestions for a program that does not fit; empty in files of versions without them."""
        return tuple(self._data.get("waysToFit", ()))

    @property
    def byte_costs(self) -> tuple[float, ...]:
        return tuple(self._data["graph"]["bytePrice"]["tried"])

    @property
    def streaming_memory_bytes(self) -> int:
        return int(self._data["graph"]["streamingMemory"]["bytes"])

    @property
    def overlapped_cycles(self) -> int:
        return int(self._run["overlapped_cycles"])

    @property
    def _byte_cost_added_cycles(self) -> int | None:
        cost: int | None = self._data["graph"]["bytePrice"].get("costCycles")
        return cost

    @property
    def cycles(self) -> int:
        return int(self._run["cycles"])

    @cached_property
    def ipu_phase_cycles(self) -> tuple[dict[str, int], ...]:
        """Cycles of each phase of every IPU, from the execution trace in files without them."""
        run = self._run
        if "ipu_phase_cycles" in run:
            return tuple(map(dict, run["ipu_phase_cycles"]))
        return phase_cycles_of_ipus(self.execution_trace)

    @property
    def limiting_ipu(self) -> int:
        """The IPU with most busy cycles; in files with phases of one IPU, that one, which ended last."""
        return int(self._run["critical_ipu"]) if self._has_one_ipu else super().limiting_ipu

    @property
    def phase_cycles(self) -> dict[str, int]:
        return dict(self._run["phase_cycles"]) if self._has_one_ipu else super().phase_cycles

    @property
    def busy_cycles(self) -> int:
        return self.cycles - self.phase_cycles["idle"] if self._has_one_ipu else super().busy_cycles

    @property
    def _has_one_ipu(self) -> bool:
        """True in files of the versions that saved the phases of one IPU only."""
        return "ipu_phase_cycles" not in self._run and "trace" not in self._run

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
    def emulated(self) -> tuple[Emulated, ...]:
        return tuple(_row(Emulated, row) for row in self._data["emulated"])

    @cached_property
    def unmet_bounds(self) -> tuple[UnmetBound, ...]:
        return tuple(_row(UnmetBound, row) for row in self._data["unmet_bounds"])

    @cached_property
    def step_costs(self) -> tuple[StepCost, ...]:
        return tuple(_row(StepCost, row) for row in self._run["step_costs"])

    def _operations(self, lines: str) -> tuple[Operation, ...]:
        if self._has_layers:
            return super()._operations(lines)
        return tuple(_row(Operation, row) for row in self._run["operations"][lines])

    @property
    def _has_layers(self) -> bool:
        """False in files of the versions that saved a list of lines instead of rows with layers."""
        return "operations" not in self._run

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """`Figures.layers`."""
        if not self._has_layers:
            self._require({}, "layers", "layers")
        return layer_costs(self.step_costs)

    # --- figures that files of older versions lack ---

    @cached_property
    def execution_trace(self) -> ExecutionTrace:
        """`Figures.execution_trace`."""
        return ExecutionTrace.of_data(self._require(self._run, "trace", "execution trace"))

    @cached_property
    def tasks(self) -> TaskTrace:
        """`Figures.tasks`."""
        return TaskTrace.of_data(self._require(self._run, "tasks", "tasks of pipelines"))

    @cached_property
    def stages(self) -> tuple[StageCost, ...]:
        """`Figures.stages`."""
        return tuple(StageCost(**row) for row in self._require(self._run, "stages", "stages of pipelines"))

    @cached_property
    def pipelines(self) -> tuple[PipelineCost, ...]:
        """`Figures.pipelines`."""
        return tuple(PipelineCost(**row) for row in self._require(self._run, "pipelines", "pipelines"))

    @cached_property
    def program_costs(self) -> ProgramNode:
        """`Figures.program_costs`."""
        return ProgramNode.of_data(self._require(self._run, "programs", "program tree"))

    @property
    def sources(self) -> Mapping[str, list[str]]:
        """Lines of the source files as they were when the profile was saved, by path."""
        texts: Mapping[str, list[str]] = self._require(self._data, "sources", "source files")
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
        return {name: sum(row) for name, row in zip(names, rows, strict=True)}

    @property
    def vertex_type_languages(self) -> dict[str, str]:
        """Empty in files from before codelets had a language."""
        types = self._data["graph"]["vertexTypes"]
        return dict(zip(types["names"], types.get("languages", ()), strict="languages" in types))

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
        return copy.deepcopy(self._data["graph"])

    def execution(self) -> Json:
        """Return the execution profile as it was saved.

        Raises:
            ProfileError: as the original, if its trip counts are data.
        """
        return copy.deepcopy(self._run["execution"]) | self._host_report
