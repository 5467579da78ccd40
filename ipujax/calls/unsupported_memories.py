"""Memory kinds that the target does not have: others than `device` and `pinned_host`.

Input: a traced jaxpr. Output: an error if a policy of `jax.checkpoint` offloads to one, texts for warnings of others.

Source: jax 0.10, which takes any string for a memory kind in a policy, and on CPUs keeps values on the device except
those that `jax.device_put`, or a policy, puts to `pinned_host`. Policies are asked about the equations of JAX's own
offloading policies: names, and products. Limits: the jaxpr does not show which of them are inside the checkpoint, so a
policy is refused for a name outside it too; arguments in `unpinned_host` are treated as on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Sharding

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentValueError

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
