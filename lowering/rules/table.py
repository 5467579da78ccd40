"""The rule table: one lowering rule for each JAX primitive; what is not here falls back to a single tile."""

from __future__ import annotations

from ipujax.lowering.rules import (
    arg_reduce,
    calls,
    codelet,
    collectives,
    control,
    cumulative,
    dynamic,
    effects,
    elementwise,
    indexing,
    iota,
    linear,
    pad,
    ragged,
    random,
    reductions,
    shape,
    sort,
    streaming,
    windows,
)
from ipujax.lowering.rules.context import Rule

_FAMILIES = (
    elementwise,
    shape,
    pad,
    iota,
    reductions,
    arg_reduce,
    cumulative,
    sort,
    linear,
    ragged,
    windows,
    indexing,
    dynamic,
    random,
    control,
    calls,
    codelet,
    collectives,
    effects,
    streaming,
)

RULES: dict[str, Rule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}
assert len(RULES) == sum(len(family.RULES) for family in _FAMILIES), "a primitive has two rules"
