"""The page of primitives says what the rule table and the op table say, of every primitive."""

from __future__ import annotations

from ipujax.lowering.jax_compat import CALLEES
from ipujax.lowering.rules import RULES
from tests.lowering.rules.op_rows_fallback import fallback_rows
from tests.lowering.rules.primitives_page import NOTES, PAGE, page, public_names

AGAIN = "python -m tests.lowering.rules.primitives_page writes it anew"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), AGAIN


def test_each_primitive_is_in_one_list() -> None:
    alone = {case.primitive for case in fallback_rows()}
    inlined = {*CALLEES, "custom_linear_solve"}
    for one, other in ((alone, set(RULES)), (alone, set(NOTES)), (set(RULES), set(NOTES)), (inlined, set(RULES))):
        assert one.isdisjoint(other)
    assert public_names() <= {*alone, *inlined, *RULES, *NOTES}


def test_each_rule_has_a_line() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    parallel = {line.split("`")[1] for line in lines if line.startswith("| `") and "| tile-parallel |" in line}
    assert parallel == set(RULES)
