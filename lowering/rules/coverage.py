"""Kinds of JAX primitives: with a lowering rule, inlined, on one tile, or not supported.

Input: the primitives that JAX names in public, the rule table, the calls that are inlined. Output: a kind by name,
from which `docs/primitives.md` is written. Limits: a primitive that JAX does not name in public is known only if it
has a rule.
"""

from __future__ import annotations

from typing import Literal

from ipujax.lowering.jax_compat import CALLEES, PUBLIC_PRIMITIVES
from ipujax.lowering.rules.table import RULES

Kind = Literal["tile-parallel", "inlined", "one tile", "–"]

INLINED = frozenset({*CALLEES, "custom_linear_solve"})  # of the latter only its solution, see the pass `inline`

# Primitives with neither a rule nor the fallback, with the reason.
OTHERS: dict[str, str] = {
    "ragged_all_to_all": "refused: rows of any number are not exchanged between replicas",
    **dict.fromkeys(("after_all", "create_token"), "a token is no array: refused when a result hangs on it"),
    **dict.fromkeys(("get", "swap"), "of a Ref, whose values take its place: see the pass `discharge`"),
    "custom_lin": "only while JAX differentiates",
    "stage": "not met in any program so far",
}

MEANINGS: dict[Kind, str] = {
    "tile-parallel": "a lowering rule spreads it over tiles, or it is a view that costs nothing until it is used",
    "inlined": "a call; its equations take its place",
    "one tile": "no rule: one vertex computes it, costed, and listed in profile.fallbacks; batches are shared out",
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
