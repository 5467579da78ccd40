"""Narrows domains: which bounds a constraint leaves to its variables.

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


def ceil_quotient(left: int, right: int) -> int:
    """A quotient, rounded up."""
    return -(-left // right)


def narrow_sum(domains: Sequence[Domain]) -> list[Domain]:
    """Σ terms = total."""
    *terms, total = domains
    low, high = sum(x.low for x in terms), sum(x.high for x in terms)
    return [*(Domain(total.low - high + x.high, total.high - low + x.low) for x in terms), Domain(low, high)]


def narrow_difference(domains: Sequence[Domain]) -> list[Domain]:
    """left − right = difference."""
    return narrow_sum(domains[::-1])[::-1]


def narrow_product(domains: Sequence[Domain]) -> list[Domain]:
    """Π factors = result."""
    *factors, result = domains
    bounds: list[Domain] = []
    for i in range(len(factors)):
        others = factors[:i] + factors[i + 1 :]
        low, high = prod(x.low for x in others), prod(x.high for x in others)
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
    least = Domain(min(x.low for x in operands), min(x.high for x in operands))
    return [*(Domain(result.low, MAX_VALUE) for _ in operands), least]


def narrow_floordiv(domains: Sequence[Domain]) -> list[Domain]:
    """left // right = quotient: quotient · right ≤ left < (quotient + 1) · right."""
    left, right, quotient = domains
    least, most = max(1, right.low), max(1, right.high)  # a divisor is at least 1: the bound of `right` says so
    return [
        Domain(quotient.low * least, (quotient.high + 1) * most - 1),
        Domain(left.low // (quotient.high + 1) + 1, left.high // quotient.low if quotient.low else MAX_VALUE),
        Domain(left.low // most, left.high // least),
    ]


def narrow_ceildiv(domains: Sequence[Domain]) -> list[Domain]:
    """left / right, rounded up, = quotient: (quotient − 1) · right < left ≤ quotient · right."""
    left, right, quotient = domains
    least, most = max(1, right.low), max(1, right.high)
    return [
        Domain((quotient.low - 1) * least + 1, quotient.high * most),
        Domain(
            max(1, ceil_quotient(left.low, quotient.high)) if quotient.high else 1,
            (left.high - 1) // (quotient.low - 1) if quotient.low > 1 else MAX_VALUE,
        ),
        Domain(ceil_quotient(left.low, most), ceil_quotient(left.high, least)),
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
