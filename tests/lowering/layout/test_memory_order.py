"""The order in which variables keep views: there and back, and new variables that keep alike."""

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
    """The tile of each element of a view of one variable."""
    assert view.affine is not None
    return owners(graph.mappings[view.affine.variable])[view.affine.flat_indices()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", range(4))
def test_of_variable_and_of_view_undo_each_other(shape: tuple[int, ...], dim: int) -> None:
    if dim >= len(shape):
        return
    held, graph = MemoryOrder.with_channels(shape, dim), Graph(small_target(4))
    variable = graph.add_variable(held.variable_shape, np.float32, "x")
    view = held.of_view(variable)
    assert view.shape == held.shape == shape
    assert held.of_variable(view).is_whole_variable
    assert held.can_cut(view)
    found = memory_order(view)
    assert found is not None and found.of_variable(view).is_whole_variable
    assert held.is_own == (shape[dim] % 16 != 0 or shape[dim] <= 16 or len(shape) < 2)


def test_channels_are_in_groups_of_16_before_the_rows() -> None:
    held = MemoryOrder.with_channels((5, 6, 48), 2)
    assert held.variable_shape == (5, 3, 6, 16)
    assert held.view_dims == [0, 2, 1, 2]
    assert MemoryOrder.with_channels((5, 48, 6, 7), 1).variable_shape == (5, 3, 6, 7, 16)
    assert held.behind(4).variable_shape == (4, 5, 3, 6, 16)


@given(dims=st.sets(st.integers(0, 3)))
def test_without_is_the_order_of_what_is_left(dims: set[int]) -> None:
    held = MemoryOrder.with_channels((2, 3, 4, 32), 3)
    left = held.without(sorted(dims))
    whole = np.arange(2 * 3 * 4 * 32).reshape(held.variable_shape)
    index = tuple(0 if d in dims else slice(None) for d in held.view_dims)
    kept = whole[index]
    graph = Graph(small_target(4))
    view = left.of_view(graph.add_variable(kept.shape, np.int32, "x"))
    assert view.affine is not None
    expected = _seen(held, whole)[tuple(0 if d in dims else slice(None) for d in range(4))]
    np.testing.assert_array_equal(kept.ravel()[view.affine.flat_indices()], expected)


def _seen(held: MemoryOrder, values: np.ndarray) -> np.ndarray:
    """Values of a variable as the view shows them."""
    return values.transpose(np.argsort(held.order)).reshape(held.shape)


def test_the_mapping_of_a_variable_by_boxes_of_the_view() -> None:
    held, graph = MemoryOrder.with_channels((8, 64), 1), Graph(small_target(8))
    cuts = even_cuts(8, 2), np.array([0, 16, 64])
    tile = np.arange(4, dtype=np.int32).reshape(2, 2)
    view = held.of_view(graph.add_variable(held.variable_shape, np.float32, "x", held.mapping(cuts, tile)))
    np.testing.assert_array_equal(_owners(graph, view), np.repeat(np.repeat(tile, [4, 4], 0), [16, 48], 1))


def test_a_variable_like_another_keeps_and_lies_as_it_does() -> None:
    graph, held = Graph(small_target(8)), MemoryOrder.with_channels((8, 64), 1)
    mapping = grid(held.variable_shape, (4, 2, 1))
    x = held.of_view(graph.add_variable(held.variable_shape, np.float32, "x", mapping))
    for like in (variable_like(graph, x, "like"), add_like(graph, x, "like", np.float16)):
        assert memory_order(like) == memory_order(x)
        np.testing.assert_array_equal(_owners(graph, like), _owners(graph, x))
    assert like.dtype == np.float16


def test_what_lies_in_no_simple_form_is_left_unmapped_or_linear() -> None:
    graph = Graph(small_target(8))
    x = graph.add_variable((6, 4), np.float32, "x", linear(24, 4, 8))
    assert not graph.is_mapped(variable_like(graph, x[:, 1:3], "like"))
    assert graph.is_mapped(add_like(graph, x[:, 1:3], "like"))


def test_mapping_like_a_variable_of_another_order() -> None:
    """The matrix is kept by rows, and lies in the boxes of the one that is kept in groups."""
    graph, held = Graph(small_target(8)), MemoryOrder.with_channels((8, 64), 1)
    x = held.of_view(graph.add_variable(held.variable_shape, np.float32, "x", grid(held.variable_shape, (4, 2, 1))))
    y = graph.add_variable((8, 64), np.float32, "y")
    map_like(graph, y, x)
    np.testing.assert_array_equal(_owners(graph, y), _owners(graph, x))
