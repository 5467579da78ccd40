"""Cycle formulas of all operations on arrays of machines: as on each machine, and smooth where not rounded."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax.runtime.compile import held_graph
from ipujax.runtime.cost import compute_set_cost, compute_set_counts, compute_set_cycles, slowest_tiles
from ipujax.runtime.graph import Graph
from ipujax.runtime.target import Machines
from tests.ipujax.studies.random_machines import RATES, random_machines
from tests.lowering.helpers import lowered, small_target
from tests.lowering.rules.op_table import CASES, FAMILIES
from tests.lowering.rules.test_ops import gradient_of, together

TILES = 7
_STEPS = 1 + 1e-5 * np.arange(-2, 3)


def graph_of(family: str, of_gradients: bool) -> Graph:
    """A graph of all rows of a family, or of their gradients."""
    cases = [case for case in FAMILIES[family] if case.grad or not of_gradients]
    functions = [gradient_of(case) if of_gradients else case.fun for case in cases]
    arguments = [case.arguments() for case in cases]
    return lowered(together(functions), arguments, small_target(TILES)).graph


def assert_equal_costs(graph: Graph) -> None:
    targets = [graph.target, *random_machines(graph.target, 3)]
    machines = Machines.of(targets)
    for compute_set, groups in graph.groups.items():
        cycles = compute_set_cycles(compute_set_counts(graph, compute_set), machines)
        alone = [slowest_tiles(compute_set_cost(held_graph(graph, x), compute_set), x) for x in targets]
        for phase in ("before", "after", "compute"):
            expected = np.stack([getattr(each, phase) for each in alone], -1)
            actual = np.broadcast_to(getattr(cycles, phase), expected.shape)
            np.testing.assert_array_equal(actual, expected, err_msg=f"{phase} of {[g.codelet.name for g in groups]}")
        np.testing.assert_array_equal(cycles.has_vertices, alone[0].has_vertices)


def assert_smooth(graph: Graph) -> None:
    """Cycles of vertices change evenly with each rate; rounding would leave them, or move them by a cycle at a time."""
    values = {item.name: getattr(graph.target, item.name) for item in RATES}
    values = {name: value for name, value in values.items() if value}
    count = len(_STEPS)
    numbers = {name: np.full(count * len(values), float(value)) for name, value in values.items()}
    for number, name in enumerate(values):
        numbers[name][number * count :][:count] *= _STEPS
    machines = Machines(graph.target, numbers, count * len(values), is_exact=True)
    for compute_set, groups in graph.groups.items():
        counts = compute_set_counts(graph, compute_set)
        if any(group.codelet.costed_by != "arrays" for group in groups):
            continue
        cycles = compute_set_cycles(counts, machines).compute.max(0)
        for number, name in enumerate(values):
            changes = np.diff(np.broadcast_to(cycles, (count * len(values),))[number * count :][:count])
            for side in (changes[:2], changes[2:]):  # there may be a kink at the machine itself, of two equal paths
                np.testing.assert_allclose(
                    side, side.mean(), rtol=0.01, atol=1e-7 * cycles.max(), err_msg=f"{name}: {groups[0].codelet}"
                )


@pytest.mark.parametrize("of_gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("family", FAMILIES)
def test_formulas_take_arrays_of_machines(family: str, of_gradients: bool) -> None:
    if of_gradients and not any(case.grad for case in FAMILIES[family]):
        pytest.skip("no gradients in this family")
    graph = graph_of(family, of_gradients)
    assert_equal_costs(graph)
    assert_smooth(graph)


def test_all_rows_are_in_a_family() -> None:
    assert sum(map(len, FAMILIES.values())) == len(CASES)
