"""Titles of profiles: function, file, label, device and day, or first of all that memory lacks."""

from __future__ import annotations

import functools
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.runtime import compile as compile_module
from ipujax.runtime.report import Profile

HERE = "test_titles.py"
DEVICE = ipu.IPUModel(tiles_per_ipu=8)
X = jax.ShapeDtypeStruct((16, 16), "float32")


@pytest.fixture(autouse=True)
def day(monkeypatch):
    monkeypatch.setattr(compile_module, "today", lambda: "2026-11-25")


def train_step(x):
    return x @ x


class Model:
    def __call__(self, x):
        return jnp.sin(x)

    def loss(self, x):
        return jnp.sum(x)


def profile_of(fun, **options):
    return ipu.jit(fun, device=DEVICE, options=ipu.Options(**options)).lower(X).compile().profile


class Texts(HTMLParser):
    """The text of each element of a page, by its name; of several the first."""

    def __init__(self, profile, tmp_path):
        super().__init__()
        profile.to_html(tmp_path / "page.html")
        self.at = ""
        self.of = {}
        self.feed((tmp_path / "page.html").read_text(encoding="utf-8"))

    def handle_starttag(self, name, attributes):
        self.at = name

    def handle_data(self, data):
        self.of.setdefault(self.at, data)


def test_a_title_names_function_file_device_and_day(tmp_path):
    profile = profile_of(train_step)
    title = f"train_step ({HERE}) on 1 × mk2, 25 Nov 2026"
    assert profile.title == title
    assert profile.summary().splitlines()[0] == title
    assert f"<caption>{title}</caption>" in profile._repr_html_()
    texts = Texts(profile, tmp_path).of
    assert (texts["title"], texts["h1"]) == (title, title)
    outputs, run = ipu.jit(train_step, device=DEVICE).lower(X).compile().profile_call(jnp.ones((16, 16)))
    assert run.title == title and outputs.shape == (16, 16)


@pytest.mark.parametrize(
    ("fun", "name"),
    [
        (functools.partial(train_step), "train_step"),
        (Model().loss, "loss"),
        (Model(), "Model"),
        (lambda x: x + 1, "<lambda>"),
        (jax.jit(train_step), "train_step"),
        (jnp.sin, "sin"),  # of a library: the file that compiles it
    ],
)
def test_all_kinds_of_functions_have_a_file(fun, name):
    assert profile_of(fun).identity.name == f"{name} ({HERE})"


def test_functions_of_a_console_have_a_title():
    names = {"__name__": "__main__"}
    exec(compile("def typed(x):\n    return x * 2\n", "<stdin>", "exec"), names)
    assert profile_of(names["typed"]).title.startswith("typed (<stdin>) on 1 × mk2")


def test_labels_are_saved_and_shown(tmp_path):
    wide = profile_of(train_step, label="wide")
    narrow = profile_of(train_step).labelled("narrow")
    assert wide.title == f"wide: train_step ({HERE}) on 1 × mk2, 25 Nov 2026"
    assert wide.labelled("").title == f"train_step ({HERE}) on 1 × mk2, 25 Nov 2026" and "wide" in wide.title
    assert wide.labelled("very wide").cycles == wide.cycles
    for profile in (wide, narrow):
        profile.save(tmp_path / "saved")
        loaded = Profile.load(tmp_path / "saved")
        assert loaded.title == profile.title and loaded.labelled("x").identity.label == "x"
        loaded.labelled("again").save(tmp_path / "saved")
        assert Profile.load(tmp_path / "saved").identity.label == "again"
    compared = ipu.compare(wide, narrow)
    before = f"wide: train_step ({HERE})"
    after = f"narrow: train_step ({HERE})"
    assert str(compared).splitlines()[:2] == [f"Before: {before}", f"After:  {after}"]
    assert f"{before} → {after}" in compared._repr_html_()
    assert Texts(compared, tmp_path).of["h1"] == f"What changed: {before} → {after}"


def test_machines_are_named_where_names_are_the_same():
    other = ipu.jit(train_step, device=ipu.IPUModel(arch="bow", tiles_per_ipu=8)).lower(X).compile().profile
    assert ipu.compare(profile_of(train_step), other).names == tuple(
        f"train_step ({HERE}) on 1 × {chip}, 25 Nov 2026" for chip in ("mk2", "bow")
    )


@pytest.mark.parametrize("label", [3, None, "two\nlines", " spaces ", "x" * 201])
def test_refuses_a_non_label(label):
    with pytest.raises(ipu.ArgumentError, match=r"Options\.label must be a label"):
        ipu.Options(label=label)
    with pytest.raises(ipu.ArgumentError, match="label"):
        profile_of(train_step).labelled(label)


def test_labels_are_never_markup(tmp_path):
    profile = profile_of(train_step, label="<script>alert(1)</script>")
    profile.to_html(tmp_path / "page.html")
    assert "<script>alert" not in (tmp_path / "page.html").read_text(encoding="utf-8") + profile._repr_html_()


def test_out_of_memory_comes_first(tmp_path):
    profile = profile_of(lambda x: jnp.sort(jnp.broadcast_to(x, (16384, 16, 16)), 0) * 2, allow_out_of_memory=True)
    memory = profile.memory
    over = memory.overflowed_bytes
    assert over.max() > 0
    profile.save(tmp_path / "saved")
    for each in (profile, Profile.load(tmp_path / "saved")):
        first, *others = each.summary().splitlines()
        headline = rf"Out of memory: {(over > 0).sum()} of 8 tiles need more than 624\.0 KiB; tile \d needs most, "
        assert re.match(headline, first) and int(re.search(r"tile (\d)", first)[1]) == over.argmax()
        assert others[0].startswith("  try: ") and f"bytes_per_tile={memory.max_tile_bytes}" in each.summary()
        texts = Texts(each, tmp_path).of
        assert texts["title"].startswith("Out of memory: <lambda> (") and texts["h1"] == first
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert 0 < page.index("Try:") < page.index('<section id="operations"')  # on the first tab


def test_no_headline_where_memory_suffices(tmp_path):
    profile = profile_of(train_step)
    assert profile.ways_to_fit == () and "Out of memory" not in profile.summary()
