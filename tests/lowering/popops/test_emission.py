"""Replay of operations on operands of equal shapes and mappings."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest

from ipujax.lowering.ipus import Ipus
from ipujax.lowering.popops import Op
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.maps.emission import emit_or_replay
from ipujax.runtime.graph import Builder, Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor
from tests.lowering.helpers import small_target

ADD = Op("add", lambda x, y: x + y, np.dtype(np.float32))


class Sums:
    """Adds sums of two operands to a graph; `planned` are the names of those that were planned."""

    def __init__(self, graph: Graph | None = None) -> None:
        self.graph = graph or Graph(small_target(8))
        self.planned: list[str] = []

    def add(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        def plan(prog: ProgramSequence) -> list[Tensor]:
            self.planned.append(name)
            return [elementwise(Builder(self.graph, prog, name), ADD, (a, b))]

        (total,) = emit_or_replay(Builder(self.graph, ProgramSequence(), name), "sum", (a, b), plan)
        return total

    def operands(self, count: int) -> list[Tensor]:
        return [self.graph.add_variable((16, 24), np.float32, f"x{n}") for n in range(count)]


def test_plans_equal_operands_once() -> None:
    sums = Sums()
    a, b, c, d = sums.operands(4)
    (planned,) = sums.add(a, b, "one").variables()
    (replayed,) = sums.add(c, d, "two").variables()
    assert sums.planned == ["one"] and (planned.name, replayed.name) == ("one", "two")
    mappings = sums.graph.mappings
    groups = [group for set_groups in sums.graph.groups.values() for group in set_groups]
    connected = [[v for access in group.accesses for v in access.tensor.variables()] for group in groups]
    assert [[v.name for v in variables] for variables in connected] == [["x0", "x1", "one"], ["x2", "x3", "two"]]
    assert all(mappings[v] is mappings[planned] for v in connected[1]) and groups[0].codelet is groups[1].codelet


@pytest.mark.parametrize(
    "operands",
    [
        lambda graph, a, c, d: (c, c),
        lambda graph, a, c, d: (c, d.reverse([0])),
        lambda graph, a, c, d: (a, d),  # a is mapped
        lambda graph, a, c, d: (c, graph.add_constant(np.ones((16, 24), np.float32))),
    ],
    ids=["one operand twice", "another view", "another mapping", "a constant"],
)
def test_plans_different_operands_again(operands: Callable[..., tuple[Tensor, Tensor]]) -> None:
    sums = Sums()
    a, b, c, d = sums.operands(4)
    sums.add(a, b, "one")
    sums.add(*operands(sums.graph, a, c, d), "two")
    assert sums.planned == ["one", "two"]


def test_equal_ipus_plan_equal_operations_once() -> None:
    full = Graph(small_target(8).replace(num_ipus=2))
    views = Ipus(full, Mock(), ProgramSequence())
    first, second = Sums(views.view(0)), Sums(views.view(1))
    results = [sums.add(*sums.operands(2), "sum").variables()[0] for sums in (first, second)]
    assert first.planned and not second.planned
    assert views.view(0).mappings[results[0]] is views.view(1).mappings[results[1]]
    (own,), (other,) = full.groups.values()
    np.testing.assert_array_equal(other.tile, own.tile + 8)
    np.testing.assert_array_equal(full.mappings[results[1]].tiles, full.mappings[results[0]].tiles + 8)


def test_scalars_of_one_value_are_planned_once() -> None:
    sums = Sums()
    a, b, c = sums.operands(3)
    for x, value in ((a, 2.0), (b, 2.0), (c, 3.0)):
        scalar = sums.graph.add_constant(np.float32(value), f"{value}")
        sums.add(x, scalar.broadcast_in_dim(x.shape, ()), f"plus {value}")
    assert sums.planned == ["plus 2.0", "plus 3.0"]


def test_plans_each_time_where_users_map_tensors() -> None:
    """A replay would map an unmapped operand, which must be refused."""
    sums = Sums()
    a, b, c, d = sums.operands(4)
    sums.add(a, b, "one")
    sums.graph.maps_automatically = False
    with pytest.raises(Exception, match=r"operand .* is mapped to no tile"):
        sums.add(c, d, "two")
