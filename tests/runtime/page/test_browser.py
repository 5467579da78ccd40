"""Pages in Chromium: nothing fails, every section holds data, and folding, sorting, zooming and choosing work.

Needs Chromium and its driver (Debian: `apt-get install chromium chromium-driver`) and Selenium; skipped without.
"""

from __future__ import annotations

import csv
import re
import shutil
import time

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.runtime.page.profile_page import TABS
from ipujax.runtime.report import Profile
from tests.runtime.page.test_pages import evil_profile

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.support.ui import WebDriverWait

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Chromium or its driver is not installed")

INSIDE = """
const all = (node) => [...node.children, ...(node.shadowRoot?.children ?? [])].flatMap((part) => [part, ...all(part)]);
const isDrawn = (part) => part.tagName === "CANVAS" && part.width > 100;
"""
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1200,1400")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def profile():
    """A pipeline of two stages, so that all that a page has is there."""

    def loss(params, x):
        with ipu.stage(0):
            hidden = jax.nn.relu(x @ params["w1"])
        with ipu.stage(1):
            return jnp.mean((hidden @ params["w2"]) ** 2)

    def step(params, x):
        grads = ipu.pipeline(jax.grad(loss), micro_batches=4)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {"w1": jax.ShapeDtypeStruct((32, 64), "float32"), "w2": jax.ShapeDtypeStruct((64, 16), "float32")}
    x = jax.ShapeDtypeStruct((32, 32), "float32")
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=64)
    return ipu.jit(step, device=device, donate_argnums=0).lower(params, x).compile().profile


@pytest.fixture(scope="module")
def page(browser, profile, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    profile.to_html(path)
    opened(browser, path)
    return browser


def opened(browser, path):
    """Opens a page, and waits until its charts are drawn."""
    browser.get(path.as_uri())
    until(lambda: browser.execute_script("return document.documentElement.dataset.ready === 'true'"))


def until(holds, seconds=30):
    """Waits until something holds; elements that it looks for may come, and be made again, while it waits."""
    WebDriverWait(None, seconds, 0.05, [NoSuchElementException, StaleElementReferenceException]).until(
        lambda _: holds(), "it never came"
    )


def open_tab(browser, key):
    """Opens a tab, and waits until its charts and tables are there."""
    find(browser, f"#tab-{key}").click()
    until(lambda: browser.execute_script("return document.documentElement.dataset.ready === 'true'"))
    until(lambda: browser.execute_script(BUILT, f"#panel-{key}"))


BUILT = """
const tables = [...document.querySelectorAll(`${arguments[0]} [data-table]`)];
return tables.every((place) => place.dataset.ready === "true");
"""


def errors(browser):
    return [row["message"] for row in browser.get_log("browser") if row["level"] in ("SEVERE", "ERROR")]


def find(browser, selector):
    return browser.find_element("css selector", selector)


def click(browser, selector):
    browser.execute_script("arguments[0].click()", find(browser, selector))


def test_nothing_fails_and_every_section_holds_data(page, tmp_path):
    for (tab, _), sections in TABS.items():
        open_tab(page, tab)
        for key, title in sections:
            section = find(page, f"#{key}")
            heading = section.find_element("css selector", "h2").get_attribute("textContent")
            assert heading == title and len(section.text) > len(title) + 3
        places = page.execute_script(f"return [...document.querySelectorAll('#panel-{tab} .chart')].map((x) => x.id)")
        for place in places:
            assert page.execute_script(f"{INSIDE} return all(document.getElementById('{place}')).some(isDrawn)"), place
        assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), tab
    assert errors(page) == []
    page.save_screenshot(str(tmp_path / "page.png"))
    assert (tmp_path / "page.png").stat().st_size > 20_000


def column(page, title, name="operations-table"):
    """Values of a column of a table of data, of the rows that are left, in their order; links as their texts."""
    return page.execute_script(
        """
        const table = ipujaxPage.dataTable(arguments[0]);
        const at = table.getColumns().findIndex((column) => column.getDefinition().title === arguments[1]);
        return table.getRows("active").map((row) => [row.getData()[`c${at}`]].flat()[0]);
        """,
        name,
        title,
    )


CLEAR = "\ue009a\ue000\ue003"  # control and A, backspace


