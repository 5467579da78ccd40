"""docs/gallery.md: every example with a picture, and commands that run."""

from __future__ import annotations

import re

import pytest

from benchmarks import gallery
from tests.examples.doc_pages import assert_figures

MOST_BYTES = 20_000  # of a picture
MACHINE = re.compile(r"^.*(?:cycles|bytes|[KM]iB).*$", re.MULTILINE)


def test_every_example_is_in_the_gallery() -> None:
    assert gallery.examples() == sorted(gallery.OPTIONS, key=lambda name: f"{name}.py")
    assert gallery.PAGE.read_text(encoding="utf-8") == gallery.page()


def test_every_picture_is_small_and_of_an_example() -> None:
    pictures = {path.stem: path for path in gallery.PICTURES.glob("*.svg")}
    assert set(pictures) == {name.replace("/", "_") for name in gallery.OPTIONS}
    for name in gallery.OPTIONS:
        path = pictures[name.replace("/", "_")]
        assert path.stat().st_size < MOST_BYTES
        assert f"$ python examples/{name}.py" in path.read_text(encoding="utf-8")


def test_pictures_cut_long_lines_and_long_outputs() -> None:
    drawn = gallery.picture("digits", "\n".join(["a" * 200, "<&>", *["b"] * 30]))
    assert "a" * (gallery.MOST_COLUMNS - 1) + "…" in drawn and "&lt;&amp;&gt;" in drawn and "… 16 more lines" in drawn


@pytest.mark.parametrize("name", gallery.OPTIONS)
def test_every_command_prints_the_cycles_and_bytes_of_its_picture(name: str, request: pytest.FixtureRequest) -> None:
    path = gallery.PICTURES / f"{name.replace('/', '_')}.svg"
    drawn = gallery.picture(name, gallery.printed(name))
    if request.config.getoption("--update-golden"):
        path.write_text(drawn, encoding="utf-8")
    stored = path.read_text(encoding="utf-8")
    hint = f"python benchmarks/gallery.py {name} draws it anew"
    assert_figures(*("\n".join(MACHINE.findall(text)) for text in (stored, drawn)), hint)
