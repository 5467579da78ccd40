"""The record of a primitive: what is true of it, whichever pass asks.

    correspondence of dimensions    `factors`, and `block_params`, the parameters of an equation on parts of its values
    view                            `view`: where a result has the elements of its operand
    monoid                          `monoid`: what a reduction, or an update, combines values by
    work                            `macs`, and `problem`, the operations of independent problems
    kind of cost                    `cost`, `is_cheap`

Limits: what a primitive costs on tiles is in the op library; how it is lowered is in `rules/`.

Factors are the index space of an equation. A factor is an index that runs over dimensions of operands and results: a
product [i, k] · [k, j] → [i, j] has three. Some indices of a factor are a part of every dimension that it runs over,
and the equation can be computed on such parts: by devices that share it, or row by row. A factor that runs over
operands only is reduced: each part gives a partial result, called its term, and the result combines them. A dimension
without factor is computed whole. A dimension may have several factors, major to minor, as that of a reshape has.
Idea: sharding rules of Shardy (openxla/shardy, docs/sharding_representation.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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


def factors_by_number(
    eqn: JaxprEqn, operands: Sequence[Sequence[int | None]], results: Sequence[Sequence[int | None]]
) -> Factors:
    """Index space of an equation whose dimensions have at most one factor each.

    A factor is an index that dimensions of operands and results share: [i, k] · [k, j] → [i, j] has three. The equation
    can be computed on a part of its range.

    Args:
        eqn: the equation.
        operands: for each operand the number of each dimension's factor; None for one that is computed whole.
        results: for each result likewise.
    """
    sizes: dict[int, int] = {}  # by factor
    labels_of: list[tuple[Labels, ...]] = []
    for atoms, factors_of_atoms in ((eqn.invars, operands), (eqn.outvars, results)):
        labels: list[Labels] = []  # for each operand or result the factors, one or none, of each dimension
        for shape, factors in zip(shapes(atoms), factors_of_atoms, strict=True):
            labels.append(tuple(() if f is None else (f,) for f in factors))
            sizes.update((f, n) for f, n in zip(factors, shape, strict=True) if f is not None)
        labels_of.append(tuple(labels))
    return Factors(labels_of[0], labels_of[1], sizes)


def factors_except(eqn: JaxprEqn, whole_dims: Sequence[int]) -> Factors:
    """Index space of an equation that works along its dimensions: a factor (index) for each that is not computed whole.

    Args:
        eqn: an equation whose operands and results have the same dimensions, but for scalars, which have no factors.
        whole_dims: dimensions that are computed whole.
    """
    operands = shapes(eqn.invars)
    results = shapes(eqn.outvars)
    # Size of each dimension: an operand of size 1 along it is repeated.
    longest = [max(sizes) for sizes in zip(*(s for s in (*operands, *results) if s), strict=False)]

    def factor_numbers(shape: Sequence[int]) -> list[int | None]:
        """The factor of each dimension, which has its number; None for one that is whole, or of size 1 and repeated."""
        return [None if d in whole_dims or n != longest[d] else d for d, n in enumerate(shape)]

    return factors_by_number(eqn, list(map(factor_numbers, operands)), list(map(factor_numbers, results)))


def elementwise(eqn: JaxprEqn) -> Factors:
    """Index space of an elementwise equation: an index, or factor, for each dimension."""
    return factors_except(eqn, ())


def batched(eqn: JaxprEqn, batch: int) -> Factors:
    """Index space of independent problems: a factor (index) for each of the first `batch` dimensions, which count them.

    The other dimensions are of one problem, which is not split.
    """

    def factor_numbers(shape: Sequence[int]) -> list[int | None]:
        return [d if d < batch else None for d in range(len(shape))]

    operands, results = (list(map(factor_numbers, shapes(atoms))) for atoms in (eqn.invars, eqn.outvars))
    return factors_by_number(eqn, operands, results)


def each_alone(eqn: JaxprEqn) -> Factors:
    """Index space of an equation with a result like each operand, as a barrier: indices of their own for each."""
    numbers: list[Sequence[int]] = []
    first = 0
    for shape in shapes(eqn.invars):
        numbers.append(range(first, first + len(shape)))
        first += len(shape)
    return factors_by_number(eqn, numbers, numbers)


def over_axes(eqn: JaxprEqn, monoid: str) -> Factors:
    """Sum or extreme over axes of a mesh or of replicas, of each operand alone.

    Axes that are numbers, of an axis of `jax.vmap`, are dimensions of the operands, which are reduced.
    """
    reduced_dims = [axis for axis in eqn.params["axes"] if isinstance(axis, int)]
    operands: list[range] = []
    results: list[list[int]] = []
    reduced: list[int] = []
    first = 0
    for shape in shapes(eqn.invars):
        factors = range(first, first + len(shape))
        operands.append(factors)
        reduced += [factors[d] for d in reduced_dims]
        results.append([factor for factor in factors if factor not in reduced])
        first += len(shape)
    return replace(factors_by_number(eqn, operands, results), reductions=dict.fromkeys(reduced, monoid))


def none_split(eqn: JaxprEqn) -> Factors:
    """Every dimension is computed whole, by each device, without communication."""
    return factors_by_number(eqn, *([[None] * len(s) for s in shapes(atoms)] for atoms in (eqn.invars, eqn.outvars)))


Cost = Literal["view", "part", "joined", "none", "body", "product", "look-up", "elementwise", "statement", "other"]
View = Literal["in order", "repeated", "permuted", "reversed", "copied"]
Shapes = Sequence[tuple[int, ...]]


def _no_changes(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> Mapping[str, Any]:
    return {}


def _no_macs(eqn: JaxprEqn) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Problem:
    """One of the independent problems of an equation, as those of a batch of matrices.

    Args:
        rank: dimensions of a problem by the parameters, the last of the first operand; those before count problems in
            all operands and results. None for a primitive that is always one problem.
        columns: dimension of the last operand, and of the only result, along which columns are problems too.
        work: operations for each element of the largest of operands and results, or of the columns, from the size n of
            a problem: the smallest dimension of the first operand, of a Fourier transform the product of all. None if
            they are not counted.
    """

    rank: Callable[[Mapping[str, Any]], int] | None = None
    columns: Callable[[Mapping[str, Any]], int] | None = None
    work: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True)
class PrimitiveRecord:
    """Facts of one primitive, which passes and cost estimates read.

    Args:
        factors: index space of an equation; None where it is not known.
        block_params: changed parameters of an equation on blocks, from their shapes.
        cost: "view" of all elements of an operand, "part" of them, "joined" views, "none" for no code at all, "body"
            for the jaxprs inside, "product" for multiply-adds, "look-up" of a part of the first operand, "elementwise"
            for a row of the op library's costs, "statement" for what says where a value is.
        view: how a view of all elements has them: "in order", "repeated" in order, with dimensions "permuted" or
            "reversed", or "copied" as its operand has them.
        is_elementwise: each element of the result comes from those of the same position.
        is_commutative: has two operands, in either order.
        is_cheap: takes a few instructions an element, as arithmetic and choices do.
        compares: chooses by comparing values: elements of an operand, or operands if it is elementwise.
        keeps_sums: it is linear: applied to partial sums it gives those of its result.
        monoid: what combines the elements that it reduces, or the updates of one element.
        rows: whether it reads rows of a table at indices, or writes them.
        macs: multiply-adds of an equation.
        problem: its independent problems.
        has_state: it reads a state that is no operand, as of a generator: each execution has other results.
    """

    factors: Callable[[JaxprEqn], Factors] | None = None
    block_params: Callable[[JaxprEqn, Shapes, Shapes], Mapping[str, Any]] = _no_changes
    cost: Cost = "other"
    view: View | None = None
    is_elementwise: bool = False
    is_commutative: bool = False
    is_cheap: bool = False
    compares: bool = False
    keeps_sums: bool = False
    monoid: str | None = None
    rows: Literal["read", "written"] | None = None
    macs: Callable[[JaxprEqn], int] = _no_macs
    problem: Problem = Problem()
    has_state: bool = False

    @property
    def is_reduction(self) -> bool:
        """True if it combines elements along dimensions by a monoid."""
        return self.monoid is not None and self.rows is None

    @property
    def is_in_order(self) -> bool:
        """True for a view with the elements of its operand in order, if it has each once."""
        return self.view in ("in order", "repeated")
