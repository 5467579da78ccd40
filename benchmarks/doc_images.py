"""Makes the pictures of the documentation from the runs that they show.

    python benchmarks/doc_images.py                 # docs/images/readme_profile.svg, of the README's program
    python benchmarks/doc_images.py --screenshots   # also the PNG files, by Chromium and Selenium

The picture of the README needs no browser: `tests/benchmarks/test_doc_images.py` runs the README and compares the
numbers in the picture; `pytest --update-golden` writes it. Screenshots are parts of the pages of benchmark models,
each at most 300 KB.
"""

from __future__ import annotations

import argparse
import base64
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from models import MODELS

import ipujax as ipu
from ipujax.runtime.page.charts import PHASE_COLOURS
from ipujax.runtime.views import Answer, answers

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
README_PICTURE = IMAGES / "readme_profile.svg"
_EDGE = 16  # pixels around the part that a screenshot shows
MOST_BYTES = 300_000  # of a PNG file

# --- the picture of the README ----------------------------------------------------------------------------------------

# pixels
_WIDTH = 1000
_MARGIN = 24
_LINE = 20
_COLUMNS = 62  # characters of a line of a card, at 13 pixels
_LEAST_SHARE = 0.01  # of the run, of a phase that has a name


def readme_picture(profile: ipu.Profile) -> str:
    """Cost of a run as SVG: phases as a bar, and a card for each question with its answer.

    Args:
        profile: of the run.
    """
    cards = [card for card in answers(profile) if card.question != "Where does an IPU wait?"]  # there is one
    parts = [_text(profile.identity.function, 40, size=20, weight=600), _text(profile.brief, 62, fill="#555555")]
    parts += _phase_bar(profile, 80)
    y = 150
    height = 0
    for number, card in enumerate(cards):
        card_x = _MARGIN + (number % 2) * (_WIDTH // 2 - 8)
        lines, drawn = _card(card, card_x, y)
        parts += drawn
        height = max(height, lines * _LINE + 52)
        if number % 2 or number == len(cards) - 1:
            y = y + height + 8
            height = 0
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" font-family="system-ui, sans-serif"'
    back = f'<rect width="{_WIDTH}" height="{y + 8}" fill="#ffffff"/>'
    return "\n".join([f'{head} font-size="13" role="img">', back, *parts, "</svg>\n"])


def _text(text: str, y: int, x: int = _MARGIN, size: int = 13, weight: int = 400, fill: str = "#1a1a1a") -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def _phase_bar(profile: ipu.Profile, y: int) -> list[str]:
    """The phases of the limiting IPU beside each other, and their names below."""
    parts = list[str]()
    x = float(_MARGIN)
    name_x = _MARGIN
    for name, cycles in profile.phase_cycles.items():
        share = cycles / max(1, profile.cycles)
        width = share * (_WIDTH - 2 * _MARGIN)
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" fill="{PHASE_COLOURS[name]}"/>')
        x += width
        if share >= _LEAST_SHARE:
            parts.append(f'<rect x="{name_x}" y="{y + 33}" width="12" height="12" fill="{PHASE_COLOURS[name]}"/>')
            parts.append(_text(f"{name.replace('_', ' ')} {share:.1%}", y + 44, name_x + 18))
            name_x += 170
    return parts


def _card(card: Answer, x: int, y: int) -> tuple[int, list[str]]:
    """Number of lines of a card, and its elements."""
    lines = [(line, "#1a1a1a") for line in textwrap.wrap(card.sentence, _COLUMNS)]
    lines += [(line, "#555555") for line in textwrap.wrap(f"Try: {card.hint}", _COLUMNS) if card.hint]
    height = len(lines) * _LINE + 44
    frame = (
        f'<rect x="{x}" y="{y}" width="{_WIDTH // 2 - 32}" height="{height}" rx="8" fill="#f4f6f8" stroke="#d6d6d6"/>'
    )
    texts = [_text(line, y + 50 + n * _LINE, x + 14, fill=fill) for n, (line, fill) in enumerate(lines)]
    return len(lines), [frame, _text(card.question, y + 26, x + 14, size=14, weight=600), *texts]


def texts_of(picture: str) -> str:
    """The texts of a picture, for those who compare its numbers.

    Args:
        picture: of `readme_picture`.
    """
    return "\n".join(re.findall(r"<text [^>]*>(.*?)</text>", picture))


# --- screenshots ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Screenshot:
    """A part of a page.

    Args:
        model: name of a benchmark model.
        first: selector of the first element that is shown.
        last: selector of the last one; the first alone when empty.
        tab: that is opened before.
        before: script that runs before.
        height: pixels that are shown at most.
        is_dark: whether the page is dark.
    """

    model: str
    first: str
    last: str = ""
    tab: str = "verdict"
    before: str = ""
    height: int = 1_000
    is_dark: bool = False


_TRACE = ("#trace", "#picked")
_FIRST_SCREEN = ("header", "#summary .ways:last-of-type")
_TOP_OPERATION = "ipujaxPage.show(document.querySelector('#operations-table .to-trace').dataset.show);"
_SEARCH = "document.getElementById('search').value = 'attention backward'; ipujaxPage.search();"
SCREENSHOTS = {
    "report_summary": Screenshot("digits-cnn", *_FIRST_SCREEN),
    "report_operations": Screenshot("digits-cnn", "#operations", tab="operations", height=760),
    "report_graph": Screenshot("gpt-block", "#graph", tab="program", height=760),
    "bert_summary": Screenshot("bert-base", *_FIRST_SCREEN, height=880),
    "bert_layers": Screenshot("bert-base", "#layers", tab="lines"),
    "bert_stages": Screenshot("bert-base", "#waits", "#stages", tab="timeline"),
    "bert_trace": Screenshot("bert-base", *_TRACE, tab="operations", before=_TOP_OPERATION),
    "bert_memory": Screenshot("bert-base", "#memory", "#chart-roles + .legend", tab="memory", is_dark=True),
    "transformer_layers": Screenshot("transformer-loop", "#layers", tab="lines", height=780),
    "transformer_search": Screenshot("transformer-loop", "nav", "#operations-table", tab="operations", before=_SEARCH),
}


def profile_of(name: str) -> ipu.Profile:
    """The profile of a training step of a benchmark model.

    Args:
        name: of the model.
    """
    model = MODELS[name]()
    options = ipu.Options(**{"allow_out_of_memory": True, "progress": False, **model.options})
    how = {"device": model.device(), "donate_argnums": model.donate_argnums, "options": options}
    return ipu.jit(model.step, **how, **model.jit).profile(*model.args)


def make_screenshots(names: Sequence[str]) -> None:
    """Writes PNG files of parts of pages.

    Args:
        names: of `SCREENSHOTS`.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1400"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options)
    models = list(dict.fromkeys(SCREENSHOTS[name].model for name in names))
    try:
        for model in models:
            with tempfile.TemporaryDirectory() as folder:
                page = Path(folder) / "page.html"
                profile_of(model).to_html(page)
                for name in names:
                    if SCREENSHOTS[name].model == model:
                        _shoot(browser, page, SCREENSHOTS[name], IMAGES / f"{name}.png")
    finally:
        browser.quit()


def _shoot(browser: Any, page: Path, part: Screenshot, path: Path) -> None:
    browser.get(page.as_uri())
    for script in ("", f"document.getElementById('tab-{part.tab}').click()"):
        browser.execute_script(script)
        while browser.execute_script("return document.documentElement.dataset.ready") != "true":
            time.sleep(0.05)
    dark = "document.getElementById('theme').click();" if part.is_dark else ""
    browser.execute_script(f"{part.before} {dark} document.querySelector('nav').style.position = 'static';")
    time.sleep(1)  # until charts are drawn again
    box = browser.execute_script(
        "const [first, last] = [...arguments].map((x) => document.querySelector(x).getBoundingClientRect());"
        "return [first.top + scrollY, last.bottom + scrollY];",
        part.first,
        part.last or part.first,
    )
    height = min(part.height, box[1] - box[0] + 2 * _EDGE)
    area = {"x": 0, "y": max(0, box[0] - _EDGE), "width": 1400, "height": height, "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": area, "captureBeyondViewport": True})
    path.write_bytes(base64.b64decode(shot["data"]))
    size = path.stat().st_size
    print(f"{path.relative_to(ROOT)}: {size:,} B")
    if size > MOST_BYTES:
        sys.exit(f"{path.name} is larger than {MOST_BYTES:,} B")


# --- start ------------------------------------------------------------------------------------------------------------


def readme_profile() -> ipu.Profile:
    """The profile that the first program of the README prints."""
    (code, *_) = re.findall(r"```python\n(.*?)```\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, "train.py", "exec", dont_inherit=True), names)
    return names["compiled"].profile


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the pictures.

    Args:
        argv: of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--screenshots", action="store_true", help="also the PNG files; needs Chromium and Selenium")
    parser.add_argument("--only", choices=SCREENSHOTS, action="append", help="of the screenshots")
    args = parser.parse_args(argv)
    README_PICTURE.write_text(readme_picture(readme_profile()), encoding="utf-8")
    if args.screenshots or args.only:
        make_screenshots(args.only or list(SCREENSHOTS))


if __name__ == "__main__":
    main()
