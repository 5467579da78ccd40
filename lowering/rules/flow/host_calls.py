"""Rules for calls of Python functions from a program: prints and callbacks, as host exchanges in program order.

A control program has one order, so calls that JAX leaves unordered are ordered too. A function gets keys as words
of 32 bits, as by JAX, and JAX lets none return keys. Results of 64 bits, such as Python's numbers, are narrowed to
32 where JAX has no 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.random import key_data

from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.layout import map_linearly
from ipujax.lowering.replicas import HOST_CALLS
from ipujax.lowering.rules.base.context import Context, Rule, lower_array_function
from ipujax.runtime.graph import StreamIn, StreamOut
from ipujax.runtime.host import CallStream, HostCall
from ipujax.runtime.tensor import Tensor, is_key_dtype


def callback_rule(ctx: Context, *operands: Tensor, sharing: int = 1, **params: Any) -> Sequence[Tensor]:
    """Lowers `pure_callback`, `io_callback`, `debug.callback` and `debug.print`; returns tensors of their results.

    Operands are sent to the host one by one, then results received; the host calls the function in between.

    Args:
        ctx: the equation.
        operands: tensors of the arguments of the call.
        sharing: number of replicas that make one call together.
        params: parameters of the primitive, the Python function among them.
    """
    operands = tuple(lower_array_function(ctx, key_data, [x])[0] if is_key_dtype(x.dtype) else x for x in operands)
    graph = ctx.graph
    prog = ctx.prog
    # JAX's wrapper of the user's function; for debugging the primitive's eager implementation, which also formats.
    fun = partial(ctx.primitive.impl, **params) if "debug" in ctx.primitive.name else params["callback"]
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64:  # without 64 bits in JAX, NumPy's results are narrowed
        fun = partial(_narrowed, fun)
    if not operands:  # an operand tells the host when to call
        operands = (graph.add_constant(np.ones((), bool), ctx.name),)
        fun = partial(_without_operand, fun)
    results = tuple((tuple(aval.shape), aval.dtype) for aval in ctx.out_avals)
    is_pure = ctx.primitive.name == "pure_callback"
    call = HostCall(ctx.name, fun, len(operands), results, graph.origin, sharing, is_pure)
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


def call_once_rule(ctx: Context, *operands: Tensor, jaxpr: ClosedJaxpr, sharing: int) -> Sequence[Tensor]:
    """Lowers a call that groups of replicas make together, the one equation of the jaxpr."""
    (eqn,) = jaxpr.eqns
    name = ctx.name.removesuffix(ctx.primitive.name) + eqn.primitive.name
    return callback_rule(replace(ctx, name=name, equation=eqn), *operands, sharing=sharing, **eqn.params)


RULES: dict[str, Rule] = {**dict.fromkeys(HOST_CALLS, callback_rule), "call_once": call_once_rule}
