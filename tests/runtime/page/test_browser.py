"""Pages in Chromium: nothing fails, every section holds data, and what can be folded, sorted, zoomed and chosen works.

Needs Chromium and its driver (Debian: `apt-get install chromium chromium-driver`) and Selenium; skipped without.
"""

from __future__ import annotations

import shutil
import time

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.runtime.page.profile_page import SECTIONS
from ipujax.runtime.report import Profile
from tests.runtime.page.test_pages import evil_profile

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
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
    """Waits until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def errors(browser):
    return [row["message"] for row in browser.get_log("browser") if row["level"] in ("SEVERE", "ERROR")]


def find(browser, selector):
    return browser.find_element("css selector", selector)


def click(browser, selector):
    browser.execute_script("arguments[0].click()", find(browser, selector))


def test_nothing_fails_and_every_section_holds_data(page, tmp_path):
    assert errors(page) == []
    for key, title in SECTIONS:
        section = find(page, f"#{key}")
        assert section.find_element("css selector", "h2").text == title and len(section.text) > len(title) + 3
    for name in ("chip", "sorted", "liveness", "trace", "roofline"):
        drawn = page.execute_script(f"{INSIDE} return all(document.getElementById('chart-{name}')).some(isDrawn)")
        assert drawn, name
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    page.save_screenshot(str(tmp_path / "page.png"))
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_columns_sort_both_ways(page):
    def column(number):
        rows = "return [...document.querySelectorAll('#operations-table tbody tr')]"
        return page.execute_script(f"{rows}.map((row) => row.cells[{number}].dataset.value)")

    cycles = list(map(float, column(2)))
    assert cycles == sorted(cycles, reverse=True) and len(cycles) > 5
    click(page, "[data-sort='4']")
    moved = list(map(float, column(4)))
    assert moved == sorted(moved, reverse=True)
    assert find(page, "#operations-table th[aria-sort]").text.startswith("Moved")
    click(page, "[data-sort='4']")
    assert list(map(float, column(4))) == sorted(moved)
    click(page, "[data-sort='0']")
    names = "return arguments[0].sort((a, b) => a.localeCompare(b))"
    assert column(0) == page.execute_script(names, column(0)) and len(set(column(0))) > 5
    click(page, "[data-sort='2']")
    assert list(map(float, column(2))) == cycles


def test_the_tree_folds(page):
    def count(state):
        return len(page.find_elements("css selector", f"#tree details{state}"))

    click(page, "#program [data-fold='closed']")
    assert count("[open]") == 0 < count("")
    click(page, "#program [data-fold='open']")
    assert count("[open]") == count("")
    click(page, "#tree summary")
    assert count("[open]") == count("") - 1


@pytest.mark.parametrize("name", ["trace", "liveness"])
def test_charts_zoom_by_buttons(page, name):
    def shown():
        return page.execute_script("const r = ipujaxPage.chart(arguments[0]).x_range; return [r.start, r.end]", name)

    start, end = shown()
    click(page, f"[data-zoom='{name}'][data-step='in']")
    assert shown() == pytest.approx([start + (end - start) / 4, end - (end - start) / 4])
    click(page, f"[data-zoom='{name}'][data-step='left']")
    assert shown()[0] == pytest.approx(start + (end - start) / 8)
    click(page, f"[data-zoom='{name}'][data-step='all']")
    assert shown() == pytest.approx([start, end])


def test_a_tile_is_chosen_by_number_and_on_the_chip(page, profile):
    def total():
        return find(page, "#tile-total").text

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


def test_a_step_is_chosen_by_keys(page):
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

    first = colours()
    click(page, "#theme")
    second = colours()
    assert first[0] != second[0] and str(first[1]) != str(second[1])
    click(page, "#theme")
    assert colours() == first


def test_all_of_it_is_reached_by_the_keyboard(page):
    page.execute_script("document.querySelector('.skip').focus()")
    seen = []
    for _ in range(1 + len(SECTIONS)):
        find(page, "body").send_keys("\ue004")  # tabulator
        seen.append(page.execute_script("return document.activeElement.textContent || document.activeElement.id"))
    wanted = ["Dark", *(title for _, title in SECTIONS)]
    assert [text.replace("Light", "Dark") for text in seen[: len(wanted)]] == wanted


@pytest.mark.slow
def test_narrow_windows_lose_nothing(page):
    size = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(0.5)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 420
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_names_that_are_markup_do_nothing(browser, tmp_path):
    evil_profile().to_html(tmp_path / "evil.html")
    opened(browser, tmp_path / "evil.html")
    browser.execute_script("ipujaxPage.showTile(1); ipujaxPage.stepAt(0)")
    assert errors(browser) == []  # an alert would have stopped this test
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert "<script>alert(1)</script>" in find(browser, "#operations").text


def test_comparisons_open_and_sort(browser, profile, tmp_path):
    ipu.compare(evil_profile(), profile).to_html(tmp_path / "compared.html")
    browser.get((tmp_path / "compared.html").as_uri())
    click(browser, "[data-sort='3']")
    assert errors(browser) == [] and "The largest part is" in find(browser, "#summary").text
    assert find(browser, "#operations-table th[aria-sort]").text.startswith("moved bytes")


def test_a_saved_profile_opens(browser, profile, tmp_path):
    profile.save(tmp_path / "saved")
    Profile.load(tmp_path / "saved").to_html(tmp_path / "loaded.html")
    opened(browser, tmp_path / "loaded.html")
    assert errors(browser) == []


def test_a_program_without_steps_has_a_page(browser, tmp_path):
    ipu.jit(lambda: (), device=ipu.IPUModel(tiles_per_ipu=4)).lower().compile().profile.to_html(tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    assert errors(browser) == [] and "0 steps of the program" in find(browser, "#liveness").text
