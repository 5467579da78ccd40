"""What an equation is to those around it, where that decides how its result should lie.

Input: a jaxpr. Output: the `Role` of each equation that has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ipujax.lowering.dense_layers import layer_roles
from ipujax.lowering.followers import followers
from ipujax.lowering.jax_compat import Jaxpr
from ipujax.lowering.loop_weights import loop_roles
from ipujax.lowering.role import NO_ROLE, NO_ROLES, Role
from ipujax.lowering.summed_scatters import scatter_roles


def roles(jaxpr: Jaxpr, known: Mapping[int, Role] = NO_ROLES) -> Mapping[int, Role]:
    """The roles of the equations of a jaxpr, by the `id` of the equation.

    Args:
        jaxpr: the equations.
        known: roles that some have by what is around them.
    """
    found = {**known, **layer_roles(jaxpr), **scatter_roles(jaxpr), **loop_roles(jaxpr)}
    for product, operations in followers(jaxpr).items():
        found[product] = replace(found.get(product, NO_ROLE), on_result=operations)
    return found
