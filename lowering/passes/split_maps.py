"""Pass `split_maps`: elementwise equations whose results are split are computed by part, where each part is read.

    y = x + b; p, q = split(y); … p …; … q …     p = x[:n] + b[:n]; … p …; q = x[n:] + b[n:]; … q …

Layers with gates, as an LSTM, or a gated linear unit, split a product's result behind the addition of a bias. By parts
that is fused into the vertices that read them: a superstep less.
Input, output: jaxprs. Limits: `split` alone, where elementwise equations read its parts, and combine them: others would
compute parts in as many supersteps, each on fewer tiles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var, shape_of
from ipujax.lowering.jaxpr import (
    Rewrite,
    everywhere,
    substituted,
    variables,
    variables_read,
    with_equations,
    with_inner,
)
from ipujax.lowering.primitives import record_of


def split_maps(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr whose elementwise equations are behind the splits of their results."""
    return everywhere(_with_split_maps)(jaxpr)


def _with_split_maps(jaxpr: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
    kept = set(variables(jaxpr.jaxpr.outvars))
    readers: dict[Var, list[JaxprEqn]] = defaultdict(list)
    later: dict[int, JaxprEqn] = {}  # equations behind, from the last to the first, by identity
    # Readers first: a split that has moved before one equation may move before those of its operands.
    for eqn in reversed([with_inner(eqn, rewrite) for eqn in jaxpr.eqns]):
        split = _split_of_result(eqn, readers, kept)
        if split is not None:
            del later[id(split)]
        for each in [eqn] if split is None else _by_parts(eqn, split, readers)[::-1]:
            later[id(each)] = each
            for var in dict.fromkeys(variables_read(each)):
                readers[var].append(each)
    return with_equations(jaxpr, list(later.values())[::-1])


def _split_of_result(eqn: JaxprEqn, readers: Mapping[Var, Sequence[JaxprEqn]], kept: set[Var]) -> JaxprEqn | None:
    """Return the split that reads the result of an elementwise equation; None if its parts are not computed alone.

    Args:
        eqn: the equation.
        readers: equations that read each variable, of all behind it.
        kept: results of the body.
    """
    if record_of(eqn).cost != "elementwise" or len(eqn.outvars) != 1:
        return None
    (result,) = eqn.outvars
    reading = readers.get(result, ())
    if len(reading) != 1 or reading[0].primitive.name != "split" or result in kept:
        return None
    parts = reading[0].outvars
    reading_parts = [reader for part in parts for reader in readers.get(part, ())]
    are_elementwise = all(record_of(reader).cost == "elementwise" for reader in reading_parts)
    has_equal_ranks = all(len(shape_of(var)) == len(shape_of(result)) for var in variables_read(eqn))
    is_by_part = are_elementwise and has_equal_ranks and kept.isdisjoint(parts) and _are_combined(parts, readers)
    return reading[0] if is_by_part else None


def _are_combined(parts: Sequence[Var], readers: Mapping[Var, Sequence[JaxprEqn]]) -> bool:
    """Return whether elementwise equations alone connect all parts that are read, so that a fused vertex reads them."""
    groups: list[set[int]] = []  # equations computed from connected parts, by identity
    for part in parts:
        reached: set[int] = set()
        computed = [part]
        for var in computed:  # which grows
            for eqn in readers.get(var, ()):
                if id(eqn) not in reached and record_of(eqn).cost == "elementwise":
                    reached.add(id(eqn))
                    computed += eqn.outvars
        if reached:
            apart = [group for group in groups if group.isdisjoint(reached)]
            connected = [group for group in groups if not group.isdisjoint(reached)]
            groups = [*apart, reached.union(*connected)]
    return len(groups) <= 1


def _by_parts(eqn: JaxprEqn, split: JaxprEqn, readers: Mapping[Var, Sequence[JaxprEqn]]) -> list[JaxprEqn]:
    """Return the splits of an elementwise equation's operands, and equations for the parts of its result that are read.

    Args:
        eqn: the equation.
        split: the split of its result.
        readers: equations that read each variable.
    """
    axis = split.params["axis"]
    eqns: list[JaxprEqn] = []
    parts_of: dict[Var, list[Var]] = {}  # of operands that have more than one element along the axis
    for var in dict.fromkeys(variables_read(eqn)):
        aval: Any = var.aval
        shape = aval.shape
        if shape[axis] == shape_of(split.invars[0])[axis]:
            shapes = [(*shape[:axis], size, *shape[axis + 1 :]) for size in split.params["sizes"]]
            parts_of[var] = [Var(aval.update(shape=each)) for each in shapes]
            # In the stage and phase of the equation that is now behind it.
            eqns.append(split.replace(invars=[var], outvars=parts_of[var], source_info=eqn.source_info))
    for number, part in enumerate(split.outvars):
        if readers.get(part):
            operands = [
                substituted(atom, {var: parts[number] for var, parts in parts_of.items()}) for atom in eqn.invars
            ]
            eqns.append(eqn.replace(invars=operands, outvars=[part]))
    return eqns
