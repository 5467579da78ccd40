"""Finds what follows a product on arrays of its result's shape, as the operations of an activation or a loss.

Alone a product is often cheapest on few tiles, or in shreds, where all that follows it would then be slow.

Input: a jaxpr. Output: for each product the elementwise operations that are its share. All products whose results have
a shape share the operations on arrays of it alike, wherever those are, so that layers that are alike are planned once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn
from ipujax.lowering.poplin.following import Operation
from ipujax.lowering.popops.elementwise_cycles import OP_COSTS


def followers(jaxpr: Jaxpr) -> Mapping[int, tuple[Operation, ...]]:
    """The share of each product of a jaxpr, by the `id` of the equation."""
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    alike = Counter(_shape(eqn.outvars[0]) for eqn in products)
    elementwise: dict[tuple[int, ...], list[JaxprEqn]] = {shape: [] for shape in alike}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in OP_COSTS and (shape := _shape(eqn.outvars[0])) in elementwise:
            elementwise[shape].append(eqn)
    shares = {shape: operations_on(shape, elementwise[shape])[::number] for shape, number in alike.items()}
    return {id(eqn): shares[_shape(eqn.outvars[0])] for eqn in products}


def operations_on(shape: tuple[int, ...], eqns: Iterable[JaxprEqn]) -> tuple[Operation, ...]:
    """The elementwise operations among some equations whose results have a shape."""
    return tuple(
        (eqn.primitive.name, arrays := sum(_shape(atom) == shape for atom in eqn.invars), len(eqn.invars) - arrays)
        for eqn in eqns
        if eqn.primitive.name in OP_COSTS and _shape(eqn.outvars[0]) == shape
    )


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)
