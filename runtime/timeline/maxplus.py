"""Max-plus algebra on clocks: what waiting and working do to the times of several IPUs.

Waiting for one another is `max`, working is `+`, so a program without data-dependent control is a matrix A over (max,
+), and running it moves the clocks x to A ⊗ x, where (A ⊗ x)_i = max_j (A_ij + x_j). Running it n times is A to the
power n, found by repeated squaring: exact for every n, with no need to notice when the clocks become periodic.

Input and output: int64 arrays of cycles. `NEVER` is the algebra's zero, minus infinity.
Source: F. Baccelli et al., Synchronization and Linearity (1992), chapter 1.
Limits: times stay below 2^60 cycles, 18 years at 2 GHz.
"""

from __future__ import annotations

import numpy as np

from ipujax.runtime.errors import ProfileError

NEVER = -(1 << 60)
_ROWS_ELEMENTS = 1 << 22  # most int64 elements of a temporary in a product: 32 MiB


def identity(size: int) -> np.ndarray:
    """The program that does nothing to `size` clocks, int64[size, size]."""
    matrix = np.full((size, size), NEVER, np.int64)
    np.fill_diagonal(matrix, 0)
    return matrix


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a ⊗ b: first what `b` does, then what `a` does.

    Args:
        a: int64[n, m], cycles.
        b: int64[m, k], cycles.

    Returns:
        int64[n, k], cycles.
    """
    result = np.empty((a.shape[0], b.shape[1]), np.int64)
    step = max(1, _ROWS_ELEMENTS // max(1, b.size))
    for first in range(0, len(a), step):
        rows = a[first : first + step]
        result[first : first + step] = (rows[:, :, None] + b[None]).max(1)
    check_time(int(result.max(initial=0)))
    return np.maximum(result, NEVER)


def check_time(cycles: int) -> None:
    """Refuses a time that sums of times might not hold.

    Raises:
        ProfileError: 2^60 cycles or more.
    """
    if cycles >= -NEVER:
        raise ProfileError("a run of 2^60 cycles or more has no profile", got=f"{cycles} cycles", hint="fewer repeats")


def repeated(a: np.ndarray, count: int, x: np.ndarray) -> np.ndarray:
    """Returns `a` applied `count` times to `x`, int64[n, k]."""
    while count:
        if count & 1:
            x = product(a, x)
        count >>= 1
        if count:
            a = product(a, a)
    return x
