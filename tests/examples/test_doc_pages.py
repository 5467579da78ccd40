"""Code of the README and of the guides runs as pasted, prints the pasted output, and links lead somewhere."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.examples.doc_pages import LEFT_OUT, ROOT, assert_figures, blocks, excerpt, run, write
from tests.test_rooms import ROOMS

PAGES = [
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "codelets",
            "command_line",
            "custom_operators",
            "extending",
            "fitting",
            "frameworks",
            "hosts",
            "ipu_in_ten_minutes",
            "models",
            "one_gpt_block",
            "onnx",
            "pipelines",
            "poplar",
            "profile",
            "quick_start",
            "search",
            "sharding",
            "studies",
            "tiles",
            "troubleshooting",
        )
    ),
]

FLOORS = ("ipujax", "lowering", "runtime")
MOST_BYTES = {
    "CONTRIBUTING.md": 10_000,
    "CHANGELOG.md": 10_000,
    "docs/architecture.md": 18_000,
    "docs/decisions.md": 18_000,
}


def markdown() -> list[str]:
    """All pages."""
    return [str(path.relative_to(ROOT)) for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])]


@pytest.mark.parametrize("page", PAGES)
def test_code_prints_the_pasted_output(page: str, request: pytest.FixtureRequest, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran, _ = run(page)
    assert ran and any(block.pasted for block in ran)
    if request.config.getoption("--update-golden"):
        write(page, ran)
        return
    for block in ran:
        if block.pasted is not None:
            kept = excerpt(block.pasted, block.printed)
            assert_figures(block.pasted, kept, f"pytest --update-golden {__file__} writes:\n{kept}")


def test_the_readme_trains_as_jax_jit_does() -> None:
    ran, _ = run("README.md")
    ((first,), (second,)) = (re.findall(r"^loss ([\d.]+)$", block.printed, re.MULTILINE) for block in (ran[0], ran[-1]))
    names: dict[str, Any] = {}
    exec(ran[0].code.split("step = ipu.jit")[0], names)
    params = names["params"]
    batch = names["batch"]
    losses = []
    opt_state = names["optimizer"].init(params)
    step = jax.jit(names["train_step"])
    for _ in range(11):  # ten on one IPU, one with replicas and a pipeline
        params, opt_state, value = step(params, opt_state, batch)
        losses.append(float(value))
    np.testing.assert_allclose([float(first), float(second)], losses[-2:], atol=1.01e-4)


def test_the_huber_loss_of_the_codelets_page_is_that_of_plain_jax() -> None:
    _, names = run("docs/codelets.md")
    step, plain = (jax.value_and_grad(names[name], (0, 1, 2)) for name in ("loss", "plain_loss"))
    args = [3 * names[name] for name in "wxy"]
    for got, expected in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(plain(*args)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    rows = jnp.ones((2, 3, 4))
    assert jax.vmap(names["huber"])(rows, -rows).shape == (2, 3)


@pytest.mark.parametrize("page", markdown())
def test_links_lead_to_files(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert not [link for link in links if not (folder / link).exists()]


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *PAGES[1:], "docs/architecture.md", "docs/decisions.md"]
)
def test_paths_exist(page: str) -> None:
    paths = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", (ROOT / page).read_text(encoding="utf-8"))
    floors = [ROOT, *(ROOT / floor for floor in FLOORS)]
    assert not [path for path in paths if not any((floor / path).exists() for floor in floors)]


@pytest.mark.parametrize("floor", FLOORS)
def test_the_architecture_page_describes_every_room(floor: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (rows,) = re.findall(rf"^\| `{floor}/` \|.*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    described = [
        name for cell in re.findall(r"^\|(.*?)\|", rows, re.MULTILINE) for name in re.findall(r"`(\w+)/?`", cell)
    ]
    assert sorted(described) == sorted({room.split(".")[1] for room in ROOMS if room.startswith(f"{floor}.")})


@pytest.mark.parametrize(("page", "most_bytes"), MOST_BYTES.items())
def test_pages_for_maintainers_are_short(page: str, most_bytes: int) -> None:
    assert (ROOT / page).stat().st_size <= most_bytes


# --- the comparison itself --------------------------------------------------------------------------------------------

PRINTED = "Target:\n  Name: mk2\nExecution:\n  Cycles:   71,080\n  Sync:  12\n"


@pytest.mark.parametrize(
    "pasted",
    ["Target:\n", f"Execution:\n{LEFT_OUT}\n", f"{LEFT_OUT}\n  Cycles: 7\n", f"{LEFT_OUT}\n  Time: 3\n{LEFT_OUT}\n"],
)
def test_output_that_is_not_printed_is_found(pasted: str) -> None:
    with pytest.raises(AssertionError):
        excerpt(pasted, PRINTED)


def test_figures_are_those_printed() -> None:
    pasted = f"{LEFT_OUT}\n  Cycles: 70,000\n{LEFT_OUT}\n"
    kept = excerpt(pasted, PRINTED)
    assert kept == f"{LEFT_OUT}\n  Cycles:   71,080\n{LEFT_OUT}\n"


@pytest.mark.parametrize(
    "text", ["7,108 cycles", "7,108", "12.5 KiB", "12.5KiB, 4 of 7", "37.1 %", "37.1%", "v12", "[84]"]
)
def test_cycles_bytes_and_shares_are_compared_to_the_digit(text: str) -> None:
    assert_figures(text, text, "")
    with pytest.raises(AssertionError):
        assert_figures(text, re.sub(r"\d(?=\D*$)", "0", text), "")


@pytest.mark.parametrize("text", ["loss 12.35", "['2.35', '2.15']", "41.35 µs,", "12 s", "0.55 ms"])
def test_times_and_results_may_differ_by_a_fifth(text: str) -> None:
    assert_figures(text, re.sub(r"\d(?=\D*$)", "3", text), "")
    with pytest.raises(AssertionError):
        assert_figures(text, re.sub(r"\d(?=[.\d]*\D*$)", "9", text, count=1), "")


def test_every_fenced_block_of_python_is_found() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert sum(not block.is_command for block in blocks(page)) == text.count("```python")
