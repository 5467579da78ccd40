"""Collectives that a gradient passes through, in the function of one replica.

Input: the jaxpr of one replica, as traced. Output: for each collective whose transpose sums over replicas its name and
the user's line.

JAX transposes a collective without regard to other replicas (`check_vma=False` of `jax.shard_map`): the transpose of a
sum over replicas is a sum, that of an all-gather a sum whose parts are scattered. Gradients are then those of the sum
of the losses of all replicas. The transposes of `psum_scatter`, `ppermute` and `all_to_all` sum nothing.

A backward rule of `jax.custom_vjp` has the name stack of a transpose too, and may contain a sum that its author
intends. A sum is a transpose if a collective outside of backward parts comes from the same call in the user's code.
`jax.linear_transpose` leaves no such collective, because it does not evaluate its function; its name stack has no `jvp`
in the transpose. Sums of authors have such a stack in rules of `linear_call` and `custom_linear_solve` only.
Limits: a rule of `jax.custom_vjp` counts as a transpose if its forward rule has a collective too and both are under
`jax.jit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ipujax.lowering.gcl import axis_of, is_collective
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, jaxprs_in_params, raw_frames
from ipujax.lowering.jaxpr import is_transposed, is_transposed_only
from ipujax.lowering.source_info import call_site, name_stack, source_line
from ipujax.runtime.errors import is_of_user

_TRANSPOSE_OF: Mapping[str, str] = MappingProxyType({"psum": "psum", "reduce_scatter": "all_gather"})
_WITH_RULES = frozenset({"linear_call", "custom_linear_solve"})  # of JAX: their authors define the transpose


class GradientSum(NamedTuple):
    """A collective that sums a gradient over replicas.

    Args:
        primitive: that of the forward pass, of which the sum is the transpose.
        line: the user's line; empty if it is not known.
    """

    primitive: str
    line: str


def gradient_sums(jaxpr: Jaxpr, axis_name: str) -> list[GradientSum]:
    """Lists the collectives of a jaxpr whose transposes sum a gradient over the replicas, one for each source line.

    `axis_name` is the axis of replicas; collectives over other axes do not count.
    """
    forward = dict[object, str]()
    backward = list[tuple[JaxprEqn, str]]()
    for eqn, stack in _collectives(jaxpr, axis_name):
        if not is_transposed(stack):
            forward.setdefault(call_site(eqn), eqn.primitive.name)
        elif eqn.primitive.name in _TRANSPOSE_OF:
            backward.append((eqn, stack))
    lines = dict[str, str]()
    for eqn, stack in backward:
        # A transposed collective keeps the call site of the one that it is the transpose of.
        if name := forward.get(call_site(eqn)) or _linearly_transposed(eqn, stack):
            lines.setdefault(source_line(eqn), name)
    return [GradientSum(name, line) for line, name in lines.items()]


def _linearly_transposed(eqn: JaxprEqn, stack: str) -> str:
    """Primitive of which `jax.linear_transpose` made a sum; "" for a sum of an author's rule, or of `grad`."""
    callers = {code.co_qualname.partition(".")[0] for code, _ in raw_frames(eqn) if not is_of_user(code.co_filename)}
    return _TRANSPOSE_OF[eqn.primitive.name] if is_transposed_only(stack) and not callers & _WITH_RULES else ""


def _collectives(jaxpr: Jaxpr, axis_name: str, outer_stack: str = "") -> Iterator[tuple[JaxprEqn, str]]:
    """Collectives over an axis at any depth, with the name stack from the outermost jaxpr."""
    for eqn in jaxpr.eqns:
        if is_collective(eqn) and axis_of(eqn) == axis_name and eqn.primitive.name != "axis_index":
            yield eqn, f"{outer_stack}/{name_stack(eqn)}"
        for inner_jaxpr in jaxprs_in_params(eqn.params):
            yield from _collectives(inner_jaxpr, axis_name, f"{outer_stack}/{name_stack(eqn)}")
