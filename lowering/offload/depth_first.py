"""Equations in the order in which results are made one after the other.

An optimiser's update is traced as operations over all parameters. One parameter after the other, what it reads of
streaming memory need not be there at the same time.

Input: equations, and what is wanted of them. Output: the same equations; those behind the last one of a gradient in
depth-first order of what is wanted. Limits: equations with effects keep their order, and so do all others then.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipujax.lowering.jax_compat import Atom, JaxprEqn, Var, without_axes
from ipujax.lowering.jaxpr import PIPELINE, stage_name, variables, variables_read


def depth_first(eqns: Sequence[JaxprEqn], wanted: Sequence[Atom]) -> list[JaxprEqn]:
    """The equations, with updates of one parameter after those of another.

    Args:
        eqns: in an order in which they can run.
        wanted: what is needed in the end.
    """
    start = 1 + max((n for n, eqn in enumerate(eqns) if _is_gradient(eqn)), default=len(eqns) - 1)
    update = eqns[start:]
    if any(without_axes(eqn.effects) for eqn in update):
        return list(eqns)
    maker = {var: n for n, eqn in enumerate(update) for var in eqn.outvars}
    order: dict[int, None] = {}
    for atom in variables(wanted):
        _visit(maker.get(atom), update, maker, order)
    rest = [n for n in range(len(update)) if n not in order]
    return [*eqns[:start], *(update[n] for n in (*order, *rest))]


def _is_gradient(eqn: JaxprEqn) -> bool:
    return stage_name(eqn).is_backward or eqn.primitive.name == PIPELINE


def _visit(last: int | None, eqns: Sequence[JaxprEqn], maker: dict[Var, int], order: dict[int, None]) -> None:
    """Adds the number of an equation to the order, behind those of what it reads."""
    todo = [] if last is None else [(last, False)]
    while todo:
        number, is_ready = todo.pop()
        if is_ready:
            order.setdefault(number)
        elif number not in order:
            todo.append((number, True))
            before = [maker[var] for var in reversed(variables_read(eqns[number])) if var in maker]
            todo += [(n, False) for n in before if n not in order]
