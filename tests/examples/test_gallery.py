"""docs/gallery.md: every example with a picture, and commands that run."""

from __future__ import annotations

import pytest

from benchmarks import gallery

MOST_BYTES = 20_000  # of a picture


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
def test_every_command_runs(name: str) -> None:
    assert gallery.printed(name)
