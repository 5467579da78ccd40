"""Order of equations in which results are completed one after the other.

An optimiser's update is traced as operations over all parameters. One parameter after the other, the state of all
parameters need not be on chip at the same time.

Input: equations, and results. Output: the same equations; those after the last one of a gradient in depth-first order
of the results. Limits: with effects in the update, all equations keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipujax.lowering.jax_compat import Atom, JaxprEqn, Var, without_axes
from ipujax.lowering.jaxpr import PIPELINE, stage_name, variables, variables_read


def depth_first(eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> list[JaxprEqn]:
    """The equations, with the update of one parameter after that of another; `results` are the program's."""
    start = 1 + max((n for n, eqn in enumerate(eqns) if _is_gradient(eqn)), default=len(eqns) - 1)
    update = eqns[start:]
    if any(without_axes(eqn.effects) for eqn in update):
        return list(eqns)
    defining_eqn = {var: n for n, eqn in enumerate(update) for var in eqn.outvars}
    order: dict[int, None] = {}
    for atom in variables(results):
        _visit(defining_eqn.get(atom), update, defining_eqn, order)
    unused = [n for n in range(len(update)) if n not in order]
    return [*eqns[:start], *(update[n] for n in (*order, *unused))]


def _is_gradient(eqn: JaxprEqn) -> bool:
    return stage_name(eqn).is_backward or eqn.primitive.name == PIPELINE


def _visit(root: int | None, eqns: Sequence[JaxprEqn], defining_eqn: dict[Var, int], order: dict[int, None]) -> None:
    """Adds the index of an equation to the order, after those of its operands."""
    # Without recursion: chains of equations may exceed Python's limit.
    stack = [] if root is None else [(root, False)]
    while stack:
        number, is_ready = stack.pop()
        if is_ready:
            order.setdefault(number)
        elif number not in order:
            stack.append((number, True))
            operand_eqns = [defining_eqn[var] for var in reversed(variables_read(eqns[number])) if var in defining_eqn]
            stack += [(n, False) for n in operand_eqns if n not in order]
