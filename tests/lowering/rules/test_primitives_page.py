"""The page of primitives agrees with the rule table and the op table."""

from __future__ import annotations

from itertools import combinations

from ipujax.lowering.jax_compat import PUBLIC_PRIMITIVES
from ipujax.lowering.rules import RULES
from ipujax.lowering.rules.table import INLINED, OTHERS, primitive_kind, primitive_names
from tests.lowering.rules.op_rows_fallback import fallback_rows
from tests.lowering.rules.primitives_page import PAGE, page

COMMAND = "python -m tests.lowering.rules.primitives_page writes it anew"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), COMMAND


def test_each_primitive_is_in_one_list() -> None:
    one_tile = {case.primitive for case in fallback_rows()}
    lists = (one_tile, set(RULES), set(OTHERS), set(INLINED))
    assert all(first.isdisjoint(second) for first, second in combinations(lists, 2))
    assert set().union(*lists) == {*primitive_names(), *one_tile} >= PUBLIC_PRIMITIVES
    assert {name for name in primitive_names() if primitive_kind(name) == "one tile"} <= one_tile


def test_each_rule_has_a_line() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    parallel = {line.split("`")[1] for line in lines if line.startswith("| `") and "| tile-parallel |" in line}
    assert parallel == set(RULES)
