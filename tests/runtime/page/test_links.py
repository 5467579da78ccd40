"""Rows of a page link to the trace, the source, the layers and each other, by addresses that stay."""

from __future__ import annotations

import re
from html import unescape
from urllib.parse import quote, unquote

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.compile import compile as ipu_compile
from ipujax.runtime.graph import Access, Axis, Execute, Graph, Sequence, VertexGroup, element
from ipujax.runtime.page.anchors import MAX_LAYERS, Anchors, anchors_of
from ipujax.runtime.page.layer_section import layer_section
from ipujax.runtime.profile import NO_LAYER
from ipujax.runtime.report import Profile
from ipujax.runtime.tensor import Origin
from ipujax.runtime.tensor.mapping import grid
from ipujax.runtime.views import tree_of
from tests.runtime.page.page_data import data_of, table_of
from tests.runtime.page.test_pages import EVIL, Page, addresses_of, evil_profile, page_of
from tests.runtime.profile.profile_helpers import (
    SIZE,
    TARGET,
    codelet,
    inputs,
    looping,
    output,
    trained_program,
    variables,
)


def dense(x, w):
    return jax.nn.relu(x @ w)


def loss(weights, x):
    with ipu.stage(0), jax.named_scope("encoder block"):
        x = dense(x, weights[0])
    with ipu.stage(1), jax.named_scope("head"):
        return jnp.mean(dense(x, weights[1]) ** 2)


def train_step(weights, x):
    grads = ipu.pipeline(jax.grad(loss), micro_batches=4)(weights, x)
    with jax.named_scope("spectrum"):
        values = jnp.linalg.svd(weights[0], compute_uv=False)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], values


@pytest.fixture(scope="module")
def profile():
    weights = [jax.ShapeDtypeStruct((32, 64), "float32"), jax.ShapeDtypeStruct((64, 16), "float32")]
    x = jax.ShapeDtypeStruct((32, 32), "float32")
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=64)
    return ipu.jit(train_step, device=device, donate_argnums=0).profile(weights, x)


@pytest.fixture(scope="module")
def text(profile, tmp_path_factory):
    return page_of(profile, tmp_path_factory.mktemp("page"))


def section_of(text, key):
    return text.split(f'<section id="{key}"')[1].split("</section>")[0]


def links_of(text):
    return [unquote(link) for link in re.findall(r'href="#([^"]+)"', text)]


def test_addresses_are_operations_lines_and_layers(profile, text):
    ids = set(Page(text).ids)
    assert {f"op-{number}" for number in range(len(profile.step_costs))} <= addresses_of(text)
    assert "line-test_links.py:" + re.search(r"test_links.py:(\d+) \(dense\)", text)[1] in ids
    layers = {row.layer for row in profile.layers}
    assert {"layer-" + "_".join(layer.split()) for layer in layers} <= ids
    assert any("encoder_block" in name for name in ids)


@pytest.mark.parametrize(
    ("section", "kinds"),
    [
        ("layers", {"line-", "trace"}),
        ("stages", {"trace"}),
        ("source", {"op-", "layer-", "trace"}),
        ("warnings", {"line-", "layer-", "trace"}),
        ("program", {"line-"}),
    ],
)
def test_rows_link_to_the_trace_the_source_and_the_layer(profile, text, section, kinds):
    assert profile.fallbacks or section != "warnings"
    links = links_of(section_of(text, section))
    assert all(any(link.startswith(kind) for link in links) for kind in kinds)


@pytest.mark.parametrize("name", ["operations-table", "fullest-items"])
def test_rows_of_tables_link_to_the_trace_the_source_and_the_layer(text, name):
    addresses = addresses_of(text)
    rows = table_of(text, name)
    for column, kind in (("Line", "line-"), ("Layer", "layer-")):
        links = {row[column][1] for row in rows} - {""}
        assert links and all(link.startswith(kind) for link in links) and links <= addresses
    assert any(row["Trace"] for row in rows)


def test_links_to_the_trace_mean_slices_that_are_there(profile, text):
    data = data_of(text)
    rows = data["operations"]["rows"]
    trace = data["trace"]
    assert [row[0] for row in rows] == [row.name for row in profile.step_costs]
    known = {number for numbers in trace["sets"] for number in numbers}
    lines = {line for _, line in data["operations"]["lines"]}
    paths = {path for path, _ in data["operations"]["layers"]}
    targets = [unescape(target) for target in re.findall(r'data-show="([^"]*)"', text)]
    columns = [column for table in data["tables"].values() for column in table["columns"] if column["kind"] == "trace"]
    targets += [value for column in columns for value in column["values"] if value]
    displayed = [target.split(" ", 1) for target in targets]
    assert {kind for kind, _ in displayed} == {"op", "line", "layer", "span"}
    for kind, value in displayed:
        if kind == "op":
            assert known.issuperset(int(n) for n in value.split() if rows[int(n)][4])
        elif kind == "line":
            assert value in lines
        elif kind == "layer":
            inside = [path for path in paths if path == value or path.startswith(f"{value}/")]
            assert inside or (value == NO_LAYER and "" in paths)
        else:
            ipu_number, start, end = map(int, value.split())
            assert 0 <= start < end <= profile.cycles and ipu_number < 2


