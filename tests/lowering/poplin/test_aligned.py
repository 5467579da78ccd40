"""Plans of products whose vertices are where one operand lies."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from ipujax.lowering.poplin.aligned import LHS, RHS, boxes_of, plan_where
from ipujax.lowering.poplin.product_plan import plan_matmul
from ipujax.runtime.exchange.traffic import traffic
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Execute, HostStream, Sequence, StreamIn, StreamOut
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.tensor.mapping import Blocked
from tests.lowering.helpers import small_target
from tests.marks import slow_but

FLOAT = np.float32
products = import_module("ipujax.lowering.poplin.matmul")


def placed(dims: tuple[int, ...], shape: tuple[int, int, int], seed: int) -> tuple[Graph, list[Any], Blocked]:
    """Two operands, of which one lies in random boxes, each on a tile of its own, as `dims` says."""
    rng = np.random.default_rng(seed)
    m, k, n = shape
    graph, shapes = Graph(small_target(16)), {LHS: (1, m, k), RHS: (1, k, n)}
    tensors = {which: graph.add_variable(size, FLOAT, "x") for which, size in shapes.items()}
    cuts = [np.array([0, 1])]
    for length, parts in zip(shapes[dims][1:], rng.permutation([3, 4]), strict=True):
        inside = np.sort(rng.choice(np.arange(1, length), parts - 1, replace=False))
        cuts.append(np.array([0, *inside, length]))
    tile = rng.permutation(16)[:12].reshape([len(cut) - 1 for cut in cuts]).astype(np.int32)
    boxes = Blocked(tuple(cuts), tile)
    graph.set_tile_mapping(tensors[dims].variables()[0], boxes)
    return graph, list(tensors.values()), boxes


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
@pytest.mark.parametrize("dims", [LHS, RHS], ids=["lhs", "rhs"])
def test_what_lies_is_not_exchanged_and_products_are_right(dims: tuple[int, ...], seed: int) -> None:
    m, k, n = shape = (13, 22, 17)
    graph, (a, b), boxes = placed(dims, shape, seed)
    assert boxes_of(graph, (a, b)[(LHS, RHS).index(dims)]) is not None
    spec = plan_matmul(1, m, k, n, FLOAT, graph.target).spec
    plan = plan_where(spec, dims, boxes, graph.target, graph.target.bytes_per_tile)
    assert plan.tiles_used == 12 and np.array_equal(np.sort(plan.grid().tile, None), np.sort(boxes.tile, None))
    prog = Sequence()
    streams = [HostStream(name, x.shape, FLOAT) for name, x in zip("ab", (a, b), strict=True)]
    for stream, x in zip(streams, (a, b), strict=True):
        prog.add(StreamIn(stream, x))
    out = products._in_steps(graph, a, b, plan, None, prog, "dot")
    sink = HostStream("out", out.shape, FLOAT)
    prog.add(StreamOut(out, sink))
    group = next(graph.groups[leaf.compute_set] for leaf in prog.children() if isinstance(leaf, Execute))[0]
    assert not traffic(group, (LHS, RHS).index(dims), graph).received_bytes.any()
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-4, 5, (1, *size)).astype(FLOAT) for size in ((m, k), (k, n)))
    found = interpret(graph, prog, dict(zip(streams, (x, y), strict=True)))
    np.testing.assert_array_equal(found[sink], x @ y)


def test_a_plan_where_an_operand_lies_keeps_its_memory_bound() -> None:
    graph, (a, *_), boxes = placed(LHS, (13, 22, 17), 0)
    spec = plan_matmul(1, 13, 22, 17, FLOAT, graph.target).spec
    assert boxes_of(graph, a) is not None
    assert plan_where(spec, LHS, boxes, graph.target, 500) is None