PASTE = """
const [field, text] = arguments; // by the pointer: no key is pressed
field.value = text;
field.dispatchEvent(new InputEvent("input", { bubbles: true, inputType: "insertFromPaste" }));
"""


def sort_by(page, title, name="operations-table"):
    """Sorts a table by a click on a heading."""
    headings = page.find_elements("css selector", f"#{name} .tabulator-col button")
    next(button for button in headings if button.text == title).send_keys("\n")  # by the keyboard


def filter_by(page, title, text, name="operations-table"):
    """Writes into the field below a heading, and waits until the filter has been applied."""
    field = find(page, f"#{name} input[aria-label='Filter {title}']")
    field.send_keys(CLEAR + text)
    applied = """
    const table = ipujaxPage.dataTable(arguments[0]);
    const field = table.getColumns().find((x) => x.getDefinition().title === arguments[1]).getField();
    return table.getHeaderFilters().find((filter) => filter.field === field)?.value ?? "";
    """
    until(lambda: page.execute_script(applied, name, title) == text)  # Tabulator waits for more letters


def test_columns_sort_both_ways(page):
    open_tab(page, "operations")
    cycles = column(page, "Cycles")
    assert cycles == sorted(cycles, reverse=True) and len(cycles) > 5
    sort_by(page, "Moved")
    moved = column(page, "Moved")
    assert moved == sorted(moved, reverse=True)
    assert find(page, "#operations-table [aria-sort='descending']").text.startswith("Moved")
    sort_by(page, "Moved")
    assert column(page, "Moved") == sorted(moved)
    sort_by(page, "Operation")
    names = "return arguments[0].sort((a, b) => a.localeCompare(b, 'en', {numeric: true}))"
    actual = column(page, "Operation")
    assert actual == page.execute_script(names, actual) and len(set(actual)) > 5
    sort_by(page, "Cycles")
    assert column(page, "Cycles") == cycles


