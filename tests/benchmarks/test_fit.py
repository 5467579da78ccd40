"""`benchmarks/fit.py`: its figures, its table, and its row of a model that cannot be compiled."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
import fit  # noqa: E402
from models import COMPARED, MODELS  # noqa: E402

sys.path.remove(BENCHMARKS)

SMALL = {"tiles_per_ipu": 4}


def test_figures_of_a_small_model() -> None:
    model = MODELS["mlp"](widths=(6, 8, 10), batch=4)
    actual = fit.figures(model, SMALL, {})
    repeated = fit.figures(model, SMALL, {})
    assert repeated.pop("cpu_seconds") > 0 and {name: actual[name] for name in repeated} == repeated
    assert actual["fits"] and actual["cycles"] > 0 and actual["compute_sets"] > 0
    assert actual["data_bytes"] + actual["code_bytes"] == actual["tile_bytes"]
    assert 0 < actual["exchange_code_bytes"] < actual["code_bytes"] <= actual["most_code_bytes"]
    assert actual["exchange_code_bytes"] <= actual["most_exchange_code_bytes"]
    tight = fit.figures(model, {**SMALL, "bytes_per_tile": actual["tile_bytes"] - 8}, {})
    assert not tight["fits"]


def test_options_that_the_package_lacks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.known_options({"exact_splits": True, "no_such_option": 1}) == {"exact_splits": True}
    assert "no_such_option in this version: left out" in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of measurements, in whose place figures made up from the name are given."""
    asked: list[tuple[Any, ...]] = []

    def measure(name: str, *rest: Any) -> dict[str, float]:
        asked.append((name, *rest))
        if name == "hmm":
            raise ValueError("no such loop\nsecond line")
        return {**dict.fromkeys(fit.COLUMNS, 1000 * len(name)), "fits": name != "gpt-4", "cpu_seconds": 2.0}

    monkeypatch.setattr(fit, "measure_apart", measure)
    return asked


def test_table_file_and_ratios(measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "old.json"
    assert fit.main(["--only", "gpt-4", "--json", str(file)]) == 0
    assert fit.main(["--only", "mlp", "--only", "gcn", "--json", str(file)]) == 0
    first = capsys.readouterr()
    assert [line.split()[0] for line in first.out.splitlines()] == ["cycles", "gpt-4", "cycles", "mlp", "gcn"]
    assert "NO" in first.out.splitlines()[1] and "yes" in first.out.splitlines()[3] and "mlp: 2.0 CPU s" in first.err
    old = json.loads(file.read_text())
    assert old.keys() == {"gpt-4", "mlp", "gcn"}
    old["mlp"]["cycles"] *= 4
    file.write_text(json.dumps(old))
    assert fit.main(["--only", "mlp", "--only", "gpt-4", "--against", str(file)]) == 0
    *_, mean, worst = capsys.readouterr().out.splitlines()
    assert " ".join(mean.split()) == "geometric mean of 2 of the 8 compared models 0.500 1.000 1.000 1.000"
    assert " ".join(worst.split()) == "worst of 2 of the 8 compared models 1.000 1.000 1.000 1.000"


def test_a_model_that_fails_is_named_and_the_rest_is_measured(measured, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main(["--only", "compared", "--tiles", "64", "--byte-cost", "0.5"]) == 1
    assert [name for name, *_ in measured] == list(COMPARED)
    assert measured[0][1:] == ({}, {"tiles_per_ipu": 64}, {"byte_cost": 0.5})
    assert "hmm                failed: ValueError: no such loop\n" in capsys.readouterr().out


def test_sizes_go_to_models_that_have_them(measured, capsys: pytest.CaptureFixture[str]) -> None:
    fit.main(["--only", "bert-large", "--layers", "4", "--micro-batches", "8"])
    assert measured == [("bert-large", {"layers": 4, "micro_batches": 8}, {}, {})]
    with pytest.raises(SystemExit):
        fit.main(["--only", "mlp", "--layers", "4"])
    assert "mlp has no layers" in capsys.readouterr().err and len(measured) == 1


def test_a_process_of_its_own_measures_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    sizes = {"states": 3, "symbols": 4, "length": 5}
    apart = fit.measure_apart("hmm", sizes, SMALL, {})
    here = fit.measure("hmm", sizes, SMALL, {})
    del apart["cpu_seconds"], here["cpu_seconds"]
    assert apart == here


def test_the_page_on_one_gpt_block_has_its_figures(request: pytest.FixtureRequest) -> None:
    path = Path(BENCHMARKS).parent / "docs" / "one_gpt_block.md"
    page = path.read_text(encoding="utf-8")
    actual = fit.figures(MODELS["gpt-block"](), {}, {})
    rows = re.findall(r"^\| `([a-z ]+)` \|.*\| ([\d,]+) \|$", page, re.MULTILINE)
    pasted = {heading: int(now.replace(",", "")) for heading, now in rows if heading in fit.COLUMNS.values()}
    assert {"cycles", "sets", "most exchange", "tile bytes"} <= set(pasted)
    measured = {heading: actual[name] for name, heading in fit.COLUMNS.items() if heading in pasted}
    if request.config.getoption("--update-golden"):
        for heading, figure in measured.items():
            page = re.sub(rf"^(\| `{heading}` \|.*\| )[\d,]+( \|)$", rf"\g<1>{figure:,}\2", page, flags=re.MULTILINE)
        path.write_text(page, encoding="utf-8")
        return
    assert pasted == measured
