"""`examples/studies/training_step.py` on small settings: the interval has the cycles; without a host it is narrower."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from tests.examples.loading import example

training_step = example("studies/training_step")


def test_the_interval_is_narrower_without_the_host(
    training_step: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    widths = []
    for flags in ([], ["--no-host"]):
        training_step.main(["--batch", "16", "--tiles", "8", *flags])
        text = capsys.readouterr().out
        figures = re.match(r"([\d,]+) cycles, 90 % interval ([\d,]+) to ([\d,]+)", text)
        assert figures
        cycles, low, high = (int(number.replace(",", "")) for number in figures.groups())
        assert low < cycles < high
        widths.append((high - low) / cycles)
        assert ("host_latency_seconds" in text) == (not flags)
    assert widths[1] < widths[0]
