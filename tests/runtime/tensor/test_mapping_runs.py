"""The runs of a tile mapping in blocks against the block of every element."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from ipujax.runtime.tensor.mapping import Blocked


@st.composite
def mappings(draw):
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    cuts = [sorted({0, n, *draw(st.sets(st.integers(1, n)))}) for n in shape]
    blocks = [len(cut) - 1 for cut in cuts]
    tile = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 4, blocks).astype(np.int32)
    return Blocked(tuple(np.array(cut, np.int64) for cut in cuts), tile)


@settings(max_examples=200)
@given(mappings())
def test_runs_name_the_tile_of_every_element(mapping):
    starts, lengths, tiles = mapping.runs()
    expected = [
        mapping.tile[tuple(np.searchsorted(cut, i, "right") - 1 for i, cut in zip(at, mapping.cuts, strict=True))]
        for at in np.ndindex(mapping.shape)
    ]
    np.testing.assert_array_equal(np.repeat(tiles, lengths), expected)
    np.testing.assert_array_equal(starts, np.cumsum(lengths) - lengths)
    assert (lengths > 0).all()
    np.testing.assert_array_equal(mapping.elements_per_tile(4), np.bincount(expected, minlength=4))
