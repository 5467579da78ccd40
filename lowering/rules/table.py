"""Rule table: one lowering rule for each JAX primitive; other primitives fall back to a single tile."""

from __future__ import annotations

from ipujax.lowering.popops import OP_COSTS
from ipujax.lowering.rules.arrays import dynamic_slices, indexing, iota, pad, shape, sort, take_rows
from ipujax.lowering.rules.base.context import Rule
from ipujax.lowering.rules.flow import (
    calls,
    codelet_calls,
    collectives,
    control,
    host_calls,
    module_operations,
    streaming,
)
from ipujax.lowering.rules.numerics import (
    arg_reduce,
    cumulative,
    elementwise,
    linear,
    ragged,
    random,
    reductions,
    windows,
)
from ipujax.lowering.rules.tiles import tile_rules

_FAMILIES = (
    elementwise,
    shape,
    take_rows,
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
    dynamic_slices,
    random,
    control,
    calls,
    codelet_calls,
    collectives,
    host_calls,
    module_operations,
    streaming,
    tile_rules,
)

RULES: dict[str, Rule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}
assert len(RULES) == sum(len(family.RULES) for family in _FAMILIES), "a primitive has two rules"


def rule_of(name: str) -> Rule | None:
    """Rule of a primitive; a row of `OP_COSTS` is enough for an elementwise one. None for the fallback."""
    return RULES.get(name, elementwise.elementwise_rule if name in OP_COSTS else None)
