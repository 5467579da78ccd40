"""An operation on operands that lie alike is planned once, and does what it did the first time on other variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ipujax.lowering.popops import Op
from ipujax.lowering.popops.maps import elementwise as maps
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor
from tests.lowering.helpers import small_target

ADD = Op("add", lambda x, y: x + y, np.dtype(np.float32))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operations that have been planned."""
    names: list[str] = []
    plan = maps._added_steps

    def noted(*args: object) -> list[Tensor]:
        names.append(str(args[6]))
        return plan(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(maps, "_added_steps", noted)
    return names


def twice(pairs: Callable[[Graph], Sequence[tuple[Tensor, Tensor]]]) -> tuple[Graph, list[Tensor]]:
    """A graph with a sum of each pair of operands, and the sums."""
    graph, prog = Graph(small_target(8)), ProgramSequence()
    return graph, [elementwise(graph, ADD, pair, prog, f"sum{n}") for n, pair in enumerate(pairs(graph))]


def variables(graph: Graph, count: int) -> list[Tensor]:
    return [graph.add_variable((16, 24), np.float32, f"x{n}") for n in range(count)]


def test_equal_operands_are_planned_once(planned: list[str]) -> None:
    def pairs(graph: Graph) -> list[tuple[Tensor, Tensor]]:
        a, b, c, d = variables(graph, 4)
        return [(a, b), (c, d)]

    graph, sums = twice(pairs)
    assert planned == ["sum0"]
    (first,), (second,) = (x.variables() for x in sums)
    assert graph.mappings[first] is graph.mappings[second] and (first.name, second.name) == ("sum0", "sum1")
    groups = [group for own in graph.groups.values() for group in own]
    read = [tuple(v for access in group.accesses for v in access.tensor.variables()) for group in groups]
    assert len(groups) == 2 and set(read[0]).isdisjoint(read[1]) and groups[0].codelet is groups[1].codelet
    assert {v.name: graph.mappings[v] is graph.mappings[first] for v in read[1]} == dict.fromkeys(
        ("x2", "x3", "sum1"), True
    )


@pytest.mark.parametrize("case", ["one operand twice", "another view", "placed elsewhere", "a constant"])
def test_what_differs_is_planned_anew(planned: list[str], case: str) -> None:
    def pairs(graph: Graph) -> list[tuple[Tensor, Tensor]]:
        a, b, c, d = variables(graph, 4)
        other = {
            "one operand twice": lambda: (c, c),
            "another view": lambda: (c, d.reverse([0])),
            "placed elsewhere": lambda: (a, d),  # a has been placed with b
            "a constant": lambda: (c, graph.add_constant(np.ones((16, 24), np.float32))),
        }[case]
        first = elementwise(graph, ADD, (a, b), ProgramSequence(), "before")
        assert graph.is_mapped(first)
        planned.clear()
        return [other()]

    twice(pairs)
    assert planned == ["sum0"]
