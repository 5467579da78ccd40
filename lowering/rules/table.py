"""Rule table, one lowering rule for each JAX primitive, and the kinds of primitives that follow from it.

Other primitives are inlined, fall back to a single tile, or are not supported. Input: the primitives that JAX names in
public, the rule table, the calls that are inlined. Output: a kind by name, from which `docs/primitives.md` is written.
Limits: a primitive that JAX does not name in public is known only if it has a rule.
"""

from __future__ import annotations

from typing import Literal

from ipujax.lowering.jax_compat import CALLEES, PUBLIC_PRIMITIVES
from ipujax.lowering.popops import OP_COSTS
from ipujax.lowering.rules.arrays import constant_indices, dynamic_slices, indexing, shape, sort
from ipujax.lowering.rules.base import fallback
from ipujax.lowering.rules.base.context import Rule
from ipujax.lowering.rules.flow import calls, codelet_calls, collectives, control, host_calls, streaming
from ipujax.lowering.rules.numerics import elementwise, linear, random, reductions
from ipujax.lowering.rules.tiles import tile_rules

_FAMILIES = (
    elementwise,
    shape,
    constant_indices,
    reductions,
    sort,
    linear,
    indexing,
    dynamic_slices,
    random,
    control,
    calls,
    codelet_calls,
    collectives,
    host_calls,
    fallback,
    streaming,
    tile_rules,
)

RULES: dict[str, Rule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}
assert len(RULES) == sum(len(family.RULES) for family in _FAMILIES), "a primitive has two rules"


def rule_of(name: str) -> Rule | None:
    """Rule of a primitive; a row of `OP_COSTS` is enough for an elementwise one. None for the fallback."""
    return RULES.get(name, elementwise.elementwise_rule if name in OP_COSTS else None)


Kind = Literal["tile-parallel", "inlined", "one tile", "–"]

# Of custom_linear_solve only its solution, see the pass `inline`.
INLINED = frozenset({*CALLEES, "custom_linear_solve", "call_exported", "pallas_call"})

# Primitives with neither a rule nor the fallback, with the reason.
OTHERS: dict[str, str] = {
    "ragged_all_to_all": "refused: replicas do not exchange different numbers of rows",
    **dict.fromkeys(("after_all", "create_token"), "a token has no elements; refused where a result depends on it"),
    **dict.fromkeys(("get", "swap"), "removed by the pass `discharge`, which replaces a Ref by its values"),
    "custom_lin": "exists only while JAX differentiates",
    "stage": "in no program that was tried",
}

MEANINGS: dict[Kind, str] = {
    "tile-parallel": "a lowering rule spreads it over tiles, or it is a view, without cost until it is used",
    "inlined": "a call, replaced by the equations of its callee",
    "one tile": "no rule: one costed vertex computes it, see profile.fallbacks; batches are spread over tiles",
    "–": "nothing runs it",
}


def primitive_kind(name: str) -> Kind:
    """Kind of a primitive; an unknown one is `one tile`, as one without a rule."""
    if name in RULES:
        return "tile-parallel"
    if name in INLINED:
        return "inlined"
    return "–" if name in OTHERS else "one tile"


def primitive_names() -> tuple[str, ...]:
    """Known names, in alphabetical order."""
    return tuple(sorted({*PUBLIC_PRIMITIVES, *RULES, *INLINED, *OTHERS}, key=str.lower))
