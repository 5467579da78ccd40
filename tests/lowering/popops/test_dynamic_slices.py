"""Slices at dynamic indices against plain JAX, and the data that they move between tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.layout import MemoryOrder
from ipujax.lowering.popops.indexing.dynamic_slices import (
    dynamic_slice,
    dynamic_update_slice_in_place,
    is_sliced_in_place,
    map_for_slicing,
)
from ipujax.runtime.compile import leaf_costs
from ipujax.runtime.cost import ComputeSetCost, compute_set_cost
from ipujax.runtime.graph import Builder
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Sequence
from ipujax.runtime.tensor.mapping import Blocked, blocked_mapping, on_one_tile
from ipujax.runtime.tensor.variable import element_bytes
from tests.lowering.helpers import check, engine, lowered, small_target

X = np.arange(6 * 5 * 7, dtype=np.float32).reshape(6, 5, 7)
STARTS = [(0, 0, 0), (2, 1, 3), (-4, 9, 100)]


@pytest.mark.parametrize("sizes", [(1, 5, 7), (6, 2, 7), (2, 3, 4), (6, 5, 7), (1, 1, 1)])
@pytest.mark.parametrize("start", STARTS)
def test_dynamic_slice(sizes: tuple[int, ...], start: tuple[int, ...]) -> None:
    check(lambda x, *s: lax.dynamic_slice(x, s, sizes), X, *map(np.int32, start), tiles=(7,))


@pytest.mark.parametrize("shape", [(1, 5, 7), (6, 2, 7), (2, 3, 4), (6, 5, 7)])
@pytest.mark.parametrize("start", STARTS)
def test_dynamic_update_slice(shape: tuple[int, ...], start: tuple[int, ...]) -> None:
    update = -np.ones(shape, np.float32)
    check(lambda x, u, *s: lax.dynamic_update_slice(x, u, s), X, update, *map(np.int32, start), tiles=(7,))


@pytest.mark.parametrize("start", [-9, -6, -1])
def test_clamps_negative_starts(start: int) -> None:
    """A rule of the primitive: `lax` itself resolves starts that count from the end."""
    i = np.int32(start)
    update = -np.ones((1, 2, 3), np.float32)
    check(lambda x, i: lax.dynamic_slice_p.bind(x, i, i, i, slice_sizes=(1, 2, 3)), X, i, tiles=(7,))
    check(lambda x, u, i: lax.dynamic_update_slice_p.bind(x, u, i, i, i), X, update, i, tiles=(7,))
    check(lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i, i)), X, update, i, tiles=(7,))


def test_other_dtypes() -> None:
    for x in (X.astype(np.int8), X > 3, X.astype(jnp.bfloat16)):
        check(lambda x, i: lax.dynamic_slice(x, (i, i, i), (2, 2, 2)), x, np.uint8(3), tiles=(4,))
    keys = jax.random.split(jax.random.key(0), 6)
    check(lambda k, i: k[i], keys, np.int32(2), tiles=(4,))


def test_of_views_and_vectors() -> None:
    check(lambda x, i: lax.dynamic_slice_in_dim(x.T[::-1], i, 2, 1), X, np.int32(2), tiles=(7,))
    check(lambda x, u, i: lax.dynamic_update_slice(x.T.reshape(-1), u, (i,)), X, X[0, 0, :3], np.int32(2), tiles=(7,))
    check(lambda x, i: x[i], X.ravel(), np.int32(17), tiles=(16,))


def test_no_elements() -> None:
    check(lambda x, i: lax.dynamic_slice(x, (i, 0, 0), (0, 5, 7)), X, np.int32(1), tiles=(4,))
    check(lambda x, i: lax.dynamic_update_slice(x, x[:0], (i, 0, 0)), X, np.int32(1), tiles=(4,))


def test_inside_a_loop() -> None:
    def fun(x: jax.Array) -> jax.Array:
        def body(i: jax.Array, y: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(y, lax.dynamic_index_in_dim(x, 5 - i, 0) * 2, i, 0)

        return lax.fori_loop(0, 6, body, jnp.zeros_like(x))

    check(fun, X, tiles=(1, 7))


def test_scan_reads_and_writes_stacks() -> None:
    def fun(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.scan(lambda c, row: (c + row, c * row), jnp.zeros((5, 7)), x)

    check(fun, X, tiles=(7,))


def test_a_worker_takes_each_of_many_short_slices() -> None:
    """As poplibs: 36 cycles for a region, 29 for a row of floats and one for each of its vectors."""

    def fun(xs: list[jax.Array]) -> list[jax.Array]:
        return lax.scan(lambda c, rows: (c, [row + 1 for row in rows]), 0, xs)[1]

    count, length = 13, 16
    check(fun, [X[:, 0] * n for n in range(count)], tiles=(3,))
    target = small_target(1)
    program = lowered(fun, [[np.ones((5, length), np.float32)] * count], target)
    cycles = [
        compute_set_cost(program.graph, compute_set).compute_cycles.max()
        for compute_set, groups in program.graph.groups.items()
        if {group.codelet.name for group in groups} == {"popops::DynamicUpdateSlice2d<float32>"}
    ]
    assert cycles == [target.supervisor_overhead_cycles + 6 * 3 * (36 + 29 + length // 2)]
    one = lowered(fun, [[np.ones((5, length), np.float32)]], target)
    names = {group.codelet.name for groups in one.graph.groups.values() for group in groups}
    assert {"popops::DynamicSlice<float32>", "popops::DynamicUpdateSlice<float32>"} <= names  # shared by all workers


def test_maps_without_cuts_of_the_sliced_dimension() -> None:
    graph = Graph(small_target(16))
    x = graph.add_variable((8, 6, 64), np.dtype(np.float32), "x")
    map_for_slicing(graph, x, (0,))
    mapping = graph.mappings[x.variables()[0]]
    assert isinstance(mapping, Blocked)
    assert len(mapping.cuts[0]) == 2
    assert np.unique(mapping.tile).size > 8
    bytes_per_tile = mapping.elements_per_tile(16) * element_bytes(x.dtype)
    assert bytes_per_tile.max() <= 2 * x.size * 4 / 16


def test_maps_rows_in_channel_groups_without_cuts_of_the_sliced_dimension() -> None:
    """Columns in groups of 16 have no blocks of other sizes; a linear mapping would cut the rows."""
    graph = Graph(small_target(92))
    order = MemoryOrder.with_channels((2, 64, 256), 2)
    x = order.add_variable(graph, np.dtype(np.float16), "x")
    map_for_slicing(graph, x, (0,))
    assert is_sliced_in_place(graph, x, (0,))


def test_cuts_short_rows_for_lack_of_other_dimensions() -> None:
    graph = Graph(small_target(16))
    x = graph.add_variable((2, 512, 2, 32), np.dtype(np.float32), "x")
    map_for_slicing(graph, x, (1,))
    mapping = graph.mappings[x.variables()[0]]
    assert isinstance(mapping, Blocked)
    assert [len(cut) - 1 for cut in mapping.cuts] == [2, 1, 2, 4]


def test_slice_of_a_suitably_mapped_tensor_moves_only_indices() -> None:
    program = lowered(lambda x, i: lax.dynamic_index_in_dim(x, i, 0), (np.zeros((8, 6, 64), np.float32), np.int32(0)),
                      small_target(16))  # fmt: skip
    (group,) = [g for groups in program.graph.groups.values() for g in groups if "Slice" in g.codelet.name]
    table, out = (access.tensor.variables()[0] for access in group.accesses[:2])
    for variable in (table, out):
        mapping = program.graph.mappings[variable]
        assert isinstance(mapping, Blocked)
        np.testing.assert_array_equal(mapping.tile.ravel(), group.tile.ravel())


def test_update_in_place_writes_the_buffer() -> None:
    graph = Graph(small_target(4))
    prog = Sequence()
    dtype = np.dtype(np.float32)
    buffer = graph.add_variable((6, 40), dtype)
    update = graph.add_variable((1, 40), dtype)
    start = graph.add_variable((), np.dtype(np.int32), "i", on_one_tile(1, 0))
    dynamic_update_slice_in_place(Builder(graph, prog, "push"), buffer, update, [start], dims=(0,))
    ((group,),) = graph.groups.values()
    assert group.accesses[0].tensor is buffer and group.codelet.fields[0].direction == "inout"
    assert len(graph.variables) == 3


def test_a_buffer_in_several_blocks_on_a_tile_is_not_rearranged() -> None:
    """Each slot of a tile's block is a vector of its own: a loop would copy the whole stack in each iteration."""
    graph = Graph(small_target(2))
    prog = Sequence()
    dtype = np.dtype(np.float32)
    mapping = blocked_mapping([np.array([0, 6]), np.array([0, 10, 20, 30, 40])], np.array([[0, 1, 0, 1]]))
    row_mapping = blocked_mapping([np.array([0, 1]), mapping.cuts[1]], mapping.tile)
    buffer = graph.add_variable((6, 40), dtype, "stack", mapping)
    update = graph.add_variable((1, 40), dtype, "row", row_mapping)
    start = graph.add_variable((), np.dtype(np.int32), "i", on_one_tile(1, 0))
    dynamic_update_slice_in_place(Builder(graph, prog, "push"), buffer, update, [start], dims=(0,))
    dynamic_slice(Builder(graph, prog, "slice"), buffer, [start], (1, 40), dims=(0,))
    costs = [cost for cost in leaf_costs(graph, prog).values() if isinstance(cost, ComputeSetCost)]
    assert len(costs) == 2 and not any(cost.rearrangement_bytes.any() for cost in costs)


