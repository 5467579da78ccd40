"""Memory kinds of arguments: shapes in host memory, moves outside of the XLA computation, errors of mixed memories.

Limits: of `jax.ShapeDtypeStruct`s, those with a sharding of kind `pinned_host`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ipujax.lowering.jax_compat import aval_on_host, is_on_host
from ipujax.runtime.errors import ArgumentValueError, line_of

_HOST_KIND = "pinned_host"
_MEMORY_ERRORS = ("memory_space of all inputs", "memory space", "cotangent type")


class RunsApart(Exception):
    """Return a compiled function to its caller: no XLA computation can contain it, see `Lowered.runs_apart`."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        super().__init__(str(compiled))
        self.compiled = compiled


def moves_apart(signature: Any, calls: bool) -> bool:
    """Return whether arrays must move to and from host memory outside of the XLA computation."""
    # `calls`: whether the program calls Python functions.
    # JAX 0.10 compiles no ordered callbacks beside host memory. It reuses the buffer of a donated argument for the
    # first result of its shape and dtype, else for any result, whatever their memories, which ends the process.

    if not any(map(is_on_host, (*signature.in_avals, *signature.out_avals))):
        return False
    leaves = zip(signature.donated, signature.used, signature.in_avals, strict=True)
    donated = [aval for is_donated, is_used, aval in leaves if is_donated and is_used]
    for result in signature.out_avals:
        # A match is taken out, so that the next result of its shape gets the next buffer, as in JAX.
        match = next((n for n, x in enumerate(donated) if (x.shape, x.dtype) == (result.shape, result.dtype)), None)
        if match is not None and is_on_host(donated.pop(match)) != is_on_host(result):
            return True
    return calls or bool(donated)


def with_host_shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, `jax.ShapeDtypeStruct`s in host memory as avals, as JAX drops their memory kind."""
    return tuple(map(_in_memory, args)), {name: _in_memory(x) for name, x in kwargs.items()}


def _in_memory(argument: Any) -> Any:
    if not any(map(_is_on_host, jax.tree.leaves(argument))):
        return argument  # the object itself, which may be static
    return jax.tree.map(lambda x: aval_on_host(x) if _is_on_host(x) else x, argument)


def _is_on_host(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and getattr(leaf.sharding, "memory_kind", None) == _HOST_KIND


def check_memories(who: str, error: Exception) -> None:
    """Raise in place of an error of JAX's trace about values in different memories."""
    text = str(error)
    if isinstance(error, ValueError) and "host>" in text and any(words in text for words in _MEMORY_ERRORS):
        raise ArgumentValueError(
            f"{who} mixes values on the host and on the device",
            where=line_of(error),
            expected="operands in one memory, as jax.jit requires",
            got=text,
            hint="jax.device_put(x, jax.memory.Space.Device) fetches, jax.memory.Space.Host puts back",
        ) from error
