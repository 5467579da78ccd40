"""Rule for what a program computes several times: a function of the control program, lowered at its first call.

A function's variables have one place for all its calls, so operands are copied to where it reads them. Results are read
where it leaves them, and what is still needed at its next call is copied before that. What nothing has placed before
its first call is placed as the function wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ipujax.lowering.jax_compat import ClosedJaxpr, DropVar
from ipujax.lowering.layout import add_like, map_like, map_linearly, memory_order, variable_like
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.base.later_values import copy_in_vertices
from ipujax.runtime.graph import Call, Function, Sequence as ProgramSequence, substituted
from ipujax.runtime.tensor import OF_CALLER, Tensor, Variable


@dataclass(frozen=True, slots=True)
class LoweredFunction:
    """A function with the tensors it reads and leaves.

    Args:
        function: what is called.
        operands: where it reads each operand.
        results: where it leaves each result.
        left: the variables of results that it alone writes, and whose elements each are one of a result.
    """

    function: Function
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    left: tuple[Variable, ...]


def function_call_rule(
    ctx: Context, *operands: Tensor, jaxpr: ClosedJaxpr, name: str, fixed: Sequence[bool]
) -> Sequence[Tensor]:
    """Copies the operands in that change between calls, calls, and copies results out."""
    graph, prog = ctx.graph, ctx.prog
    place = ctx.name.removesuffix(ctx.primitive.name) + name
    settled = _settled(ctx, operands, fixed)
    key = jaxpr.jaxpr, *(x.node for x, same in zip(settled, fixed, strict=True) if same)
    if key not in ctx.functions:
        ctx.functions[key] = _lower(ctx, settled, jaxpr, name, fixed)
    lowered: LoweredFunction = ctx.functions[key]
    if ctx.later is not None:
        ctx.later.move_out(graph, lowered.left, prog)
    for number, (given, own, same) in enumerate(zip(settled, lowered.operands, fixed, strict=True)):
        if not same:
            map_like(graph, given, own)
            copy_in_vertices(graph, given, own, prog, f"{place}/operand{number}")
    prog.add(Call(lowered.function, graph.origin))
    outs = []
    for number, own in enumerate(lowered.results):
        is_read_there = ctx.later is not None and set(lowered.left).issuperset(own.variables())
        if is_read_there or isinstance(ctx.equation.outvars[number], DropVar):
            outs.append(own)
            continue
        outs.append(add_like(graph, own, f"{place}/result{number}"))
        copy_in_vertices(graph, own, outs[-1], prog, f"{place}/result{number}")
    return outs


def _settled(ctx: Context, operands: Sequence[Tensor], fixed: Sequence[bool]) -> list[Tensor]:
    """The operands, those that the function reads where they lie out of the way of other functions' calls."""
    if ctx.later is None:
        return list(operands)
    read = {v for x, same in zip(operands, fixed, strict=True) if same for v in x.variables()}
    left = [v for function in ctx.functions.values() for v in function.left if v in read]
    moved = ctx.later.move_out(ctx.graph, left, ctx.prog)
    return [substituted(x, moved) for x in operands]


def _lower(
    ctx: Context, operands: Sequence[Tensor], jaxpr: ClosedJaxpr, name: str, fixed: Sequence[bool]
) -> LoweredFunction:
    """Lowers a callee on variables of its own, which lie as the operands of this first call do."""
    graph, body = ctx.graph, ProgramSequence()
    with graph.debug_origin(replace(graph.origin, path=name, layer=OF_CALLER, part="")):
        own = tuple(
            x if same else variable_like(graph, x, f"{name}/operand{n}")
            for n, (x, same) in enumerate(zip(operands, fixed, strict=True))
        )
        results = tuple(ctx.lower_jaxpr(jaxpr, own, body))
    for tensor in (*own, *results):
        map_linearly(graph, tensor)
    given = {v for x in own for v in x.variables()}
    whole = dict.fromkeys(v for x in results if memory_order(x) is not None for v in x.variables())
    left = tuple(v for v in whole if v not in given and not v.is_constant)
    return LoweredFunction(graph.add_function(body, name), own, results, left)


RULES: dict[str, Rule] = {"function_call": function_call_rule}
