"""Rules for calls of Python functions from a program: prints and callbacks, as host exchanges in program order.

Whether JAX calls them ordered or not, here they run in order: a control program has one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ipujax.lowering.context import Context, Rule
from ipujax.lowering.fallback import fallback
from ipujax.lowering.poputil.mapping import map_linearly
from ipujax.runtime.host_call import CallStream, HostCall
from ipujax.runtime.program import StreamIn, StreamOut
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import is_key_dtype


def callback_rule(ctx: Context, *operands: Tensor, **params: Any) -> Sequence[Tensor]:
    """`pure_callback`, `io_callback`, `debug.callback` and `debug.print`."""
    if any(is_key_dtype(x.dtype) for x in (*operands, *ctx.out_avals)):
        return fallback(ctx, *operands)
    graph, prog = ctx.graph, ctx.prog
    # JAX's own wrapper of the user's function; debugging has more to it, which its primitive does when called eagerly.
    fun = partial(ctx.primitive.impl, **params) if "debug" in ctx.primitive.name else params["callback"]
    if not operands:  # something must tell the host that it is time
        operands, fun = (graph.add_constant(np.ones((), bool), ctx.name),), partial(_without_operand, fun)
    results = tuple((tuple(aval.shape), aval.dtype) for aval in ctx.out_avals)
    call = HostCall(ctx.name, fun, len(operands), results, graph.origin)
    for number, tensor in enumerate(operands):
        map_linearly(graph, tensor)
        stream = CallStream(f"{ctx.name}/operand{number}", tensor.shape, tensor.dtype, call=call, number=number)
        prog.add(StreamOut(tensor, stream, graph.origin))
    outs = []
    for number, (shape, dtype) in enumerate(results):
        outs.append(graph.add_variable(shape, dtype, f"{ctx.name}/result{number}"))
        map_linearly(graph, outs[-1])
        stream = CallStream(f"{ctx.name}/result{number}", shape, dtype, call=call, number=number)
        prog.add(StreamIn(stream, outs[-1], graph.origin))
    return outs


def _without_operand(fun: Any, _: Any) -> Sequence[Any]:
    return fun()


RULES: dict[str, Rule] = dict.fromkeys(("pure_callback", "io_callback", "debug_callback", "debug_print"), callback_rule)
