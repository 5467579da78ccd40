"""Costs of many machines at once equal those of the same program on each machine."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax.runtime.compile import held_graph
from ipujax.runtime.cost import compute_set_cost, compute_set_counts
from ipujax.runtime.cost.compute_set import NOT_OF_TILES
from ipujax.runtime.errors import TargetError
from ipujax.runtime.many_machines import ProgramCounts
from ipujax.runtime.target import Machines, TargetArray
from tests.ipujax.studies.program_kinds import KINDS
from tests.ipujax.studies.random_machines import random_machines


@pytest.mark.parametrize("name", KINDS)
def test_cycles_are_those_of_each_machine(name: str) -> None:
    executable = KINDS[name].compiled().executable
    targets = [executable.target, *random_machines(executable.target, 4)]
    expected = [executable.on(target).timeline_of(None).cycles for target in targets]
    counts = ProgramCounts(executable)
    assert counts.cycles(targets).tolist() == expected
    assert [int(counts.cycles([target])[0]) for target in targets] == expected


def test_phases_of_no_cycles() -> None:
    executable = KINDS["buffered pipeline"].compiled().executable
    free = {"internal_sync_cycles": 0, "global_sync_cycles": 0, "exchange_startup_cycles": 0, "copy_startup_cycles": 0}
    targets = [executable.target, executable.target.replace(**free, copy_fragment_cycles=0)]
    expected = [executable.on(target).timeline_of(None).cycles for target in targets]
    assert ProgramCounts(executable).cycles(targets).tolist() == expected


def test_exact_cycles_are_not_rounded_where_a_step_has_no_cycles_on_some_machines() -> None:
    executable = KINDS["branches"].compiled().executable
    counts = ProgramCounts(executable)
    syncs = np.array([0.0, 1.0003]) * executable.target.internal_sync_cycles
    both = Machines(executable.target, {"internal_sync_cycles": syncs}, 2, is_exact=True)
    alone = Machines(executable.target, {"internal_sync_cycles": syncs[1:]}, 1, is_exact=True)
    (expected,) = counts.cycles_on(alone)
    assert expected % 1 and counts.cycles_on(both)[1] == expected


def test_memory_is_that_of_each_machine() -> None:
    executable = KINDS["operations"].compiled().executable
    counts = ProgramCounts(executable)
    for changes in ({}, {"bytes_per_tile": 2**14}, {"exchange_receive_instructions": 30}):
        target = executable.target.replace(**changes)
        memory = executable.on(target).memory
        assert counts.memory(target).max_tile_bytes == memory.max_tile_bytes
        assert counts.memory(target).fits == (not memory.lacking())


def test_rates_are_smooth_where_machines_are_exact() -> None:
    executable = KINDS["operations"].compiled().executable
    counts = ProgramCounts(executable)
    target = executable.target
    for name in ("exchange_bytes_per_cycle", "memcpy_bytes_per_cycle", "load_bytes_per_cycle", "clock_hz"):
        factors = 1 + np.linspace(-1e-3, 1e-3, 5)
        cycles = counts.cycles_on(
            Machines(target, {name: getattr(target, name) * factors}, len(factors), is_exact=True)
        )
        steps = np.diff(cycles)
        assert (steps != 0).all(), name
        np.testing.assert_allclose(steps, steps.mean(), rtol=0.01)
        assert abs(cycles[2] / counts.cycles([target])[0] - 1) < 0.02


def test_machines_differ_in_rates_alone() -> None:
    executable = KINDS["operations"].compiled().executable
    with pytest.raises(TargetError, match="differ in tiles_per_ipu"):
        ProgramCounts(executable).cycles([executable.target, executable.target.replace(tiles_per_ipu=8)])


@pytest.mark.parametrize("name", ["operations", "branches", "offloaded", "function on tiles", "replicas"])
def test_costs_of_compute_sets_read_no_other_constants(name: str) -> None:
    executable = KINDS[name].compiled().executable
    graph = executable.graph
    for compute_set in graph.groups:
        target = TargetArray(graph.target, {})
        counts = compute_set_counts(graph, compute_set)
        for part in (counts.before.cycles, counts.after.cycles, counts.compute_cycles):
            part(target)
        assert target.noted.isdisjoint(NOT_OF_TILES), compute_set.name


def test_costs_are_recalled_for_machines_that_differ_in_others() -> None:
    graph = KINDS["operations"].compiled().executable.graph
    (compute_set, *_) = graph.groups
    cost = compute_set_cost(graph, compute_set)
    other = held_graph(graph, graph.target.replace(clock_hz=1e9, host_latency_seconds=1.0))
    assert compute_set_cost(other, compute_set).compute_cycles is cost.compute_cycles
    slower = held_graph(graph, graph.target.replace(supervisor_overhead_cycles=99))
    assert compute_set_cost(slower, compute_set).compute_cycles is not cost.compute_cycles
