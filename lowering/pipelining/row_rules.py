"""Table of equations that go row by row along the first axis of their operands and results: stacks of layers.

    each      row i of the result comes from row i of the operands: x * y, casts, transposes of the other axes
    chain     a `lax.scan`: rows are its iterations, and the carry goes from row to row
    combine   a reduction over rows, which combines those of groups of rows
    sums      a sum over replicas of several values, each by itself

Input: an equation. Output: its `Rows`, None if rows are mixed, and the parameters of the equation for some rows.
Limits: primitives outside the table mix rows; so do loops and branches, except a scan of as many iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jax import lax

from ipujax.lowering.gcl import is_reduction
from ipujax.lowering.jax_compat import JaxprEqn, Primitive, shape_of
from ipujax.lowering.popops import OP_COSTS

Kind = Literal["each", "chain", "combine", "sums"]

COMBINES: dict[str, Primitive] = {
    "reduce_sum": lax.add_p,
    "reduce_prod": lax.mul_p,
    "reduce_max": lax.max_p,
    "reduce_min": lax.min_p,
    "reduce_and": lax.and_p,
    "reduce_or": lax.or_p,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """The operands and results of an equation that have rows."""

    kind: Kind
    operands: tuple[bool, ...]  # for each operand whether it has rows
    results: tuple[bool, ...]  # for each result whether it has rows


def rows_of(eqn: JaxprEqn) -> Rows | None:
    """The rows of an equation, None if it mixes them."""
    name = eqn.primitive.name
    if name in OP_COSTS:
        return _elementwise(eqn)
    if name in _RULES:
        return _RULES[name](eqn)
    if is_reduction(eqn):
        has_rows = tuple(bool(shape_of(atom)) for atom in eqn.invars)
        return Rows("sums", has_rows, has_rows)
    return None


def params_for(eqn: JaxprEqn, rows: int) -> dict[str, Any]:
    """The parameters of an equation that computes only so many rows of another."""
    params = eqn.params
    match eqn.primitive.name:
        case "broadcast_in_dim":
            return {**params, "shape": (rows, *params["shape"][1:])}
        case "reshape":
            return {**params, "new_sizes": (rows, *params["new_sizes"][1:])}
        case "scan":
            return {**params, "length": rows, "unroll": min(params["unroll"], rows)}
    return dict(params)


def _elementwise(eqn: JaxprEqn) -> Rows | None:
    """Operands are scalars, or have the shape of the result except for broadcast dimensions of 1."""
    out = shape_of(eqn.outvars[0])
    shapes = [shape_of(atom) for atom in eqn.invars]
    if not out or any(shape and not _is_broadcastable(shape, out) for shape in shapes):
        return None
    return Rows("each", tuple(shape[:1] == out[:1] for shape in shapes), (True,))


def _is_broadcastable(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    return len(shape) == len(out) and all(n in (1, m) for n, m in zip(shape, out, strict=True))


def _broadcast(eqn: JaxprEqn) -> Rows | None:
    # Rows of the result are rows of the operand if its first dimension stays first, else each is the whole operand.
    shape = eqn.params["shape"]
    dims = eqn.params["broadcast_dimensions"]
    if not shape or len(eqn.invars) > 1 or eqn.params["sharding"] is not None:
        return None
    has_rows = bool(dims) and dims[0] == 0 and shape_of(eqn.invars[0])[0] == shape[0]
    return Rows("each", (has_rows,), (True,))


def _reshape(eqn: JaxprEqn) -> Rows | None:
    operand_shape = shape_of(eqn.invars[0])
    result_shape = eqn.params["new_sizes"]
    is_plain = eqn.params["dimensions"] is None and eqn.params["sharding"] is None
    return _all_of(eqn) if is_plain and operand_shape and result_shape and operand_shape[0] == result_shape[0] else None


def _reduce(eqn: JaxprEqn) -> Rows | None:
    if not shape_of(eqn.invars[0]) or eqn.params.get("out_sharding") is not None:
        return None
    return Rows("combine", (True,), (False,)) if 0 in eqn.params["axes"] else _all_of(eqn)


def _product(eqn: JaxprEqn) -> Rows | None:
    _, (left, right) = eqn.params["dimension_numbers"]
    return _all_of(eqn) if (*left[:1], *right[:1]) == (0, 0) else None


def _scan(eqn: JaxprEqn) -> Rows | None:
    first_stack = eqn.params["num_consts"] + eqn.params["num_carry"]
    num_carry = eqn.params["num_carry"]
    operands = tuple(n >= first_stack for n in range(len(eqn.invars)))
    return Rows("chain", operands, tuple(n >= num_carry for n in range(len(eqn.outvars))))


def _all_of(eqn: JaxprEqn) -> Rows:
    return Rows("each", (True,) * len(eqn.invars), (True,) * len(eqn.outvars))


_RULES: dict[str, Callable[[JaxprEqn], Rows | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": lambda eqn: _all_of(eqn) if eqn.params["permutation"][:1] == (0,) else None,
    "squeeze": lambda eqn: _all_of(eqn) if 0 not in eqn.params["dimensions"] else None,
    "concatenate": lambda eqn: _all_of(eqn) if eqn.params["dimension"] else None,
    "dot_general": _product,
    "scan": _scan,
    **dict.fromkeys(
        ("remote_load", "remote_fetch", "remote_take", "remote_hand", "remote_store", "remote_wait"), _all_of
    ),
    **dict.fromkeys(COMBINES, _reduce),
}
