"""Memory kinds of arguments: shapes in host memory, moves outside of the XLA computation, errors of mixed memories
and of kinds that the target does not have: others than `device` and `pinned_host`.

Limits: of `jax.ShapeDtypeStruct`s, those with a sharding of kind `pinned_host`.

Source of the arguments in streaming memory, `offload_argnums`: PopART keeps tensors of less than 2 elements on chip
(`TensorLocationSettings`, minElementsForOffChip).

A policy of `jax.checkpoint` that offloads to a kind that the target does not have is an error; others are warned of.
Source: jax 0.10, which takes any string for a memory kind in a policy, and on CPUs keeps values on the device except
those that `jax.device_put`, or a policy, puts to `pinned_host`. Policies are asked about the equations of JAX's own
offloading policies: names, and products. Limits: the jaxpr does not show which of them are inside the checkpoint, so a
policy is refused for a name outside it too; arguments in `unpinned_host` are treated as on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import Sharding

from ipujax.lowering.jax_compat import JaxprEqn, aval_on_host, is_float0, is_on_host
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError, ArgumentValueError, line_of
from ipujax.runtime.tensor import is_key_dtype

_MIN_ELEMENTS = 2  # published: PopART, see above


def offloaded_arguments(who: str, numbers: Sequence[int], count: int, static: Collection[int]) -> frozenset[int]:
    """Return positions of offloaded arguments, counted without static ones; refuse those of static ones, or of none."""
    offloaded = set()
    for number in numbers:
        position = number + count if number < 0 else number
        if not 0 <= position < count or position in static:
            raise ArgumentError(
                f"offload_argnums of {who} names {'a static argument' if position in static else 'no argument'}",
                expected=f"positions of {count} positional arguments that are arrays",
                got=number,
            )
        # Traces have no static arguments: the operands behind them move up.
        offloaded.add(position - sum(other < position for other in static))
    return frozenset(offloaded)


def may_be_offloaded(leaf: Any) -> bool:
    """Return whether an array of an offloaded argument is stored in streaming memory: not keys, not single elements."""
    return not is_key_dtype(leaf.dtype) and not is_float0(leaf) and prod(leaf.shape) >= _MIN_ELEMENTS


_DEVICE = "device"
_HOST = "pinned_host"
_OFFLOADED = ("name", "dot_general")  # primitives that policies of JAX offload


def check_policies(who: str, eqns: Sequence[JaxprEqn]) -> None:
    """Refuses policies that offload to other than streaming memory."""
    differentiated = (eqn.params["policy"] for eqn in eqns if eqn.params.get("differentiated"))
    policies = {id(policy): policy for policy in differentiated if policy is not None}
    for eqn in eqns if policies else ():
        if eqn.primitive.name in _OFFLOADED:
            for policy in policies.values():
                _check_answer(who, eqn, policy(eqn.primitive, *(x.aval for x in eqn.invars), **eqn.params))


def _check_answer(who: str, eqn: JaxprEqn, answer: Any) -> None:
    """Refuses the answer of a policy for an equation, if it offloads its result from or to another memory."""
    for setting, kind, kinds in (
        ("offload_src", getattr(answer, "src", _DEVICE), (_DEVICE,)),
        ("offload_dst", getattr(answer, "dst", _HOST), (_HOST, _DEVICE)),
    ):
        if kind not in kinds:
            raise ArgumentValueError(
                f"a policy of jax.checkpoint in {who} offloads a {eqn.primitive.name} with {setting}={kind!r}",
                where=source_line(eqn) or None,
                expected=f"{setting}={kinds[0]!r}" + (", which is streaming memory" if kinds[0] == _HOST else ""),
                got=f"{setting}={kind!r}",
                hint=f"{setting}={kinds[0]!r}; or save_only_these_names, which keeps values on the chip",
            )


def memories_without_effect(eqn: JaxprEqn) -> Iterator[str]:
    """Texts of memory kinds of an equation that have no effect."""
    if eqn.primitive.name == "device_put":
        for kind in sorted({*_kinds(eqn.params["devices"])} - {_DEVICE, _HOST}):
            yield f"puts a value to {kind!r}, and it stays on the chip: {_HOST!r} is streaming memory"
    else:
        for kind in sorted({*_kinds(eqn.params.values())} - {_DEVICE}):
            setting = f"asks for {kind!r} by the sharding of {eqn.primitive.name}"
            yield f"{setting}, and the value is not moved, as with jax.jit: jax.device_put moves values"


def _kinds(values: Any) -> Iterator[str]:
    """Memory kinds of the shardings among values, and among tuples of them."""
    for value in values:
        if isinstance(value, tuple):
            yield from _kinds(value)
        elif isinstance(value, Sharding) and value.memory_kind is not None:
            yield value.memory_kind


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
