"""Pages are whole without network, hold every section, and let no name become markup."""

from __future__ import annotations

import builtins
import importlib
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

import ipujax as ipu
from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ArgumentTypeError, ProfileError
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Repeat, Sequence
from ipujax.runtime.markup import Markup, escaped, table, tag
from ipujax.runtime.page.anchors import anchors_of
from ipujax.runtime.page.profile_page import SECTIONS
from ipujax.runtime.page.program_tree import program_section
from ipujax.runtime.profile import ProgramNode
from ipujax.runtime.report import Profile
from ipujax.runtime.tensor.mapping import on_one_tile
from ipujax.runtime.tensor.roles import UNKNOWN
from tests.runtime.page.page_data import cells_of, data_of, table_of
from tests.runtime.profile.profile_helpers import (
    F32,
    TARGET,
    apply,
    codelet,
    grid,
    inputs,
    looping,
    output,
    trained_program,
    two_ipus,
)
from tests.runtime.profile.test_reports import everything
from tests.runtime.profile.test_saved import too_large
from tests.test_layering import ROOT

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
VOID = {"meta", "input", "img", "br", "link", "hr"}


class Page(HTMLParser):
    """The elements of a page; fails where they are not nested."""

    def __init__(self, text):
        super().__init__()
        self.stack = []
        self.tags = []
        self.ids = []
        self.links = []
        self.texts = []
        self.feed(text)
        self.close()
        assert not self.stack, self.stack

    def handle_starttag(self, name, attributes):
        actual = dict(attributes)
        self.tags.append((name, actual))
        self.ids += [actual["id"]] if "id" in actual else []
        self.links += [actual[key] for key in ("src", "href") if key in actual]
        if name not in VOID:
            self.stack.append(name)

    def handle_endtag(self, name):
        assert self.stack.pop() == name

    def handle_data(self, data):
        if "script" not in self.stack and "style" not in self.stack:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


def addresses_of(text):
    """Ids of elements, and of rows of tables."""
    return {*Page(text).ids, *(id for table in data_of(text)["tables"].values() for id in table["ids"])}


