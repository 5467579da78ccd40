"""Profiles of unusual programs and files: every view works, or names the missing part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax import poplar
from ipujax.cli import main
from ipujax.runtime.compile import compile as compile_graph
from ipujax.runtime.graph import Call, Function, Graph, Sequence
from ipujax.runtime.profile import NO_LAYER
from ipujax.runtime.report import Profile
from ipujax.runtime.report.many_runs import runs_table
from ipujax.runtime.tensor import Origin
from tests.runtime.page.test_pages import EVIL, Page
from tests.runtime.profile.profile_helpers import TARGET, apply, codelet, inputs, output, variables
from tests.runtime.profile.sums import check_sums

DEVICE = ipu.IPUModel(tiles_per_ipu=8)
DATA = Path(__file__).resolve().parents[1] / "data"
X = jax.ShapeDtypeStruct((16, 16), np.float32)


def page_of(profile: Profile, folder: Path) -> str:
    profile.to_html(folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def check(profile: Profile, folder: Path) -> None:
    """Asserts that the views of a profile and of its file agree."""
    profile.save(folder / "saved")
    loaded = Profile.load(folder / "saved")
    check_sums(profile, folder)
    assert loaded.summary(by="layer") == profile.summary(by="layer") and loaded.scalars() == profile.scalars()
    assert "No layer differs." in runs_table([("a", profile), ("b", loaded)])
    assert loaded._repr_html_() == profile._repr_html_() and str(ipu.compare(profile, loaded))


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_of_layers_arguments_and_functions_are_never_markup(tmp_path: Path) -> None:
    scope = EVIL.replace("/", "|")  # a slash separates scopes

    def step(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        with jax.named_scope(scope):
            return jnp.sum(jnp.tanh(x @ weights[EVIL]))

    step.__name__ = EVIL
    run = ipu.jit(jax.value_and_grad(step), device=DEVICE, options=ipu.Options(label=EVIL))
    profile = run.profile({EVIL: X}, X)
    check(profile, tmp_path)
    assert any(scope in row.layer for row in profile.layers)
    assert EVIL in profile.summary() and scope in profile.summary(by="layer")
    for text in (page_of(profile, tmp_path), profile._repr_html_()):
        page = Page(text)  # which fails where elements are not nested
        assert EVIL in page.text and "<script>alert" not in text and "<img" not in text
        assert not [given for _, given in page.tags if "onerror" in given]


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_ten_thousand_layers_have_a_short_summary_and_a_page_of_bounded_size(tmp_path: Path) -> None:
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    there = apply(graph, codelet("popops::There", 3), a, b, 4, "model.py:3 (block)")
    back = apply(graph, codelet("popops::Back", 5), b, a, 4, "model.py:4 (block)")
    block = Function(Sequence(there, back))
    calls = [Call(block, Origin("model.py:9 (model)", layer=f"model/block[{n}]")) for n in range(10_000)]
    profile = Profile(compile_graph(graph, Sequence(*inputs(a), *calls, output(a))))
    assert len({row.layer for row in profile.layers}) == 10_001  # one for transfers
    check(profile, tmp_path)
    assert len(profile.summary().splitlines()) < 150 and "more layers" in profile.summary()
    assert len(profile.summary(by="layer").splitlines()) < 1_200
    assert "more layers" in page_of(profile, tmp_path)
    assert (tmp_path / "page.html").stat().st_size < 6e6


# --- nothing ----------------------------------------------------------------------------------------------------------


def engine_of_nothing() -> Profile:
    graph = poplar.Graph(poplar.IPUModel(tiles_per_ipu=4).create_device().target)
    return poplar.Engine(graph, poplar.program.Sequence()).profile


EMPTY = {
    "no arguments and no results": lambda: ipu.jit(lambda: (), device=DEVICE).profile(),
    "its argument": lambda: ipu.jit(lambda x: x, device=DEVICE).profile(X),
    "no elements": lambda: ipu.jit(lambda x: x + 1, device=DEVICE).profile(jax.ShapeDtypeStruct((0, 4), np.float32)),
    "an empty Poplar program": engine_of_nothing,
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_program_that_does_nothing_has_all_views(name: str, tmp_path: Path) -> None:
    profile = EMPTY[name]()
    check(profile, tmp_path)
    text = profile.summary(by="layer", show_execution_steps=True, show_var_storage=True)
    assert "nan" not in text and "inf " not in text
    assert 'id="summary"' in page_of(profile, tmp_path)


# --- no lines ---------------------------------------------------------------------------------------------------------


def test_a_program_without_lines_says_so(tmp_path: Path) -> None:
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    profile = Profile(compile_graph(graph, Sequence(*inputs(a), apply(graph, codelet("f", 30), a, b, 4), output(b))))
    check(profile, tmp_path)
    assert {row.layer for row in profile.layers} == {NO_LAYER}
    text = Page(page_of(profile, tmp_path)).text
    assert "No line of source is known" in text and "No layer is known" in text


# --- scripts, sessions and notebooks ----------------------------------------------------------------------------------

SCRIPT = """
import jax
import jax.numpy as jnp
import ipujax as ipu

