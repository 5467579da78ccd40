"""Links, clicks on the trace and the search box of a page in Chromium; skipped without it, as `test_browser`."""

from __future__ import annotations

import pytest

from tests.runtime.page.test_browser import (
    browser,
    click,
    column,
    errors,
    find,
    frame,
    open_tab,
    opened,
    pointer,
    pytestmark as needs_chromium,
    until,
)
from tests.runtime.page.test_links import profile

pytestmark = needs_chromium
FIXTURES = browser, profile  # of the modules they are from
ESCAPE = "\ue00c"
MARKED = """
const drawn = ipujaxPage.chart("trace").renderers.find((part) => part.name === "selected");
return drawn.data_source.data.left.length;
"""
NODES = """
const nodes = [...document.querySelectorAll('#layer-tree details, #layer-tree .leaf')];
return nodes.filter((node) => !node.hidden).map((node) => node.dataset.find.split(" ")[0]);
"""
ROWS = """
return ipujaxPage.dataTable(arguments[0]).getRows("active").map((row) => Object.values(row.getData()).flat().join(" "));
"""


@pytest.fixture(scope="module")
def page(browser, profile, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    profile.to_html(path)
    opened(browser, path)
    return browser


def shown(page):
    return page.execute_script("const r = ipujaxPage.chart('trace').x_range; return [r.start, r.end]")


def picked(page):
    return find(page, "#picked").text


def is_in_view(page, selector):
    box = "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
    return page.execute_script(f"{box} return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight", selector)


def rows(page, table):
    """Texts of the rows of a table of data that are left."""
    return page.execute_script(ROWS, table)


def write(page, text):
    field = find(page, "#search")
    field.clear()
    field.send_keys(text)
    page.execute_script("ipujaxPage.search()")


def test_a_row_leads_to_its_slices_and_back(page, profile):
    open_tab(page, "operations")
    products = [n for n, row in enumerate(profile.step_costs) if row.name == "dot_general"]
    number = max(products, key=lambda n: profile.step_costs[n].cycles)
    find(page, f"#op-{number} .to-trace").send_keys("\n")  # by the keyboard
    until(lambda: is_in_view(page, "#chart-trace"))
    trace = profile.execution_trace
    row = profile.step_costs[number]
    spans = [n for n, step in enumerate(trace.step.tolist()) if number in trace.row_sets[trace.rows[step]]]
    assert page.execute_script(MARKED) == len(spans) and f"slice 1 of {len(spans)} of {row.name}" in picked(page)
    first = min(spans, key=lambda n: (trace.start[n], trace.ipu[n]))
    start, end = shown(page)
    assert start <= trace.start[first] and trace.end[first] <= end and end - start < profile.cycles
    click(page, f"#picked a[href='#op-{number}']")
    until(lambda: is_in_view(page, f"#op-{number}"))
    assert len(spans) > 1
    open_tab(page, "timeline")  # the slices stay chosen
    assert page.execute_script(MARKED) == len(spans) and f"slice 1 of {len(spans)}" in picked(page)
    click(page, "[data-pick='next']")
    assert f"slice 2 of {len(spans)}" in picked(page)
    page.back()
    until(lambda: is_in_view(page, f"#op-{number}"))


def test_a_click_on_a_slice_names_its_operation_line_and_layer(page, profile):
    open_tab(page, "timeline")
    page.execute_script("ipujaxPage.zoom('trace', 'all')")
    trace = profile.execution_trace
    span = int((trace.end - trace.start).argmax())
    left, top, width, height = frame(page, "trace")
    x = left + width * (trace.start[span] + trace.end[span]) / 2 / profile.cycles
    y = top + height * (trace.ipu[span] + 0.5) / profile.target.num_ipus
    moves = pointer(page)
    moves.pointer_action.move_to_location(round(x), round(y)).click()
    moves.perform()
    label = trace.label(int(trace.step[span]))
    until(lambda: picked(page).startswith(f"{label} on IPU {trace.ipu[span]}"))
    assert page.execute_script(MARKED) == 1
    rows = [profile.step_costs[n] for n in trace.row_sets[trace.rows[int(trace.step[span])]]]
    for row in rows[:3]:
        assert row.name in picked(page) and str(row.origin) in picked(page) and row.origin.layer in picked(page)
    click(page, "[data-pick='none']")
    assert picked(page) == "No slice is chosen." and page.execute_script(MARKED) == 0
    click(page, "[data-pick='longest']")
    assert picked(page).startswith(label)


@pytest.mark.parametrize(
    ("tab", "table"), [("lines", "layers-table"), ("lines", "lines-table"), ("timeline", "tasks-table")]
)
def test_layers_lines_and_tasks_lead_to_the_trace(page, tab, table):
    open_tab(page, tab)
    click(page, f"#{table} [data-show]")
    until(lambda: is_in_view(page, "#chart-trace"))
    assert page.execute_script(MARKED) > 0 and "slice 1 of" in picked(page)


def test_waits_lead_to_the_trace(page, profile):
    open_tab(page, "timeline")
    first, start, end = (column(page, title, "waits-table")[0] for title in ("IPU", "From cycle", "To cycle"))
    click(page, "#waits-table [data-show]")
    until(lambda: is_in_view(page, "#chart-trace"))
    assert page.execute_script(MARKED) == 1
    assert picked(page).startswith(f"{first} waits from cycle {start:,} to {end:,}")
    low, high = shown(page)
    assert low <= start < end <= high


def test_addresses_unfold_their_sections(page):
    layer = page.execute_script("return [...document.querySelectorAll('#layer-tree .leaf')].pop().id")
    page.execute_script("for (const part of document.querySelectorAll('#layers details')) part.open = false")
    page.execute_script("location.hash = '#' + encodeURIComponent(arguments[0])", layer)
    until(lambda: page.execute_script("return document.getElementById(arguments[0]).offsetHeight > 0", layer))


def test_one_box_searches_all_tables_and_marks_the_trace(page, profile):
    open_tab(page, "operations")
    find(page, "body").send_keys("/")
    assert page.execute_script("return document.activeElement.id") == "search"
    write(page, "DENSE dot_general")
    left = rows(page, "operations-table")
    assert all("dense" in text and "dot_general" in text for text in left)
    meant = [
        n
        for n, row in enumerate(profile.step_costs)
        if row.name.startswith("dot_general") and "dense" in str(row.origin)
    ]
    assert len(left) >= len(meant) > 0
    trace = profile.execution_trace
    spans = sum(any(n in trace.row_sets[trace.rows[step]] for n in meant) for step in trace.step.tolist())
    assert f"Trace {spans}" in find(page, "#found").text
    open_tab(page, "timeline")
    assert page.execute_script(MARKED) == spans
    open_tab(page, "memory")  # a search lasts from tab to tab
    write(page, "no such name")
    assert rows(page, "operations-table") == rows(page, "fullest-items") == []
    assert find(page, "#found").text == "Nothing has all these words."
    find(page, "#search").send_keys(ESCAPE)
    assert len(rows(page, "operations-table")) == len(profile.step_costs)
    assert find(page, "#search").get_attribute("value") == find(page, "#found").text == ""
    assert page.execute_script(MARKED) == 0
    open_tab(page, "operations")
    until(lambda: len(page.find_elements("css selector", "#operations-table .tabulator-row")) > len(left))


def test_results_of_a_search_lead_to_their_sections(page):
    open_tab(page, "verdict")
    write(page, "dot_general")
    page.find_element("partial link text", "Operations ").click()
    until(lambda: find(page, "#operations-table .tabulator-row").is_displayed())
    seen = [row.text for row in page.find_elements("css selector", "#operations-table .tabulator-row")]
    assert seen and all("dot_general" in text for text in seen)
    page.find_element("partial link text", "Trace ").click()
    until(lambda: "of dot_general" in picked(page))
    assert page.execute_script(MARKED) > 0 and is_in_view(page, "#chart-trace")
    find(page, "#search").send_keys(ESCAPE)


def test_the_box_finds_variables_layers_and_lines(page, profile):
    open_tab(page, "memory")
    variable = next(item for item in profile.memory.largest if item.category == "variable")
    write(page, variable.readable.upper()[:30])
    left = rows(page, "fullest-items")
    assert 0 < len(left) < len(profile.memory.largest)
    assert all(variable.readable[:30].lower() in text.lower() for text in left)
    write(page, "spectrum")
    nodes = page.execute_script(NODES)
    assert nodes and all("spectrum" in node or any(other.startswith(f"{node}/") for other in nodes) for node in nodes)
    open_tab(page, "lines")  # a table that is opened later is filtered too
    left = rows(page, "lines-table")
    assert left and all("spectrum" in text for text in left) and any("svd" in text for text in left)
    find(page, "#search").send_keys(ESCAPE)


@pytest.mark.parametrize("tab", ["operations", "verdict"])
def test_address_of_a_hidden_row_clears_the_search(page, tab):
    open_tab(page, tab)
    write(page, "spectrum")
    hidden = page.execute_script("""
        const table = ipujaxPage.dataTable("operations-table");
        const left = new Set(table.getRows("active").map((row) => row.getIndex()));
        return table.getRows().map((row) => row.getIndex()).filter((id) => !left.has(id)).pop();
    """)
    page.execute_script("location.hash = '#' + arguments[0]", hidden)
    until(lambda: page.find_elements("id", hidden) and is_in_view(page, f"#{hidden}"))
    assert find(page, "#search").get_attribute("value") == ""
    assert find(page, f"#{hidden}").get_attribute("class").count("tabulator-selected")
    assert errors(page) == []


def test_the_way_back_ends_at_the_first_tab(page):
    page.execute_script("history.pushState(null, '', location.pathname)")
    open_tab(page, "machine")
    assert find(page, "#panel-machine").is_displayed()
    page.back()
    until(lambda: find(page, "#panel-verdict").is_displayed())
    assert not find(page, "#panel-machine").is_displayed()