def test_columns_filter_and_the_rows_that_are_left_are_saved(page, profile, tmp_path):
    open_tab(page, "operations")
    expected = [row for row in profile.step_costs if "dot" in row.name]
    filter_by(page, "Operation", "DOT")
    assert len(column(page, "Operation")) == len(expected) < len(profile.step_costs)
    middle = sorted(row.cycles for row in expected)[len(expected) // 2]
    for text, holds in (
        (f"{middle:,}", lambda cycles: cycles >= middle),
        (f"< {middle}", lambda cycles: cycles <= middle),
        (f"1..{middle}", lambda cycles: 1 <= cycles <= middle),
        ("nothing", lambda _: True),
    ):
        filter_by(page, "Cycles", text)
        assert sorted(column(page, "Cycles")) == sorted(row.cycles for row in expected if holds(row.cycles)), text
    filter_by(page, "Cycles", "")
    page.execute_script(PASTE, find(page, "#operations-table input[aria-label='Filter Cycles']"), f"{middle}")
    until(lambda: len(column(page, "Cycles")) == sum(row.cycles >= middle for row in expected) < len(expected))
    filter_by(page, "Cycles", "")
    page.execute_cdp_cmd("Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    find(page, "[data-csv='operations-table']").click()
    file = tmp_path / "operations-table.csv"
    until(file.exists)
    rows = list(csv.DictReader(file.read_text("utf-8-sig").splitlines()))
    assert sorted((row["Operation"], int(row["Cycles"]), int(row["Moved"])) for row in rows) == sorted(
        (row.name, row.cycles, row.moved_bytes) for row in expected
    )
    clear = next(
        button for button in page.find_elements("css selector", "#operations-table button") if "Clear" in button.text
    )
    clear.click()
    assert len(column(page, "Operation")) == len(profile.step_costs)


def test_the_tree_folds(page):
    def count(state):
        return len(page.find_elements("css selector", f"#tree details{state}"))

    open_tab(page, "program")
    click(page, "#program [data-fold='closed']")
    assert count("[open]") == 0 < count("")
    click(page, "#program [data-fold='open']")
    assert count("[open]") == count("")
    click(page, "#tree summary")
    assert count("[open]") == count("") - 1


@pytest.mark.parametrize("name", ["trace", "liveness", "tasks"])
def test_charts_zoom_by_buttons(page, name):
    open_tab(page, TAB_OF_CHART[name])

    def shown():
        return page.execute_script("const r = ipujaxPage.chart(arguments[0]).x_range; return [r.start, r.end]", name)

    start, end = shown()
    click(page, f"[data-zoom='{name}'][data-step='in']")
    assert shown() == pytest.approx([start + (end - start) / 4, end - (end - start) / 4])
    click(page, f"[data-zoom='{name}'][data-step='left']")
    assert shown()[0] == pytest.approx(start + (end - start) / 8)
    click(page, f"[data-zoom='{name}'][data-step='all']")
    assert shown() == pytest.approx([start, end])


TAB_OF_CHART = {"trace": "timeline", "liveness": "memory", "tasks": "verdict"}


def shown(page, name="trace"):
    """The range of the horizontal axis of a chart."""
    return page.execute_script("const r = ipujaxPage.chart(arguments[0]).x_range; return [r.start, r.end]", name)


def frame(page, name):
    """The part of the window inside the axes of a chart: left, top, width, height."""
    page.execute_script("document.getElementById(arguments[0]).scrollIntoView({block: 'center'})", f"chart-{name}")
    time.sleep(0.3)
    script = f"""{INSIDE}
    const drawn = all(document.getElementById("chart-" + arguments[0])).find((part) => part.tagName === "CANVAS");
    const box = drawn.getBoundingClientRect();
    const inner = Bokeh.index.find_one_by_id(ipujaxPage.chart(arguments[0]).id).frame.bbox;
    return [box.left + inner.left, box.top + inner.top, inner.width, inner.height];
    """
    return page.execute_script(script, name)


def pointer(page):
    return ActionBuilder(page, duration=20)


def at(box, part):
    """A point of a chart, so far from its left side."""
    left, top, width, height = box
    return round(left + part * width), round(top + height / 2)


@pytest.mark.parametrize("name", ["trace", "liveness"])
def test_dragging_zooms_to_the_range_and_a_double_click_shows_all(page, name):
    open_tab(page, TAB_OF_CHART[name])
    full = shown(page, name)
    box = frame(page, name)
    moves = pointer(page)
    moves.pointer_action.move_to_location(*at(box, 0.25)).pointer_down()
    for part in (0.3, 0.4, 0.5):
        moves.pointer_action.move_to_location(*at(box, part))
    moves.pointer_action.pointer_up()
    moves.perform()
    length = full[1] - full[0]
    reference = [full[0] + 0.25 * length, full[0] + 0.5 * length]
    until(lambda: shown(page, name) == pytest.approx(reference, abs=0.02 * length), 5)
    moves = pointer(page)
    moves.pointer_action.move_to_location(*at(box, 0.5)).click()
    moves.pointer_action.click()
    moves.perform()
    until(lambda: shown(page, name) == pytest.approx(full), 5)


def test_the_wheel_zooms_about_the_pointer_and_scrolls_an_unzoomed_chart(page):
    open_tab(page, "timeline")
    full = shown(page)
    box = frame(page, "trace")
    length = full[1] - full[0]
    (x, y) = at(box, 0.25)

    def turn(amount):
        wheel = ScrollOrigin.from_viewport(x, y)
        ActionChains(page).scroll_from_origin(wheel, 0, amount).perform()

    turn(-400)
    until(lambda: shown(page)[1] - shown(page)[0] < 0.9 * length, 5)
    start, end = shown(page)
    assert start + 0.25 * (end - start) == pytest.approx(full[0] + 0.25 * length, abs=0.01 * length)
    for _ in range(20):
        if shown(page) == pytest.approx(full):
            break
        turn(300)
        time.sleep(0.1)
    assert shown(page) == pytest.approx(full)
    frame(page, "trace")
    before = page.execute_script("return window.scrollY")
    turn(200)
    until(lambda: page.execute_script("return window.scrollY") > before, 5)
    assert shown(page) == pytest.approx(full)


LABELS = """
const source = ipujaxPage.chart("trace").renderers.find((part) => part.name === "slice labels").data_source;
return [...source.data.text];
"""


def test_wide_slices_have_their_names(page, profile):
    open_tab(page, "timeline")
    page.execute_script("ipujaxPage.zoom('trace', 'all')")
    time.sleep(0.3)
    at_first = page.execute_script(LABELS)
    for _ in range(5):
        page.execute_script("ipujaxPage.zoom('trace', 'in')")
    time.sleep(0.3)
    names = {profile.execution_trace.label(step) for step in range(len(profile.execution_trace.name))} | {"idle"}
    labels = page.execute_script(LABELS)
    assert labels and labels != at_first
    for text in (*at_first, *labels):
        begins = text.endswith("…") and any(name.startswith(text[:-1]) for name in names)
        ends = text.startswith("…") and any(name.endswith(text[1:]) for name in names)
        assert text in names or begins or ends
    start, end = shown(page)
    text = find(page, "#trace-range").text
    assert text == f"cycles {round(start):,} to {round(end):,} of {profile.cycles:,}"
    page.execute_script("ipujaxPage.zoom('trace', 'all')")


def test_a_tile_is_chosen_by_number_and_on_the_chip(page, profile):
    def total():
        return find(page, "#tile-total").text

    open_tab(page, "memory")
    worst = profile.memory.worst_tile
    assert find(page, "#tile").get_attribute("value") == str(worst)
    page.execute_script("ipujaxPage.showTile(70)")
    used = int(profile.memory.tile_bytes[70])
    assert total().startswith(f"{used / 1024:.1f}".rstrip("0").rstrip(".") + " KiB of 624 KiB")
    assert "Category" in find(page, "#tile-contents").text
    page.execute_script("ipujaxPage.tileAt(0.5, -0.5)")  # the upper left of the first chip
    assert find(page, "#tile").get_attribute("value") == "0"
    for wrong in ("100000", "-3", "1.5", ""):
        field = find(page, "#tile")
        page.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))", field, wrong
        )
        assert total() == "There is no such tile: 0 to 127" and not find(page, "#tile-contents").text


