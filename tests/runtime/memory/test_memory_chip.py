"""Tiles packed in groups against every tile packed on its own: the fullest needs no more, and each what it holds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from ipujax.runtime.memory.chip import Chip, Item, pack_all, pack_fullest
from ipujax.runtime.memory.packing import merge, round_up

STEPS, TILES = 6, 24

_step = st.integers(0, STEPS - 1)
_spans = st.lists(st.tuples(_step, _step).map(sorted).map(tuple), min_size=1, max_size=2).map(merge)


@st.composite
def chips(draw):
    """Two IPUs, items large and small that many tiles share, and buffers; the peak of each tile, and what else is."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    unit = draw(st.sampled_from([8, 800]))
    items = []
    for spans in draw(st.lists(_spans, min_size=1, max_size=12)):
        first, stop = sorted(random.choice(TILES + 1, 2, replace=False).tolist())
        wide = bool(random.integers(0, 4) == 0)
        size = round_up(random.choice([8, 16, 40, unit]) + random.choice([0, 8], stop - first), 16 if wide else 8)
        items.append(Item(first, size, spans, wide))
    layers = [
        (
            step,
            [("message", 0, random.choice([0, 8, 100], TILES)), ("outputEdge", 3, random.choice([0, 24], TILES - 3))],
        )
        for step in draw(st.sets(_step))
    ]
    held = np.zeros((STEPS, TILES), np.int64)
    for item in items:
        for low, high in item.spans:
            held[low : high + 1, item.first : item.stop] += item.values
    for step, found in layers:
        for _, first, values in found:
            held[step, first : first + len(values)] += values
    limit = draw(st.sampled_from([0, 100, 10**6]))
    halves = [range(0, TILES // 2), range(TILES // 2, TILES)]
    own = [[item for item in items if item.first < half.stop and item.stop > half.start] for half in halves]
    both = [Chip(half, mine, layers, limit) for half, mine in zip(halves, own, strict=True)]
    return both, held.max(0), random.integers(0, draw(st.sampled_from([1, 50, 5000])), TILES)


@settings(max_examples=150, deadline=None)
@given(chips())
def test_the_fullest_tile_needs_no_more_than_if_all_were_packed_on_their_own(drawn):
    both, peak, always = drawn
    packed, best = pack_fullest(both, peak, always), pack_all(both, peak)
    assert (packed.size >= peak).all() and (packed.wide <= packed.size).all()
    assert (always + packed.size).max() <= (always + best.size).max()


@settings(max_examples=60, deadline=None)
@given(chips(), st.data())
def test_what_a_tile_needs_does_not_depend_on_what_is_packed_with_it(drawn, data):
    both, peak, _ = drawn
    every = pack_all(both, peak)
    for chip in both:
        tiles = np.array(sorted(data.draw(st.sets(st.sampled_from(list(chip.tiles)), min_size=1))))
        some = chip.pack_best(tiles, peak[tiles] * 1.01)
        np.testing.assert_array_equal(some.size, every.size[tiles])
        np.testing.assert_array_equal(some.wide, every.wide[tiles])
