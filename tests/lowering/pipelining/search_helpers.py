"""Search for the stages of a function's only pipeline, for the tests of automatic stages."""

from __future__ import annotations

from typing import Any

from ipujax.lowering.pipelining.pipeline_cost import Planning
from ipujax.lowering.pipelining.primitive import staged_pipeline_p
from ipujax.lowering.pipelining.stage_search import StageSearch
from ipujax.lowering.rules.equations import Lowering
from ipujax.runtime.graph import BYTE_COST_CYCLES
from ipujax.runtime.target.target import Target
from tests.lowering.helpers import passed


def search_of(fun: Any, args: Any, target: Target, make: Any = Lowering) -> StageSearch:
    jaxpr = passed(fun, *args)
    (number,) = [n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive is staged_pipeline_p]
    return StageSearch(jaxpr, number, Planning(target, make, BYTE_COST_CYCLES))
