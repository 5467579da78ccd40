"""Memory orders: from view to variable and back, and new variables in the order of another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ipujax.lowering.layout import MemoryOrder, add_like, map_like, memory_order, variable_like
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.tensor.mapping import even_cuts, grid, linear, owners
from tests.lowering.helpers import small_target

SHAPES = [(8, 32), (32, 8), (3, 4, 48), (2, 64, 5), (2, 3, 4, 32), (16, 16), (7,), ()]


def _owners(graph: Graph, view: Tensor) -> np.ndarray:
    """Tile of each element of a view of one variable."""
    assert view.affine is not None
    return owners(graph.mappings[view.affine.variable])[view.affine.flat_indices()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", range(4))
def test_of_variable_inverts_of_view(shape: tuple[int, ...], dim: int) -> None:
    if dim >= len(shape):
        return
    order = MemoryOrder.with_channels(shape, dim)
    graph = Graph(small_target(4))
    variable = graph.add_variable(order.variable_shape, np.float32, "x")
    view = order.of_view(variable)
    assert view.shape == order.shape == shape
    assert order.of_variable(view).is_whole_variable
    assert order.can_cut(view)
    view_order = memory_order(view)
    assert view_order is not None and view_order.of_variable(view).is_whole_variable
    assert order.is_own == (shape[dim] % 16 != 0 or shape[dim] <= 16 or len(shape) < 2)


def test_a_view_with_another_size_along_cut_channels_cannot_be_cut() -> None:
    order = MemoryOrder.with_channels((5, 6, 48), 2)
    graph = Graph(small_target(4))
    assert not order.with_shape((5, 6, 32)).can_cut(graph.add_variable((5, 6, 32), np.float32, "x"))


def test_puts_groups_of_16_channels_before_the_rows() -> None:
    order = MemoryOrder.with_channels((5, 6, 48), 2)
    assert order.variable_shape == (5, 3, 6, 16)
    assert order.view_dims == [0, 2, 1, 2]
    assert MemoryOrder.with_channels((5, 48, 6, 7), 1).variable_shape == (5, 3, 6, 7, 16)
    assert order.behind(4).variable_shape == (4, 5, 3, 6, 16)


@given(dims=st.sets(st.integers(0, 3)))
def test_without_removes_dimensions(dims: set[int]) -> None:
    order = MemoryOrder.with_channels((2, 3, 4, 32), 3)
    remaining = order.without(sorted(dims))
    values = np.arange(2 * 3 * 4 * 32).reshape(order.variable_shape)
    index = tuple(0 if d in dims else slice(None) for d in order.view_dims)
    stored = values[index]
    graph = Graph(small_target(4))
    view = remaining.of_view(graph.add_variable(stored.shape, np.int32, "x"))
    assert view.affine is not None
    expected = _in_view_shape(order, values)[tuple(0 if d in dims else slice(None) for d in range(4))]
    np.testing.assert_array_equal(stored.ravel()[view.affine.flat_indices()], expected)


def _in_view_shape(order: MemoryOrder, values: np.ndarray) -> np.ndarray:
    """Values of a variable in the shape of the view."""
    return values.transpose(np.argsort(order.order)).reshape(order.shape)


def test_maps_a_variable_by_blocks_of_the_view() -> None:
    order = MemoryOrder.with_channels((8, 64), 1)
    graph = Graph(small_target(8))
    cuts = even_cuts(8, 2), np.array([0, 16, 64])
    tile = np.arange(4, dtype=np.int32).reshape(2, 2)
    view = order.of_view(graph.add_variable(order.variable_shape, np.float32, "x", order.mapping(cuts, tile)))
    np.testing.assert_array_equal(_owners(graph, view), np.repeat(np.repeat(tile, [4, 4], 0), [16, 48], 1))


def test_variable_like_has_order_and_mapping_of_the_tensor() -> None:
    graph = Graph(small_target(8))
    order = MemoryOrder.with_channels((8, 64), 1)
    mapping = grid(order.variable_shape, (4, 2, 1))
    x = order.of_view(graph.add_variable(order.variable_shape, np.float32, "x", mapping))
    for like in (variable_like(graph, x, "like"), add_like(graph, x, "like", np.float16)):
        assert memory_order(like) == memory_order(x)
        np.testing.assert_array_equal(_owners(graph, like), _owners(graph, x))
    assert like.dtype == np.float16


def test_leaves_a_scattered_tensor_unmapped_or_linear() -> None:
    graph = Graph(small_target(8))
    x = graph.add_variable((6, 4), np.float32, "x", linear(24, 4, 8))
    assert not graph.is_mapped(variable_like(graph, x[:, 1:3], "like"))
    assert graph.is_mapped(add_like(graph, x[:, 1:3], "like"))


def test_maps_like_a_variable_of_another_order() -> None:
    """The matrix is stored by rows, and gets the blocks of the one that is stored in groups."""
    graph = Graph(small_target(8))
    order = MemoryOrder.with_channels((8, 64), 1)
    x = order.of_view(graph.add_variable(order.variable_shape, np.float32, "x", grid(order.variable_shape, (4, 2, 1))))
    y = graph.add_variable((8, 64), np.float32, "y")
    map_like(graph, y, x)
    np.testing.assert_array_equal(_owners(graph, y), _owners(graph, x))
