"""poprand: dependence, mapping and distribution of draws; helpers of poputil for placing."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from ipujax import poplar, poprand, poputil
from ipujax.poplar.program import Sequence
from ipujax.runtime.errors import GraphError
from tests.ipujax.poplar.engine_helpers import DEVICE, both, constant, new_graph, on_tiles, variable

SHAPE = [40, 50]


@cache
def draws(seed=(7, 9), modifier=1, tiles=None, device=DEVICE):
    """One draw of each kind, with a reference tensor on given tiles, and their tile mappings."""
    graph = poplar.Graph(device.get_target())
    prog = Sequence()
    words = constant(graph, np.uint32(seed), poplar.UNSIGNED_INT)
    reference = graph.add_variable(poplar.FLOAT, SHAPE, "reference")
    graph.set_tile_mapping(reference, np.arange(2000) % 7 if tiles is None else tiles)
    outs = {
        "uniform": poprand.uniform(graph, words, modifier, reference, poplar.FLOAT, -1, 3, prog),
        "integers": poprand.uniform(graph, words, modifier, reference, poplar.INT, 1, 6, prog),
        "normal": poprand.normal(graph, words, modifier, reference, poplar.HALF, 2, 0.5, prog),
        "truncated": poprand.truncated_normal(graph, words, modifier, reference, poplar.FLOAT, 1, 2, 1.5, prog),
        "bernoulli": poprand.bernoulli(graph, words, modifier, reference, poplar.INT, 0.25, prog),
    }
    mapping = graph.get_tile_mapping(reference)
    assert all(graph.get_tile_mapping(out) == mapping for out in outs.values())
    engine = poplar.Engine(graph, prog)
    engine.load(device)
    engine.run()
    return {name: engine.read_tensor(out) for name, out in outs.items()}


def test_a_draw_depends_on_seed_and_modifier_and_not_on_tiles():
    first = draws()
    repeated = draws(tiles=0, device=poplar.IPUModel(tiles_per_ipu=16).create_device())
    others = [draws(seed=(7, 10)), draws(modifier=2)]
    for name, value in first.items():
        np.testing.assert_array_equal(value, repeated[name])
        for other in others:
            assert np.mean(value != other[name]) > 0.2


def test_distributions():
    actual = draws()
    n = np.prod(SHAPE)
    # Means lie within five standard errors of the distribution's: sqrt(variance / n).
    for name, mean, variance in (
        ("uniform", 1, 16 / 12), ("integers", 3.5, 35 / 12), ("normal", 2, 0.25), ("bernoulli", 0.25, 0.1875),
        ("truncated", 1, 4 * 0.5518),  # 1 - 3 φ(1.5) / (2 Φ(1.5) - 1) of a unit normal
    ):  # fmt: skip
        value = actual[name].astype(np.float64)
        assert abs(value.mean() - mean) < 5 * np.sqrt(variance / n), name
        assert abs(value.var() / variance - 1) < 0.2, name
    assert actual["uniform"].min() >= -1 and actual["uniform"].max() < 3
    assert np.histogram(actual["uniform"], 8, (-1, 3))[0].min() > n / 8 * 0.75
    assert set(np.unique(actual["integers"])) == {1, 2, 3, 4, 5, 6}
    assert np.abs(actual["truncated"] - 1).max() <= 3
    assert actual["normal"].dtype == np.float16 and set(np.unique(actual["bernoulli"])) == {0, 1}


def test_shaped_dropout_and_the_interpreter():
    graph = new_graph()
    prog = Sequence()
    seed = constant(graph, np.uint32([3, 4]), poplar.UNSIGNED_INT)
    value = np.arange(1.0, 97).reshape(8, 3, 4)
    x = variable(graph, [8, 3, 4], value=value)
    rows = on_tiles(graph, graph.add_variable(poplar.FLOAT, [8, 1, 4], "reference"))
    shaped = poprand.shaped_dropout(graph, seed, 0, x, rows, 0.5, 2, prog)
    every = poprand.dropout(graph, seed, 0, x, 1.0, 3, prog)
    none = poprand.dropout(graph, seed, 0, x, 0.0, 3, prog)
    drawn = poprand.normal(graph, seed, 0, x, poplar.FLOAT, 0, 1, prog)
    actual = both(graph, prog, {"shaped": shaped, "every": every, "none": none, "drawn": drawn})
    kept = actual["shaped"] != 0
    assert np.all(kept == kept[:, :1]) and 0.2 < kept.mean() < 0.8
    np.testing.assert_array_equal(actual["shaped"], np.where(kept, 2 * value, 0))
    np.testing.assert_array_equal(actual["every"], 3 * value)
    assert not actual["none"].any() and not np.any(actual["drawn"] == value)


def test_wrong_operands():
    graph = new_graph()
    prog = Sequence()
    seed = constant(graph, np.uint32([1, 2]), poplar.UNSIGNED_INT)
    x = variable(graph, [3, 4])
    integers = variable(graph, [3, 4], poplar.INT)
    nowhere = graph.add_variable(poplar.FLOAT, [3], "nowhere")
    cases = [
        (lambda: poprand.uniform(graph, seed, -1, x, poplar.FLOAT, 0, 1, prog), "seed_modifier"),
        (lambda: poprand.uniform(graph, seed, 0, x, poplar.FLOAT, 1, 0, prog), "low at most high"),
        (lambda: poprand.uniform(graph, seed, 0, x, poplar.HALF, 0, 1e6, prog), "bounds"),
        (lambda: poprand.uniform(graph, seed, 0, x, poplar.HALF, -6e4, 6e4, prog), "the difference of bounds"),
        (lambda: poprand.uniform(graph, seed, 0, [4], np.int64, 0, 1, prog), "at most 32 bits"),
        (lambda: poprand.normal(graph, seed, 0, x, poplar.HALF, 1e6, 1, prog), "mean and standard deviation"),
        (lambda: poprand.bernoulli(graph, seed, 0, x, poplar.INT, 1.5, prog), r"0 to 1(.|\n)*1.5"),
        (lambda: poprand.dropout(graph, seed, 0, x, -0.5, 1, prog), "must have a probability"),
        (lambda: poprand.shaped_dropout(graph, seed, 0, x, [2, 4], 0.5, 1, prog), "must broadcast"),
        (lambda: poprand.dropout(graph, seed, 0, integers, 0.8, 1.25, prog), "the scale"),
        (lambda: poprand.normal(graph, x, 0, x, poplar.FLOAT, 0, 1, prog), "seed must be"),
        (lambda: poputil.map_tensor_linearly(graph, nowhere, 0, 1), "at least 1"),
    ]
    for call, message in cases:
        with pytest.raises(GraphError, match=message) as error:
            call()
        assert "test_poprand.py" in str(error.value)


def test_linear_mapping_with_grains():
    graph = new_graph()
    x = graph.add_variable(poplar.FLOAT, [5, 9], "x")
    poputil.map_tensor_linearly(graph, x, 6, 4)
    mapping = graph.get_tile_mapping(x)
    assert mapping == poputil.calc_linear_tile_mapping(graph, x, 6, 4)
    sizes = [sum(end - begin for begin, end in tile) for tile in mapping if tile]
    assert sum(sizes) == 45 and min(sizes) >= 6 and not any(n % 4 for n in sizes[:-1])
    small = graph.add_variable(poplar.HALF, [3], "small")
    poputil.map_tensor_linearly(graph, small, grain_size=1)
    assert graph.get_tile_mapping(small)[0] == [(0, 3)]  # less than 128 bytes


def test_linear_mapping_of_a_view_maps_its_elements():
    graph = new_graph()
    x = graph.add_variable(poplar.FLOAT, [4, 64], "x")
    graph.set_tile_mapping(x, 7)
    poputil.map_tensor_linearly(graph, x[1:3])
    expected = [[(32 * tile, 32 * tile + 32)] for tile in range(4)] + [[]] * 4
    assert graph.get_tile_mapping(x[1:3]) == expected  # 128 bytes each
    assert graph.get_tile_mapping(x[0])[7] == graph.get_tile_mapping(x[3])[7] == [(0, 64)]
    poputil.map_tensor_linearly(graph, x)
    assert [len(tile) for tile in graph.get_tile_mapping(x)] == [1] * 8


@pytest.mark.parametrize(
    "low, high, dtype",
    [
        (-(2**31), 2**31 - 1, poplar.INT),
        (2**31 - 3, 2**31 - 1, poplar.INT),
        (-(2**31), -(2**31) + 2, poplar.INT),
        (0, 2**31, poplar.UNSIGNED_INT),
        (2**31, 2**32 - 1, poplar.UNSIGNED_INT),
    ],
)
def test_integers_up_to_the_ends_of_their_type(low, high, dtype):
    graph = new_graph()
    prog = Sequence()
    seed = constant(graph, np.uint32([1, 2]), poplar.UNSIGNED_INT)
    drawn = poprand.uniform(graph, seed, 0, [4096], dtype, low, high, prog)
    values = both(graph, prog, {"drawn": drawn})["drawn"].astype(np.int64)
    span = high - low
    assert low <= values.min() <= low + span / 100 and high - span / 100 <= values.max() <= high
    assert abs(values.mean() - (low + high) / 2) < max(0.1, span / 20)


def test_clones_have_the_mapping_of_their_tensor():
    graph = new_graph()
    x = on_tiles(graph, graph.add_variable(poplar.FLOAT, [6, 4]))
    for view in (x, x.transpose(), x[1:3, ::2], x.reverse(0)):
        copy = poputil.clone(graph, view, dtype=poplar.INT)
        assert copy.dtype == poplar.INT and copy.shape == view.shape
        assert graph.get_tile_mapping(copy) == graph.get_tile_mapping(view)
    assert poputil.can_broadcast_to_match(x, x[0]) and not poputil.can_broadcast_to_match(x, x[:, 0])
