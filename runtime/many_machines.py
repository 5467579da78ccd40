"""Counts of a compiled program, and its cycles and memory on machines that differ in rates.

Input: an `Executable`. Output: `ProgramCounts`, whose `cycles` and `memory` are those of `Executable.on` each machine.
Equal compute sets, and equal copies, are counted once, on whichever IPU they are; the cycles of a phase are computed
once for each combination of the constants that it reads. Clocks of all machines are walked together.
Limits: trip counts that are data are those of `Options.trip_counts`; branches that data decide are the costliest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.compile import Executable, held_graph
from ipujax.runtime.cost import (
    ComputeSetCost,
    ComputeSetCycles,
    CopyCost,
    CopyCosts,
    CopyCycles,
    KnownCounts,
    StreamCost,
    SyncCost,
    WaitCost,
    compute_set_counts,
    compute_set_cycles,
    copy_cycles_on,
    copy_key,
    cost_key,
    stream_cycles_on,
)
from ipujax.runtime.graph import ComputeSet, Copy, CrossReplicaCopy, Execute, Leaf, Program
from ipujax.runtime.memory import fits, memory_report
from ipujax.runtime.target import Machines, Target
from ipujax.runtime.timeline import ClockStep, MachineClocks, equal_ipus
from ipujax.runtime.timeline.clock_steps import LeafCycles, steps_of_cycles

OnMachines = Callable[[Machines], LeafCycles]
Counted = tuple[OnMachines, int]  # from machines to the cycles of a leaf, and how many IPUs further this one is
_MOST_AT_ONCE = 1024  # machines of which the steps of a program are in memory: 40 bytes a step, IPU and machine
MEMORY_CONSTANTS = ("bytes_per_tile", "interleaved_offset_bytes", "exchange_receive_instructions")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest tile of a program on a machine, and whether it fits tiles and streaming memory."""

    max_tile_bytes: int
    fits: bool


