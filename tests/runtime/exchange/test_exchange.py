"""The exchange count against a brute-force list of messages, its two ways against each other, and cases by hand."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from ipujax.runtime.cache import cached_calls, find_arrays
from ipujax.runtime.errors import GraphError
from ipujax.runtime.exchange import (
    copy_cycles,
    exchange_cycles,
    receive_code_bytes,
    receive_cycles,
    receiver_code_bytes,
)
from ipujax.runtime.exchange.blocks import count_blocks
from ipujax.runtime.exchange.count import count_traffic
from ipujax.runtime.exchange.demand import access_demand
from ipujax.runtime.exchange.disjoint_reads import count_disjoint_reads, is_disjoint_read
from ipujax.runtime.exchange.runs import block_runs, flat_bases, merge_runs
from ipujax.runtime.exchange.shared_bus import Buses
from ipujax.runtime.exchange.traffic import Traffic, copy_traffic, traffic
from ipujax.runtime.graph.codelet import Codelet, Field
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.vertex_group import Access, Axis, Dim, Term, VertexGroup, block, element, extents
from ipujax.runtime.interpreter.tile_memory import list_messages
from ipujax.runtime.target.presets import preset
from ipujax.runtime.tensor import Concat, Indexed, Reshaped, Tensor, concat
from ipujax.runtime.tensor.mapping import Blocked, Flat, TileMapping, even_cuts, grid, linear, on_one_tile, owners
from ipujax.runtime.tensor.variable import Variable

RNG_SEEDS = range(60)
F32 = np.dtype(np.float32)


def graph_of(num_tiles: int, bus: int = 2) -> Graph:
    return Graph(preset("mk2").replace(tiles_per_ipu=num_tiles, tiles_per_exchange_bus=bus))


def group_on(axes: list[Axis], access: Access, tile: np.ndarray, direction: str = "in") -> VertexGroup:
    codelet = Codelet("test", (Field("x", direction, access.tensor.dtype),), lambda x: x, lambda shapes, target: 0)
    return VertexGroup(codelet, tuple(axes), (access,), np.asarray(tile, np.int32))


# --- oracle -----------------------------------------------------------------------------------------------------------


Element = tuple[int, int]  # variable number, element


def operands(group: VertexGroup, access: Access) -> dict[tuple[int, object], frozenset[Element]]:
    """The elements of every box of the view that a vertex on a tile needs, by a Python loop."""
    which, index = (np.broadcast_to(a, access.tensor.shape) for a in access.tensor.flat_indices())
    per_dim = extents(group, access)
    actual: dict[tuple[int, object], frozenset[Element]] = {}
    for at in np.ndindex(*group.grid):
        tile = int(group.tile[at])
        if tile >= 0:
            box = []
            for extent in per_dim:
                start, length = (int(np.broadcast_to(a, group.grid)[at]) for a in (extent.start, extent.length))
                box.append(slice(start, start + length))
            pairs = zip(which[tuple(box)].ravel(), index[tuple(box)].ravel(), strict=True)
            key = tile, tuple((part.start, part.stop) for part in box)
            actual[key] = frozenset((int(w), int(i)) for w, i in pairs)
    return actual


def needs(group: VertexGroup, access: Access) -> set[tuple[int, int, int]]:
    """(tile, variable number, element) of all vertices."""
    return {(tile, *pair) for (tile, _), elements in operands(group, access).items() for pair in elements}


def expected(
    reference: set[tuple[int, int, int]],
    each: dict[tuple[int, object], frozenset[Element]],
    maps: list[TileMapping],
    graph: Graph,
    writes: bool,
) -> np.ndarray:
    """received, sent, receives, local, local fragments, shared, copied, copied fragments, fragments, sends."""
    num_tiles = graph.target.num_tiles
    width = graph.target.tiles_per_exchange_bus
    out = np.zeros((10, num_tiles), np.int64)
    home = [owners(m) for m in maps]
    rank = []
    for own in home:
        place = np.zeros(len(own), np.int64)
        for tile in range(num_tiles):
            place[own == tile] = np.arange(np.count_nonzero(own == tile))
        rank.append(place)
    multicast = set()
    left = set()  # first elements of fragments that leave
    last = None
    for tile, w, e in sorted(reference):
        owner = int(home[w][e])
        here = (tile, w, owner, int(rank[w][e]))
        new = last is None or here != (*last[:3], last[3] + 1)
        of_other_tile = last is None or (tile, owner) != (last[0], last[2])
        last = here
        if owner == tile:
            out[3, tile] += 1
            out[4, tile] += new
            continue
        receiver, sender = (owner, tile) if writes else (tile, owner)
        out[0, receiver] += 1
        out[2, receiver] += new if writes else of_other_tile
        out[8, receiver] += new
        out[9, sender] += of_other_tile if writes else new and (w, e) not in left
        left |= {(w, e)} if new else set()
        if writes or (w, e) not in multicast:
            multicast.add((w, e))
            out[1, sender] += 1
    arriving = [{(w, e) for t, w, e in reference if t == tile and home[w][e] != tile} for tile in range(num_tiles)]
    for first in range(0, num_tiles - width + 1, width) if width > 1 and not writes else ():
        out[5, first : first + width] = len(set.intersection(*arriving[first : first + width]))
    for (tile, _), elements in each.items():
        places = [(int(home[w][e]), w, int(rank[w][e])) for w, e in sorted(elements)]
        starts = [n == 0 or here != (*places[n - 1][:2], places[n - 1][2] + 1) for n, here in enumerate(places)]
        if sum(starts) > 1:
            out[6, tile] += sum(owner == tile for owner, *_ in places)
            out[7, tile] += sum(start for start, (owner, *_) in zip(starts, places, strict=True) if owner == tile)
    return out


def as_rows(actual: Traffic, item_bytes: int) -> np.ndarray:
    scale = np.array([item_bytes, item_bytes, 1, item_bytes, 1, item_bytes, item_bytes, 1, 1, 1])[:, None]
    rows = [actual.received_bytes, actual.sent_bytes, actual.receives, actual.local_bytes, actual.local_fragments]
    rows += [actual.shared_bytes, actual.copied_bytes, actual.copied_fragments, actual.fragments, actual.sends]
    assert not np.any(np.stack(rows) % scale)
    return np.stack(rows) // scale


def check(graph: Graph, group: VertexGroup, writes: bool) -> set[str]:
    """Compares all ways; returns which of the special ones applied."""
    access = group.accesses[0]
    num_tiles = graph.target.num_tiles
    maps = [graph.mappings[v] for v in access.tensor.variables()]
    reference = needs(group, access)
    right = expected(reference, operands(group, access), maps, graph, writes)
    buses = Buses(graph.target.tiles_per_exchange_bus, graph.target.tiles_per_ipu)
    general = count_traffic(access_demand(group, access, num_tiles), tuple(maps), writes, buses)
    fast = count_blocks(group, access, maps[0], num_tiles, writes, buses) if len(maps) == 1 else None
    disjoint = None
    if not writes and is_disjoint_read(group, access):
        known = count_traffic(access_demand(group, access, num_tiles), tuple(maps), writes, buses, is_disjoint=True)
        np.testing.assert_array_equal((known.sent_bytes, known.shared_bytes), (right[1], right[5]))
        disjoint = count_disjoint_reads(group, access, maps[0], num_tiles) if len(maps) == 1 else None
    for counts in (way for way in (general, disjoint) if way is not None):
        np.testing.assert_array_equal(as_rows(counts, 1), right)
    if fast is not None:
        np.testing.assert_array_equal(as_rows(fast, 1)[:-1], right[:-1])
        # Blocks that overlap in part may begin a fragment each where one begins.
        assert np.all(fast.sends >= right[-1]) and np.all((fast.sends > 0) == (right[-1] > 0))
    chosen = next(way for way in (fast, disjoint, general) if way is not None)
    np.testing.assert_array_equal(as_rows(traffic(group, 0, graph, writes), 4), as_rows(chosen, 1))
    listed = list_messages(graph, group, 0, writes)
    rows = [listed.which, listed.element, *((listed.destination, listed.source) if writes else listed[3:])]
    home = [owners(m) for m in maps]
    moves = {(w, e, int(home[w][e]), t) for t, w, e in reference}
    assert sorted(zip(*(r.tolist() for r in rows), strict=True)) == sorted(m for m in moves if m[2] != m[3])
    return {name for name, counts in (("blocks", fast), ("disjoint", disjoint)) if counts is not None}


# --- random cases -----------------------------------------------------------------------------------------------------


def random_cuts(rng: np.random.Generator, size: int, most: int) -> np.ndarray:
    inner = rng.choice(np.arange(1, size), min(size - 1, int(rng.integers(0, most))), replace=False) if size > 1 else []
    return np.array([0, *sorted(int(c) for c in inner), size], np.int64)


def random_mapping(rng: np.random.Generator, shape: tuple[int, ...], num_tiles: int, distinct: bool) -> TileMapping:
    if rng.random() < 0.35:
        cuts = random_cuts(rng, prod(shape), num_tiles if distinct else 2 * num_tiles)
        if rng.random() < 0.5 and len(shape) > 1:
            row = shape[-1]
            cuts = np.unique(cuts // row * row)
            cuts = np.append(cuts[cuts < prod(shape)], prod(shape))
        n = len(cuts) - 1
        return Flat(prod(shape), cuts[:-1], random_tiles(rng, (n,), num_tiles, distinct))
    while True:
        most = 3 if rng.random() < 0.7 else 5
        cuts_of = tuple(random_cuts(rng, n, most) for n in shape)
        counts = tuple(len(c) - 1 for c in cuts_of)
        if not distinct or prod(counts) <= num_tiles:
            return Blocked(cuts_of, random_tiles(rng, counts, num_tiles, distinct))


def random_tiles(rng: np.random.Generator, counts: tuple[int, ...], num_tiles: int, distinct: bool) -> np.ndarray:
    n = prod(counts)
    return rng.choice(num_tiles, n, replace=not (distinct and n <= num_tiles)).reshape(counts).astype(np.int32)


def random_view(rng: np.random.Generator, tensor: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        match rng.integers(0, 5):
            case 0:
                tensor = tensor.transpose([int(i) for i in rng.permutation(tensor.ndim)])
            case 1:
                starts = [int(rng.integers(0, n)) for n in tensor.shape]
                stops = [int(rng.integers(a + 1, n + 1)) for a, n in zip(starts, tensor.shape, strict=True)]
                steps = [int(n) for n in rng.integers(1, 3, tensor.ndim)]
                tensor = tensor[tuple(map(slice, starts, stops, steps))]
            case 2:
                tensor = tensor.reverse([int(rng.integers(tensor.ndim))])
            case 3:
                where = int(rng.integers(tensor.ndim + 1))
                shape = (*tensor.shape[:where], int(rng.integers(1, 4)), *tensor.shape[where:])
                axes = [i for i in range(len(shape)) if i != where]
                tensor = tensor.broadcast_in_dim(shape, axes)
            case 4 if tensor.ndim > 1 and rng.random() < 0.5:
                where = int(rng.integers(tensor.ndim - 1))
                joined = (
                    *tensor.shape[:where],
                    tensor.shape[where] * tensor.shape[where + 1],
                    *tensor.shape[where + 2 :],
                )
                tensor = tensor.reshape(joined)
    return tensor


def random_group(
    rng: np.random.Generator, tensor: Tensor, num_tiles: int, simple: bool, direction: str = "in"
) -> VertexGroup:
    """One or two axes a dimension (conv-like), a free axis, steps, halos, offsets; one vertex a tile if simple."""
    axes: list[Axis] = []
    dims: list[Dim] = []
    budget = num_tiles if simple else 3 * num_tiles

    def axis(extent: int, most: int) -> int:
        nonlocal budget
        cuts = random_cuts(rng, extent, max(1, min(most, budget)))
        budget //= len(cuts) - 1
        axes.append(Axis(f"a{len(axes)}", cuts))
        return len(axes) - 1

    for size in tensor.shape:
        kind = rng.random()
        if kind < 0.6 or direction == "out":
            dims.append(element(axis(size, 4)))
        elif kind < 0.7:
            dims.append(Dim((), int(rng.integers(0, size))))
        elif kind < 0.8 and size <= budget:
            axes.append(Axis(f"a{len(axes)}", np.arange(size + 1)))
            dims.append(block(len(axes) - 1))
            budget //= size
        else:
            stride = int(rng.integers(1, 3))
            taps = int(rng.integers(1, 4))
            out = axis(max(1, -(-size // stride)), 4)
            tap = axis(taps, 2)
            offset = int(rng.integers(-2, 2))
            divisor = int(rng.integers(1, 3))
            dims.append(Dim((Term(out, stride), Term(tap)), offset, divisor))
    if direction == "in" and rng.random() < 0.4:
        axis(4, 3)
    counts = tuple(a.blocks for a in axes)
    tile = random_tiles(rng, counts, num_tiles, simple)
    if not simple and rng.random() < 0.5:
        tile = np.where(rng.random(counts) < 0.2, -1, tile)
    return group_on(axes, Access(tensor, tuple(dims), 0.0), tile, direction)


def random_shape(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(1, 9, int(rng.integers(1, 4))))


@pytest.mark.parametrize("num_tiles", [1, 4, 7, 16])
@pytest.mark.parametrize("simple", [True, False])
def test_counts_equal_brute_force(num_tiles: int, simple: bool) -> None:
    rng = np.random.default_rng([num_tiles, simple])
    fast = 0
    for number in RNG_SEEDS:
        graph = graph_of(num_tiles, (2, 2, 1, 3)[number % 4])
        shape = random_shape(rng)
        whole = graph.add_variable(shape, F32, "x", random_mapping(rng, shape, num_tiles, simple))
        tensor = random_view(rng, whole, int(rng.integers(0, 3)))
        fast += "blocks" in check(graph, random_group(rng, tensor, num_tiles, simple), False)
    assert not simple or fast >= len(RNG_SEEDS) // 3, "the fast way is hardly tried"


@pytest.mark.parametrize("num_tiles", [2, 5, 16])
def test_disjoint_reads_equal_brute_force(num_tiles: int) -> None:
    """Whole views in blocks or in one row, so that runs are short and those who need them hold some themselves."""
    rng = np.random.default_rng(num_tiles)
    tried = 0
    for number in range(120):
        graph = graph_of(num_tiles, (1, 2, 3)[number % 3])
        shape = random_shape(rng)
        whole = graph.add_variable(shape, F32, "x", random_mapping(rng, shape, num_tiles, number % 2 == 0))
        tensor = random_view(rng, whole, int(rng.integers(1, 4)))
        tensor = tensor.flatten() if number % 2 else tensor
        cuts = [random_cuts(rng, n, num_tiles if tensor.ndim == 1 else 2) for n in tensor.shape]
        axes = [Axis(f"a{d}", cut) for d, cut in enumerate(cuts)]
        order = [int(axis) for axis in rng.permutation(len(axes))]
        blocks = tuple(axes[axis].blocks for axis in order)
        if prod(blocks) > num_tiles:
            continue
        tile = random_tiles(rng, blocks, num_tiles, True)
        if number % 5 == 0:
            tile = np.where(rng.random(blocks) < 0.2, -1, tile)
        dims = tuple(element(order.index(d)) for d in range(tensor.ndim))
        group = group_on([axes[axis] for axis in order], Access(tensor, dims), tile)
        tried += "disjoint" in check(graph, group, False)
    assert tried >= 30, "the way for elements that nobody shares is hardly tried"


@pytest.mark.parametrize("num_tiles", [1, 4, 7, 16])
def test_writes_equal_brute_force(num_tiles: int) -> None:
    rng = np.random.default_rng(num_tiles)
    fast = 0
    for number in RNG_SEEDS:
        graph = graph_of(num_tiles)
        shape = random_shape(rng)
        simple = number % 4 > 0
        whole = graph.add_variable(shape, F32, "x", random_mapping(rng, shape, num_tiles, simple))
        tensor = random_view(rng, whole, int(rng.integers(0, 3)))
        if tensor.is_writable:
            fast += "blocks" in check(graph, random_group(rng, tensor, num_tiles, simple, "out"), True)
    assert fast >= len(RNG_SEEDS) // 6, "the fast way is hardly tried"


@pytest.mark.parametrize("num_tiles", [1, 4, 7, 16])
def test_views_of_several_variables_equal_brute_force(num_tiles: int) -> None:
    rng = np.random.default_rng(num_tiles)
    kinds = set()
    for number in range(40):
        graph = graph_of(num_tiles)
        columns = int(rng.integers(2, 7))
        shapes = [(int(n), columns) for n in rng.integers(1, 6, 3)]
        parts = [graph.add_variable(s, F32, "x", random_mapping(rng, s, num_tiles, False)) for s in shapes]
        parts.append(parts[0][:1] if number % 2 else parts[0].reverse([0]))
        tensor = random_view(rng, concat(parts, 0), int(rng.integers(0, 4)))
        if number % 5 == 0:
            tensor = concat([tensor.flatten(), tensor.flatten()[::-1]], 0)
        if number % 5 == 1:
            tensor = scattered(parts[1].transpose((1, 0)).flatten(), parts[0].flatten())
        if number % 5 == 2:
            node = concat(parts, 0).transpose((1, 0)).node
            assert isinstance(node, Concat)
            tensor = Tensor(Reshaped(node, (node.shape[1], columns)), (node.shape[1], columns), F32)
        kinds.add(type(tensor.node))
        check(graph, random_group(rng, tensor, num_tiles, number % 3 == 0), False)
    assert {Concat, Indexed, Reshaped} <= kinds


def scattered(*tensors: Tensor) -> Tensor:
    """A tensor that only a list of elements describes."""
    both = concat(tensors, 0)
    index = np.random.default_rng(both.size).permutation(np.arange(both.size).repeat(2))[: both.size + 1]
    which, element = (np.array(a)[index] for a in both.flat_indices())
    return Tensor(Indexed(both.variables(), which, element), index.shape, both.dtype)


@pytest.mark.parametrize("num_tiles", [1, 4, 7, 16])
def test_copies_equal_brute_force(num_tiles: int) -> None:
    rng = np.random.default_rng(num_tiles)
    for number in range(80):
        graph = graph_of(num_tiles)
        shape = random_shape(rng)
        shape_to = random_shape(rng)
        distinct = number % 2 == 0
        whole = graph.add_variable(shape, F32, "a", random_mapping(rng, shape, num_tiles, distinct))
        whole_to = graph.add_variable(shape_to, F32, "b", random_mapping(rng, shape_to, num_tiles, distinct))
        source = random_view(rng, whole, int(rng.integers(0, 3))).flatten()
        target = whole_to if number % 3 == 0 else random_view(rng, whole_to, int(rng.integers(0, 3)))
        target = target if target.is_writable else whole_to
        if source.size < target.size:
            source = concat([source] * -(-target.size // source.size), 0)
        source = source[: target.size].reshape(target.shape)
        which, index = (np.broadcast_to(a, source.shape).ravel() for a in source.flat_indices())
        _, index_to = (np.broadcast_to(a, target.shape).ravel() for a in target.flat_indices())
        tile = owners(graph.mappings[whole_to.variables()[0]])[index_to]
        reference = {(int(t), int(w), int(i)) for t, w, i in zip(tile, which, index, strict=True)}
        maps = [graph.mappings[v] for v in source.variables()]
        right = expected(reference, {}, maps, graph, False)
        np.testing.assert_array_equal(as_rows(copy_traffic(source, target, graph), 4)[:6], right[:6])


@pytest.mark.parametrize("num_tiles", [1, 4, 7])
def test_copies_to_several_variables_equal_brute_force(num_tiles: int) -> None:
    rng = np.random.default_rng(num_tiles)
    for number in range(60):
        graph = graph_of(num_tiles)
        shapes = [(2, int(n)) for n in rng.integers(1, 8, 6)]
        maps = [random_mapping(rng, shape, num_tiles, number % 2 == 0) for shape in shapes]
        x, y, z, a, b, c = (graph.add_variable(s, F32, n, m) for s, n, m in zip(shapes, "xyzabc", maps, strict=True))
        flat = concat([a.flatten(), b.transpose((1, 0)).flatten(), c.flatten()[1:]], 0)
        target = [flat, concat([a, b, c], 1), concat([a[:, :1], b[:1, :1]], 0)][number % 3]
        source = concat([x.flatten(), y.flatten(), z.flatten()], 0)
        source = concat([source] * -(-target.size // source.size), 0)[: target.size].reshape(target.shape)
        which, index, which_to, index_to = (
            np.broadcast_to(part, target.shape).ravel() for view in (source, target) for part in view.flat_indices()
        )
        home = [owners(graph.mappings[variable]) for variable in target.variables()]
        tiles = [int(home[w][i]) for w, i in zip(which_to, index_to, strict=True)]
        reference = {(tile, int(w), int(i)) for tile, w, i in zip(tiles, which, index, strict=True)}
        right = expected(reference, {}, [graph.mappings[v] for v in source.variables()], graph, False)
        actual = as_rows(copy_traffic(source, target, graph), 4)
        of_parts = [0, 1, 3, 4, 5]
        np.testing.assert_array_equal(actual[of_parts], right[of_parts])
        # Independent parts of a copy are received one by one, also those that follow one another on a tile.
        assert np.all(right[2] <= actual[2]) and np.all(actual[2] <= right[2] + 2 * (right[2] > 0))


# --- cases by hand ----------------------------------------------------------------------------------------------------


def elementwise(graph: Graph, tensor: Tensor, mapping: TileMapping) -> Traffic:
    """Reads `tensor` by the blocks of a mapping of its shape."""
    cuts = mapping.cuts if isinstance(mapping, Blocked) else (np.append(mapping.starts, mapping.size),)
    axes = [Axis(f"a{number}", cut) for number, cut in enumerate(cuts)]
    access = Access(tensor, tuple(element(number) for number in range(len(axes))))
    return traffic(group_on(axes, access, mapping.tile if isinstance(mapping, Blocked) else mapping.tiles), 0, graph)


@pytest.mark.parametrize("mapping", [grid((8, 8), (2, 2)), grid((8, 8), (8, 1)), grid((64,), (4,)), linear(64, 4, 4)])
def test_vertices_on_home_tiles_exchange_nothing(mapping: TileMapping) -> None:
    graph = graph_of(8)
    shape = mapping.shape if isinstance(mapping, Blocked) else (mapping.size,)
    actual = elementwise(graph, graph.add_variable(shape, F32, "x", mapping), mapping)
    held = mapping.elements_per_tile(8) * 4
    assert not np.any([actual.received_bytes, actual.sent_bytes, actual.receives])
    np.testing.assert_array_equal(actual.local_bytes, held)
    np.testing.assert_array_equal(actual.local_fragments, held > 0)
    assert not actual.copied_bytes.any() and not actual.copied_fragments.any()


@pytest.mark.parametrize("writes", [False, True])
def test_counts_columns_in_groups_axis_by_axis(writes: bool) -> None:
    """A matrix of 12 columns, kept as 3 groups of 4, in blocks that cut no group: each block is one fragment."""
    graph = graph_of(6)
    kept = graph.add_variable((3, 8, 4), F32, "x", grid((3, 8, 4), (1, 2, 1)))
    matrix = kept.transpose((1, 0, 2)).reshape((8, 12))
    axes = [Axis("i", even_cuts(8, 2)), Axis("j", np.array([0, 8, 12]))]
    tile = np.array([[2, 3], [4, 5]], np.int32)
    group = group_on(axes, Access(matrix, (element(0), element(1))), tile, "out" if writes else "in")
    assert "blocks" in check(graph, group, writes)
    if not writes:
        np.testing.assert_array_equal(traffic(group, 0, graph).receives, [0, 0, 1, 1, 1, 1])


def test_a_complete_block_is_one_fragment() -> None:
    graph = graph_of(4)
    x = graph.add_variable((8, 8), F32, "x", Blocked((even_cuts(8, 2), even_cuts(8, 2)), np.array([[0, 1], [2, 3]])))
    actual = elementwise(graph, x, Blocked((even_cuts(8, 2), even_cuts(8, 2)), np.array([[1, 0], [3, 2]])))
    np.testing.assert_array_equal(actual.receives, [1, 1, 1, 1])
    np.testing.assert_array_equal(actual.received_bytes, [64] * 4)
    # Part of a box is as many fragments as it has rows, and a receive for each part of a row of another tile.
    half = elementwise(graph, x[:, 2:6], Blocked((even_cuts(8, 1), even_cuts(4, 1)), np.array([[0]])))
    np.testing.assert_array_equal(half.receives, [4 + 8, 0, 0, 0])
    np.testing.assert_array_equal(half.sends, [0, 4, 4, 4])
    np.testing.assert_array_equal(half.local_fragments, [4, 0, 0, 0])
    np.testing.assert_array_equal(half.copied_bytes, [32, 0, 0, 0])


def test_rows_of_one_tile_are_sent_one_by_one_and_received_at_once() -> None:
    graph = graph_of(2)
    x = graph.add_variable((6, 4), F32, "x", on_one_tile(24, 1))
    half = elementwise(graph, x[:, :2], Blocked((even_cuts(6, 1), even_cuts(2, 1)), np.array([[0]])))
    assert (half.receives.tolist(), half.sends.tolist()) == ([1, 0], [0, 6])


@pytest.mark.parametrize(("width", "fragments"), [(3, 4), (4, 6)])
def test_strided_columns_that_meet_both_ends_of_a_row(width: int, fragments: int) -> None:
    """Columns 0 and 2 of rows of three: the last of a row and the first of the next are neighbours in memory."""
    graph = graph_of(2)
    x = graph.add_variable((3, width), F32, "x", on_one_tile(3 * width, 1))
    group = group_on(
        [Axis("i", even_cuts(3, 1)), Axis("j", even_cuts(2, 1))],
        Access(x[:, :3:2], (element(0), element(1))),
        np.zeros((1, 1)),
    )
    actual = traffic(group, 0, graph)
    assert (actual.receives.tolist(), actual.sends.tolist()) == ([1, 0], [0, fragments])


def test_sends_an_operand_of_many_tiles_once() -> None:
    graph = graph_of(4)
    scalar = graph.add_variable((), F32, "s", on_one_tile(1, 2))
    group = group_on([Axis("i", even_cuts(8, 4))], Access(scalar, ()), np.arange(4))
    actual = traffic(group, 0, graph)
    np.testing.assert_array_equal(actual.received_bytes, [4, 4, 0, 4])
    np.testing.assert_array_equal(actual.sent_bytes, [0, 0, 4, 0])
    np.testing.assert_array_equal(actual.receives, [1, 1, 0, 1])
    np.testing.assert_array_equal(actual.local_bytes, [0, 0, 4, 0])


def test_a_stencil_receives_its_halo_and_copies_its_block() -> None:
    graph = graph_of(3)
    x = graph.add_variable((12,), F32, "x", grid((12,), (3,)))
    dims = (Dim((Term(0), Term(1)), -1),)
    axes = [Axis("i", even_cuts(12, 3)), Axis("tap", np.array([0, 3]))]
    actual = traffic(group_on(axes, Access(x, dims, 0.0), np.arange(3).reshape(3, 1)), 0, graph)
    np.testing.assert_array_equal(actual.received_bytes, [4, 8, 4])
    np.testing.assert_array_equal(actual.sent_bytes, [4, 8, 4])
    np.testing.assert_array_equal(actual.receives, [1, 2, 1])
    np.testing.assert_array_equal(actual.copied_bytes, [16, 16, 16])
    np.testing.assert_array_equal(actual.copied_fragments, [1, 1, 1])


def test_results_are_sent_to_their_home_tiles() -> None:
    graph = graph_of(4)
    y = graph.add_variable((8,), F32, "y", on_one_tile(8, 1))
    axes = [Axis("i", even_cuts(8, 4))]
    group = group_on(axes, Access(y, (element(0),)), np.arange(4), "out")
    actual = traffic(group, 0, graph)
    np.testing.assert_array_equal(actual.received_bytes, [0, 24, 0, 0])
    np.testing.assert_array_equal(actual.sent_bytes, [8, 0, 8, 8])
    np.testing.assert_array_equal(actual.receives, [0, 3, 0, 0])
    both = group_on(axes, Access(y, (element(0),)), np.arange(4), "inout")
    np.testing.assert_array_equal(traffic(both, 0, graph).sent_bytes, [0, 24, 0, 0])
    np.testing.assert_array_equal(traffic(both, 0, graph, results=True).sent_bytes, [8, 0, 8, 8])


def test_block_counts_never_list_elements() -> None:
    """A matmul operand of 2^40 elements: every tile needs a row block of it and holds a share of that block."""
    n = 1 << 20
    tiles = 1024
    graph = graph_of(tiles)
    x = graph.add_variable((n, n), F32, "x", grid((n, n), (32, 32)))
    axes = [Axis("m", even_cuts(n, 32)), Axis("n", even_cuts(n, 32)), Axis("k", even_cuts(n, 1), "reduce")]
    group = group_on(axes, Access(x, (element(0), element(2))), np.arange(tiles).reshape(32, 32, 1))
    actual = traffic(group, 0, graph)
    box = 4 * (n // 32) ** 2
    np.testing.assert_array_equal(actual.received_bytes, np.full(tiles, 31 * box))
    np.testing.assert_array_equal(actual.sent_bytes, np.full(tiles, box))
    np.testing.assert_array_equal(actual.receives, np.full(tiles, 31 * n // 32))
    transposed = elementwise(graph, x.transpose((1, 0)), grid((n, n), (32, 32)))
    diagonal = np.arange(tiles) % 33 == 0
    np.testing.assert_array_equal(transposed.received_bytes, np.where(diagonal, 0, box))
    np.testing.assert_array_equal(transposed.receives, ~diagonal)


def test_blocks_of_columns_in_groups_are_rows_of_groups() -> None:
    """Runs are as long as a group has rows if columns are cut at groups, and the mapping elsewhere."""
    rows, columns = 64, 96
    x = Tensor.of(Variable((columns // 16, rows, 16), F32, "x")).transpose((1, 0, 2)).reshape((rows, columns))
    start = np.array([[0, 16], [32, 40]])
    length = np.array([[64, 32], [32, 56]])
    runs = merge_runs(block_runs(x.node, np.arange(2), start, length, flat_bases(x.variables())), x.size + 1)
    actual = np.stack([runs.block, runs.start, runs.length], 1).tolist()
    group = 16 * rows
    assert actual[0] == [0, group, 2 * group]
    assert actual[1:33] == [[1, 2 * group + 16 * row + 8, 8] for row in range(32, 64)]  # half a group
    assert actual[33:] == [[1, number * group + 16 * 32, 16 * 32] for number in (3, 4, 5)]


def test_answers_depend_on_geometry_and_not_on_the_variable() -> None:
    graph = graph_of(4)
    mapping = grid((6, 4), (2, 2))
    a, b = (graph.add_variable((6, 4), F32, name, mapping) for name in "ab")
    other = grid((4, 6), (2, 2))
    first = elementwise(graph, a.transpose((1, 0)), other)
    counted = cached_calls()
    np.testing.assert_array_equal(as_rows(elementwise(graph, b.transpose((1, 0)), other), 4), as_rows(first, 4))
    assert set(cached_calls()) == set(counted)
    moved = Blocked(other.cuts, other.tile[::-1])
    assert not np.array_equal(elementwise(graph, b.transpose((1, 0)), moved).received_bytes, first.received_bytes)
    assert np.any(elementwise(graph, b.transpose((1, 0))[:, ::-1], other).received_bytes != first.received_bytes)
    half = graph.add_variable((6, 4), np.dtype(np.float16), "h", mapping)
    assert np.array_equal(elementwise(graph, half.transpose((1, 0)), other).sent_bytes * 2, first.sent_bytes)
    with pytest.raises(ValueError, match="read-only"):
        first.sent_bytes[0] = 1


def test_a_list_of_elements_is_counted_once() -> None:
    """The cost of its compute set, and the counts for other machines, share an answer that keeps no list alive."""
    graph = graph_of(4)
    x, other = (scattered(graph.add_variable((6, 4), F32, name, grid((6, 4), (2, 2))).flatten()) for name in "xy")
    assert isinstance(x.node, Indexed)
    group = random_group(np.random.default_rng(0), x, 4, False)
    first = as_rows(traffic(group, 0, graph), 4)
    counted = cached_calls()
    np.testing.assert_array_equal(as_rows(traffic(group, 0, graph), 4), first)
    assert set(cached_calls()) == set(counted)
    traffic(random_group(np.random.default_rng(0), other, 4, False), 0, graph)
    assert set(cached_calls()) > set(counted)
    assert not [array for array in find_arrays(cached_calls()) if array is x.node.index]


@pytest.mark.parametrize("writes", [False, True])
def test_an_axis_of_one_block_that_an_access_has_not_makes_no_difference(writes: bool) -> None:
    """Stashes of any length are pushed to in place, and read their operands alike."""
    graph = graph_of(4)
    stash = Tensor.of(Variable((3, 16), np.float32))
    tile = np.arange(4, dtype=np.int32)
    columns = Axis("columns", even_cuts(16, 4))
    mapping = Blocked((even_cuts(3, 1), columns.cuts), tile.reshape(1, 4))
    graph.set_tile_mapping(stash.variables()[0], mapping)
    rows, one = Axis("rows", even_cuts(3, 1)), Axis("one", even_cuts(1, 1))
    access = Access(stash, (element(0), element(1)))
    direction = "out" if writes else "in"
    short = group_on([rows, columns], access, tile.reshape(1, 4), direction)
    long = group_on([rows, columns, one], access, tile.reshape(1, 4, 1), direction)
    counts, others = (as_rows(traffic(group, 0, graph), 4) for group in (short, long))
    np.testing.assert_array_equal(others, counts)
    assert not traffic(long, 0, graph).copied_bytes.any() and not traffic(long, 0, graph).received_bytes.any()


def test_tiles_of_a_later_ipu_count_as_those_of_the_first() -> None:
    graph = Graph(preset("mk2", 3).replace(tiles_per_ipu=4))
    first = [grid((6, 4), (2, 2), 4 * ipu) for ipu in range(3)]
    tensors = [graph.add_variable((4, 6), F32, "x", grid((4, 6), (2, 2), 4 * ipu)) for ipu in range(3)]
    rows = [as_rows(elementwise(graph, x.transpose((1, 0)), m), 4) for x, m in zip(tensors, first, strict=True)]
    rows += [as_rows(elementwise(graph, x, graph.mappings[x.variables()[0]]), 4) for x in tensors]
    assert rows[0][:, :4].any() and rows[0].shape == (10, 12)
    for ipu in range(3):
        np.testing.assert_array_equal(rows[ipu], np.roll(rows[0], 4 * ipu, axis=1))
        np.testing.assert_array_equal(rows[3 + ipu], np.roll(rows[3], 4 * ipu, axis=1))


def test_empty_operands_have_no_traffic() -> None:
    graph = graph_of(4)
    x = graph.add_variable((0, 3), F32, "x", grid((0, 3), (1, 1)))
    group = group_on(
        [Axis("i", np.array([0])), Axis("j", np.array([0, 3]))], Access(x, (element(0), element(1))), np.zeros((0, 1))
    )
    assert not traffic(group, 0, graph).local_bytes.any()
    y = graph.add_variable((4,), F32, "y", on_one_tile(4, 0))
    idle = group_on([Axis("i", even_cuts(4, 2))], Access(y, (element(0),)), np.full(2, -1))
    assert not traffic(idle, 0, graph).sent_bytes.any()
    assert list_messages(graph, idle, 0, False).element.size == 0
    fill = group_on([Axis("i", even_cuts(4, 2))], Access(y, (element(0, offset=9),), 0.0), np.arange(2))
    assert not traffic(fill, 0, graph).sent_bytes.any()
    assert not copy_traffic(x, x, graph).local_bytes.any()


def test_refuses_a_variable_without_mapping() -> None:
    graph = graph_of(4)
    x = graph.add_variable((4,), F32, "lost")
    y = graph.add_variable((4,), F32, "y", on_one_tile(4, 0))
    group = group_on([Axis("i", even_cuts(4, 2))], Access(x, (element(0),)), np.arange(2))
    for call in (
        lambda: traffic(group, 0, graph),
        lambda: copy_traffic(x, y, graph),
        lambda: copy_traffic(y, x, graph),
    ):
        with pytest.raises(GraphError, match=r"lost.*is mapped to no tile"):
            call()


def test_tiles_of_a_bus_share_common_data() -> None:
    graph = graph_of(5)
    x = graph.add_variable((12,), F32, "x", on_one_tile(12, 0))
    whole = [Axis("i", even_cuts(12, 1)), Axis("copy", even_cuts(5, 5))]
    everywhere = traffic(group_on(whole, Access(x, (element(0),)), np.arange(5)[None]), 0, graph)
    # Tile 0 has it, so tile 1 receives alone; tile 4 has a bus to itself.
    np.testing.assert_array_equal(everywhere.received_bytes, [0, 48, 48, 48, 48])
    np.testing.assert_array_equal(everywhere.shared_bytes, [0, 0, 48, 48, 0])
    windows = [Axis("i", np.array([0, 4, 8])), Axis("tap", np.array([0, 4]))]
    overlap = Access(x, (Dim((Term(0), Term(1))),))
    halves = traffic(group_on(windows, overlap, np.array([[2], [3]])), 0, graph)  # elements 0 to 6 and 4 to 10
    np.testing.assert_array_equal(halves.received_bytes, [0, 0, 28, 28, 0])
    np.testing.assert_array_equal(halves.shared_bytes, [0, 0, 12, 12, 0])
    apart = traffic(group_on(windows, overlap, np.array([[1], [2]])), 0, graph)  # neighbours, but of two buses
    assert not apart.shared_bytes.any()


def test_a_bus_does_not_reach_beyond_an_ipu() -> None:
    graph = Graph(preset("mk2", 2).replace(tiles_per_ipu=3))
    x = graph.add_variable((4,), F32, "x", on_one_tile(4, 5))
    whole = [Axis("i", even_cuts(4, 1)), Axis("copy", even_cuts(3, 3))]
    for tiles, shared in (([2, 3, 4], [3, 4]), ([3, 4, 5], [3, 4]), ([1, 2, 3], [])):
        actual = traffic(group_on(whole, Access(x, (element(0),)), np.array([tiles])), 0, graph)
        assert np.flatnonzero(actual.shared_bytes).tolist() == shared


def test_copies_each_operand_that_is_not_in_one_piece() -> None:
    """Two vertices of a tile: columns of a matrix it holds are scattered, though all of it lies in one piece."""
    graph = graph_of(2)
    x = graph.add_variable((3, 4), F32, "x", on_one_tile(12, 0))
    tile = np.array([[0, 0]])
    columns = [Axis("i", even_cuts(3, 1)), Axis("j", even_cuts(4, 2))]
    actual = traffic(group_on(columns, Access(x, (element(0), element(1))), tile), 0, graph)
    np.testing.assert_array_equal(actual.copied_bytes, [48, 0])
    np.testing.assert_array_equal(actual.copied_fragments, [6, 0])
    rows = [Axis("i", np.array([0, 1, 3])), Axis("j", even_cuts(4, 1))]
    actual = traffic(group_on(rows, Access(x, (element(0), element(1))), tile.T), 0, graph)
    assert not actual.copied_bytes.any() and actual.local_bytes[0] == 48
    # Rows 0 and 2 are two pieces of the tile, but each is the whole operand of a vertex.
    apart = [Axis("i", even_cuts(2, 2)), Axis("j", even_cuts(4, 1))]
    actual = traffic(group_on(apart, Access(x[::2], (element(0), element(1))), tile.T), 0, graph)
    assert not actual.copied_bytes.any() and actual.local_fragments[0] == 2


def test_cycles_by_hand() -> None:
    target = preset("mk2").replace(
        tiles_per_ipu=6,
        exchange_startup_cycles=100,
        exchange_bytes_per_cycle=4,
        exchange_receive_cycles=3,
        memcpy_bytes_per_cycle=8,
        copy_startup_cycles=20,
        copy_fragment_cycles=30,
    )
    received = np.array([0, 41, 4, 0, 16, 41])
    shared = np.array([0, 0, 0, 0, 0, 33])
    fragments = np.array([0, 1, 1, 0, 4, 1])
    sent = np.array([0, 8, 40, 4, 0, 0])
    receiving = receive_cycles(received, shared, fragments, target)
    np.testing.assert_array_equal(receiving, [0, 11, 3, 0, 12, 7])  # the last: 8 bytes alone, 33 at twice the rate
    np.testing.assert_array_equal(exchange_cycles(receiving, sent, target), [0, 111, 110, 101, 112, 107])
    np.testing.assert_array_equal(copy_cycles(np.array([0, 17]), np.array([0, 2]), target), [0, 83])


def test_code_of_a_receiver_is_as_long_as_poplar_makes_it() -> None:
    """Four parts that follow at once take ten words (ipu21-rs, docs/EXCHANGE_INSTRUCTION_REFERENCE.md)."""
    receives = np.array([0, 4])
    code_bytes = receive_code_bytes(receives, preset("mk2")) + receiver_code_bytes(receives)
    np.testing.assert_array_equal(code_bytes, [0, 10 * 4])