def test_all_that_is_on_the_fullest_tile_is_listed(page, profile):
    open_tab(page, "memory")
    items = profile.memory.largest
    numbers = column(page, "Bytes", "fullest-items")
    assert numbers == [item.num_bytes for item in items] and sum(numbers) == profile.memory.max_tile_bytes
    page.execute_script("ipujaxPage.showTile(arguments[0])", profile.memory.worst_tile)
    assert "things" not in find(page, "#tile-contents").text.split("The largest things then:")[1]


def test_a_step_is_chosen_by_keys(page):
    open_tab(page, "memory")
    slider = find(page, "#step")
    page.execute_script("arguments[0].value = 3; arguments[0].dispatchEvent(new Event('input'))", slider)
    before = find(page, "#step-name").text
    assert before.startswith("3: ")
    slider.send_keys("\ue014")  # the right arrow
    assert find(page, "#step-name").text.startswith("4: ") and find(page, "#step-variables table")


def test_light_and_dark(page):
    def colours():
        back = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        return back, page.execute_script("return ipujaxPage.chart('trace').below[0].major_label_text_color")

    open_tab(page, "timeline")
    first = colours()
    click(page, "#theme")
    second = colours()
    assert first[0] != second[0] and str(first[1]) != str(second[1])
    click(page, "#theme")
    assert colours() == first


def test_keys_reach_every_tab(page):
    open_tab(page, "verdict")
    page.execute_script("document.querySelector('.skip').focus()")
    focused = "return document.activeElement.textContent || document.activeElement.id"
    recorded = []
    for _ in range(3):
        page.switch_to.active_element.send_keys("\ue004")  # tabulator
        recorded.append(page.execute_script(focused).replace("Light", "Dark"))
    assert recorded == ["Dark", "Verdict", "search"]
    find(page, "#tab-verdict").send_keys("\ue012")  # the left arrow: from the first to the last
    recorded = [page.execute_script(focused)]
    for _ in TABS:
        page.switch_to.active_element.send_keys("\ue014")  # the right arrow
        recorded.append(page.execute_script(focused))
        panels = page.execute_script("return [...document.querySelectorAll('[role=tabpanel]')].map((x) => x.hidden)")
        assert panels.count(False) == 1
    titles = [title for _, title in TABS]
    assert recorded == [titles[-1], *titles]


def test_narrow_windows_lose_nothing(page):
    size = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(0.5)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 420
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_names_that_are_markup_do_nothing(browser, tmp_path):
    evil_profile().to_html(tmp_path / "evil.html")
    opened(browser, tmp_path / "evil.html")
    open_tab(browser, "memory")
    browser.execute_script("ipujaxPage.showTile(1); ipujaxPage.stepAt(0)")
    assert errors(browser) == []  # an alert would have stopped this test
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    open_tab(browser, "operations")
    assert "<script>alert(1)</script>" in find(browser, "#operations").text
    assert errors(browser) == []


