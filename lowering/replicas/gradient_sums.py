"""Collectives that a gradient passes through, in what one replica computes.

Input: the jaxpr of one replica, as it is traced. Output: for each collective whose transpose sums over replicas its
name and the user's line.

JAX transposes a collective as if no replica knew what the others have (`check_vma=False` of `jax.shard_map`): the
transpose of a sum over replicas is a sum, that of an all-gather a sum whose parts are scattered. Gradients are then
those of the sum of the losses of all replicas. The transposes of `psum_scatter`, `ppermute` and `all_to_all` sum
nothing.

A backward rule of `jax.custom_vjp` has the name stack of a transpose too, and may sum what its author wants summed. A
sum is a transpose if a collective outside of backward parts comes from the same call in the user's code.
`jax.linear_transpose` leaves no such collective: it does not evaluate its function. Its name stack tells, which has no
`jvp` in the transpose; sums of authors are there in rules of `linear_call` and `custom_linear_solve` only.
Limits: a rule of `jax.custom_vjp` counts as a transpose where its forward rule has a collective too and both are under
`jax.jit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ipujax.lowering.gcl import axis_of, is_collective
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, jaxprs_in_params, raw_frames
from ipujax.lowering.jaxpr import is_transposed, is_transposed_only
from ipujax.lowering.source_info import call_site, name_stack, source_line
from ipujax.runtime.errors import is_of_user

_TRANSPOSE_OF: Mapping[str, str] = MappingProxyType({"psum": "psum", "reduce_scatter": "all_gather"})
_WITH_RULES = frozenset({"linear_call", "custom_linear_solve"})  # of JAX: their authors say what a transpose is


def gradient_sums(jaxpr: Jaxpr, axis_name: str) -> list[tuple[str, str]]:
    """The collectives that a gradient passes through and is summed over replicas by, each line once.

    Args:
        jaxpr: what one replica computes.
        axis_name: the axis of replicas.

    Returns:
        The name of the primitive and the user's line of each, "" where JAX does not know it.
    """
    forward, backward = dict[object, str](), list[tuple[JaxprEqn, str]]()
    for eqn, stack in _collectives(jaxpr, axis_name):
        if not is_transposed(stack):
            forward.setdefault(call_site(eqn), eqn.primitive.name)
        elif eqn.primitive.name in _TRANSPOSE_OF:
            backward.append((eqn, stack))
    lines = dict[str, str]()
    for eqn, stack in backward:
        if name := forward.get(call_site(eqn)) or _linearly_transposed(eqn, stack):
            lines.setdefault(source_line(eqn), name)
    return [(name, line) for line, name in lines.items()]


def _linearly_transposed(eqn: JaxprEqn, stack: str) -> str:
    """The primitive that `jax.linear_transpose` made a sum of, "" if it is a sum of an author's rule, or of `grad`."""
    callers = {code.co_qualname.partition(".")[0] for code, _ in raw_frames(eqn) if not is_of_user(code.co_filename)}
    return _TRANSPOSE_OF[eqn.primitive.name] if is_transposed_only(stack) and not callers & _WITH_RULES else ""


def _collectives(jaxpr: Jaxpr, axis_name: str, outer: str = "") -> Iterator[tuple[JaxprEqn, str]]:
    """The collectives over an axis, however deep inside, with the names of all they are in."""
    for eqn in jaxpr.eqns:
        if is_collective(eqn) and axis_of(eqn) == axis_name and eqn.primitive.name != "axis_index":
            yield eqn, f"{outer}/{name_stack(eqn)}"
        for inner in jaxprs_in_params(eqn.params):
            yield from _collectives(inner, axis_name, f"{outer}/{name_stack(eqn)}")
