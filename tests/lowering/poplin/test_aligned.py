"""Plans of products whose vertices are on the tiles of one operand."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from ipujax.lowering.poplin.matmul import LHS, RHS, aligned_plan, blocks_of
from ipujax.lowering.poplin.product_plan import plan_matmul
from ipujax.runtime.exchange.traffic import traffic
from ipujax.runtime.graph import Builder
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Execute, HostStream, Sequence, StreamIn, StreamOut
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.tensor.mapping import Blocked
from tests.lowering.helpers import small_target

FLOAT = np.float32
products = import_module("ipujax.lowering.poplin.matmul")


def mapped_operands(dims: tuple[int, ...], shape: tuple[int, int, int], seed: int) -> tuple[Graph, list[Any], Blocked]:
    """Two operands, of which the one of `dims` is mapped in random blocks, each on a tile of its own."""
    rng = np.random.default_rng(seed)
    m, k, n = shape
    graph = Graph(small_target(16))
    shapes = {LHS: (1, m, k), RHS: (1, k, n)}
    tensors = {operand_dims: graph.add_variable(size, FLOAT, "x") for operand_dims, size in shapes.items()}
    cuts = [np.array([0, 1])]
    for length, count in zip(shapes[dims][1:], rng.permutation([3, 4]), strict=True):
        inner_cuts = np.sort(rng.choice(np.arange(1, length), count - 1, replace=False))
        cuts.append(np.array([0, *inner_cuts, length]))
    tile = rng.permutation(16)[:12].reshape([len(cut) - 1 for cut in cuts]).astype(np.int32)
    blocks = Blocked(tuple(cuts), tile)
    graph.set_tile_mapping(tensors[dims].variables()[0], blocks)
    return graph, list(tensors.values()), blocks


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dims", [LHS, RHS], ids=["lhs", "rhs"])
def test_does_not_exchange_the_aligned_operand(dims: tuple[int, ...], seed: int) -> None:
    m, k, n = shape = (32, 24, 17)
    graph, (a, b), blocks = mapped_operands(dims, shape, seed)
    assert blocks_of(graph, (a, b)[(LHS, RHS).index(dims)]) is not None
    spec = plan_matmul(1, m, k, n, FLOAT, graph.target).spec
    plan = aligned_plan(spec, dims, blocks, graph.target, graph.target.bytes_per_tile)
    assert plan.tiles_used == 12 and np.array_equal(np.sort(plan.grid().tile, None), np.sort(blocks.tile, None))
    prog = Sequence()
    streams = [HostStream(name, x.shape, FLOAT) for name, x in zip("ab", (a, b), strict=True)]
    for stream, x in zip(streams, (a, b), strict=True):
        prog.add(StreamIn(stream, x))
    out = products._add_steps(Builder(graph, prog, "dot"), a, b, plan, None)
    sink = HostStream("out", out.shape, FLOAT)
    prog.add(StreamOut(out, sink))
    group = next(graph.groups[leaf.compute_set] for leaf in prog.children() if isinstance(leaf, Execute))[0]
    assert not traffic(group, (LHS, RHS).index(dims), graph).received_bytes.any()
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(-4, 5, (1, *size)).astype(FLOAT) for size in ((m, k), (k, n)))
    outputs = interpret(graph, prog, dict(zip(streams, (x, y), strict=True)))
    np.testing.assert_array_equal(outputs[sink], x @ y)


@pytest.mark.parametrize("dims", [LHS, RHS], ids=["lhs", "rhs"])
def test_an_operand_that_is_rearranged_is_exchanged(dims: tuple[int, ...]) -> None:
    graph, _, blocks = mapped_operands(dims, (32, 22, 17), 0)  # 22 channels of floats do not fill groups of 8
    spec = plan_matmul(1, 32, 22, 17, FLOAT, graph.target).spec
    assert aligned_plan(spec, dims, blocks, graph.target, graph.target.bytes_per_tile) is None


def test_aligned_plan_meets_its_memory_bound() -> None:
    graph, (a, *_), blocks = mapped_operands(LHS, (32, 24, 17), 0)
    spec = plan_matmul(1, 32, 24, 17, FLOAT, graph.target).spec
    assert blocks_of(graph, a) is not None
    assert aligned_plan(spec, LHS, blocks, graph.target, graph.target.bytes_per_tile) is not None
    assert aligned_plan(spec, LHS, blocks, graph.target, 500) is None
