"""An operation on operands that lie alike is planned once, and does what it did the first time on other variables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ipujax.lowering.popops import Op
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.maps.emission import added
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor
from tests.lowering.helpers import small_target

ADD = Op("add", lambda x, y: x + y, np.dtype(np.float32))


class Sums:
    """Adds sums of two operands to a graph; `planned` are the names of those that were planned."""

    def __init__(self) -> None:
        self.graph, self.planned = Graph(small_target(8)), list[str]()

    def of(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        def plan(prog: ProgramSequence) -> list[Tensor]:
            self.planned.append(name)
            return [elementwise(self.graph, ADD, (a, b), prog, name)]

        (found,) = added(self.graph, "sum", (a, b), ProgramSequence(), name, plan)
        return found

    def operands(self, count: int) -> list[Tensor]:
        return [self.graph.add_variable((16, 24), np.float32, f"x{n}") for n in range(count)]


def test_equal_operands_are_planned_once() -> None:
    sums = Sums()
    a, b, c, d = sums.operands(4)
    (first,), (second,) = sums.of(a, b, "one").variables(), sums.of(c, d, "two").variables()
    assert sums.planned == ["one"] and (first.name, second.name) == ("one", "two")
    mappings, groups = sums.graph.mappings, [group for own in sums.graph.groups.values() for group in own]
    seen = [[v for access in group.accesses for v in access.tensor.variables()] for group in groups]
    assert [[v.name for v in own] for own in seen] == [["x0", "x1", "one"], ["x2", "x3", "two"]]
    assert all(mappings[v] is mappings[first] for v in seen[1]) and groups[0].codelet is groups[1].codelet


@pytest.mark.parametrize(
    "other",
    [
        lambda graph, a, c, d: (c, c),
        lambda graph, a, c, d: (c, d.reverse([0])),
        lambda graph, a, c, d: (a, d),  # a has been placed
        lambda graph, a, c, d: (c, graph.add_constant(np.ones((16, 24), np.float32))),
    ],
    ids=["one operand twice", "another view", "placed elsewhere", "a constant"],
)
def test_what_differs_is_planned_anew(other: Callable[..., tuple[Tensor, Tensor]]) -> None:
    sums = Sums()
    a, b, c, d = sums.operands(4)
    sums.of(a, b, "one")
    sums.of(*other(sums.graph, a, c, d), "two")
    assert sums.planned == ["one", "two"]


def test_what_users_place_themselves_is_planned_each_time() -> None:
    """Else what lies nowhere would be placed for them, not refused."""
    sums = Sums()
    a, b, c, d = sums.operands(4)
    sums.of(a, b, "one")
    sums.graph.maps_automatically = False
    with pytest.raises(Exception, match="unmapped variable"):
        sums.of(c, d, "two")
