"""Rules for calls of Python functions from a program: prints and callbacks, as host exchanges in program order.

Whether JAX calls them ordered or not, here they run in order: a control program has one order. A function is given
words of 32 bits for keys, as by JAX, and JAX lets none give keys back. What it gives in 64 bits, as Python's numbers
are, is narrowed to 32 where JAX has no 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.random import key_data

from ipujax.lowering.layout import map_linearly
from ipujax.lowering.rules.base.composed import composed
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.runtime.graph import StreamIn, StreamOut
from ipujax.runtime.host import CallStream, HostCall
from ipujax.runtime.tensor import Tensor, is_key_dtype


def callback_rule(ctx: Context, *operands: Tensor, **params: Any) -> Sequence[Tensor]:
    """`pure_callback`, `io_callback`, `debug.callback` and `debug.print`."""
    operands = tuple(composed(ctx, key_data, [x])[0] if is_key_dtype(x.dtype) else x for x in operands)
    graph, prog = ctx.graph, ctx.prog
    # JAX's own wrapper of the user's function; debugging has more to it, which its primitive does when called eagerly.
    fun = partial(ctx.primitive.impl, **params) if "debug" in ctx.primitive.name else params["callback"]
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        fun = partial(_narrowed, fun)
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


_NARROWED = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}


def _narrowed(fun: Any, *operands: Any) -> Sequence[Any]:
    results = [np.asarray(value) for value in fun(*operands)]
    return [value.astype(_NARROWED.get(value.dtype.name, value.dtype), copy=False) for value in results]


def _without_operand(fun: Any, _: Any) -> Sequence[Any]:
    return fun()


RULES: dict[str, Rule] = dict.fromkeys(("pure_callback", "io_callback", "debug_callback", "debug_print"), callback_rule)
