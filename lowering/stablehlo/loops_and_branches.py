"""Rules of loops, branches and calls of StableHLO.

Carries that no iteration changes are values from outside of the loop. The pass `count_loops` makes a scan of a loop
with a known trip count, as in the function that was exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from ipujax.lowering.stablehlo.operation_attributes import UntranslatedError, text
from ipujax.lowering.stablehlo.translation import Rule, Scope, Values


def while_rule(scope: Scope, op: Any, initial: Values) -> Sequence[Any]:
    """Loop over the carries that its iterations change."""
    body = op.regions[1].blocks[0]
    returned = list(body.operations[len(body.operations) - 1].operands)
    is_fixed = [x == argument for x, argument in zip(returned, body.arguments, strict=True)]
    changed = [n for n, fixed in enumerate(is_fixed) if not fixed]

    def all_values(carries: Sequence[Any]) -> Values:
        remaining = iter(carries)
        return [x if fixed else next(remaining) for x, fixed in zip(initial, is_fixed, strict=True)]

    def run_body(carries: Sequence[Any]) -> Values:
        results = scope.block(op.regions[1], all_values(carries))
        return [results[n] for n in changed]

    carries = [initial[n] for n in changed]
    finals = lax.while_loop(lambda carries: scope.block(op.regions[0], all_values(carries))[0], run_body, carries)
    return all_values(finals)


def case_rule(scope: Scope, op: Any, operands: Values) -> Sequence[Any]:
    """Branch by a number; the last one for numbers of none."""
    (index,) = operands
    count = len(op.regions)
    if isinstance(index, np.ndarray):
        known = int(index)
        return scope.block(op.regions[known if 0 <= known < count else count - 1], [])
    truth = _truth_of(scope, op)
    branches = [lambda region=region: scope.block(region, []) for region in op.regions]
    if truth is not None and count == 2:
        return list(lax.cond(truth, branches[1], branches[0]))
    index = lax.select(lax.lt(index, np.int32(0)), lax.full_like(index, count - 1), index)
    return list(lax.switch(index, branches))


def _truth_of(scope: Scope, op: Any) -> Any:
    """The truth that was converted to the number of a branch; None for other numbers."""
    convert = op.operands[0].owner
    if getattr(convert, "name", "") != "stablehlo.convert":
        return None
    value = scope.values[convert.operands[0]]
    return value if value.dtype == bool else None


def if_rule(scope: Scope, op: Any, operands: Values) -> Sequence[Any]:
    """Branch by a truth."""
    (truth,) = operands
    if isinstance(truth, np.ndarray):
        return scope.block(op.regions[0 if truth else 1], [])
    return list(lax.cond(truth, *(lambda region=region: scope.block(region, []) for region in op.regions)))


def call_rule(scope: Scope, op: Any, operands: Values) -> Sequence[Any]:
    """Results of a function of the module."""
    return scope.function(text(op, "callee"), operands)


def barrier_rule(scope: Scope, op: Any, operands: Values) -> Sequence[Any]:
    """The operands, which no operation is moved across."""
    return list(lax.optimization_barrier(tuple(operands)))


def refuse_rule(scope: Scope, op: Any, operands: Values) -> Sequence[Any]:
    """Refuse an operation of several devices or of tokens."""
    raise UntranslatedError(f"the operation {op.name}")


_OF_DEVICES = ("all_gather", "all_reduce", "all_to_all", "collective_permute", "collective_broadcast", "reduce_scatter")
_OF_TOKENS = ("after_all", "create_token", "infeed", "outfeed", "send", "recv")

RULES: dict[str, Rule] = {
    "stablehlo.while": while_rule,
    "stablehlo.case": case_rule,
    "stablehlo.if": if_rule,
    "func.call": call_rule,
    "stablehlo.optimization_barrier": barrier_rule,
    **{f"stablehlo.{name}": refuse_rule for name in (*_OF_DEVICES, *_OF_TOKENS, "partition_id", "replica_id")},
}