def page_of(made, tmp_path):
    made.to_html(tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def evil_profile():
    graph = Graph(TARGET)
    a, b = (graph.add_variable((16,), F32, EVIL, grid((16,), (4,))) for _ in range(2))
    step = apply(graph, codelet(EVIL, 30), a, b, 4, f"{EVIL}:3 ({EVIL})")
    graph.notes.fallbacks[step.compute_set] = EVIL
    return Profile(compile(graph, Sequence(*inputs(a), Repeat(3, step), output(b))))


PROFILES = {
    "trained": lambda: Profile(trained_program()),
    "two IPUs": lambda: Profile(two_ipus()),
    "everything": lambda: Profile(everything()),
    "too large": too_large,
    "names that are markup": evil_profile,
}


@pytest.mark.parametrize("name", PROFILES)
def test_a_page_holds_every_section_and_needs_no_network(name, tmp_path):
    profile = PROFILES[name]()
    text = page_of(profile, tmp_path)
    page = Page(text)
    sections = [actual["id"] for kind, actual in page.tags if kind == "section"]
    absent = {"stages", "passes"} | ({"waits"} if profile.target.num_ipus == 1 else set())  # there are none
    assert sections == [key for key, _ in SECTIONS if key not in absent]
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") and unquote(link[1:]) in addresses_of(text) for link in page.links)
    assert "Not known" not in page.text
    several = ("IPU wait",) if profile.num_ipus > 1 else ()
    for question in ("operation takes most", "line should change", "tile is fullest", *several):
        assert question in page.text
    assert text.count(">Show</a>") == text.count(">Show<")  # none leads nowhere


def test_small_steps_behind_one_another_are_folded_and_none_is_lost():
    def step(name, cycles):
        return ProgramNode("OnTileExecute", name, "", cycles, 1)

    steps = [
        *(step(f"small {n}", 1) for n in range(5)),
        step("large", 10_000),
        *(step(f"few {n}", 1) for n in range(2)),
    ]
    root = ProgramNode("Sequence", "all", "", 10_007, 1, tuple(steps))
    section = program_section(root, anchors_of(PROFILES["trained"]()))
    assert [each.name in section.body for each in steps] == [True] * 8
    assert section.body.count("small steps") == 1 and "5 small steps" in section.body
    folded = section.body.split("5 small steps")[1].split("</details>")[0]
    assert [each.name for each in steps if each.name in folded] == [f"small {n}" for n in range(5)]


def test_the_guide_describes_every_section_in_order():
    guide = (ROOT / "docs" / "profile.md").read_text(encoding="utf-8")
    part = guide.split("## Reading the report\n")[1].split("\n## ")[0]
    described = re.findall(r"^- \*\*([^*]+)\*\*", part, re.MULTILINE)
    assert described == [title for _, title in SECTIONS]


def test_figures_of_the_page_are_those_of_the_profile(tmp_path):
    profile = Profile(two_ipus())
    text = Page(page_of(profile, tmp_path)).text
    assert f"{profile.cycles:,}" in text and f"Tile {profile.memory.worst_tile}" in text
    for name, cycles in profile.phase_cycles.items():
        assert f"{cycles:,} ({cycles / profile.cycles:.1%})" in text, name


def test_a_full_tile_is_named_with_its_variable_and_role(tmp_path):
    graph = Graph(TARGET.replace(bytes_per_tile=64 * 1024))
    table = graph.add_variable((12_800,), F32, "planted table", on_one_tile(12_800, 2))
    profile = Profile(compile(graph, Sequence(*inputs(table), output(table))))
    page = page_of(profile, tmp_path)
    text = Page(page).text
    said = "The largest variable is Variable(planted table: float32[12800])"
    assert said in text and f"({UNKNOWN}), 50.0 KiB" in text and text.index(said) < text.index("In figures")
    assert "All that is on tile 2 at its peak" in text
    assert 51_200 in [row["Bytes"] for row in table_of(page, "fullest-items")]
    assert (
        'aria-label="Bytes of tiles by role' in page and 'aria-label="Bytes of the fullest tile at each step.' in page
    )


def test_names_are_never_markup(tmp_path):
    profile = evil_profile()
    profile.save(tmp_path / "saved")
    for each in (page_of(profile, tmp_path), page_of(ipu.compare(profile, Profile(trained_program())), tmp_path)):
        page = Page(each)
        assert EVIL in page.text + " ".join(cells_of(each)) and "<script>alert" not in each and "<img" not in each
        assert [actual for kind, actual in page.tags if kind == "img" or "onerror" in actual] == []


def test_a_saved_profile_has_the_same_page(tmp_path):
    profile = Profile(two_ipus())
    profile.save(tmp_path / "saved")
    first, second = (page_of(each, tmp_path) for each in (profile, Profile.load(tmp_path / "saved")))
    assert Page(first).text == Page(second).text and data_of(first) == data_of(second)


def test_without_trip_counts_memory_is_shown(tmp_path):
    graph, program, _, _ = looping()
    page = Page(page_of(Profile(compile(graph, program)), tmp_path))
    assert "the trip count of loop 'model.py:18 (decode)' is data" in page.text and "chart-chip" in page.ids


def test_paths_that_cannot_be_written(tmp_path):
    profile = Profile(trained_program())
    for made in (profile, ipu.compare(profile, profile)):
        with pytest.raises(ProfileError, match=r"cannot be written to(.|\n)*try: a path"):
            made.to_html(tmp_path / "none" / "page.html")
        with pytest.raises(ArgumentTypeError, match="needs a path"):
            made.to_html(3)


def test_the_error_without_bokeh_has_the_install_line(tmp_path, monkeypatch):
    real = importlib.import_module

    def no_bokeh(name, *rest):
        if name.startswith("bokeh"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr("ipujax.runtime.page.document.import_module", no_bokeh)
    profile = Profile(trained_program())
    with pytest.raises(ProfileError, match=r"bokeh, which is not installed(.|\n)*pip install 'ipujax\[report\]'"):
        profile.to_html(tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    ipu.compare(profile, profile).to_html(tmp_path / "page.html")  # which has no charts


def test_ipujax_does_not_import_bokeh(monkeypatch):
    real = builtins.__import__
    recorded = []
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: recorded.append(name) or real(name, *rest))
    Profile(trained_program()).summary()
    assert not [name for name in recorded if name.startswith("bokeh")]


def test_markup_is_put_in_and_text_is_escaped():
    assert tag("p", "a < b", Markup("<b>c</b>"), class_="x", title='"', hidden=True, open=False) == Markup(
        '<p class="x" title="&quot;" hidden>a &lt; b<b>c</b></p>'
    )
    assert escaped(Markup("<i>")) == "<i>" and escaped("<i>") == "&lt;i&gt;"
    assert table(("a", "b"), [("x", 1_000)]).count("1,000") == 1


def test_comparisons_have_pages(tmp_path):
    before = Profile(trained_program())
    after = Profile(two_ipus())
    actual = ipu.compare(before, after)
    page = page_of(actual, tmp_path)
    text = Page(page).text
    assert f"{before.cycles:,}" in text and f"{after.cycles:,}" in text
    for change in actual.changes:
        assert change.name in cells_of(page) and str(change.origin) in cells_of(page)
    same = Page(page_of(ipu.compare(before, before), tmp_path)).text
    assert "No operation differs." in same and "Both runs take" in same
