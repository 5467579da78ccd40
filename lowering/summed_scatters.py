"""Finds scatters whose result is added to an array that there is already, as the gradient of a gather is to others.

Alone such a scatter is often cheapest on few tiles, from which the sum would then have to fetch all of it.

Input: a jaxpr. Output: for each such scatter its `Role`, which names the array.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ipujax.lowering.jax_compat import Jaxpr, Literal, shape_of
from ipujax.lowering.popops.scatter import SCATTERS
from ipujax.lowering.role import Role

SUMS = ("add", "add_any")


def scatter_roles(jaxpr: Jaxpr) -> Mapping[int, Role]:
    """The roles of the scatters of a jaxpr, by the `id` of the equation."""
    reads = Counter(atom for eqn in jaxpr.eqns for atom in eqn.invars if not isinstance(atom, Literal))
    reads.update(atom for atom in jaxpr.outvars if not isinstance(atom, Literal))
    made = {var: n for n, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    found = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in SUMS:
            continue
        for scattered, other in zip(eqn.invars, eqn.invars[::-1], strict=True):
            if isinstance(scattered, Literal) or isinstance(other, Literal) or scattered not in made:
                continue
            scatter = jaxpr.eqns[made[scattered]]
            is_scatter = scatter.primitive.name in SCATTERS and reads[scattered] == 1
            if is_scatter and made.get(other, -1) < made[scattered] and shape_of(other) == shape_of(scattered):
                found[id(scatter)] = Role(laid_as=other)
    return found
