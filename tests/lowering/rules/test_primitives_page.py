"""The page of primitives says what the rule table and the op table say, of every primitive."""

from __future__ import annotations

from itertools import combinations

from ipujax.lowering.jax_compat import PUBLIC_PRIMITIVES
from ipujax.lowering.rules import RULES
from ipujax.lowering.rules.coverage import INLINED, OTHERS, primitive_kind, primitive_names
from tests.lowering.rules.op_rows_fallback import fallback_rows
from tests.lowering.rules.primitives_page import PAGE, page

AGAIN = "python -m tests.lowering.rules.primitives_page writes it anew"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), AGAIN


def test_each_primitive_is_in_one_list() -> None:
    alone = {case.primitive for case in fallback_rows()}
    lists = (alone, set(RULES), set(OTHERS), set(INLINED))
    assert all(one.isdisjoint(other) for one, other in combinations(lists, 2))
    assert set().union(*lists) == {*primitive_names(), *alone} >= PUBLIC_PRIMITIVES
    assert {name for name in primitive_names() if primitive_kind(name) == "one tile"} <= alone


def test_each_rule_has_a_line() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    parallel = {line.split("`")[1] for line in lines if line.startswith("| `") and "| tile-parallel |" in line}
    assert parallel == set(RULES)
