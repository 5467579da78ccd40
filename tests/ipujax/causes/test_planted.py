"""Planted causes are named by the first sentence, promise what their remedy saves, and are not seen where none is."""

from __future__ import annotations

import pytest

from ipujax.runtime.views import verdict
from tests.ipujax.causes.planted_kinds import KINDS
from tests.ipujax.causes.planted_programs import PLAIN, PLANTED, check_planted
from tests.ipujax.causes.planted_siblings import SIBLINGS

PROGRAMS = {**PLANTED, **SIBLINGS, **KINDS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_planted_cause_is_named_and_promises_what_its_remedy_saves(name: str) -> None:
    check_planted(PROGRAMS[name])


@pytest.mark.parametrize("name", PLAIN)
def test_no_change_is_proposed_where_nothing_is_planted(name: str) -> None:
    result = verdict(PLAIN[name]())
    assert not result.causes and not result.remedies
    assert result.sentence.startswith(("No cause takes 3 % of the run", "Exchange of products", "Exchange of look-ups"))
