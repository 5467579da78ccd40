"""Finds what follows a product on arrays of its result's shape, as the operations of an activation or a loss.

Alone a product is often cheapest on few tiles, or in shreds, where all that follows it would then be slow.

Input: a jaxpr. Output: for each product the elementwise operations that are its share. All products whose results have
a shape share the operations on arrays of it alike, wherever those are, so that layers that are alike are planned once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn
from ipujax.lowering.poplin.following import Operation
from ipujax.lowering.popops.elementwise_cycles import OP_COSTS


def followers(jaxpr: Jaxpr) -> Mapping[int, tuple[Operation, ...]]:
    """The share of each product of a jaxpr, by the `id` of the equation."""
    results = {id(eqn): _shape(eqn.outvars[0]) for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"}
    alike, elementwise = Counter(results.values()), operations(jaxpr.eqns)
    shares = {shape: tuple(elementwise[shape][::number]) for shape, number in alike.items()}
    return {product: shares[shape] for product, shape in results.items()}


def operations(eqns: Iterable[JaxprEqn]) -> defaultdict[tuple[int, ...], list[Operation]]:
    """The elementwise operations among some equations, in order, by the shape of their results."""
    found: defaultdict[tuple[int, ...], list[Operation]] = defaultdict(list)
    for eqn in eqns:
        if eqn.primitive.name in OP_COSTS:
            shape = _shape(eqn.outvars[0])
            arrays = sum(_shape(atom) == shape for atom in eqn.invars)
            found[shape].append((eqn.primitive.name, arrays, len(eqn.invars) - arrays))
    return found


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)
