"""Lists of whole numbers as runs of equal ones: "7 0*1471" is 7, then 1,471 zeros.

Input: numbers by tile, of which most are equal to those beside them. Output: a text, and the numbers again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

_RUNS = re.compile(r"\d{1,18}(?:\*\d{1,9})?(?: \d{1,18}(?:\*\d{1,9})?)*", re.ASCII)


def runs_of(numbers: Sequence[int] | np.ndarray) -> str:
    """Return numbers from 0 on, below 10¹⁸, as runs."""
    values = np.asarray(numbers, np.int64)
    return _text(values, np.ones_like(values))


def _text(values: np.ndarray, counts: np.ndarray) -> str:
    """Return runs of which some beside each other may have equal numbers."""
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])) if len(values) else np.zeros(0, np.int64)
    sizes = np.add.reduceat(counts, starts) if len(values) else starts
    rows = zip(values[starts].tolist(), sizes.tolist(), strict=True)
    return " ".join(f"{value}*{count}" if count > 1 else f"{value}" for value, count in rows)


def values_and_counts(runs: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each run and its length, int64[runs] each.

    Raises:
        ValueError: a text of another form, or a run of no numbers.
    """
    if not runs:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if not _RUNS.fullmatch(runs):
        raise ValueError("no runs of numbers")
    rows = [run.partition("*") for run in runs.split(" ")]
    values = np.array([value for value, _, _ in rows], np.int64)
    counts = np.array([count or "1" for _, _, count in rows], np.int64)
    if not counts.all():
        raise ValueError("a run of no numbers")
    return values, counts


def numbers_of_runs(runs: str) -> np.ndarray:
    """Return the numbers, int64[…]; see `runs_of`."""
    return np.repeat(*values_and_counts(runs))


def total_of_runs(runs: str) -> int:
    """Return the sum of the numbers."""
    values, counts = values_and_counts(runs)
    return sum(value * count for value, count in zip(values.tolist(), counts.tolist(), strict=True))


def sum_of_runs(lists: Iterable[str]) -> str:
    """Return the sums of lists of equal lengths, element by element."""
    rows = [values_and_counts(runs) for runs in lists]
    ends = np.unique(np.concatenate([np.cumsum(counts) for _, counts in rows] or [np.zeros(0, np.int64)]))
    sums = np.zeros(len(ends), np.int64)
    for values, counts in rows:
        sums += values[np.searchsorted(np.cumsum(counts), ends)]
    return _text(sums, np.diff(ends, prepend=0))
