"""Narrows domains to the bounds that a constraint leaves to its variables.

Input: the domains of a constraint's variables, a result last. Output: a bound for each of them, which the solver
intersects with the domain. A bound holds all values of solutions; of single values it holds exactly the solutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

MAX_VALUE = (1 << 32) - 1  # of variables: Poplar's unsigned int


class Domain(NamedTuple):
    """All whole numbers from `low` to `high`, both included."""

    low: int
    high: int


Narrow = Callable[[Sequence[Domain]], Sequence[Domain]]


def ceil_quotient(dividend: int, divisor: int) -> int:
    """Return a quotient, rounded up."""
    return -(-dividend // divisor)


def narrow_sum(domains: Sequence[Domain]) -> list[Domain]:
    """Σ terms = total."""
    *terms, total = domains
    low = sum(x.low for x in terms)
    high = sum(x.high for x in terms)
    return [*(Domain(total.low - high + x.high, total.high - low + x.low) for x in terms), Domain(low, high)]


def narrow_difference(domains: Sequence[Domain]) -> list[Domain]:
    """left − right = difference."""
    # left = right + difference, read backwards: the order of the domains is reversed twice.
    return narrow_sum(domains[::-1])[::-1]


def narrow_product(domains: Sequence[Domain]) -> list[Domain]:
    """Π factors = result."""
    *factors, result = domains
    bounds: list[Domain] = []
    for i in range(len(factors)):
        other_factors = factors[:i] + factors[i + 1 :]
        low = prod(x.low for x in other_factors)
        high = prod(x.high for x in other_factors)
        # A factor is bounded from above only where all others are positive: 0 · x = 0 for all x.
        bounds.append(Domain(ceil_quotient(result.low, high) if high else 0, result.high // low if low else MAX_VALUE))
    return [*bounds, Domain(prod(x.low for x in factors), prod(x.high for x in factors))]


def narrow_max(domains: Sequence[Domain]) -> list[Domain]:
    """max(operands) = result."""
    *operands, result = domains
    greatest = Domain(max(x.low for x in operands), max(x.high for x in operands))
    return [*(Domain(0, result.high) for _ in operands), greatest]


def narrow_min(domains: Sequence[Domain]) -> list[Domain]:
    """min(operands) = result."""
    *operands, result = domains
    smallest = Domain(min(x.low for x in operands), min(x.high for x in operands))
    return [*(Domain(result.low, MAX_VALUE) for _ in operands), smallest]


def narrow_floordiv(domains: Sequence[Domain]) -> list[Domain]:
    """left // right = quotient: quotient · right ≤ left < (quotient + 1) · right."""
    left, right, quotient = domains
    # A divisor is at least 1: the bound of `right` says so.
    divisor_low = max(1, right.low)
    divisor_high = max(1, right.high)
    return [
        Domain(quotient.low * divisor_low, (quotient.high + 1) * divisor_high - 1),
        Domain(left.low // (quotient.high + 1) + 1, left.high // quotient.low if quotient.low else MAX_VALUE),
        Domain(left.low // divisor_high, left.high // divisor_low),
    ]


def narrow_ceildiv(domains: Sequence[Domain]) -> list[Domain]:
    """left / right, rounded up, = quotient: (quotient − 1) · right < left ≤ quotient · right."""
    left, right, quotient = domains
    divisor_low = max(1, right.low)
    divisor_high = max(1, right.high)
    return [
        Domain((quotient.low - 1) * divisor_low + 1, quotient.high * divisor_high),
        Domain(
            max(1, ceil_quotient(left.low, quotient.high)) if quotient.high else 1,
            (left.high - 1) // (quotient.low - 1) if quotient.low > 1 else MAX_VALUE,
        ),
        Domain(ceil_quotient(left.low, divisor_high), ceil_quotient(left.high, divisor_low)),
    ]


def narrow_ordered(gap: int, domains: Sequence[Domain]) -> list[Domain]:
    """left + gap ≤ right."""
    left, right = domains
    return [Domain(0, right.high - gap), Domain(left.low + gap, MAX_VALUE)]


def narrow_equal(domains: Sequence[Domain]) -> list[Domain]:
    """left = right."""
    return list(domains[::-1])


def narrow_to_better(best: Sequence[int], domains: Sequence[Domain]) -> list[Domain]:
    """Objectives that come before those of the best solution, in lexicographic order."""
    bounds = [Domain(0, MAX_VALUE) for _ in domains]
    for i, (domain, value) in enumerate(zip(domains, best, strict=True)):
        bounds[i] = Domain(0, value - (i == len(best) - 1))
        if domain.low < value:
            break
    return bounds
