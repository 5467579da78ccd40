"""Rows of numbers of which a sample is listed, so that an exchange of any size is counted in bounded time.

Input: for each row the first number and how many follow it. Output: numbers of each row, all or a sample, and how many
numbers each listed one stands for. A row of a sample has one number of every `step`, at a place that depends on the
numbers alone: rows that overlap list the same numbers where they do. The weights of a row add up to its numbers.
Limits: rows of few numbers are sampled evenly, on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

_FEWEST = 16  # numbers of a row that is sampled, assumed: an end of a box is a sixteenth of it at most
_SAMPLE = 1 / 4  # listed numbers to those that are listed without a sample, assumed
_MIX = 0x9E3779B1  # 2^32 over the golden ratio: multiples are spread evenly (Knuth, vol. 3, 6.4)


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number of the row and position in it of every entry of rows of given lengths, int64[sum of counts] each."""
    row = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return row, np.arange(len(row)) - first[row]


def sampling_steps(counts: Sequence[np.ndarray], most: float) -> tuple[list[int], int]:
    """How densely boxes are sampled that have more than `most` points together.

    Args:
        counts: for each dimension the numbers of each box, int64[boxes] each.
        most: points that are all listed; of more, a quarter of so many.

    Returns:
        For each dimension how many numbers a listed one stands for, 1 where all are listed; and the fewest numbers that
        are listed of a dimension.
    """
    steps, listed = [1] * len(counts), [np.asarray(count, np.float64) for count in counts]
    if not counts or np.sum(np.prod(listed, axis=0)) <= most:
        return steps, _FEWEST
    boxes, sample = len(counts[0]), _SAMPLE * most
    fewest = min(_FEWEST, max(1, int((sample / boxes) ** (1 / len(counts)))))
    while np.sum(np.prod(listed, axis=0)) > sample:
        means = [float(numbers.mean()) for numbers in listed]
        dim = int(np.argmax(means))
        if means[dim] <= fewest:
            break
        steps[dim] *= 2
        listed[dim] = np.maximum(np.minimum(counts[dim], fewest), counts[dim] / steps[dim])
    return steps, fewest


def sampled(
    first: np.ndarray, count: np.ndarray, step: int, fewest: int = _FEWEST
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A sample of rows of successive numbers.

    Args:
        first: the first number of each row, int64[rows].
        count: how many numbers it has, at least 1, int64[rows].
        step: how many numbers a listed one stands for.
        fewest: numbers that are listed of a row, or all if it has fewer.

    Returns:
        The row of each listed number, its position in the row, and how many it stands for, float64.
    """
    is_few = count < fewest * step
    low = first // step
    row, within = ragged(np.where(is_few, np.minimum(count, fewest), (first + count - 1) // step - low + 1))
    chunk = low[row] + within
    spread = chunk * step + (chunk * _MIX & 0x7FFFFFFF) % step - first[row]
    even = (2 * within + 1) * count[row] // (2 * np.minimum(count, fewest)[row])
    position = np.where(is_few[row], even, spread)
    inside = (position >= 0) & (position < count[row])
    row, position = row[inside], position[inside]
    return row, position, (count / np.bincount(row, minlength=len(count)))[row]


def sampled_if_many(
    first: np.ndarray, count: np.ndarray, most: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """All numbers of rows, or a sample if there are more than `most`; as `sampled`, the weight None for all."""
    numbers = int(count.sum())
    if numbers <= most:
        return (*ragged(count), None)
    return sampled(
        first, count, ceil(numbers / (_SAMPLE * most)), max(1, min(_FEWEST, int(_SAMPLE * most / len(count))))
    )
