"""Rule for repeated computations: a function of the control program, lowered at its first call.

A function has one set of variables for all its calls, so operands are copied there; fixed ones, which are the same
tensor at several calls, are read in place. Results are read in the function's variables, and values still needed at
its next call are copied before it. Unmapped operands of the first call are mapped as the function needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ipujax.lowering.jax_compat import ClosedJaxpr, DropVar
from ipujax.lowering.layout import add_like, map_like, map_linearly, memory_order, variable_like
from ipujax.lowering.rules.base.context import Context, LoweredFunction, Rule, copy_in_vertices
from ipujax.runtime.graph import Builder, Call, Sequence as ProgramSequence
from ipujax.runtime.tensor import OF_CALLER, Origin, Tensor, substitute


def function_call_rule(
    ctx: Context, *operands: Tensor, jaxpr: ClosedJaxpr, name: str, fixed: Sequence[bool]
) -> Sequence[Tensor]:
    """Calls a function whose code exists once: copies operands to its variables, calls it, and copies its results.

    The first call lowers the function. A result that is read before the next call alone is not copied.

    Args:
        ctx: the equation.
        operands: tensors of the caller.
        jaxpr: the function.
        name: its name in reports.
        fixed: for each operand whether it is the same at each call, so that the function reads it where it is.
    """
    graph = ctx.graph
    prog = ctx.prog
    path = ctx.name.removesuffix(ctx.primitive.name) + name
    arguments = _with_fixed_copied(ctx, operands, fixed)
    # A fixed operand is read in place, so calls with another one need another function.
    key = jaxpr.jaxpr, *(x.node for x, is_fixed in zip(arguments, fixed, strict=True) if is_fixed)
    if key not in ctx.functions:
        ctx.functions[key] = _lower_function(ctx, arguments, jaxpr, name, fixed)
    lowered = ctx.functions[key]
    if ctx.later is not None:
        ctx.later.copy_before_call(graph, lowered.owned_results, prog)
    # A call of several layers: operands are copied for the first of them, results for the last.
    with graph.debug_origin(_in_layer(graph.origin, 0)):
        for number, (operand, tensor, is_fixed) in enumerate(zip(arguments, lowered.operands, fixed, strict=True)):
            if not is_fixed:
                map_like(graph, operand, tensor)
                copy_in_vertices(Builder(graph, prog, f"{path}/operand{number}"), operand, tensor)
    prog.add(Call(lowered.function, graph.origin))
    outs = []
    with graph.debug_origin(_in_layer(graph.origin, -1)):
        for number, tensor in enumerate(lowered.results):
            # Where later reads are unknown (`ctx.later` is None), results are copied.
            is_read_in_place = ctx.later is not None and set(lowered.owned_results).issuperset(tensor.variables())
            if is_read_in_place or isinstance(ctx.equation.outvars[number], DropVar):
                outs.append(tensor)
                continue
            outs.append(add_like(graph, tensor, f"{path}/result{number}"))
            copy_in_vertices(Builder(graph, prog, f"{path}/result{number}"), tensor, outs[-1])
    return outs


def _in_layer(origin: Origin, number: int) -> Origin:
    """Origin of copies before or after a call: layer `number` of those it holds if they have no common one."""
    return origin if origin.layer or not origin.names else replace(origin, layer=origin.names[number])


def _with_fixed_copied(ctx: Context, operands: Sequence[Tensor], fixed: Sequence[bool]) -> list[Tensor]:
    """Operands of a call, of which some are copied, so that they last until its callee's other calls.

    The callee reads a fixed operand, which is the same at each of its calls, where it is. If that is in results of
    another function, the next call of that one would overwrite it.
    """
    if ctx.later is None:
        return list(operands)
    read = {v for x, is_fixed in zip(operands, fixed, strict=True) if is_fixed for v in x.variables()}
    overwritten = [v for function in ctx.functions.values() for v in function.owned_results if v in read]
    copies = ctx.later.copy_before_call(ctx.graph, overwritten, ctx.prog)
    return [substitute(x, copies) for x in operands]


def _lower_function(
    ctx: Context, operands: Sequence[Tensor], jaxpr: ClosedJaxpr, name: str, fixed: Sequence[bool]
) -> LoweredFunction:
    """Lowers a callee, once for all its calls, on variables of its own, mapped as the operands of this first call.

    Args:
        ctx: the equation of the call.
        operands: tensors of the caller.
        jaxpr: the callee.
        name: its name in reports.
        fixed: for each operand whether it is the same at each call, so that the callee reads the caller's tensor.

    Returns:
        The function, its variables for operands and results, and which results callers may read in place.
    """
    graph = ctx.graph
    body = ProgramSequence()
    with graph.debug_origin(replace(graph.origin, path=name, layer=OF_CALLER, part="")):
        function_operands = tuple(
            x if is_fixed else variable_like(graph, x, f"{name}/operand{n}")
            for n, (x, is_fixed) in enumerate(zip(operands, fixed, strict=True))
        )
        results = tuple(ctx.lower_jaxpr(jaxpr, function_operands, body))
    for tensor in (*function_operands, *results):
        map_linearly(graph, tensor)
    operand_variables = {v for x in function_operands for v in x.variables()}
    # Results in variables that only the function writes stay there until its next call: callers read them in place.
    # One without a memory order repeats or skips elements of its variable: it is copied after each call.
    result_variables = dict.fromkeys(v for x in results if memory_order(x) is not None for v in x.variables())
    owned_results = tuple(v for v in result_variables if v not in operand_variables and not v.is_constant)
    return LoweredFunction(graph.add_function(body, name), function_operands, results, owned_results)


RULES: dict[str, Rule] = {"function_call": function_call_rule}