class ProgramCounts:
    """Counts of a program; see the module.

    Args:
        executable: the compiled program.
    """

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._memories: dict[tuple[int, ...], Memory] = {}
        self._firsts: dict[object, Counted] = {}  # first of equal leaves, with its IPU

    @cached_property
    def _leaves(self) -> Mapping[Leaf, Counted]:
        """The cycles of each leaf as a function of machines, and by how many IPUs they are moved."""
        executable = self._executable
        leaves: dict[Leaf, Counted] = {}
        copies = CopyCosts(executable.graph)
        groups: KnownCounts = {}  # vertex groups of compute sets that are merged differ less than these
        for leaf, cost in executable.costs.items():
            match leaf, cost:
                case Execute(compute_set), ComputeSetCost():
                    leaves[leaf] = self._of_compute_set(compute_set, cost, groups)
                case Copy(), CopyCost():
                    leaves[leaf] = self._of_copy(leaf, cost, copies)
                case CrossReplicaCopy(), _:
                    leaves[leaf] = copy_cycles_on(executable.graph, leaf, copies), 0
                case _, StreamCost():
                    leaves[leaf] = self._firsts.setdefault(cost.counts.key, (stream_cycles_on(cost.counts), 0))
                case _, SyncCost() | WaitCost():
                    leaves[leaf] = partial(_constantly, cost), 0
        return leaves

    def _of_compute_set(self, compute_set: ComputeSet, cost: ComputeSetCost, groups: KnownCounts) -> Counted:
        """Return the cycles of a compute set, counted once for all that are equal but for their IPUs."""
        key = id(cost.before)  # compute sets that are equal but for their IPUs share the exchanges of their costs
        if key not in self._firsts:
            graph = self._executable.graph
            keys = cost_key(graph, compute_set, cost.first_ipu * graph.target.tiles_per_ipu)
            counts = compute_set_counts(graph, compute_set, keys, groups)
            self._firsts[key] = partial(compute_set_cycles, counts), cost.first_ipu
        on, ipu = self._firsts[key]
        return on, cost.first_ipu - ipu

    def _of_copy(self, copy: Copy, cost: CopyCost, copies: CopyCosts) -> Counted:
        """Return the cycles of a copy, counted once for all that are equal but for the IPU that they are inside of."""
        graph = self._executable.graph
        tiles_per_ipu = graph.target.tiles_per_ipu
        is_inside = len(cost.ipus) == 1
        key = (copy_key(graph, copy, cost.first_ipu * tiles_per_ipu) if is_inside else None) or copy
        if key not in self._firsts:
            self._firsts[key] = copy_cycles_on(graph, copy, copies), cost.first_ipu
        on, ipu = self._firsts[key]
        return on, cost.first_ipu - ipu

    @cached_property
    def _effects(self) -> EffectsOf:
        return EffectsOf(self._executable.graph)

    def steps(self, machines: Machines) -> tuple[dict[Program, ClockStep], int]:
        """Return the clock steps of all leaves and decisions on some machines, and the slots beside the IPUs."""
        cycles_of: dict[Counted, LeafCycles] = {}
        for on, ipus in self._leaves.values():
            if (on, 0) not in cycles_of:
                cycles_of[on, 0] = on(machines)
            if (on, ipus) not in cycles_of:
                cycles_of[on, ipus] = _on_further_ipu(cycles_of[on, 0], ipus)
        cycles = {leaf: cycles_of[counted] for leaf, counted in self._leaves.items()}
        return steps_of_cycles(self._executable.program, cycles, self._effects, machines.arrays())

    def cycles(self, targets: Sequence[Target]) -> np.ndarray:
        """Return the cycles of one run on each machine, int64[machines], as `Executable.on(machine)` has them.

        Args:
            targets: machines that differ from the executable's in rates alone, see `target.constant`.

        Raises:
            ProfileError: the trip count of a loop is data and not in `Options.trip_counts`.
        """
        parts = [targets[n : n + _MOST_AT_ONCE] for n in range(0, len(targets), _MOST_AT_ONCE)]
        return np.concatenate([self.cycles_on(Machines.of(part)) for part in parts])

    def cycles_on(self, machines: Machines) -> np.ndarray:
        """Return the cycles of one run on each machine, [machines]; floats where machines are exact."""
        steps, slots = self.steps(machines)
        kinds = equal_ipus(list(steps.values()))
        if kinds.max(initial=0) > 0:  # phases of no cycles on some machines: other IPUs take part there
            members = [np.flatnonzero(kinds == kind) for kind in range(int(kinds.max()) + 1)]
            cycles = np.concatenate([self.cycles_on(machines.subset(of_kind)) for of_kind in members])
            return cycles[np.argsort(np.concatenate(members))]  # back in the order of the machines
        trip_counts = self._executable.options.trip_counts
        return MachineClocks.of(self._executable.program, steps, slots, trip_counts).cycles()

    def memory(self, target: Target) -> Memory:
        """Return the memory of the program on a machine."""
        constants = tuple(getattr(target, name) for name in MEMORY_CONSTANTS)
        if constants not in self._memories:
            executable = self._executable
            if constants == tuple(getattr(executable.target, name) for name in MEMORY_CONSTANTS):
                report = executable.memory
            else:
                graph = held_graph(executable.graph, target)
                report = memory_report(graph, executable.program, EffectsOf(graph), executable.costs)
            self._memories[constants] = Memory(report.max_tile_bytes, fits(report))
        memory = self._memories[constants]
        available_bytes = target.streaming_memory_bytes * target.num_ipus
        return replace(memory, fits=memory.fits and self._executable.streaming_memory_bytes <= available_bytes)


def _on_further_ipu(cycles: LeafCycles, ipus: int) -> LeafCycles:
    """Return the cycles of a compute set, or of a copy inside an IPU, that is so many IPUs further."""
    match cycles:
        case ComputeSetCycles(before, after, compute, has_vertices):
            return ComputeSetCycles(*(np.roll(x, ipus, 0) for x in (before, after, compute, has_vertices)))
        case CopyCycles(ports, copying, None, None):
            return CopyCycles(np.roll(ports, ipus, 0), np.roll(copying, ipus, 0), None, None)
    raise AssertionError("leaves of other kinds are not moved")


def _constantly(cost: SyncCost | WaitCost, machines: Machines) -> LeafCycles:
    return cost
