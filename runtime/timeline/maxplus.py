"""Max-plus algebra on clocks: waits and work of several IPUs as matrices.

Waiting for one another is `max`, working is `+`, so a program without data-dependent control is a matrix A over (max,
+), and running it moves the clocks x to A ⊗ x, where (A ⊗ x)_i = max_j (A_ij + x_j). Running it n times is A to the
power n, computed by repeated squaring: exact for every n, without looking for a period of the clocks.

Input and output: int64 arrays of cycles. `NEVER` is the algebra's zero, minus infinity.
Source: F. Baccelli et al., Synchronization and Linearity (1992), chapter 1.
Limits: times stay below 2^60 cycles, 18 years at 2 GHz.
"""

from __future__ import annotations

import numpy as np

from ipujax.runtime.errors import ProfileError

NEVER = -(1 << 60)
_TEMPORARY_ELEMENTS = 1 << 22  # upper bound of int64 elements of a temporary in a product: 32 MiB


def identity(size: int) -> np.ndarray:
    """Return the matrix of a program that leaves `size` clocks unchanged, int64[size, size]."""
    matrix = np.full((size, size), NEVER, np.int64)
    np.fill_diagonal(matrix, 0)
    return matrix


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a ⊗ b, int64[n, k] cycles: the effect of `b`, int64[m, k], followed by that of `a`, int64[n, m].

    All may have one more dimension, of machines.
    """
    result = np.empty((a.shape[0], *b.shape[1:]), b.dtype)
    step = max(1, _TEMPORARY_ELEMENTS // max(1, b.size))
    for first in range(0, len(a), step):
        rows = a[first : first + step]
        result[first : first + step] = (rows[:, :, None] + b[None]).max(1)
    check_time(int(result.max(initial=0)))
    return np.maximum(result, NEVER)  # sums of NEVER would underflow in long chains of products


def check_time(cycles: int) -> None:
    """Refuse 2^60 cycles or more, whose sums with other times might overflow int64."""
    if cycles >= -NEVER:
        raise ProfileError(
            "a run of 2^60 cycles or more cannot be profiled", got=f"{cycles} cycles", hint="fewer repeats"
        )


def apply_power(a: np.ndarray, count: int, x: np.ndarray) -> np.ndarray:
    """Return `a` applied `count` times to `x`, int64[n, k] cycles."""
    while count:
        if count & 1:
            x = product(a, x)
        count >>= 1
        if count:
            a = product(a, a)
    return x
