"""Notebook views of profiles, stages and tile mappings."""

from __future__ import annotations

import json
import linecache
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.errors import shown_place
from ipujax.runtime.sources import line_number
from ipujax.runtime.tensor.mapping import flat_mapping, grid
from ipujax.runtime.views import source_view


@pytest.fixture(scope="module")
def lowered():
    def evil(x):
        return jnp.sum(jnp.exp(x) @ x.T)

    evil.__name__ = "<script>"
    return ipu.jit(evil).lower(jnp.ones((32, 16)))


def test_a_profile_is_a_short_table(lowered):
    profile = lowered.compile().profile
    displayed = profile._repr_html_()
    assert f"{profile.cycles:,}" in displayed and "Most expensive line" in displayed and displayed.count("<tr>") == 6
    assert f"{profile.memory.worst_tile:,} with" in displayed


def test_stages_are_tables_with_their_figures(lowered):
    displayed = lowered._repr_html_()
    assert (
        str(len(lowered.jaxpr.eqns)) in displayed and "trace, " in displayed and "Lowered &lt;script&gt;" in displayed
    )
    compiled = lowered.compile()._repr_html_()
    assert "Compiled &lt;script&gt;" in compiled and "Fullest tile" in compiled
    assert "<script>" not in displayed + compiled


def test_tile_mappings_say_how_even_they_are():
    blocks = grid((6, 8), (2, 4), 10)._repr_html_()
    assert "6 × 8 elements, in blocks" in blocks and "10 to 17" in blocks
    intervals = flat_mapping(12, np.array([0, 5, 6]), np.array([1, 0, 3]))._repr_html_()
    assert "6, tile 3" in intervals and "0 to 3" in intervals
    assert "Tiles" in flat_mapping(0, np.array([], np.int64), np.array([], np.int32))._repr_html_()


def test_a_comparison_is_a_table(lowered):
    profile = lowered.compile().profile
    assert "; 0 operations differ" in ipu.compare(profile, profile)._repr_html_()


# --- cells: of IPython, whose part that names cells is stood in for ---------------------------------------------------

CELL = "/tmp/ipykernel_12/345.py"
SOURCE = """import jax.numpy as jnp
def loss(x):
    return jnp.sum(jnp.exp(x) @ x.T)
"""


@pytest.fixture
def cell(monkeypatch):
    """The function of a notebook's third cell."""
    label = {CELL: ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=label.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(linecache.cache, CELL, (len(SOURCE), None, SOURCE.splitlines(keepends=True), CELL))
    scope = {"__name__": "__main__"}
    exec(compile(SOURCE, CELL, "exec"), scope)
    return scope["loss"]


def test_lines_of_cells_are_those_that_a_notebook_shows(cell, tmp_path):
    profile = ipu.jit(cell).lower(jnp.ones((32, 16))).compile().profile
    lines = {str(row.origin) for row in profile.operations()}
    assert "cell 3, line 3 (loss)" in lines and "ipykernel" not in profile.summary(20)
    [file] = source_view(profile)
    assert file.name == "cell 3" and file.lines[2].strip() == "return jnp.sum(jnp.exp(x) @ x.T)" and 3 in file.costs
    profile.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<strong>cell 3</strong>" in page and "ipykernel" not in page.split("BokehJS")[0]
    profile.save(tmp_path / "saved")
    assert source_view(ipu.Profile.load(tmp_path / "saved")) and source_view(profile)[0].name == "cell 3"


def test_errors_name_cells(cell):
    with pytest.raises(ipu.IpuError) as caught:
        ipu.jit(cell).lower(jnp.ones((32, 16)), 1)
    assert "ipykernel" not in str(caught.value)
    assert shown_place((CELL, 5, "loss")) == "cell 3, line 5 (loss)"


def test_cells_of_consoles_have_their_number_in_their_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert shown_place(("<ipython-input-7-0f3a>", 2, "f")) == "cell 7, line 2 (f)"
    assert shown_place((CELL, 2, "f")) == "345.py:2 (f)"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert shown_place((CELL, 2, "f")) == "345.py:2 (f)"


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("cell 3, line 5 (loss)", ("cell 3", 5)),
        ("train.py:12 (loss)", ("train.py", 12)),
        ("a, line b.py:3 (f)", ("a, line b.py", 3)),
        ("host stream w", None),
    ],
)
def test_lines_are_read_again(line, place):
    assert line_number(line) == place


# --- what a console prints --------------------------------------------------------------------------------------------


def test_large_answers_are_short_in_a_console(lowered):
    tiles = lowered.tile_map()
    memory = lowered.compile().profile.memory
    assert len(repr(tiles)) < 400 < len(str(tiles)) and f"{len(tiles['variables'])} variables" in repr(tiles)
    assert str(tiles) == str(dict(tiles)) and json.loads(json.dumps(tiles)) == tiles
    assert len(repr(memory)) < 300 and f"{memory.max_tile_bytes:,} of 638,976 bytes" in repr(memory)
