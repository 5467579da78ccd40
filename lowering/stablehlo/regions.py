"""Operations of StableHLO with regions: loops, branches and calls, and the monoids of reductions and sorts.

Carries that no iteration changes are values from outside of the loop. The pass `count_loops` makes a scan of a loop
with a known trip count, as in the function that was exported.
Regions of reductions are recognised as monoids, or as those that JAX itself makes for sorts and positions of extrema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import mlir
from ipujax.lowering.stablehlo.translation import Operation, Region, Rule, Scope, UntranslatedError, Values, text
from ipujax.runtime.names_at_import import jax_jit

ir = mlir.ir
Signature = tuple[Any, ...]


def only_operation(region: Region) -> str:
    """Name of the operation that a region consists of, as that of a reduction does: "stablehlo.add" of two arguments.

    "" for a region that returns its second argument (of several arrays, that of the first array), "?" for any other.
    """
    block = region.blocks[0]
    result = block.operations[len(block.operations) - 1].operands[0]
    left, right = (block.arguments[n] for n in (0, len(block.arguments) // 2))
    if result == right:
        return ""
    op = result.owner
    if isinstance(op, ir.Block) or len(block.arguments) != 2 or {*op.operands} != {left, right}:
        return "?"
    return str(op.name)


def signature(region: Region, functions: Mapping[str, Any] | None = None) -> Signature:
    """Computation of a region as nested tuples; equal for regions that compute the same in the same way.

    So a region is recognised as one that JAX makes.

    Args:
        region: the region.
        functions: operation of each function by name, to look into calls; without, names tell functions apart.

    Returns:
        A tuple for each result.
    """
    block = region.blocks[0]
    signatures = {argument: ("argument", n, str(argument.type)) for n, argument in enumerate(block.arguments)}
    return tuple(
        _computation_of(x, signatures, functions or {}) for x in block.operations[len(block.operations) - 1].operands
    )


def loop_signature(loop: Any, functions: Mapping[str, Any]) -> Signature:
    """Computation of a loop on its first carry, which may be any array of its type."""
    signatures = {loop.operands[0]: ("carry", str(loop.operands[0].type))}
    initial = tuple(_computation_of(x, signatures, functions) for x in loop.operands)
    return (initial, *(signature(region, functions) for region in loop.regions))


def _computation_of(value: Any, signatures: dict[Any, Signature], functions: Mapping[str, Any]) -> Signature:
    """Computation of a value as nested tuples, from its operation and the computations of operands.

    Args:
        value: the value.
        signatures: computations of values met before; updated: gets this one.
        functions: operation of each function by name, to look into calls.
    """
    if value in signatures:
        return signatures[value]
    op = value.owner
    if isinstance(op, ir.Block):
        return ("outside",)
    operands = [_computation_of(x, signatures, functions) for x in op.operands]
    callee = str(op.attributes["callee"]).lstrip("@") if op.name == "func.call" else ""
    if callee in functions:
        of_callee = signature(functions[callee].regions[0], functions)
        signatures[value] = (op.name, value.result_number, of_callee, *operands)
    else:
        attributes = tuple(sorted((name, str(op.attributes[name])) for name in op.attributes))
        signatures[value] = (op.name, attributes, value.result_number, *operands)
    return signatures[value]


@lru_cache(maxsize=256)
def region_of_jax(operation: str, fun: Callable[..., Any], *dtypes: str) -> Signature:
    """Signature of the region (as a reduction's function) of an operation in JAX's own lowering, to recognise it by.

    Args:
        operation: name of the operation in the lowered module.
        fun: function of one-dimensional arrays that JAX lowers to it.
        dtypes: dtypes of its arguments.
    """
    shapes = [jax.ShapeDtypeStruct((2,), dtype) for dtype in dtypes]
    module: Any = jax_jit(fun).lower(*shapes).compiler_ir("stablehlo")
    signatures: list[Signature] = []

    def note_signature(op: Operation) -> Any:
        if op.name == operation:
            signatures.append(signature(op.regions[0]))
        return ir.WalkResult.ADVANCE

    module.operation.walk(note_signature)
    return signatures[0]


@lru_cache(maxsize=16)
def sort_of_keys(num_keys: int) -> Callable[..., Any]:
    """The sort of JAX by its first operands."""
    return lambda *arrays: lax.sort(arrays, dimension=0, num_keys=num_keys)


def position_of_maximum(x: jax.Array) -> jax.Array:
    """Position of the maximum of a one-dimensional array."""
    return lax.argmax(x, 0, np.int32)


def position_of_minimum(x: jax.Array) -> jax.Array:
    """Position of the minimum of a one-dimensional array."""
    return lax.argmin(x, 0, np.int32)


def while_rule(scope: Scope, op: Operation, initial: Values) -> Sequence[Any]:
    """`stablehlo.while` as `lax.while_loop` over the carries that its iterations change; returns all carries.

    The others are values from outside, so that a bound of the trip count stays known.
    """
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


def case_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.case`: results of the branch of a number; of the last branch for a number that has none.

    A number that is known while the module is read takes its branch at once. One that was converted from a bool, with
    two branches, is JAX's form of `lax.cond`, which is restored.
    """
    (index,) = operands
    count = len(op.regions)
    if isinstance(index, np.ndarray):
        branch = int(index)
        return scope.block(op.regions[branch if 0 <= branch < count else count - 1], [])
    truth = _truth_of(scope, op)
    branches = [lambda region=region: scope.block(region, []) for region in op.regions]
    if truth is not None and count == 2:  # true was converted to 1, the number of the second branch
        return list(lax.cond(truth, branches[1], branches[0]))
    # A negative number has no branch: it takes the last. `lax.switch` clamps one that is too high to the last.
    index = lax.select(lax.lt(index, np.int32(0)), lax.full_like(index, count - 1), index)
    return list(lax.switch(index, branches))


def _truth_of(scope: Scope, op: Operation) -> Any:
    """The bool that was converted to the number of a branch; None for a number of another origin."""
    convert = op.operands[0].owner
    if getattr(convert, "name", "") != "stablehlo.convert":
        return None
    value = scope.values[convert.operands[0]]
    return value if value.dtype == bool else None


def if_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.if`: results of its first region where the operand is true, of its second where it is false."""
    (truth,) = operands
    if isinstance(truth, np.ndarray):
        return scope.block(op.regions[0 if truth else 1], [])
    return list(lax.cond(truth, *(lambda region=region: scope.block(region, []) for region in op.regions)))


def call_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Results of a function of the module."""
    return scope.function(text(op, "callee"), operands)


def barrier_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """The operands, which no operation is moved across."""
    return list(lax.optimization_barrier(tuple(operands)))


def refuse_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
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
