"""Rules of loops, branches and calls of StableHLO.

A loop whose condition compares a counter with a constant has a known trip count: it becomes a scan, as in the function
that was exported. Carries that no iteration changes are values from outside of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import mlir
from ipujax.lowering.stablehlo.operation_attributes import UntranslatedError, text, word
from ipujax.lowering.stablehlo.translation import FINAL, Rule, Scope, Values

ir = mlir.ir
_STEPS = {"stablehlo.add": 1, "stablehlo.subtract": -1}
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def while_rule(scope: Scope, op: Any, initial: Values) -> Sequence[Any]:
    """Scan of a known trip count, else a loop."""
    condition, body = (region.blocks[0] for region in op.regions)
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
    trips = _trip_count(scope, condition, body, initial)
    if trips is None:
        finals = lax.while_loop(lambda carries: scope.block(op.regions[0], all_values(carries))[0], run_body, carries)
    else:
        finals, _ = lax.scan(lambda carries, _: (run_body(carries), None), carries, None, length=trips)
    return all_values(finals)


def _trip_count(scope: Scope, condition: Any, body: Any, initial: Values) -> int | None:
    """Number of iterations of a loop over a counter; None if it is data."""
    predicate = condition.operations[len(condition.operations) - 1].operands[0].owner
    if isinstance(predicate, ir.Block) or predicate.name != "stablehlo.compare":
        return None
    direction = word(predicate, "comparison_direction")
    counter, limit = map(_converted, predicate.operands)
    if _argument_number(condition, counter) is None:
        counter, limit = limit, counter
        direction = _MIRRORED.get(direction, "")
    number = _argument_number(condition, counter)
    if number is None:
        return None
    step = _step(scope, body, number, initial)
    start = _known(initial[number])
    end = _known(_value(scope, condition, body, limit, initial))
    if step is None or start is None or end is None or step == 0:
        return None
    return _iterations(start, end, step, direction)


def _converted(value: Any) -> Any:
    """The value behind conversions, which JAX writes where they change nothing."""
    while getattr(value.owner, "name", "") == "stablehlo.convert" and value.type == value.owner.operands[0].type:
        value = value.owner.operands[0]
    return value


def _iterations(start: int, end: int, step: int, direction: str) -> int | None:
    if direction not in _MIRRORED:
        return None
    if direction in ("LE", "GE"):
        end = end + (1 if direction == "LE" else -1)
    if direction == "NE":
        return (end - start) // step if (end - start) % step == 0 and (end - start) // step >= 0 else None
    upwards = direction in ("LT", "LE")
    if upwards != (step > 0):
        return None if (start < end) == upwards and start != end else 0  # None: it never ends
    return max(0, -((start - end) // step))


def _argument_number(block: Any, value: Any) -> int | None:
    return next((n for n, argument in enumerate(block.arguments) if argument == value), None)


def _known(value: Any) -> int | None:
    is_integer = isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu"
    return int(value) if is_integer else None


def _value(scope: Scope, block: Any, body: Any, value: Any, initial: Values) -> Any:
    """Value in the condition or the body of a loop that is known and the same in all iterations; else None."""
    number = _argument_number(block, value)
    if number is not None:
        returned = body.operations[len(body.operations) - 1].operands[number]
        return initial[number] if returned == body.arguments[number] else None
    if value in scope.values:
        return scope.values[value]
    op = value.owner
    if isinstance(op, ir.Block) or op.regions or op.name in FINAL:
        return None
    operands = [_value(scope, block, body, x, initial) for x in op.operands]
    are_known = all(isinstance(x, np.ndarray) for x in operands)
    return scope.results(op, operands)[0] if are_known and len(op.results) == 1 else None


def _step(scope: Scope, body: Any, number: int, initial: Values) -> int | None:
    """Constant that each iteration adds to a carry; None if there is none."""
    op = body.operations[len(body.operations) - 1].operands[number].owner
    if isinstance(op, ir.Block) or op.name not in _STEPS:
        return None
    counter, step = op.operands
    if _argument_number(body, counter) != number and op.name == "stablehlo.add":
        counter, step = step, counter
    if _argument_number(body, counter) != number:
        return None
    value = _known(_value(scope, body, body, step, initial))
    return None if value is None else _STEPS[op.name] * value


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
