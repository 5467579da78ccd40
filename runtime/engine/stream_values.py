"""Values of host streams: their variables in the engine, and checks of the values that are given for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import HostStream, Program, StreamIn, StreamOut, distinct
from ipujax.runtime.host import CallStream
from ipujax.runtime.tensor import Variable, dtype_name


def stream_variables(program: Program, kind: type[StreamIn] | type[StreamOut]) -> dict[HostStream, Variable]:
    """Return a variable for each stream of a kind of node, in the order of the nodes."""
    nodes = (node for node in distinct(program) if isinstance(node, kind) and not is_call(node))
    streams = dict.fromkeys(node.stream for node in nodes)
    return {stream: Variable(stream.shape, stream.dtype, stream.name) for stream in streams}


def is_call(node: StreamIn | StreamOut) -> bool:
    """Return whether a node moves an operand or a result of a Python function."""
    return isinstance(node.stream, CallStream)


def check_input(stream: HostStream, inputs: Mapping[HostStream, Any], shape: tuple[int, ...]) -> jax.Array:
    """Return the value of a stream; refuse a missing one, or another shape or dtype than those of a transfer."""
    expected = f"{dtype_name(stream.dtype)}{list(shape)}"
    if stream not in inputs:
        raise ArgumentError(f"stream {stream.name} has no value", expected=expected)
    value = jnp.asarray(inputs[stream])
    if value.shape != shape or value.dtype != stream.dtype:
        got = f"{dtype_name(value.dtype)}{list(value.shape)}"
        raise ArgumentError(f"value of stream {stream.name} has the wrong shape or dtype", expected=expected, got=got)
    return value
