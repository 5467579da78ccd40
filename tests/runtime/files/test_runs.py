"""Runs of equal numbers against lists."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax.runtime.files import numbers_of_runs, runs_of, total_of_runs
from ipujax.runtime.files.figure_kinds import sum_of_runs

EXAMPLES = {"": [], "7": [7], "7 0*3": [7, 0, 0, 0], "1 2 1": [1, 2, 1], f"{2**53}*2": [2**53] * 2}


@pytest.mark.parametrize("runs", EXAMPLES)
def test_examples(runs):
    assert runs_of(EXAMPLES[runs]) == runs and numbers_of_runs(runs).tolist() == EXAMPLES[runs]
    assert total_of_runs(runs) == sum(EXAMPLES[runs])


def test_random_lists():
    generator = np.random.default_rng(0)
    for size in range(40):
        lists = [generator.integers(0, 3, size) for _ in range(4)]
        assert [numbers_of_runs(runs_of(x)).tolist() for x in lists] == [x.tolist() for x in lists]
        assert sum_of_runs(map(runs_of, lists)) == runs_of(sum(lists))


@pytest.mark.parametrize(
    "text", [" ", "1 ", "-1", "1*", "*2", "1*0", "1*2*3", "1.0", "١", "1\n", "1" * 19, "1*" + "1" * 10]
)
def test_texts_that_are_no_runs(text):
    with pytest.raises(ValueError, match=r"no runs|no numbers"):
        numbers_of_runs(text)