def test_slices_of_the_trace_have_their_rows(profile, text):
    data = data_of(text)["trace"]
    trace = profile.execution_trace
    assert len(data["ipu"]) == int(trace.work.any(1).sum())
    for step, rows in enumerate(data["rows"]):
        assert tuple(data["sets"][rows]) == trace.row_sets[trace.rows[step]]


def test_one_search_box_is_for_all_tables(text):
    page = Page(text)
    boxes = [actual for kind, actual in page.tags if kind == "input" and actual.get("type") == "search"]
    assert [box["id"] for box in boxes] == ["search"] and not any("data-filter" in actual for _, actual in page.tags)
    searched = {actual["data-search"] for _, actual in page.tags if "data-search" in actual}
    assert searched == {"layers", "tile", "step", "program", "source", "warnings"}
    assert set(data_of(text)["tables"]) >= {"operations-table", "lines-table", "layers-table", "tasks-table"}


def test_answers_lead_to_their_row(profile, text):
    links = links_of(section_of(text, "summary"))
    assert any(link.startswith("op-") for link in links) and any(link.startswith("line-") for link in links)
    first = next(link for link in links if link.startswith("op-"))
    assert profile.step_costs[int(first[3:])].cycles == max(row.cycles for row in profile.step_costs)


def test_every_figure_has_a_text(text):
    figures = [actual for _, actual in Page(text).tags if actual.get("role") == "figure"]
    assert len(figures) == 7 and all(len(actual["aria-label"]) > 20 for actual in figures)


def test_rows_that_a_page_leaves_out_are_not_links():
    anchors = Anchors(operations={3: "op-3"}, layers={"a": "layer-a"}, lines={("model.py", 7): "line-model.py:7"})
    assert anchors.operation(4, "<b>") == "<b>" and anchors.operation(None, "x") == "x"
    assert anchors.operation(3, "x") == '<a href="#op-3">x</a>'
    assert anchors.layer("b") == "b" and anchors.layer("a", "text") == '<a href="#layer-a">text</a>'
    assert anchors.line("model.py:8 (f)") == "model.py:8 (f)" and "line-model.py:7" in anchors.line("model.py:7 (f)")
    assert anchors.trace("op", 3) == "" and 'data-show="span 0 1 2"' in anchors.trace("span", 0, 1, 2)


def test_of_many_layers_the_most_expensive_are_listed():
    graph = Graph(TARGET)
    steps = []
    layers = MAX_LAYERS + 500
    a, b = variables(graph, "a", "b")
    for number in range(layers):
        with graph.debug_origin(
            Origin(f"model.py:{number} (f)", layer=f"group[{number // 100}]/block[{number % 100}]")
        ):
            compute_set = graph.add_compute_set(f"step{number}")
        cuts = grid((SIZE,), (4,)).cuts[0]
        tiles = np.arange(4, dtype=np.int32)
        accesses = tuple(Access(tensor, (element(0),)) for tensor in ((a, b) if number % 2 else (b, a)))
        cycles = 90 if number == layers - 1 else 3
        vertices = VertexGroup(codelet(f"code{cycles}", cycles), (Axis("i", cuts),), accesses, tiles)
        graph.add_vertices(compute_set, vertices)
        steps.append(Execute(compute_set))
    profile = Profile(ipu_compile(graph, Sequence(*inputs(b), *steps, output(a))))
    anchors = anchors_of(profile)
    assert len(anchors.layers) <= MAX_LAYERS + 1 and f"group[{(layers - 1) // 100}]/block[99]" in anchors.layers
    section = layer_section(tree_of(profile), 0, anchors)
    assert set(Page(section.body).ids) >= set(anchors.layers.values()) and "more layers" in section.body


def test_names_that_are_markup_have_addresses(tmp_path):
    text = page_of(evil_profile(), tmp_path)
    page = Page(text)
    assert all(unquote(link[1:]) in addresses_of(text) for link in page.links)
    assert any("script" in quote(actual) for actual in page.ids) or EVIL in page.text


def test_profiles_that_lack_figures_have_the_anchors_of_the_others(tmp_path):
    graph, program, _, _ = looping()
    assert anchors_of(Profile(ipu_compile(graph, program))) == Anchors()
    profile = Profile(trained_program())
    profile.save(tmp_path / "saved")
    assert anchors_of(Profile.load(tmp_path / "saved")) == anchors_of(profile)
