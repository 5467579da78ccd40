"""The lab of `examples/notebooks/supersteps.ipynb`: right answers are found right, wrong ones get a hint."""

from __future__ import annotations

import json

import pytest

from tests.examples.loading import EXAMPLES
from tests.examples.test_notebooks import run

LAB = EXAMPLES / "notebooks" / "supersteps.ipynb"
RIGHT = (
    "syncs_of(profile)",
    "2 * exchange_cycles(8) - exchange_cycles(4) + (exchange_cycles(4) - exchange_cycles(8)) / 2",
    "2048",
    "lambda x, *ws: jnp.split(x @ jnp.concatenate(ws, axis=1), 4, axis=1)",
    "cycles_by_tiles[16] / cycles_by_tiles[256] * 16 / 256",
    "'fp32_amp_macs_per_cycle'",
)
WRONG = ("0", "0", "1500", "lambda *arrays: separate(*arrays)", "2.0", "'internal_sync_cycles'")
_HELPERS = "def syncs_of(profile):\n    return profile.phase_cycles['sync'] // profile.target.internal_sync_cycles\n"


@pytest.mark.parametrize(("answers", "expected"), [(RIGHT, "right\n"), (WRONG, "not yet: ")], ids=["right", "wrong"])
def test_answers_are_checked(answers: tuple[str, ...], expected: str) -> None:
    cells = [cell for cell in json.loads(LAB.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    cells[0]["source"].append(f"\n\n{_HELPERS}")
    exercises = [cell for cell in cells if "answer = None\n" in cell["source"]]
    assert len(exercises) == len(answers) == 6
    for cell, answer in zip(exercises, answers, strict=True):
        cell["source"] = [line.replace("answer = None", f"answer = {answer}") for line in cell["source"]]
    verdicts = [printed for cell, printed in zip(cells, run(cells), strict=True) if cell in exercises]
    assert all(verdict.startswith(expected) for verdict in verdicts), verdicts
