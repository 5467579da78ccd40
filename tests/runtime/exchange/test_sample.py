"""Samples of huge exchanges against all of them, and a bound of the list of any exchange."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import pytest

from ipujax.runtime.exchange import count as counting, demand as demands, homes as places
from ipujax.runtime.exchange.count import count_traffic, cut_at_homes
from ipujax.runtime.exchange.demand import access_demand, copy_demand, grid_of
from ipujax.runtime.exchange.homes import find_homes, home_table
from ipujax.runtime.exchange.runs import Runs, flat_bases, interval_runs
from ipujax.runtime.exchange.sample import ragged_rows, sample_rows, sampling_steps
from ipujax.runtime.exchange.shared_bus import Buses
from ipujax.runtime.exchange.traffic import Traffic, independent_parts
from ipujax.runtime.graph.vertex_group import Access, Axis, Dim, Term, element
from ipujax.runtime.tensor import Indexed, Tensor, concat
from ipujax.runtime.tensor.mapping import Flat, TileMapping, even_cuts, grid, linear
from ipujax.runtime.tensor.variable import Variable

F32 = np.dtype(np.float32)
TILES = 48
SHAPE = 6, 8, 800, 40
BUSES = Buses(2, TILES)
FIGURES = ("received_bytes", "sent_bytes", "receives", "sends", "local_bytes", "shared_bytes", "copied_bytes")


def variable(*shape: int) -> Tensor:
    return Tensor.of(Variable(shape, F32, "x"))


# --- rows of numbers --------------------------------------------------------------------------------------------------


def test_weights_add_up_to_the_numbers_of_a_row_and_few_are_listed() -> None:
    random = np.random.default_rng(0)
    first = random.integers(0, 10**9, 50)
    counts = random.integers(1, 10**6, 50)
    for step in (2, 100, 10**5):
        row, position, weight = sample_rows(first, counts, step)
        np.testing.assert_allclose(np.bincount(row, weight, len(counts)), counts)
        assert np.all((position >= 0) & (position < counts[row]))
        assert np.all(np.diff(row * 10**7 + position) > 0)
        assert np.all(np.bincount(row) <= np.maximum(16, counts / step + 1))


def test_overlapping_rows_list_the_same_numbers() -> None:
    row, position, _ = sample_rows(np.array([1000, 3000]), np.array([5000, 7000]), 10)
    one, other = (position[row == n] + start for n, start in ((0, 1000), (1, 3000)))
    np.testing.assert_array_equal(one[one >= 3000], other[other < 6000])
    assert 200 < np.count_nonzero(one >= 3000) < 400


@pytest.mark.parametrize("boxes", [1, 1000, 10**5])
def test_the_count_of_listed_points_is_bounded(boxes: int) -> None:
    most = 1 << 18
    counts = [np.full(boxes, n) for n in (10**4, 7, 10**6, 30)]
    steps, fewest = sampling_steps(counts, most)
    listed = [np.maximum(np.minimum(n, fewest), n / step) for n, step in zip(counts, steps, strict=True)]
    assert boxes <= np.prod(listed, axis=0).sum() <= most
    assert sampling_steps([np.full(boxes, 2)], most)[0] == [1]


# --- exchanges --------------------------------------------------------------------------------------------------------


def windows(mapping: TileMapping) -> tuple[Traffic, Traffic]:
    """Boxes with a halo, as of a convolution: images, channels, rows, columns."""
    x = variable(*SHAPE)
    stride = 2
    window = 7
    axes = [Axis(name, even_cuts(n, m)) for name, n, m in (("n", 6, 6), ("y", 397, 4), ("x", 17, 2))]
    axes += [Axis("c", even_cuts(8, 1), "reduce"), *(Axis(f"k{d}", even_cuts(window, 1), "reduce") for d in "yx")]
    dims = [element(0), element(3), *(Dim((Term(1 + d, stride), Term(4 + d, 1))) for d in range(2))]
    group = grid_of(tuple(axes), np.arange(TILES, dtype=np.int32).reshape(6, 4, 2, 1, 1, 1))
    return both(x, mapping, lambda most: access_demand(group, Access(x, tuple(dims)), TILES, most))


def transposed(mapping: TileMapping) -> tuple[Traffic, Traffic]:
    """A matrix read by columns, spread evenly in its own order."""
    x = variable(*SHAPE)
    axes = (Axis("i", even_cuts(x.size, TILES)),)
    group = grid_of(axes, np.arange(TILES, dtype=np.int32))
    view = x.transpose((3, 1, 2, 0)).reshape((x.size,))
    return both(x, mapping, lambda most: access_demand(group, Access(view, (element(0),)), TILES, most))


def copied(mapping: TileMapping) -> tuple[Traffic, Traffic]:
    """A copy to a view that is no grid."""
    x = variable(*SHAPE)
    other = concat([variable(40, 800, 17), variable(40, 800, 31)], 2)
    mappings = [linear(v.size, 4, TILES) for v in other.variables()]
    source = x.transpose((3, 2, 1, 0)).reshape((40, 800, 48))

    def needs(most: float) -> counting.Demand:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demands, "_MAX_ELEMENTS", most)
            patch.setattr(demands, "MAX_RUNS", most)
            return copy_demand(source, other, mappings, TILES)

    return both(x, mapping, needs)


def both(
    x: Tensor, mapping: TileMapping, needs: Callable[[float], counting.Demand], most: int = 60_000
) -> tuple[Traffic, Traffic]:
    """The traffic by all runs, and by a sample of them."""
    every = count_traffic(needs(np.inf), (mapping,), False, BUSES)
    reference = needs(most)
    assert reference.runs.weight is not None and len(reference.runs.block) <= most
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "MAX_RUNS", most)
        return every, count_traffic(reference, (mapping,), False, BUSES)


@pytest.mark.parametrize(
    "mapping", [linear(6 * 8 * 800 * 40, 4, TILES), grid(SHAPE, (3, 2, 4, 2))], ids=["flat", "blocked"]
)
@pytest.mark.parametrize("case", [windows, transposed, copied])
def test_a_sample_counts_about_as_all_runs(
    case: Callable[[TileMapping], tuple[Traffic, Traffic]], mapping: TileMapping
) -> None:
    every, sample = case(mapping)
    needed, about = (part.received_bytes + part.local_bytes for part in (every, sample))
    np.testing.assert_allclose(about, needed, rtol=0.02, atol=1)
    for name in FIGURES:
        right = getattr(every, name)
        about = getattr(sample, name)
        scale = int(right.max() if name in ("receives", "sends") else needed.max())
        # Changes of the sending tile are rare, and a sample has few of them; fragments of one start may be missed.
        most, mean = {"receives": (0.5, 0.35), "sends": (0.25, 0.1)}.get(name, (0.12, 0.06))
        assert abs(int(about.max()) - int(right.max())) <= most * scale, name
        assert abs(float(about.mean()) - float(right.mean())) <= mean * scale, name


def test_huge_operands_list_few_runs() -> None:
    """A convolution's operand of 3 · 10¹¹ elements, mapped linearly."""
    n = 10**4
    tiles = 1000
    x = variable(1000, 3, n, n)
    axes = [Axis("n", even_cuts(1000, tiles)), Axis("y", even_cuts(n // 2, 1)), Axis("x", even_cuts(n // 2, 1))]
    axes += [Axis("c", even_cuts(3, 1), "reduce"), *(Axis(f"k{d}", even_cuts(7, 1), "reduce") for d in "yx")]
    dims = (element(0), element(3), *(Dim((Term(1 + d, 2), Term(4 + d, 1)), -3) for d in range(2)))
    access = Access(x, dims, fill=0)
    group = grid_of(tuple(axes), np.arange(tiles, dtype=np.int32).reshape(tiles, 1, 1, 1, 1, 1))
    reference = access_demand(group, access, tiles, counting.MAX_RUNS)
    assert len(reference.runs.block) <= counting.MAX_RUNS
    actual = count_traffic(reference, (linear(x.size, 4, tiles),), False, BUSES)
    assert actual.received_bytes.sum() + actual.local_bytes.sum() == pytest.approx(x.size, rel=1e-3)


# --- runs of blocked mappings by arithmetic ---------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [(3, 1, 5), (3, 4, 5), (1, 4, 1), (2, 1, 1), (1, 1, 7)])
def test_runs_by_arithmetic_are_those_of_a_table(blocks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = 6, 8, 35
    mappings = (grid(shape, blocks), Flat(50, np.array([0, 20]), np.array([1, 0], np.int32)), grid(shape[:2], (2, 4)))
    listed = home_table(mappings)
    monkeypatch.setattr(places, "_MAX_RUNS", 0)
    computed = find_homes(mappings)
    assert type(computed) is not type(listed)
    assert computed.size == listed.size
    run = np.arange(len(listed.start))
    for name in ("start_of", "tile_of"):
        np.testing.assert_array_equal(getattr(computed, name)(run), getattr(listed, name)(run))
    every = np.concatenate([np.arange(1680), np.arange(1681, 1731), np.arange(1732, 1780)])  # one is free between two
    np.testing.assert_array_equal(computed.run_of(every), listed.run_of(every))
    runs = Runs(np.zeros(3, np.int64), np.array([0, 1681, 1732]), np.array([1680, 50, 48]))
    one, other = (
        cut_at_homes(runs, mappings) for _ in (monkeypatch.undo(), monkeypatch.setattr(places, "_MAX_RUNS", 0))
    )
    for name in ("block", "start", "length", "home", "first"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


# --- copies of many parts ---------------------------------------------------------------------------------------------


def test_independent_parts_are_those_that_share_no_variable() -> None:
    a, b, c, d = (variable(4, 3) for _ in range(4))
    out = [variable(rows, 3) for rows in (4, 2, 4, 2, 4, 4)]
    source = concat([a, b[:2], c, b[2:], d, d[::-1]])
    destination = concat(out)
    parts = independent_parts(source, destination)
    assert [set(part.variables()) for part, _ in parts] == [{v} for x in (a, b, c, d) for v in x.variables()]
    for part, into in parts:
        assert part.shape == into.shape
    which, index = (
        np.concatenate([e.ravel() for e in each]) for each in zip(*(p.flat_indices() for p, _ in parts), strict=True)
    )
    assert len(which) == len(index) == source.size
    assert independent_parts(a, out[0]) == [(a, out[0])]


def test_ragged_rows() -> None:
    row, within = ragged_rows(np.array([2, 0, 3]))
    assert row.tolist() == [0, 0, 2, 2, 2]
    assert within.tolist() == [0, 1, 0, 1, 2]


# --- lists of elements ------------------------------------------------------------------------------------------------


def test_a_list_of_elements_is_cut_into_runs_before_it_is_sampled() -> None:
    whole = Variable((64, 100), F32, "x")
    index = np.arange(6400).reshape(64, 100)[::-1, 10:90]  # rows of 80 elements, in falling order
    node = Indexed((whole,), np.zeros(index.size, np.int8), index.reshape(-1))
    bounds = np.array([0, 1000, 5119])
    for max_runs, listed in ((inf, [65]), (1000, [65]), (32, range(2, 20))):
        (runs,) = interval_runs(node, np.arange(2), bounds[:-1], np.diff(bounds), flat_bases([whole]), max_runs)
        assert len(runs.block) in listed
        weight = np.ones(len(runs.block)) if runs.weight is None else runs.weight
        np.testing.assert_allclose(np.bincount(runs.block, weight), [13, 52])
