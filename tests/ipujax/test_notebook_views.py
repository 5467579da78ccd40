"""What notebooks show of profiles, stages and tile mappings."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.tensor.mapping import flat_mapping, grid


@pytest.fixture(scope="module")
def lowered():
    def evil(x):
        return jnp.sum(jnp.exp(x) @ x.T)

    evil.__name__ = "<script>"
    return ipu.jit(evil).lower(jnp.ones((32, 16)))


def test_a_profile_is_a_short_table(lowered):
    profile = lowered.compile().profile
    shown = profile._repr_html_()
    assert f"{profile.cycles:,}" in shown and "Most expensive line" in shown and shown.count("<tr>") == 6
    assert f"{profile.memory.worst_tile:,} with" in shown


def test_stages_are_tables_with_their_figures(lowered):
    shown = lowered._repr_html_()
    assert str(len(lowered.jaxpr.eqns)) in shown and "trace, " in shown and "Lowered &lt;script&gt;" in shown
    compiled = lowered.compile()._repr_html_()
    assert "Compiled &lt;script&gt;" in compiled and "Fullest tile" in compiled
    assert "<script>" not in shown + compiled


def test_tile_mappings_say_how_even_they_are():
    boxes = grid((6, 8), (2, 4), 10)._repr_html_()
    assert "6 × 8 elements, in boxes" in boxes and "10 to 17" in boxes
    intervals = flat_mapping(12, np.array([0, 5, 6]), np.array([1, 0, 3]))._repr_html_()
    assert "6, tile 3" in intervals and "0 to 3" in intervals
    assert "Tiles" in flat_mapping(0, np.array([], np.int64), np.array([], np.int32))._repr_html_()


def test_a_comparison_is_a_table(lowered):
    profile = lowered.compile().profile
    assert "What changed; 0 operations differ" in ipu.compare(profile, profile)._repr_html_()
