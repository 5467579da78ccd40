"""Values that stay terms of a sum on each device, because their only reader takes the sum or is unreduced too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ipujax.lowering.jax_compat import Jaxpr, Var
from ipujax.lowering.partition.specs import MeshAxes, Spec, typed_spec

# Equations that keep the terms of a sum.
_KEEPING_TERMS = frozenset({"transpose", "reshape", "squeeze", "convert_element_type", "copy", "sharding_constraint"})
_SCALED_BY = frozenset({"mul", "div"})  # by a number, its second operand


def values_that_stay_terms(jaxpr: Jaxpr, summed: Iterable[Var]) -> frozenset[Var]:
    """Those of `summed` that nothing else reads, and values that become them alone."""
    uses = Counter(atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, Var))
    uses.update(atom for atom in jaxpr.outvars if isinstance(atom, Var))
    sums = {var for var in summed if uses[var] == 1}
    for eqn in reversed(jaxpr.eqns):
        is_scaled = eqn.primitive.name in _SCALED_BY and not isinstance(eqn.invars[1], Var)
        if (is_scaled or eqn.primitive.name in _KEEPING_TERMS) and eqn.outvars[0] in sums:
            sums.update(atom for atom in eqn.invars if isinstance(atom, Var) and uses[atom] == 1)
    return frozenset(sums)


def left_by_reshards(jaxpr: Jaxpr, specs: Mapping[Var, Spec], mesh: MeshAxes) -> frozenset[Var]:
    """Values without a type of their own that are resharded to an unreduced sum only."""
    left = [
        eqn.invars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "reshard" and (spec := specs.get(eqn.outvars[0])) is not None and spec.unreduced
    ]
    return values_that_stay_terms(jaxpr, [v for v in left if isinstance(v, Var) and typed_spec(v.aval, mesh) is None])