def layer(w, x):
    return jnp.tanh(x @ w)

def loss(w, x):
    for _ in range(3):
        x = layer(w, x)
    return x.sum()

if __name__ == "__main__":
    step = ipu.jit(jax.value_and_grad(loss), device=ipu.IPUModel(tiles_per_ipu=4))
    step(jnp.ones((8, 8)), jnp.ones((8, 8)))
"""


def check_session(profile: Profile, file: str, folder: Path, *, has_text: bool) -> None:
    """Asserts that lines, functions and layers are those of the session."""
    lines = {str(row.origin) for row in profile.operations()}
    assert f"{file}:7 (layer)" in lines, lines
    assert {"layer[0]", "layer[1]", "layer[2]"} <= {part for row in profile.layers for part in row.layer.split("/")}
    page = page_of(profile, folder)
    assert file in Page(page).text and f"{file}:7 (layer)" in Page(page).text
    assert ("return jnp.tanh(x @ w)" in Page(page).text) == has_text
    check_sums(profile, folder)


def test_the_profile_command_names_functions_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    assert main(["profile", "--save", str(tmp_path / "saved"), str(tmp_path / "train.py")]) == 0
    assert "loss" in capsys.readouterr().err
    (saved,) = (tmp_path / "saved").iterdir()
    check_session(Profile.load(saved), "train.py", tmp_path, has_text=True)
    assert main(["report", str(saved), "--html", str(tmp_path / "report.html")]) == 0
    assert "train.py:7 (layer)" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_session_whose_text_is_not_kept_has_lines(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SCRIPT.partition("if __name__")[0], "<stdin>", "exec"), names)
    profile = ipu.jit(jax.value_and_grad(names["loss"]), device=DEVICE).profile(X, X)
    check_session(profile, "<stdin>", tmp_path, has_text=False)
    assert "could not be read" in Page(page_of(profile, tmp_path)).text


def test_an_interactive_session_of_python_has_a_page(tmp_path: Path) -> None:
    typed = [
        "import jax.numpy as jnp, ipujax as ipu",
        "def f(x): return jnp.tanh(x @ x)\n",
        "p = ipu.jit(f, device=ipu.IPUModel(tiles_per_ipu=4)).profile(jnp.ones((8, 8)))",
        "p.to_html('page.html'); p.to_perfetto('trace.json')",
        "print(p.title, *[row.origin for row in p.operations()])",
    ]
    environment = {"PYTHONPATH": str(Path(ipu.__file__).resolve().parents[1]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input="\n".join([*typed, ""]),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "f (<stdin>) on 1 × mk2" in done.stdout and "<stdin>:1 (f)" in done.stdout, done
    assert "<stdin>" in Page((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def test_refuses_a_notebook_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.ipynb").write_text('{"cells": [], "nbformat": 4}', encoding="utf-8")
    assert main(["profile", str(tmp_path / "train.ipynb")]) != 0
    said = capsys.readouterr().err
    assert "is a notebook" in said and "nbconvert --to script" in said and "profile.save" in said
