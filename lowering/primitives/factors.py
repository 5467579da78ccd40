"""Factors: the index space of an equation.

A factor is an index that runs over dimensions of operands and results: a product [i, k] · [k, j] → [i, j] has three.
Some indices of a factor are a part of every dimension that it runs over, and the equation can be computed on such
parts: by devices that share it, or row by row. A factor that runs over operands only is reduced: parts give terms of
the result. A dimension without factor is computed whole. A dimension may have several factors, major to minor, as that
of a reshape has.
Idea: sharding rules of Shardy (openxla/shardy, docs/sharding_representation.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipujax.lowering.jax_compat import JaxprEqn

Labels = tuple[tuple[int, ...], ...]  # factors of each dimension


@dataclass(frozen=True, slots=True)
class Factors:
    """Index space of one equation.

    Args:
        operands: for each operand the factors of each dimension.
        results: for each result likewise.
        sizes: length of each factor.
        reductions: for each reduced factor that may be split, the monoid of its terms: "add", "max" or "min";
            "own" for one without a collective, whose terms are gathered and reduced by the equation.
        macs: multiply-adds of one point of the index space; 0 for other equations.
        positions: factors of which a part is computed otherwise than the whole, by where it begins.
    """

    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    sizes: Mapping[int, int]
    reductions: Mapping[int, str] = field(default_factory=dict)
    macs: int = 0
    positions: frozenset[int] = frozenset()


def shapes(atoms: Sequence[Any]) -> list[tuple[int, ...]]:
    """Shapes of operands or results."""
    return [tuple(atom.aval.shape) for atom in atoms]


def aligned(
    eqn: JaxprEqn, operands: Sequence[Sequence[int | None]], results: Sequence[Sequence[int | None]]
) -> Factors:
    """Factors of an equation whose dimensions have at most one factor each, given by its number, or None."""
    sizes: dict[int, int] = {}
    labels_of: list[tuple[Labels, ...]] = []
    for atoms, numbers in ((eqn.invars, operands), (eqn.outvars, results)):
        labels: list[Labels] = []
        for shape, dims in zip(shapes(atoms), numbers, strict=True):
            labels.append(tuple(() if f is None else (f,) for f in dims))
            sizes.update((f, n) for f, n in zip(dims, shape, strict=True) if f is not None)
        labels_of.append(tuple(labels))
    return Factors(labels_of[0], labels_of[1], sizes)


def except_dims(eqn: JaxprEqn, whole: Sequence[int]) -> Factors:
    """One factor a dimension, but for those that are computed whole; scalars, and dimensions of size 1 that are
    broadcast, have none.
    """
    operands = shapes(eqn.invars)
    results = shapes(eqn.outvars)
    longest = [max(sizes) for sizes in zip(*(s for s in (*operands, *results) if s), strict=False)]

    def labels(shape: Sequence[int]) -> list[int | None]:
        return [None if d in whole or n != longest[d] else d for d, n in enumerate(shape)]

    return aligned(eqn, list(map(labels, operands)), list(map(labels, results)))


def elementwise(eqn: JaxprEqn) -> Factors:
    """One factor a dimension."""
    return except_dims(eqn, ())


def batched(eqn: JaxprEqn, batch: int) -> Factors:
    """One factor for each of the first dimensions, which count independent problems."""

    def labels(shape: Sequence[int]) -> list[int | None]:
        return [d if d < batch else None for d in range(len(shape))]

    return aligned(eqn, [labels(s) for s in shapes(eqn.invars)], [labels(s) for s in shapes(eqn.outvars)])


def each_alone(eqn: JaxprEqn) -> Factors:
    """Results that are their operands, each with factors of its own."""
    numbers: list[Sequence[int]] = []
    first = 0
    for shape in shapes(eqn.invars):
        numbers.append(range(first, first + len(shape)))
        first += len(shape)
    return aligned(eqn, numbers, numbers)


def none_split(eqn: JaxprEqn) -> Factors:
    """Every dimension is computed whole, by each device, without communication."""
    return aligned(eqn, *([[None] * len(s) for s in shapes(atoms)] for atoms in (eqn.invars, eqn.outvars)))
