"""Regions of operations of StableHLO: monoids, and those that JAX itself makes for sorts and positions of extrema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import mlir
from ipujax.runtime.names_at_import import jax_jit

ir = mlir.ir
Signature = tuple[Any, ...]


def only_operation(region: Any) -> str:
    """Name of the operation of a region that applies one to its two arguments, "" of the second itself, else "?"."""
    block = region.blocks[0]
    result = block.operations[len(block.operations) - 1].operands[0]
    left, right = (block.arguments[n] for n in (0, len(block.arguments) // 2))
    if result == right:
        return ""
    op = result.owner
    if isinstance(op, ir.Block) or len(block.arguments) != 2 or {*op.operands} != {left, right}:
        return "?"
    return str(op.name)


def signature(region: Any, functions: Mapping[str, Any] | None = None) -> Signature:
    """Computation of a region as nested tuples; equal for regions that compute the same in the same way.

    Args:
        region: the region.
        functions: operation of each function by name, to look into calls; without, names tell functions apart.

    Returns:
        A tuple for each result.
    """
    block = region.blocks[0]
    known = {argument: ("argument", n, str(argument.type)) for n, argument in enumerate(block.arguments)}
    return tuple(_of_value(x, known, functions or {}) for x in block.operations[len(block.operations) - 1].operands)


def loop_signature(loop: Any, functions: Mapping[str, Any]) -> Signature:
    """Computation of a loop on its first carry, which may be any array of its type."""
    known = {loop.operands[0]: ("carry", str(loop.operands[0].type))}
    initial = tuple(_of_value(x, known, functions) for x in loop.operands)
    return (initial, *(signature(region, functions) for region in loop.regions))


def _of_value(value: Any, known: dict[Any, Signature], functions: Mapping[str, Any]) -> Signature:
    """Computation of a value as nested tuples; `known` has those of values met before, and gets this one."""
    if value in known:
        return known[value]
    op = value.owner
    if isinstance(op, ir.Block):
        return ("outside",)
    operands = [_of_value(x, known, functions) for x in op.operands]
    callee = str(op.attributes["callee"]).lstrip("@") if op.name == "func.call" else ""
    if callee in functions:
        known[value] = (op.name, value.result_number, signature(functions[callee].regions[0], functions), *operands)
    else:
        attributes = tuple(sorted((name, str(op.attributes[name])) for name in op.attributes))
        known[value] = (op.name, attributes, value.result_number, *operands)
    return known[value]


@lru_cache(maxsize=256)
def region_of_jax(operation: str, fun: Callable[..., Any], *dtypes: str) -> Signature:
    """Signature of the region of an operation that JAX makes for a function of one-dimensional arrays."""
    shapes = [jax.ShapeDtypeStruct((2,), dtype) for dtype in dtypes]
    module: Any = jax_jit(fun).lower(*shapes).compiler_ir("stablehlo")
    signatures: list[Signature] = []

    def look(op: Any) -> Any:
        if op.name == operation:
            signatures.append(signature(op.regions[0]))
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
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
