"""Table of partition rules, one a primitive."""

from __future__ import annotations

from ipujax.lowering.partition import rules_indexing, rules_numeric, rules_shape
from ipujax.lowering.partition.rules_base import Rule

_FAMILIES = (rules_numeric, rules_shape, rules_indexing)

RULES: dict[str, Rule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}
assert len(RULES) == sum(len(family.RULES) for family in _FAMILIES), "a primitive has two rules"


def rule_of(name: str) -> Rule | None:
    """Rule of a primitive; None for one whose operands are gathered."""
    return RULES.get(name) or rules_numeric.rule_of(name)
