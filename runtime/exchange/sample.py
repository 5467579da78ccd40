"""Samples of rows of numbers, so that an exchange of any size is counted in bounded time.

Input: for each row its first number and their count. Output: numbers of each row, all or a sample, and the weight of
each listed one, the count of numbers that it stands for. A row of a sample has one number of every `step`, at a
position that depends on the numbers alone: overlapping rows list the same numbers where they overlap. The weights of a
row add up to its count.
Limits: rows of few numbers are sampled evenly, each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

_MIN_LISTED = 16  # numbers listed of a sampled row, assumed: an end of a block is a sixteenth of it at most
_SAMPLED_SHARE = 1 / 4  # size of a sample, as a share of the limit beyond which one is drawn; assumed
_MIX = 0x9E3779B1  # 2^32 over the golden ratio: multiples are spread evenly (Knuth, vol. 3, 6.4)


def ragged_rows(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the position in it of every entry of rows of given lengths, int64[sum of counts] each."""
    row = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return row, np.arange(len(row)) - first[row]


def sampling_steps(counts: Sequence[np.ndarray], max_points: float) -> tuple[list[int], int]:
    """Return a sampling step for each dimension of blocks, and the minimum of numbers listed of a dimension."""
    # All steps are 1 for at most `max_points` points in all; else the steps list about a quarter of that limit.
    steps = [1] * len(counts)
    listed = [np.asarray(count, np.float64) for count in counts]
    if not counts or np.sum(np.prod(listed, axis=0)) <= max_points:
        return steps, _MIN_LISTED
    blocks = len(counts[0])
    sample = _SAMPLED_SHARE * max_points
    min_listed = min(_MIN_LISTED, max(1, int((sample / blocks) ** (1 / len(counts)))))
    while np.sum(np.prod(listed, axis=0)) > sample:
        means = [float(numbers.mean()) for numbers in listed]
        dim = int(np.argmax(means))  # thinned where rows are longest, so that short rows stay complete
        if means[dim] <= min_listed:  # no dimension can be thinned further: the limit is exceeded
            break
        steps[dim] *= 2
        listed[dim] = np.maximum(np.minimum(counts[dim], min_listed), counts[dim] / steps[dim])
    return steps, min_listed


def sample_rows(
    first: np.ndarray, count: np.ndarray, step: int, min_listed: int = _MIN_LISTED
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample one of about `step` numbers of rows: the row of each, its position there, and its weight, float64."""
    is_few = count < min_listed * step
    low = first // step
    row, within = ragged_rows(np.where(is_few, np.minimum(count, min_listed), (first + count - 1) // step - low + 1))
    # One number of each aligned chunk of `step`, chosen by a hash of the chunk's number: the same in every row.
    chunk = low[row] + within
    spread = chunk * step + (chunk * _MIX & 0x7FFFFFFF) % step - first[row]
    # A row of few numbers would often have no chunk of its own: its sample is spread evenly instead.
    even = (2 * within + 1) * count[row] // (2 * np.minimum(count, min_listed)[row])
    position = np.where(is_few[row], even, spread)
    inside = (position >= 0) & (position < count[row])
    row = row[inside]
    return row, position[inside], (count / np.bincount(row, minlength=len(count)))[row]


def list_or_sample(
    first: np.ndarray, count: np.ndarray, max_numbers: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """List all numbers of rows, or sample more than `max_numbers`; as `sample_rows`, the weight None for all."""
    numbers = int(count.sum())
    if numbers <= max_numbers:
        return (*ragged_rows(count), None)
    sample = _SAMPLED_SHARE * max_numbers
    return sample_rows(first, count, ceil(numbers / sample), max(1, min(_MIN_LISTED, int(sample / len(count)))))
