"""The documentation site in Chromium: no code block is cut off at 1,280 px, and each can be copied.

Builds the site, which takes a minute; skipped without Sphinx, its theme and its extensions, or without Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
    pytest.importorskip(package, reason=f"{package} is not installed")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Chromium or its driver is not installed")
DOCS = Path(__file__).resolve().parents[2] / "docs"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1280,900")
CUT_OFF = (
    "return [...document.querySelectorAll('pre')].filter((x) => x.scrollWidth > x.clientWidth).map((x) => x.innerText)"
)
WITHOUT_BUTTON = (
    "return [...document.querySelectorAll('div.highlight')].filter((x) => !x.querySelector('button.copybtn')).length"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(folder)]
    done = subprocess.run(build, cwd=DOCS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def test_code_blocks_are_whole_and_can_be_copied(site: Path, browser: Any) -> None:
    pages = [page for page in site.rglob("*.html") if "_modules" not in page.parts]
    assert len(pages) > 30
    wrong = {}
    for page in pages:
        browser.get(page.as_uri())
        actual = browser.execute_script(CUT_OFF), browser.execute_script(WITHOUT_BUTTON)
        if actual != ([], 0):
            wrong[page.name] = actual
    assert wrong == {}
