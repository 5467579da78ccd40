"""Mappings of results, against the tile of each single element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ipujax.lowering.layout.mapping import linear_mapping, map_by_plan, map_linearly, mapping_like
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.tensor.mapping import Blocked, Flat, TileMapping, check_mapping, even_cuts, frozen, grid, owners
from ipujax.runtime.tensor.tensor import Tensor, concat
from tests.lowering.helpers import small_target

TILES = 8


@st.composite
def cuts(draw: Any, extent: int) -> np.ndarray:
    """Random cuts of a dimension."""
    inner = draw(st.sets(st.integers(1, extent - 1), max_size=3)) if extent > 1 else set()
    return frozen([0, *sorted(inner), extent], np.int64)


@st.composite
def mappings(draw: Any, shape: tuple[int, ...]) -> TileMapping:
    """Random mapping, blocked or flat."""
    if draw(st.booleans()):
        block_cuts = tuple(draw(cuts(n)) for n in shape)
        counts = [len(c) - 1 for c in block_cuts]
        return Blocked(block_cuts, frozen(np.reshape(draw(tiles(int(np.prod(counts)))), counts), np.int32))
    size = int(np.prod(shape))
    bounds = draw(cuts(size))
    return Flat(size, bounds[:-1], frozen(draw(tiles(len(bounds) - 1)), np.int32))


def tiles(count: int) -> st.SearchStrategy[list[int]]:
    """Random tiles of `count` pieces."""
    return st.lists(st.integers(0, TILES - 1), min_size=count, max_size=count)


SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def views(draw: Any, tensor: Tensor) -> Tensor:
    """Random chain of views of a tensor."""
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["transpose", "slice", "stride", "reverse", "reshape", "index", "broadcast"]))
        rank = tensor.ndim
        if kind == "transpose":
            tensor = tensor.transpose(tuple(draw(st.permutations(range(rank)))))
        elif kind == "slice" and rank:
            starts = [draw(st.integers(0, n - 1)) for n in tensor.shape]
            stops = [draw(st.integers(a + 1, n)) for a, n in zip(starts, tensor.shape, strict=True)]
            tensor = tensor.slice(starts, stops)
        elif kind == "stride" and rank:
            tensor = tensor.slice([0] * rank, tensor.shape, [draw(st.integers(1, 2)) for _ in range(rank)])
        elif kind == "reverse" and rank:
            tensor = tensor.reverse((draw(st.integers(0, rank - 1)),))
        elif kind == "reshape":
            tensor = tensor.reshape(draw(st.sampled_from([(tensor.size,), (1, tensor.size), (*tensor.shape, 1)])))
        elif kind == "index" and rank:
            tensor = tensor[draw(st.integers(0, tensor.shape[0] - 1))]
        elif kind == "broadcast":
            tensor = tensor.broadcast_in_dim((2, *tensor.shape), tuple(range(1, rank + 1)))
    return tensor


def tiles_of_view(mapping: TileMapping, view: Tensor) -> np.ndarray:
    """Tile of each element of a view of one variable."""
    _, element = view.flat_indices()
    return owners(mapping)[element].reshape(view.shape)


@settings(max_examples=200)
@given(st.data())
def test_mapping_like_has_the_tiles_of_the_view(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    graph = Graph(small_target(TILES))
    mapping = data.draw(mappings(shape))
    tensor = graph.add_variable(shape, np.float32, "x", mapping)
    view = data.draw(views(tensor))
    like = mapping_like(graph, view)
    if like is None:
        return
    check_mapping(like, view.shape, TILES, "like")
    np.testing.assert_array_equal(owners(like).reshape(view.shape), tiles_of_view(mapping, view))


@settings(max_examples=100)
@given(st.data())
def test_mapping_like_follows_permutations_and_slices(data: st.DataObject) -> None:
    """None for a permutation or slice would cost an exchange."""
    shape = data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=3, unique=True).map(tuple))
    graph = Graph(small_target(TILES))
    block_cuts = tuple(data.draw(cuts(n)) for n in shape)
    counts = [len(c) - 1 for c in block_cuts]
    mapping = Blocked(block_cuts, frozen(np.reshape(data.draw(tiles(int(np.prod(counts)))), counts), np.int32))
    tensor = graph.add_variable(shape, np.float32, "x", mapping)
    view = tensor.transpose(tuple(data.draw(st.permutations(range(len(shape))))))
    starts = [data.draw(st.integers(0, n - 1)) for n in view.shape]
    view = view.slice(starts, view.shape)
    like = mapping_like(graph, view)
    assert isinstance(like, Blocked)
    np.testing.assert_array_equal(owners(like).reshape(view.shape), tiles_of_view(mapping, view))


def test_mapping_like_is_none_for_unmapped_joined_and_broadcast_views() -> None:
    graph = Graph(small_target(TILES))
    loose = graph.add_variable((4, 5), np.float32, "loose")
    placed = graph.add_variable((4, 5), np.float32, "placed", grid((4, 5), (2, 2)))
    assert mapping_like(graph, loose) is None
    assert mapping_like(graph, concat([placed, placed], 0)) is None
    assert mapping_like(graph, placed[0].broadcast_in_dim((4, 5), (1,))) is None


@pytest.mark.parametrize("shape", [(4, 5), (3, 2, 5), (5, 1, 4)])
def test_mapping_like_follows_slices_of_a_flattened_variable(shape: tuple[int, ...]) -> None:
    """A slice within a row has a blocked mapping; one that continues in the next row follows no single dimension."""
    graph = Graph(small_target(TILES))
    mapping = grid(shape, (2, *(1 for _ in shape[1:-1]), 2))
    flat = graph.add_variable(shape, np.float32, "x", mapping).flatten()
    for start in range(flat.size):
        for stop in range(start + 2, min(start + shape[-1], flat.size) + 1):
            view = flat[start:stop]
            like = mapping_like(graph, view)
            assert (like is None) == (start // shape[-1] != (stop - 1) // shape[-1])
            if like is not None:
                np.testing.assert_array_equal(owners(like), tiles_of_view(mapping, view))
    rows = graph.add_variable((2, 3, 4), np.float32, "rows", grid((2, 3, 4), (2, 3, 1)))
    assert mapping_like(graph, rows.reshape((6, 4))[2:5]) is None


@settings(max_examples=100)
@given(st.data())
def test_map_by_plan_maps_each_block_of_the_view_to_its_tile(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    graph = Graph(small_target(TILES))
    variable = graph.add_variable(shape, np.float32, "x")
    view = variable.transpose(tuple(data.draw(st.permutations(range(len(shape))))))
    view = data.draw(joined_or_cut(view))
    view = view.reverse(tuple(d for d in range(view.ndim) if data.draw(st.booleans())))
    plan = tuple(data.draw(cuts(n)) for n in view.shape)
    counts = [len(c) - 1 for c in plan]
    tile = np.reshape(data.draw(tiles(int(np.prod(counts)))), counts).astype(np.int32)
    map_by_plan(graph, view, plan, tile)
    (only,) = variable.variables()
    mapping = graph.mappings[only]
    check_mapping(mapping, shape, TILES, "x")
    if isinstance(mapping, Blocked):
        expected = owners(Blocked(plan, frozen(tile, np.int32))).reshape(view.shape)
        np.testing.assert_array_equal(tiles_of_view(mapping, view), expected)


@st.composite
def joined_or_cut(draw: Any, tensor: Tensor) -> Tensor:
    """Random reshape of a tensor: neighbouring dimensions joined, or one cut in two."""
    shape = list(tensor.shape)
    for _ in range(draw(st.integers(0, 2))):
        d = draw(st.integers(0, max(0, len(shape) - 1)))
        if draw(st.booleans()) and d + 1 < len(shape):
            shape[d : d + 2] = [shape[d] * shape[d + 1]]
        elif shape:
            factor = draw(st.sampled_from([n for n in range(1, shape[d] + 1) if shape[d] % n == 0]))
            shape[d : d + 1] = [factor, shape[d] // factor]
    return tensor.reshape(tuple(shape))


def test_map_by_plan_follows_reshapes() -> None:
    """Heads joined with the batch, and groups cut out of the channels, get the tiles of the plan."""
    graph = Graph(small_target(TILES))
    heads = graph.add_variable((2, 4, 5, 3), np.float32, "heads")
    map_by_plan(graph, heads.reshape((8, 5, 3)), (even_cuts(8, 8), even_cuts(5, 1), even_cuts(3, 1)), column(8))
    np.testing.assert_array_equal(owners(graph.mappings[heads.variables()[0]]).reshape(8, -1)[:, 7], np.arange(8))
    grouped = graph.add_variable((3, 6), np.float32, "grouped")
    view = grouped.reshape((3, 2, 3)).transpose((1, 0, 2))
    map_by_plan(graph, view, (even_cuts(2, 2), even_cuts(3, 1), even_cuts(3, 1)), column(2))
    np.testing.assert_array_equal(owners(graph.mappings[grouped.variables()[0]]).reshape(3, 6)[1], [0, 0, 0, 1, 1, 1])


def column(count: int) -> np.ndarray:
    """Blocks along the first of three dimensions, each on the tile of its number."""
    return frozen(np.arange(count).reshape(count, 1, 1), np.int32)


def test_map_by_plan_follows_permutations_and_maps_other_views_linearly() -> None:
    graph = Graph(small_target(TILES))
    plan = (even_cuts(3, 3), even_cuts(4, 2))
    tile = frozen(np.arange(6).reshape(3, 2), np.int32)
    transposed = graph.add_variable((4, 3), np.float32, "transposed")
    map_by_plan(graph, transposed.transpose((1, 0)), plan, tile)
    (variable,) = transposed.variables()
    np.testing.assert_array_equal(owners(graph.mappings[variable]).reshape(4, 3)[:, 1], [2, 2, 3, 3])
    mapping = graph.mappings[variable]
    map_by_plan(graph, transposed.transpose((1, 0)), plan, tile[::-1])
    assert graph.mappings[variable] is mapping

    for other_view in (lambda t: t[:3], lambda t: t[::2], lambda t: concat([t, t], 0)):
        other = graph.add_variable((4, 5), np.float32, "other")
        view = other_view(other)
        map_by_plan(graph, view, tuple(even_cuts(n, n) for n in view.shape), np.zeros(view.shape, np.int32))
        (variable,) = other.variables()
        assert isinstance(graph.mappings[variable], Flat)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 255, 257, 10_001])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.bool_])
def test_linear_mapping(size: int, dtype: Any) -> None:
    mapping = linear_mapping(Graph(small_target(TILES)), size, dtype)
    check_mapping(mapping, (size,), TILES, "x")
    counts = mapping.elements_per_tile(TILES)
    width = np.dtype(dtype).itemsize
    assert counts.sum() == size
    assert (np.diff(owners(mapping)) >= 0).all()
    assert counts.max() - counts[counts > 0].min() <= 2 * 8 // width if size else True
    assert (counts[counts > 0] * width >= min(128, size * width) - 8).all()


def test_map_linearly_keeps_mappings() -> None:
    graph = Graph(small_target(TILES))
    placed = graph.add_variable((4,), np.float32, "placed", grid((4,), (4,)))
    loose = graph.add_variable((4,), np.float32, "loose")
    mapping = graph.mappings[placed.variables()[0]]
    map_linearly(graph, concat([placed, loose], 0))
    assert graph.mappings[placed.variables()[0]] is mapping
    assert isinstance(graph.mappings[loose.variables()[0]], Flat)