def test_engine_computes_one_slice() -> None:
    args = X, np.int32(1)
    program = lowered(lambda x, i: lax.dynamic_index_in_dim(x, i, 0), args, small_target(16))
    text = str(jax.make_jaxpr(engine(program))(*args))
    assert text.count("dynamic_slice") == 1 and "gather" not in text


def test_slice_has_the_memory_order_of_the_tensor() -> None:
    graph = Graph(small_target(4))
    prog = Sequence()
    columns = graph.add_variable((6, 8, 4), np.dtype("float32"), "x").transpose((1, 0, 2))  # [8, 6, 4]
    start = graph.add_constant(np.int32(3), "start")
    part = dynamic_slice(Builder(graph, prog, "part"), columns, [start], (2, 6, 4), dims=(0,))
    assert part.shape == (2, 6, 4) and part.transpose((1, 0, 2)).is_whole_variable


def test_writes_an_update_in_the_memory_order_of_the_buffer() -> None:
    """Otherwise the full buffer would be exchanged twice."""
    graph = Graph(small_target(4))
    prog = Sequence()
    columns = graph.add_variable((6, 8, 4), np.dtype("float32"), "x").transpose((1, 0, 2))  # [8, 6, 4]
    update = graph.add_variable((2, 6, 4), np.dtype("float32"), "update")
    start = graph.add_constant(np.int32(3), "start")
    dynamic_update_slice_in_place(Builder(graph, prog, "write"), columns, update, [start], dims=(0,))
    ((group,),) = graph.groups.values()
    buffer, written = (access.tensor for access in group.accesses[:2])
    assert buffer.is_whole_variable and written.shape == (6, 2, 4)
