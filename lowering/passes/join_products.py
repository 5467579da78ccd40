"""Pass `join_products`: products of parts of one array with one operand are one product.

    a = x[0] @ w   b = x[1] @ w          y = x @ w   a = y[0]   b = y[1]

So steps of a recurrent layer that an exporter wrote one after the other share their input product, as those of a loop
do by `hoist_products`. A product of more rows costs little more than one of a few.
Input and output: jaxprs; those in loops, branches, replicas too. Products stay that `jax.checkpoint` computes again,
those of a stage, those of different phases, and those whose results would cost more bytes, until they are read, than
their supersteps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var, trace
from ipujax.lowering.jaxpr import (
    HOLDERS,
    Rewrite,
    everywhere,
    phase_of,
    spliced,
    variables_read,
    with_equations,
    with_inner,
)
from ipujax.lowering.passes.hoist_products import NUM_TILES, VIEWS, is_cheap_to_keep, may_move, most_kept_bytes
from ipujax.lowering.primitives import is_matrix_product, record_of
from ipujax.runtime.graph import BYTE_COST_CYCLES


def join_products(
    jaxpr: ClosedJaxpr,
    byte_cost: float = BYTE_COST_CYCLES,
    *,
    num_tiles: int = NUM_TILES,
    keeps_products: bool = False,
) -> ClosedJaxpr:
    """Returns an equal jaxpr in which products of parts of an array with one operand are one.

    Args:
        jaxpr: the jaxpr, without calls.
        byte_cost: cost per byte on the fullest tile, in cycles.
        num_tiles: tiles over which results are spread.
        keeps_products: whether all products stay as they are: where memory is short.
    """
    if keeps_products:
        return jaxpr
    most_bytes = most_kept_bytes(byte_cost, num_tiles)

    def rewritten(body: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
        eqns = [with_inner(eqn, rewrite) if eqn.primitive.name in HOLDERS else eqn for eqn in body.jaxpr.eqns]
        return with_equations(body, _with_shared_products(eqns, most_bytes))

    return everywhere(rewritten)(jaxpr)


def _with_shared_products(eqns: Sequence[JaxprEqn], most_bytes: float) -> list[JaxprEqn]:
    """The equations, with one product for each group of them, at the place of the group's first.

    A group has the products of parts of one array, of equal shape, with the same right operand and parameters, in one
    phase of execution: those of several phases would run in the first, and read what later ones compute.

    Args:
        eqns: equations of a body.
        most_bytes: upper bound of the bytes of a product's result on all tiles, which is live from there on.
    """
    makers = {var: eqn for eqn in eqns for var in eqn.outvars}
    groups: dict[Hashable, list[JaxprEqn]] = defaultdict(list)
    for eqn in eqns:
        if is_matrix_product(eqn) and may_move(eqn) and is_cheap_to_keep(eqn, most_bytes):
            lhs, rhs = eqn.invars
            views = _views(lhs, makers) if isinstance(lhs, Var) and isinstance(rhs, Var) else []
            if views:
                array = variables_read(views[0])[0]
                params = tuple(sorted(map(repr, eqn.params.items())))
                groups[array, rhs, lhs.aval, params, phase_of(eqn)].append(eqn)
    group_of = {id(eqn): group for group in groups.values() if len(group) > 1 for eqn in group}
    added = set[int]()
    result: list[JaxprEqn] = []
    for eqn in eqns:
        group = group_of.get(id(eqn), [])
        views = [view for product in group for view in _views(product.invars[0], makers)]
        if id(eqn) not in added:
            result += [view for view in dict.fromkeys(views) if id(view) not in added]
            result += _product(group) if group else [eqn]
        added.update(map(id, (eqn, *views, *group)))
    return result


def _views(part: Any, makers: Mapping[Var, JaxprEqn]) -> list[JaxprEqn]:
    """Equations that make a part of an array, in order."""
    views: list[JaxprEqn] = []
    while (maker := makers.get(part)) is not None and record_of(maker).cost in VIEWS and variables_read(maker):
        views.append(maker)
        (part,) = variables_read(maker)
    return views[::-1]


def _product(group: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Equations of one product for a group, with the results of each."""
    first = group[0]

    def products(rhs: jax.Array, *lhs_parts: jax.Array) -> list[jax.Array]:
        stacked = lax.concatenate([lax.expand_dims(lhs, (0,)) for lhs in lhs_parts], 0)
        results = jax.vmap(lambda lhs: first.primitive.bind(lhs, rhs, **first.params))(stacked)
        return [lax.index_in_dim(results, number, keepdims=False) for number in range(len(lhs_parts))]

    operands = [first.invars[1], *(eqn.invars[0] for eqn in group)]
    jaxpr = trace(products, [atom.aval for atom in operands], {}, ()).jaxpr.jaxpr
    results = zip(jaxpr.outvars, (eqn.outvars[0] for eqn in group), strict=True)
    eqns, _ = spliced(jaxpr, {**dict(results), **dict(zip(jaxpr.invars, operands, strict=True))})
    return [eqn.replace(source_info=first.source_info) for eqn in eqns]
