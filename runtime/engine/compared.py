"""Values that codelets test for equality, computed once.

XLA computes a cheap value again in each fusion that reads it, with a fused multiply-add in one and without in another.
The largest element then equals none of the elements that it was chosen from, and its gradient is lost.

Input: a graph and a program. Output: the variables whose values are to be computed once, and such a value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from ipujax.runtime.engine.collapse import executed_groups
from ipujax.runtime.graph import Graph, Program
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.tensor import Variable


def compared_variables(graph: Graph, program: Program) -> frozenset[Variable]:
    """Return the variables that codelets compare, in a program that tests any for equality."""
    groups = [group for group in executed_groups(graph, program) if group.codelet.compares != "nothing"]
    if all(group.codelet.compares == "order" for group in groups):
        return frozenset()
    reads = (access for group in groups for access in group.accesses)
    variables = (v for access in reads for v in access.tensor.variables() if not v.is_constant)
    return frozenset(v for v in variables if jnp.issubdtype(v.dtype, jnp.inexact))


_same = jax_jit(lambda x: x)  # one function: traced once for each shape and dtype


def computed_once(value: jax.Array) -> jax.Array:
    """Return an array as the result of a function that XLA does not inline: all fusions read one value of it."""
    with set_xla_metadata(inlineable="false"):
        result: jax.Array = _same(value)
    return result
