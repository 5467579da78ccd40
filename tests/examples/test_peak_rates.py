"""`examples/studies/peak_rates.py` on few tiles: no plan is faster than the claim, and large products come near."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.examples.loading import example

peak_rates = example("studies/peak_rates")


def test_no_plan_is_faster_than_the_claim(peak_rates: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = peak_rates.main(["--tiles", "64", "--sizes", "64", "512"])
    assert len(rows) == 4 and all(row.is_within and row.planned <= row.of_any_plan for row in rows)
    for small, large in zip(rows[::2], rows[1::2], strict=True):
        assert small.of_any_plan < large.of_any_plan and large.of_any_plan > 0.9 * large.claimed
    assert "No plan is faster than the claim." in capsys.readouterr().out


def test_a_bound_above_the_claim_is_told(peak_rates: ModuleType) -> None:
    row = peak_rates.Rates(64, "float32", claimed=31.1, of_any_plan=31.2, planned=20.0)
    assert not row.is_within
