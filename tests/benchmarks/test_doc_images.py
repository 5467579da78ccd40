"""The picture of the README has the numbers of its run, and screenshots are small."""

from __future__ import annotations

import sys
from html import unescape
from pathlib import Path

import pytest

from tests.examples.doc_pages import ROOT, assert_figures, run

sys.path.insert(0, str(ROOT / "benchmarks"))
import doc_images

sys.path.pop(0)


def test_the_picture_of_the_readme_shows_its_run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, names = run("README.md")
    profile = names["compiled"].profile
    picture = doc_images.readme_picture(profile)
    if request.config.getoption("--update-golden"):
        doc_images.README_PICTURE.write_text(picture, encoding="utf-8")
    texts = doc_images.texts_of(doc_images.README_PICTURE.read_text(encoding="utf-8"))
    printed = doc_images.texts_of(picture)
    assert_figures(texts, printed, "pytest --update-golden writes it anew")
    assert f"{profile.cycles:,} cycles" in printed
    figures = unescape(" ".join(printed.split()))
    line = next(line for line in profile.operations() if line.origin.line)  # the costliest of the user's
    assert str(line.origin) in figures and f"{line.cycles:,}" in figures


def test_screenshots_are_there_and_small() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for name in doc_images.SCREENSHOTS:
        path = doc_images.IMAGES / f"{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size <= doc_images.MOST_BYTES
        assert f"images/{name}.png" in pages, name
    displayed = {f"{name}.png" for name in doc_images.SCREENSHOTS} | {doc_images.README_PICTURE.name}
    # Pictures of docs/fidelity.md and docs/gallery.md have scripts and tests of their own.
    assert {path.name for path in doc_images.IMAGES.iterdir()} - {"fidelity.svg", "gallery"} == displayed
