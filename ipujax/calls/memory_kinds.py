"""Memory kinds of arguments: shapes that are on the host, what runs apart, errors about values in different memories.

Limits: of `jax.ShapeDtypeStruct`s, those with a sharding of kind `pinned_host`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ipujax.lowering.jax_compat import aval_on_host, is_on_host
from ipujax.runtime.errors import ArgumentValueError, line_of

_HOST_KIND = "pinned_host"
_JAX_SAYS = ("memory_space of all inputs", "memory space", "cotangent type")


class RunsApart(Exception):
    """A compiled function that runs by itself, see `Lowered.runs_apart`: it cannot be part of a computation."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        super().__init__(str(compiled))
        self.compiled = compiled


def moves_apart(signature: Any, calls: bool) -> bool:
    """Whether arrays move to and from memory of the host before and behind what XLA runs.

    JAX 0.10 compiles no ordered callbacks beside such memory. It gives the buffer of a donated argument to the first
    result of its shape and dtype, and others to any, whatever their memories, which ends the process.

    Args:
        signature: memories of arguments and results, and which are donated.
        calls: whether the program calls functions of the host.
    """
    if not any(map(is_on_host, (*signature.in_avals, *signature.out_avals))):
        return False
    given = zip(signature.donated, signature.used, signature.in_avals, strict=True)
    donated = [aval for is_donated, is_used, aval in given if is_donated and is_used]
    for result in signature.out_avals:
        match = next((n for n, x in enumerate(donated) if (x.shape, x.dtype) == (result.shape, result.dtype)), None)
        if match is not None and is_on_host(donated.pop(match)) != is_on_host(result):
            return True
    return calls or bool(donated)


def with_host_shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with shapes that are on the host as JAX traces them there; it drops the kind of their sharding."""
    return tuple(map(_in_memory, args)), {name: _in_memory(x) for name, x in kwargs.items()}


def _in_memory(argument: Any) -> Any:
    if not any(map(_is_on_host, jax.tree.leaves(argument))):
        return argument  # the object itself: it may be a static one
    return jax.tree.map(lambda x: aval_on_host(x) if _is_on_host(x) else x, argument)


def _is_on_host(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and getattr(leaf.sharding, "memory_kind", None) == _HOST_KIND


def check_memories(who: str, error: Exception) -> None:
    """Raises an error of JAX about values in different memories as one of ours.

    Args:
        who: the function, for the message.
        error: what JAX raised while it traced.

    Raises:
        ArgumentValueError: in its place.
    """
    said = str(error)
    if isinstance(error, ValueError) and "host>" in said and any(words in said for words in _JAX_SAYS):
        raise ArgumentValueError(
            f"{who} mixes values on the host and on the device",
            where=line_of(error),
            expected="values in one memory, as jax.jit wants them",
            got=said,
            hint="jax.device_put(x, jax.memory.Space.Device) fetches, jax.memory.Space.Host puts back",
        ) from error
