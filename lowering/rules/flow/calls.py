"""Rule for what a program computes several times: a function of the control program, lowered at its first call.

A function's variables have one place for all its calls, so operands are copied to where it reads them and results from
where it leaves them. What nothing has placed before its first call is placed as the function wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, DropVar
from ipujax.lowering.layout import add_like, map_like, map_linearly, variable_like
from ipujax.lowering.popops import Op
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Call, Copy, Function, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor, is_key_dtype


@dataclass(frozen=True, slots=True)
class LoweredFunction:
    """A function with the tensors it reads and leaves.

    Args:
        function: what is called.
        operands: where it reads each operand.
        results: where it leaves each result.
    """

    function: Function
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


def function_call_rule(
    ctx: Context, *operands: Tensor, jaxpr: ClosedJaxpr, name: str, fixed: Sequence[bool]
) -> Sequence[Tensor]:
    """Copies the operands in that change between calls, calls, and copies results out."""
    graph, prog = ctx.graph, ctx.prog
    key = jaxpr.jaxpr, *(x.node for x, same in zip(operands, fixed, strict=True) if same)
    if key not in ctx.functions:
        ctx.functions[key] = _lower(ctx, operands, jaxpr, name, fixed)
    lowered: LoweredFunction = ctx.functions[key]
    place = ctx.name.removesuffix(ctx.primitive.name) + name
    for number, (given, own) in enumerate(zip(operands, lowered.operands, strict=True)):
        if given.node is not own.node:
            map_like(graph, given, own)
            _copy(ctx, given, own, f"{place}/operand{number}")
    prog.add(Call(lowered.function))
    outs = []
    for number, own in enumerate(lowered.results):
        if isinstance(ctx.equation.outvars[number], DropVar):
            outs.append(own)
            continue
        outs.append(add_like(graph, own, f"{place}/result{number}"))
        _copy(ctx, own, outs[-1], f"{place}/result{number}")
    return outs


def _copy(ctx: Context, source: Tensor, destination: Tensor, name: str) -> None:
    """Copies in vertices, so that the copies of one call share a compute set."""
    if is_key_dtype(source.dtype):
        ctx.prog.add(Copy(source, destination, name, ctx.graph.origin))
    else:
        elementwise(ctx.graph, _copying(source.dtype), [source], ctx.prog, name, destination)


@remembered
def _copying(dtype: np.dtype) -> Op:
    return Op("copy", lambda x: x, dtype, "copy")


def _lower(
    ctx: Context, operands: Sequence[Tensor], jaxpr: ClosedJaxpr, name: str, fixed: Sequence[bool]
) -> LoweredFunction:
    """Lowers a callee on variables of its own, which lie as the operands of this first call do."""
    graph, body = ctx.graph, ProgramSequence()
    with graph.debug_origin(replace(graph.origin, path=name)):
        own = tuple(
            x if same else variable_like(graph, x, f"{name}/operand{n}")
            for n, (x, same) in enumerate(zip(operands, fixed, strict=True))
        )
        results = tuple(ctx.lower_jaxpr(jaxpr, own, body))
    for tensor in (*own, *results):
        map_linearly(graph, tensor)
    return LoweredFunction(graph.add_function(body, name), own, results)


RULES: dict[str, Rule] = {"function_call": function_call_rule}
