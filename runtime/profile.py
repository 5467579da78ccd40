"""The profile of one run of a program: time, memory, and where both go.

Input: an `Executable`, and for a run that was recorded what its data-dependent control did. Output: `Profile`, which
computes what it is asked for and never changes.
Source: section names of `graph()` and `execution()`: Poplar & PopLibs user guide, "Profiling".
Limits: memory is that of one replica. A static profile takes the dearer branch of each decision.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ipujax.runtime.clocks import PHASES
from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.memory import MemoryReport
from ipujax.runtime.program import Execute, If, Program, RepeatWhile, Switch
from ipujax.runtime.report import execution_report, graph_report
from ipujax.runtime.steps import Leaf, leaf_name, leaf_origin
from ipujax.runtime.summary import summary
from ipujax.runtime.timeline import Recording, Timeline
from ipujax.runtime.variable import Origin


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operation without a tile-parallel rule, which runs as one vertex.

    Args:
        operation: its name.
        name: its compute set.
        cycles: cycles of one run of its slowest tile.
        borrowed_tiles: tiles whose memory it needs, 1 when it fits its own.
        origin: where it comes from.
    """

    operation: str
    name: str
    cycles: int
    borrowed_tiles: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class Operation:
    """All that one line of the user's source costs in one run.

    Args:
        origin: the line.
        names: debug names of its steps, most expensive first.
        cycles: cycles on the IPU that spends most on it, all runs of all its steps together.
        share: `cycles` over the cycles of the whole run.
        phases: `cycles` by phase.
        dominant: the phase that takes most.
    """

    origin: Origin
    names: tuple[str, ...]
    cycles: int
    share: float
    phases: dict[str, int]
    dominant: str


@dataclass(frozen=True, eq=False)
class Profile:
    """What one run of an executable costs.

    Args:
        executable: what runs.
        recording: what its data-dependent control did in a run; None for the static profile.
    """

    executable: Executable = field(repr=False)
    recording: Recording | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """When each IPU does what.

        Raises:
            ProfileError: a loop whose trip count is data, is in no option and was not recorded.
        """
        return self.executable.timeline_of(self.recording)

    @property
    def cycles(self) -> int:
        """Length of one run in cycles of the tile clock."""
        return self.timeline.cycles

    @property
    def seconds(self) -> float:
        """Estimated time of one run, in seconds."""
        return float(self.executable.target.seconds(self.cycles))

    @property
    def phase_cycles(self) -> dict[str, int]:
        """Cycles of each phase of the critical IPU; they add up to `cycles`."""
        return self.timeline.phase_cycles()

    @property
    def total_worker_cycles(self) -> int:
        """Cycles in which workers of any tile issue instructions, in one run."""
        costs, runs = self.executable.costs, self.timeline.executions
        return sum(
            int(cost.active_cycles.sum()) * runs.get(leaf, 0)
            for leaf, cost in costs.items()
            if isinstance(cost, ComputeSetCost)
        )

    @property
    def memory(self) -> MemoryReport:
        """What every tile needs."""
        return self.executable.memory

    @cached_property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Operations that run as one vertex, in program order."""
        graph, found = self.executable.graph, {}
        borrowed = {item.name: item.num_tiles for item in self.memory.borrowed}
        for leaf, cost in self.executable.costs.items():
            if isinstance(leaf, Execute) and isinstance(cost, ComputeSetCost) and leaf.compute_set in graph.fallbacks:
                name, origin = leaf.compute_set.name, leaf.compute_set.origin
                cycles, tiles = int(cost.compute_cycles.max()), borrowed.get(name, 1)
                found[leaf.compute_set] = Fallback(graph.fallbacks[leaf.compute_set], name, cycles, tiles, origin)
        return tuple(found.values())

    def operations(self, n: int | None = None) -> tuple[Operation, ...]:
        """The most expensive lines of the user's source, most expensive first; those that take no time are left out.

        Args:
            n: how many; all of them when None.
        """
        total, rows = max(1, self.cycles), []
        for origin, work, names in self._work_by_line().values():
            if not work.any():
                continue
            ipu = int(work.sum(1).argmax())
            phases = {name: int(c) for name, c in zip(PHASES, work[ipu], strict=True) if c}
            cycles = sum(phases.values())
            ordered = tuple(name for name, _ in names.most_common())
            dominant = max(phases, key=lambda name: phases[name])
            rows.append(Operation(origin, ordered, cycles, cycles / total, phases, dominant))
        rows.sort(key=lambda row: -row.cycles)
        return tuple(rows[:n])

    def _work_by_line(self) -> dict[str, tuple[Origin, np.ndarray, Counter[str]]]:
        """Work of each phase on each IPU, and cycles by name of the step, for each line of source."""
        lines: dict[str, tuple[Origin, np.ndarray, Counter[str]]] = {}
        for node, runs in self.timeline.executions.items():
            origin, name = _place(node)
            step = self.executable.steps[node]
            if str(origin) not in lines:
                lines[str(origin)] = origin, np.zeros_like(step.work), Counter()
            _, work, names = lines[str(origin)]
            work += step.work * runs
            names[name] += int(step.cycles.max()) * runs
        return lines

    def graph(self) -> dict[str, Any]:
        """The graph profile, JSON-able: target, graph, vertexTypes, computeSets, exchanges, programs, memory."""
        return graph_report(self.executable)

    def execution(self) -> dict[str, Any]:
        """The execution profile, JSON-able: profilerMode, programTrace, simulation."""
        return execution_report(self.executable, self.timeline)

    def summary(self, operations: int = 5) -> str:
        """The profile as text for people.

        Args:
            operations: how many of the costliest source lines to list.
        """
        return summary(self, operations)


def _place(node: Program) -> tuple[Origin, str]:
    """Where a step comes from, and its name."""
    if isinstance(node, Leaf):
        return leaf_origin(node), leaf_name(node)
    assert isinstance(node, (If, Switch, RepeatWhile))
    return node.origin, "decision"
