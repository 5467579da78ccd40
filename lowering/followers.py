"""Finds what follows a product on arrays of its result's shape, as the operations of an activation or a loss.

Alone a product is often cheapest on few tiles, or in shreds, where all that follows it would then be slow.

    y = x · W + b; z = max(y, 0)      forward: the sum and the maximum follow x · W
    dy = where(y > 0, dz, 0)          backward: the comparison and the selection too, and they follow the product dz

Arrays of one shape belong together if elementwise operations lead from one to the other, in either direction. What an
optimizer does to weights belongs to them and their gradient, even if there are as many examples as inputs.

Input: a jaxpr. Output: for each product the elementwise operations that are its share, evenly of those that belong to
its result, which several products may share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, Literal, Var, shape_of
from ipujax.lowering.poplin.following import Operation
from ipujax.lowering.popops.elementwise_cycles import OP_COSTS


def followers(jaxpr: Jaxpr) -> Mapping[int, tuple[Operation, ...]]:
    """The share of each product of a jaxpr, by the `id` of the equation."""
    together = _Together(jaxpr)
    results = {id(eqn): together.of(eqn.outvars[0]) for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"}
    sharing, found = Counter(results.values()), operations(jaxpr.eqns, together.of)
    shares = {group: tuple(found[group][::number]) for group, number in sharing.items()}
    return {product: shares[group] for product, group in results.items()}


def operations(
    eqns: Iterable[JaxprEqn], group_of: Callable[[Any], Hashable] = shape_of
) -> defaultdict[Hashable, list[Operation]]:
    """The elementwise operations among some equations, in order, by the shape or another group of their results."""
    found: defaultdict[Hashable, list[Operation]] = defaultdict(list)
    for eqn in eqns:
        if eqn.primitive.name in OP_COSTS:
            shape = shape_of(eqn.outvars[0])
            arrays = sum(shape_of(atom) == shape for atom in eqn.invars)
            found[group_of(eqn.outvars[0])].append((eqn.primitive.name, arrays, len(eqn.invars) - arrays))
    return found


class _Together:
    """Which variables of a jaxpr belong together; each group is called by one of its variables."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._next: dict[Var, Var] = {}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in OP_COSTS:
                (out,) = eqn.outvars
                for atom in eqn.invars:
                    if not isinstance(atom, Literal) and shape_of(atom) == shape_of(out):
                        self._join(atom, out)

    def of(self, var: Var) -> Var:
        """The variable by which the group of `var` is called."""
        path = []
        while var in self._next:
            path.append(var)
            var = self._next[var]
        self._next.update(dict.fromkeys(path, var))
        return var

    def _join(self, a: Var, b: Var) -> None:
        first, second = self.of(a), self.of(b)
        if first is not second:
            self._next[first] = second