def test_comparisons_open_and_sort(browser, profile, tmp_path):
    ipu.compare(evil_profile(), profile).to_html(tmp_path / "compared.html")
    browser.get((tmp_path / "compared.html").as_uri())
    assert re.search("Most of it is|The largest part is", find(browser, "#summary").text)
    open_tab(browser, "operations")
    sort_by(browser, "moved bytes before")
    moved = column(browser, "moved bytes before")
    assert moved == sorted(moved, reverse=True) and len(moved) > 2 and errors(browser) == []


def test_a_saved_profile_opens(browser, profile, tmp_path):
    profile.save(tmp_path / "saved")
    Profile.load(tmp_path / "saved").to_html(tmp_path / "loaded.html")
    opened(browser, tmp_path / "loaded.html")
    assert errors(browser) == []


def test_a_program_without_steps_has_a_page(browser, tmp_path):
    ipu.jit(lambda: (), device=ipu.IPUModel(tiles_per_ipu=4)).lower().compile().profile.to_html(tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    open_tab(browser, "memory")
    assert errors(browser) == [] and "0 steps of the program" in find(browser, "#liveness").text


def test_folded_iterations_are_hatched(browser, tmp_path):
    def run(w, x):
        return jax.lax.fori_loop(0, 5000, lambda _, h: jnp.tanh(h @ w), x)

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 16), (4, 16))]
    profile = ipu.jit(run, device=ipu.IPUModel(tiles_per_ipu=4)).lower(*shapes).compile().profile
    profile.to_html(tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    open_tab(browser, "timeline")
    time.sleep(0.3)
    drawn = browser.execute_script("""
        const part = ipujaxPage.chart("trace").renderers.find((part) => part.name === "folded");
        return [part.glyph.hatch_pattern.value, [...part.data_source.data.left], [...part.data_source.data.right]];
    """)
    pattern, left, right = drawn
    trace = profile.execution_trace
    folded = trace.is_folded
    assert pattern and left == trace.start[folded].tolist() and right == trace.end[folded].tolist() and left
    assert any(text.endswith("folded") for text in browser.execute_script(LABELS))
    assert find(browser, "#trace .legend .hatched") and errors(browser) == []


def test_the_scale_of_the_chip_ends_at_the_memory_of_a_tile(browser, profile, tmp_path):
    def scale():
        return browser.execute_script("""
            const parts = ipujaxPage.chart("chip").renderers;
            const { low, high, high_color } = parts[0].glyph.color_mapper;
            const { x, y } = parts.find((part) => part.name === "fullest").data_source.data;
            return [low, high, high_color, x[0], y[0]];
        """)

    def over(x):
        return jnp.sort(jnp.broadcast_to(x, (16384, 16, 16)), 0) * 2

    options = ipu.Options(allow_out_of_memory=True)
    lowered = ipu.jit(over, device=ipu.IPUModel(tiles_per_ipu=8), options=options).lower(jnp.ones((16, 16)))
    large = lowered.compile().profile
    have = 638_976
    ends = []
    for each in (profile, large):
        each.to_html(tmp_path / "page.html")
        opened(browser, tmp_path / "page.html")
        open_tab(browser, "memory")
        low, high, colour, x, y = scale()
        ends.append((low, high, colour))
        if each is profile:
            click(browser, "#contrast")
            assert scale()[1] == each.memory.max_tile_bytes
            click(browser, "#contrast")
            assert scale()[1] == have
        browser.execute_script("ipujaxPage.showTile(1); ipujaxPage.tileAt(arguments[0], arguments[1])", x, y)
        assert find(browser, "#tile").get_attribute("value") == str(each.memory.worst_tile)
    assert ends[0] == ends[1] and ends[0][:2] == (0, have)
    assert find(browser, "#chart-chip").get_attribute("aria-label").count("624.0 KiB that a tile has")
    assert f"{(large.memory.tile_bytes > have).sum()} tiles" in find(browser, "#memory .legend").text
    assert find(browser, "h1").text.startswith("Out of memory: ") and errors(browser) == []
