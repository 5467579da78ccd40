"""Questions of an engineer, each answered by at most three clicks from the opened page; needs Chromium."""

from __future__ import annotations

import csv
import re
from collections import Counter
from difflib import SequenceMatcher

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.profile import TRACE_PHASES, slices
from ipujax.runtime.views import wait_view
from tests.runtime.page.test_browser import (
    browser,
    errors,
    find,
    frame,
    open_tab,
    opened,
    pointer,
    pytestmark as needs_chromium,
    until,
)

pytestmark = needs_chromium
FIXTURES = (browser,)  # of the module it is from
MOST_CLICKS = 3
TILE = 7
IPU = 2


def loss(params, x):
    for number, weights in enumerate(params):
        with ipu.stage(number), jax.named_scope(f"block{number}"):
            x = jax.nn.relu(x @ weights)
    return jnp.mean(x**2)


def step(params, x):
    grads = ipu.pipeline(jax.grad(loss), micro_batches=4)(params, x)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)]


@pytest.fixture(scope="module")
def profile():
    params = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((32, 64), (64, 128), (128, 16))]
    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=32)
    return ipu.jit(step, device=device, donate_argnums=0).profile(params, jax.ShapeDtypeStruct((32, 32), "float32"))


@pytest.fixture(scope="module")
def page(browser, profile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    profile.to_html(folder / "page.html")
    opened(browser, folder / "page.html")
    browser.execute_cdp_cmd("Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    browser.folder = folder
    return browser


def texts(page, rows, cells):
    """Texts of the cells of rows, by the selectors of both."""
    script = """
    const cells = (row) => [...row.querySelectorAll(arguments[1])].map((cell) => cell.textContent);
    return [...document.querySelectorAll(arguments[0])].map(cells);
    """
    return page.execute_script(script, rows, cells)


class Reader:
    """Clicks of a reader; writing into a field is the click on it."""

    def __init__(self, page):
        self.page = page
        self.clicks = 0
        open_tab(page, "verdict")

    def tab(self, key):
        self.clicks += 1
        open_tab(self.page, key)

    def click(self, selector):
        self.clicks += 1
        self.page.execute_script("document.querySelector(arguments[0]).click()", selector)  # tables may draw it again

    def write(self, selector, text):
        self.clicks += 1
        field = find(self.page, selector)
        field.clear()
        field.send_keys(text)
        field.send_keys("\t")

    def sort(self, table, title):
        self.clicks += 1
        buttons = self.page.find_elements("css selector", f"#{table} .tabulator-col button")
        next(button for button in buttons if button.text == title).click()
        heading = f"#{table} [aria-sort='descending']"
        until(lambda: title in [x.text.split("\n")[0] for x in self.page.find_elements("css selector", heading)])

    def click_on_trace(self, ipu_number, cycle, cycles, num_ipus):
        self.clicks += 1
        left, top, width, height = frame(self.page, "trace")
        moves = pointer(self.page)
        x, y = left + width * cycle / cycles, top + height * (ipu_number + 0.5) / num_ipus
        moves.pointer_action.move_to_location(round(x), round(y)).click()
        moves.perform()

    def rows(self, table):
        """The rows of a table that the reader sees, as lists of texts."""
        return texts(self.page, f"#{table} .tabulator-row", ".tabulator-cell")

    def shown(self, selector):
        element = find(self.page, selector)
        assert element.is_displayed()
        return element.text


@pytest.fixture
def reader(page):
    reader = Reader(page)
    yield reader
    assert 0 <= reader.clicks <= MOST_CLICKS and errors(page) == []


def test_peak_of_a_tile_and_its_variables(reader, profile):
    reader.tab("memory")
    reader.write("#tile", f"{TILE}")
    until(
        lambda: f"{profile.memory.tile_bytes[TILE] / 1024:.1f}".rstrip("0").rstrip(".") in reader.shown("#tile-total")
    )
    variables = [item for item in profile.memory.at_peak(TILE).items if item.category == "variable"]
    assert variables and variables[0].readable in reader.shown("#tile-contents")


def test_what_an_ipu_waits_for_at_a_time(reader, profile):
    waits = wait_view(profile)
    row = max(np.flatnonzero(waits.ipu == IPU), key=lambda n: waits.cycles[n])
    middle = (waits.start[row] + waits.end[row]) / 2
    reader.tab("timeline")
    reader.click_on_trace(IPU, middle, profile.cycles, profile.target.num_ipus)
    until(lambda: reader.shown("#picked").startswith(f"IPU {IPU} waits from cycle {waits.start[row]:,}"))
    assert f"It waits for IPU {waits.awaited[row]}, which runs" in reader.shown("#picked")


def test_cycles_and_bytes_of_a_line(reader, profile):
    row = profile.operations(1)[0]
    place = row.origin.line.split(" ")[0]
    reader.tab("lines")
    reader.write("#lines-table input[aria-label='Filter Line']", place)
    until(lambda: len(reader.rows("lines-table")) == 1)
    assert f"{row.cycles:,}" in reader.rows("lines-table")[0]
    assert any(re.fullmatch(r"[\d,.]+ (B|KiB|MiB)", text) for text in reader.rows("lines-table")[0])


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_the_layer_that_costs_most_in_a_part(reader, profile, part):
    def cycles(layer):
        return sum(row.cycles for row in profile.layers if row.part == part and f"{row.layer}/".startswith(f"{layer}/"))

    most = max(cycles(row.layer) for row in profile.layers)
    reader.tab("lines")
    reader.sort("layers-table", part.capitalize())
    first = reader.rows("layers-table")[0]
    assert f"{most:,}" in first and cycles(first[0]) == most > 0


def test_the_largest_exchange_and_its_variable(reader, profile):
    largest = max(profile.step_costs, key=lambda row: row.moved_bytes)
    reader.tab("operations")
    reader.sort("operations-table", "Moved")
    first = reader.rows("operations-table")[0]
    assert largest.name in first and any(text.startswith("Variable(") for text in first)


def test_sums_over_a_range(reader, profile):
    start, end = profile.cycles // 4, profile.cycles // 2
    reader.tab("timeline")
    reader.write("#range-from", f"{start}")
    reader.write("#range-to", f"{end}")
    cut = slices(profile.execution_trace)
    inside = np.clip(np.minimum(cut.start + cut.cycles, end) - np.maximum(cut.start, start), 0, None)
    sums = np.zeros((profile.target.num_ipus, len(TRACE_PHASES)), np.int64)
    np.add.at(sums, (cut.ipu, cut.phase), inside)
    sums[:, -1] += end - start - sums.sum(1)
    until(lambda: reader.shown("#trace-range").startswith(f"cycles {start:,} to {end:,}"))
    rows = texts(reader.page, "#range-sums tbody tr", "th, td")
    actual = [[int(text.split(" ")[0].replace(",", "")) for text in row[1:]] for row in rows]
    assert actual == sums.tolist()
    reader.page.execute_script("ipujaxPage.zoom('trace', 'all')")


def test_all_operations_of_a_kind_as_csv(reader, page, profile):
    reader.tab("operations")
    reader.write("#operations-table input[aria-label='Filter Operation']", "dot_general")
    until(lambda: "of" in reader.shown("#operations-table output"))
    reader.click("[data-csv='operations-table']")
    file = page.folder / "operations-table.csv"
    until(file.exists)
    names = [row["Operation"] for row in csv.DictReader(file.read_text("utf-8-sig").splitlines())]
    assert sorted(names) == sorted(row.name for row in profile.step_costs if "dot_general" in row.name)


def test_tiles_of_a_variable(reader, profile):
    variable = profile.memory.variables.variables[0]
    reader.tab("memory")
    reader.click("#variables-table [data-map='0']")
    tile_bytes = profile.memory.variables.layouts[variable.layout]
    assert f"on {np.count_nonzero(tile_bytes)} of {len(tile_bytes)} tiles" in reader.shown("#mapped")
    images = "return ipujaxPage.chart('chip').renderers[0].data_source.data.image.map((x) => [...x])"
    drawn = np.array(reader.page.execute_script(images), float)
    assert np.nansum(drawn) == tile_bytes.sum() == variable.num_bytes
    find(reader.page, "#unmap").click()
    drawn = np.array(reader.page.execute_script(images), float)
    assert np.nansum(drawn) == profile.memory.total_bytes


def choose_passes(reader, profile, first, second):
    """Chooses two passes to be compared."""
    names = [each.name for each in profile.pass_changes]
    for field, name in (("#pass-from", first), ("#pass-to", second)):
        reader.clicks += 1
        reader.page.execute_script(
            "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
            "field.dispatchEvent(new Event('change'))",
            field,
            str(names.index(name)),
        )


def text_of(equation):
    """The text of an equation in a difference, without its level and line."""
    (primitive, types, _), _ = equation
    return f"{primitive}  {types}"


@pytest.mark.parametrize(("first", "second"), [("trace", "inline"), ("inline", "trace"), ("inline", "cse")])
def test_the_texts_of_two_passes_beside_each_other(reader, profile, first, second):
    reader.tab("program")
    choose_passes(reader, profile, first, second)
    shown = reader.shown("#pass-difference").splitlines()
    before, after = ([text_of(x) for x in each.equations] for each in by_name(profile, first, second))
    removed, added = ([row[1:].split("  # ")[0].strip() for row in shown if row.startswith(sign)] for sign in "−+")
    blocks = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    assert Counter(before) - Counter(removed) == Counter(after) - Counter(added)  # what is left of each is the same
    assert len(removed) <= len(before) - sum(block.size for block in blocks)  # no longer than another difference
    assert (removed or added) or before == after


def by_name(profile, *names):
    changes = {each.name: each for each in profile.pass_changes}
    return [changes[name] for name in names]


def test_what_changed_between_two_passes(reader, page, profile):
    names = [each.name for each in profile.pass_changes]
    reader.tab("program")
    choose_passes(reader, profile, "trace", "inline")
    expected = sum(len(profile.pass_changes[n].changes) for n in range(1, names.index("inline") + 1))
    until(lambda: 0 < len(reader.rows("passes-table")) <= expected)
    added = sum(int(row[0].replace(",", "")) for row in reader.rows("passes-table"))
    equations = [each.num_equations for each in profile.pass_changes]
    assert added == equations[names.index("inline")] - equations[names.index("trace")]


def test_the_stage_that_limits_the_pipeline(reader, profile):
    (pipeline,) = profile.pipelines
    text = reader.shown("#summary")
    assert re.search(rf"[Ss]tage {pipeline.slowest_stage} \(IPU {pipeline.slowest_stage}\)", text)


def unfold_to(page, name):
    """Unfolds nodes of the graph, by the keyboard, until one of this name is drawn."""
    for _ in range(20):
        if page.find_elements("css selector", f".node-name[title='{name}']"):
            return
        find(page, ".node-fold[aria-expanded='false']").send_keys("\n")
        assert page.execute_script("return document.activeElement.getAttribute('aria-expanded')") == "true"
    raise AssertionError(f"no node {name}")


def test_the_operations_of_a_node_of_the_graph(reader, page, profile):
    reader.tab("program")
    reader.click("#graph-drawing .node-name[title^='backward']")
    rows = [row for row in profile.step_costs if row.origin.part == "backward" and row.cycles]
    until(lambda: "of" in reader.shown("#graph-table output"))
    names = [row[0] for row in reader.rows("graph-table")]
    assert set(names) <= {row.name for row in rows} and max(rows, key=lambda row: row.cycles).name == names[0]
    assert f"{sum(row.cycles for row in rows):,} cycles" in reader.shown("#graph-chosen")
    reader.click("#graph-drawing .node-name[title='program']")
    until(lambda: reader.shown("#graph-table output") == f"{len(profile.step_costs):,} rows")


def test_the_graph_unfolds_by_the_keyboard_to_the_values_between_layers(reader, page, profile):
    reader.tab("program")
    find(page, "[data-graph='closed']").send_keys("\n")
    parts = {row.origin.part for row in profile.step_costs if row.cycles}
    folded = page.find_elements("css selector", ".node")
    assert len(folded) <= len(parts) + 2  # the program, and what has no part
    unfold_to(page, "block1")
    of_layer = sum(row.cycles for row in profile.step_costs if "block1" in row.origin.layer.split("/"))
    shown = texts(page, ".node:has(> .node-head > [title^='block1'])", ".node-cycles")
    assert sum(int(cells[0].split(", ")[0].replace(",", "")) for cells in shown) <= of_layer
    titles = texts(page, "#graph-drawing .value", "title")
    assert titles and all(re.fullmatch(r".+ → .+: [\d,.]+ (B|KiB|MiB)", title) for (title,) in titles)
    overlaps = """
    const boxes = [...document.querySelectorAll(".node:not(.unfolded)")].map((box) => box.getBoundingClientRect());
    const cross = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    return boxes.flatMap((a, n) => boxes.slice(n + 1).filter((b) => cross(a, b))).length;
    """
    assert page.execute_script(overlaps) == 0
    find(page, "[data-graph='costliest']").click()
