"""The record of a primitive: what is true of it, whichever pass asks.

    correspondence of dimensions    `factors`, and `block_params`, the parameters of an equation on parts of its values
    view                            `view`: where a result has the elements of its operand
    monoid                          `monoid`: what a reduction, or an update, combines values by
    work                            `macs`, and `problem`, the operations of independent problems
    kind of cost                    `cost`, `is_cheap`

Limits: what a primitive costs on tiles is in the op library; how it is lowered is in `rules/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.primitives.factors import Factors

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
    """What is true of one primitive.

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
        keeps_sums: a sum may be taken after it instead of before.
        monoid: what combines the elements that it reduces, or the updates of one element.
        rows: whether it reads rows of a table at indices, or writes them.
        macs: multiply-adds of an equation.
        problem: its independent problems.
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

    @property
    def is_reduction(self) -> bool:
        """True if it combines elements along dimensions by a monoid."""
        return self.monoid is not None and self.rows is None

    @property
    def is_in_order(self) -> bool:
        """True for a view with the elements of its operand in order, if it has each once."""
        return self.view in ("in order", "repeated")
