"""Tiles packed in groups against every tile packed on its own: equal peaks, and bytes that suffice for each."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from ipujax.runtime.memory.chip import Chip, Item, KnownArenas, pack_all, pack_fullest
from ipujax.runtime.memory.packing import ORDERS, merge_spans, round_up

STEPS = 6
TILES = 24

_step = st.integers(0, STEPS - 1)
_spans = st.lists(st.tuples(_step, _step).map(sorted).map(tuple), min_size=1, max_size=2).map(merge_spans)


@st.composite
def chips(draw):
    """Two IPUs, items large and small that many tiles share, and buffers; the peak of each tile, and other bytes."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    unit = draw(st.sampled_from([8, 800]))
    items = []
    for spans in draw(st.lists(_spans, min_size=1, max_size=12)):
        first, stop = sorted(random.choice(TILES + 1, 2, replace=False).tolist())
        wide = bool(random.integers(0, 4) == 0)
        size = round_up(random.choice([8, 16, 40, unit]) + random.choice([0, 8], stop - first), 16 if wide else 8)
        items.append(Item(first, size, spans, wide))
    for step in draw(st.sets(_step)):  # buffers live during one step
        items.append(Item(0, round_up(random.choice([0, 8, 100], TILES)), ((step, step),), False))
    held = np.zeros((STEPS, TILES), np.int64)
    for item in items:
        for low, high in item.spans:
            held[low : high + 1, item.first : item.stop] += item.values
    limit = draw(st.sampled_from([0, 100, 10**6]))
    halves = [range(0, TILES // 2), range(TILES // 2, TILES)]
    own = [[item for item in items if item.first < half.stop and item.stop > half.start] for half in halves]
    both = [Chip(half, mine, limit) for half, mine in zip(halves, own, strict=True)]
    return both, held.max(0), random.integers(0, draw(st.sampled_from([1, 50, 5000])), TILES)


def in_the_orders(chip, tiles, peak):
    """Some tiles packed on their own in each of the orders, and in no other sequence."""
    return chip.pack_best(tiles, peak[tiles] * 1.01, 0.0, len(ORDERS))


@settings(max_examples=75)
@given(chips())
def test_the_fullest_tile_needs_no_more_than_if_all_were_packed_on_their_own(drawn):
    both, peak, always = drawn
    packed = pack_fullest(both, peak, always, KnownArenas())
    alone = pack_all(both, peak, KnownArenas())
    in_orders = np.concatenate([in_the_orders(chip, np.array(chip.tiles), peak).size for chip in both])
    assert (packed.size >= peak).all() and (packed.wide <= packed.size).all()
    assert (alone.size >= peak).all() and (alone.size <= in_orders).all()
    assert (always + packed.size).max() <= (always + in_orders).max()


@settings(max_examples=30)
@given(chips(), st.data())
def test_bytes_of_a_tile_do_not_depend_on_tiles_packed_with_it(drawn, data):
    both, peak, _ = drawn
    for chip in both:
        every = in_the_orders(chip, np.array(chip.tiles), peak)
        tiles = np.array(sorted(data.draw(st.sets(st.sampled_from(list(chip.tiles)), min_size=1))))
        some = in_the_orders(chip, tiles, peak)
        np.testing.assert_array_equal(some.size, every.size[tiles - chip.tiles.start])
        np.testing.assert_array_equal(some.wide, every.wide[tiles - chip.tiles.start])


def test_items_on_top_are_placed_first_again_until_no_gap_is_left():
    """Values of a step with sharded state: the orders alone leave gaps of a fifth."""
    lives = [(10240, 21, 27), (10240, 32, 38), (10240, 38, 38), (9216, 19, 19), (8192, 1, 47), (8192, 19, 20)]
    lives += [(8192, 20, 21), (6144, 16, 16), (4096, 8, 9), (4096, 9, 9), (2576, 29, 29), (2560, 23, 29)]
    lives += [(2560, 24, 27), (2560, 26, 27), (2560, 30, 37), (2560, 34, 37), (2048, 0, 46), (2048, 16, 19)]
    lives += [(2048, 4, 50), (2048, 6, 52)]
    items = [Item(0, np.array([size]), ((first, last),), False) for size, first, last in lives]
    peak = np.array([max(sum(size for size, first, last in lives if first <= t <= last) for t in range(53))])
    chip = Chip(range(1), items, 10**6)
    assert in_the_orders(chip, np.array([0]), peak).size[0] > 1.05 * peak[0]
    assert pack_all([chip], peak, KnownArenas()).size[0] <= 1.01 * peak[0]
