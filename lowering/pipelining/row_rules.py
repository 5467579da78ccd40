"""Equations that go row by row along the first axis of their operands and results: stacks of layers.

    each      row i of the result comes from row i of the operands: x * y, casts, transposes of the other axes
    chain     a `lax.scan`: rows are its iterations, and the carry goes from row to row
    combine   a reduction over rows, which combines those of groups of rows
    sums      a sum over replicas of several values: row i of each result comes from row i of its own operand

Input: an equation. Output: its `Rows`, None if rows are mixed, and the parameters of the equation for some rows.
Limits: equations whose factors are unknown mix rows; so do loops and branches, except a scan of as many iterations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jax import lax

from ipujax.lowering.gcl import is_reduction
from ipujax.lowering.jax_compat import JaxprEqn, Primitive, shape_of
from ipujax.lowering.jaxpr import scan_body
from ipujax.lowering.primitives import Factors, Labels, record_of

Kind = Literal["each", "chain", "combine", "sums"]

COMBINES: dict[str, Primitive] = {
    "add": lax.add_p,
    "mul": lax.mul_p,
    "max": lax.max_p,
    "min": lax.min_p,
    "and": lax.and_p,
    "or": lax.or_p,
    "xor": lax.xor_p,
}
_OF_ROWS = frozenset(("remote_load", "remote_fetch", "remote_take", "remote_hand", "remote_store", "remote_wait"))


@dataclass(frozen=True, slots=True)
class Rows:
    """The operands and results of an equation that have rows: slices of a stack along its first axis."""

    kind: Kind  # how rows of results come from rows of operands, see the module
    operands: tuple[bool, ...]  # for each operand whether it has rows
    results: tuple[bool, ...]  # for each result whether it has rows


def rows_of(eqn: JaxprEqn) -> Rows | None:
    """Which operands and results of an equation have rows, slices along their first axis that are computed one by one.

    None if it mixes rows. `Rows.kind` "each": a row of a result comes from that row of the operands; "sums": from that
    row of its own operand.
    """
    if eqn.primitive.name == "scan":
        return _rows_of_scan(eqn)
    if eqn.primitive.name in _OF_ROWS:
        return Rows("each", operands=(True,) * len(eqn.invars), results=(True,) * len(eqn.outvars))
    if is_reduction(eqn):  # over replicas, of each of several operands element by element; a scalar has no rows
        has_rows = tuple(bool(shape_of(atom)) for atom in eqn.invars)
        return Rows("sums", operands=has_rows, results=has_rows)
    record = record_of(eqn)
    has_sharding = eqn.params.get("sharding", eqn.params.get("out_sharding")) is not None
    # A "statement" says where a value is, as a sharding does: that is of the whole value.
    if record.factors is None or record.cost == "statement" or has_sharding or eqn.effects:
        return None
    factors = record.factors(eqn)
    # `record.is_reduction`: it reduces dimensions of its operand, unlike `is_reduction` above.
    return _rows_computed_alone(factors) or (_rows_reduced(factors) if record.is_reduction else None)


def params_for(eqn: JaxprEqn, rows: Rows, count: int) -> dict[str, Any]:
    """The parameters of an equation that computes only `count` rows of another, whose rows are `rows`."""
    if rows.kind == "chain":
        return {**eqn.params, "length": count, "unroll": min(eqn.params["unroll"], count)}
    operands, results = (
        [(count, *shape_of(x)[1:]) if has else shape_of(x) for x, has in zip(atoms, flags, strict=True)]
        for atoms, flags in ((eqn.invars, rows.operands), (eqn.outvars, rows.results))
    )
    return {**eqn.params, **record_of(eqn).block_params(eqn, operands, results)}


def _rows_computed_alone(factors: Factors) -> Rows | None:
    """Rows of one factor that is the first dimension of all results, and part of no other dimension."""
    first = {_row_factor(labels) for labels in factors.results}
    factor = first.pop() if len(first) == 1 else None
    values = (*factors.operands, *factors.results)
    # Rows of a factor with positions are computed otherwise if they begin at another place.
    if factor is None or factor in factors.positions or any(_is_elsewhere(factor, labels) for labels in values):
        return None
    return Rows("each", operands=_have_rows(factor, factors.operands), results=_have_rows(factor, factors.results))


def _rows_reduced(factors: Factors) -> Rows | None:
    """Rows of a reduction over the first dimension, None of one over other dimensions only."""
    (labels,) = factors.operands
    combined = Rows("combine", operands=(True,), results=(False,))
    return combined if _row_factor(labels) in factors.reductions else None


def _row_factor(labels: Labels) -> int | None:
    """The factor of the first dimension, None if it has several or none."""
    return labels[0][0] if labels and len(labels[0]) == 1 else None


def _is_elsewhere(factor: int, labels: Labels) -> bool:
    """True if a factor runs over another dimension than the first, or over a part of the first."""
    return any(factor in factors and (dim or len(factors) > 1) for dim, factors in enumerate(labels))


def _have_rows(factor: int, values: tuple[Labels, ...]) -> tuple[bool, ...]:
    """For each value whether a factor is its first dimension."""
    return tuple(labels[:1] == ((factor,),) for labels in values)


def _rows_of_scan(eqn: JaxprEqn) -> Rows:
    body = scan_body(eqn.params)
    return Rows("chain", operands=body.operands.are_stacks(), results=body.results.are_stacks())
