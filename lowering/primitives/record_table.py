"""Table of the records of primitives, of which some depend on the parameters of an equation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ipujax.lowering.jax_compat import JaxprEqn, closed, jaxprs_in_params
from ipujax.lowering.popops import OP_COSTS
from ipujax.lowering.primitives import numeric_records, shape_records
from ipujax.lowering.primitives.record import PrimitiveRecord

_FAMILIES = (shape_records, numeric_records)
_UNKNOWN = PrimitiveRecord()

RECORDS: dict[str, PrimitiveRecord] = {name: x for family in _FAMILIES for name, x in family.RECORDS.items()}
assert len(RECORDS) == sum(len(family.RECORDS) for family in _FAMILIES), "a primitive has two records"

_ORDERED_RESHAPE = RECORDS["reshape"]
_PERMUTING_RESHAPE = replace(_ORDERED_RESHAPE, view=None)  # with `dimensions`: of the transposed operand
_CAST = RECORDS["convert_element_type"]
_LINEAR_CAST = replace(_CAST, keeps_sums=True)


def _record_of_reshape(eqn: JaxprEqn) -> PrimitiveRecord:
    return _ORDERED_RESHAPE if eqn.params["dimensions"] is None else _PERMUTING_RESHAPE


def _record_of_cast(eqn: JaxprEqn) -> PrimitiveRecord:
    return _LINEAR_CAST if _is_linear_cast(eqn.invars[0].aval, eqn.outvars[0].aval) else _CAST


def _is_linear_cast(before: Any, after: Any) -> bool:
    """True if casts of partial sums add up to that of the sum."""
    # Sums of integers wrap in the narrower dtype, those of more bits do not.
    if all(jnp.issubdtype(aval.dtype, jnp.integer) for aval in (before, after)):
        return bool(jnp.iinfo(after.dtype).bits <= jnp.iinfo(before.dtype).bits)
    is_inexact = all(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in (before, after))
    drops_imaginary = jnp.iscomplexobj(before) and not jnp.iscomplexobj(after)
    # Floats of fewer bits round, or overflow, where the terms of a sum are larger than the sum.
    return is_inexact and not drops_imaginary and _has_all_numbers(jnp.finfo(after.dtype), jnp.finfo(before.dtype))


def _has_all_numbers(wide: Any, narrow: Any) -> bool:
    """True if a format of floats, by its `finfo`, has the numbers of another."""
    has_range = wide.maxexp >= narrow.maxexp and wide.minexp <= narrow.minexp
    return bool(has_range and wide.nmant >= narrow.nmant)


_RECORDS_OF_EQUATIONS: dict[str, Callable[[JaxprEqn], PrimitiveRecord]] = {
    "reshape": _record_of_reshape,
    "convert_element_type": _record_of_cast,
}


def has_state(eqn: JaxprEqn) -> bool:
    """True if an equation, or one inside of it, reads a state: it may be run neither again nor once for several."""
    inner = (each for jaxpr in jaxprs_in_params(eqn.params) for each in closed(jaxpr).jaxpr.eqns)
    return record_of(eqn).has_state or any(map(has_state, inner))


def is_matrix_product(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a product of matrices, batched or not: no convolution."""
    return eqn.primitive.name == "dot_general"


def record_of(primitive: JaxprEqn | str) -> PrimitiveRecord:
    """The record of an equation's primitive, or of a name; one that tells nothing if there is none."""
    name = primitive if isinstance(primitive, str) else primitive.primitive.name
    if name in _RECORDS_OF_EQUATIONS and not isinstance(primitive, str):
        return _RECORDS_OF_EQUATIONS[name](primitive)
    if name in RECORDS:
        return RECORDS[name]
    # A row of costs that a user has added is enough for an elementwise primitive.
    return numeric_records.elementwise_record(name) if name in OP_COSTS else _UNKNOWN
