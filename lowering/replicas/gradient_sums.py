"""Collectives that a gradient passes through, in what one replica computes.

Input: the jaxpr of one replica, as it is traced. Output: for each collective whose transpose sums over replicas its
name and the user's line.

JAX transposes a collective as if no replica knew what the others have (`check_vma=False` of `jax.shard_map`): the
transpose of a sum over replicas is a sum, that of an all-gather a sum whose parts are scattered. Gradients are then
those of the sum of the losses of all replicas. The transposes of `psum_scatter`, `ppermute` and `all_to_all` sum
nothing.

A backward rule of `jax.custom_vjp` has the name stack of a transpose too, and may sum what its author wants summed. A
sum is a transpose if a collective outside of backward parts comes from the same call in the user's code.
Limits: such a rule counts as a transpose where its forward rule has a collective too and both are under `jax.jit`;
`jax.linear_transpose` of a function that is not evaluated has no such collective.
"""

from __future__ import annotations

from collections.abc import Iterator

from ipujax.lowering.gcl import axis_of, is_collective
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, jaxprs_in_params
from ipujax.lowering.jaxpr import is_transposed
from ipujax.lowering.source_info import call_site, name_stack, source_line

_SUMS = ("psum", "reduce_scatter")


def gradient_sums(jaxpr: Jaxpr, axis_name: str) -> list[tuple[str, str]]:
    """The collectives that a gradient passes through and is summed over replicas by, each line once.

    Args:
        jaxpr: what one replica computes.
        axis_name: the axis of replicas.

    Returns:
        The name of the primitive and the user's line of each, "" where JAX does not know it.
    """
    forward, sums = dict[object, str](), list[JaxprEqn]()
    for eqn, stack in _collectives(jaxpr, axis_name):
        if not is_transposed(stack):
            forward.setdefault(call_site(eqn), eqn.primitive.name)
        elif eqn.primitive.name in _SUMS:
            sums.append(eqn)
    lines = {source_line(eqn): forward[call_site(eqn)] for eqn in sums if call_site(eqn) in forward}
    return [(name, line) for line, name in lines.items()]


def _collectives(jaxpr: Jaxpr, axis_name: str, outer: str = "") -> Iterator[tuple[JaxprEqn, str]]:
    """The collectives over an axis, however deep inside, with the names of all they are in."""
    for eqn in jaxpr.eqns:
        if is_collective(eqn) and axis_of(eqn) == axis_name and eqn.primitive.name != "axis_index":
            yield eqn, f"{outer}/{name_stack(eqn)}"
        for inner in jaxprs_in_params(eqn.params):
            yield from _collectives(inner, axis_name, f"{outer}/{name_stack(eqn)}")
