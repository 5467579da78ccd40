"""Finds the products of recurrent layers: those by matrices that a loop reads in every turn.

    forward loop    y  = x · W            W is a constant of the loop
    backward loop   dx = dy · Wᵀ          W again, if the gradient of x is wanted
                    dW = dW + xᵀ · dy     a sum of W's shape

Neither loop holds all passes of the layer, so that its equations alone do not tell.

Input: a jaxpr. Output: for each loop the roles of the products in it that have one because of a later loop.
Limit: only matrices that are read as they are, not through a view, and whole, not one slice of a stack a turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ipujax.lowering.dense_layers import Use, uses_of
from ipujax.lowering.followers import operations
from ipujax.lowering.jax_compat import Atom, Jaxpr, JaxprEqn, Literal, Var, shape_of
from ipujax.lowering.poplin.following import Operation
from ipujax.lowering.poplin.joint import Later
from ipujax.lowering.role import Role
from ipujax.lowering.summed_scatters import SUMS


def loop_roles(jaxpr: Jaxpr) -> Mapping[int, Role]:
    """The role of each loop of a jaxpr with such products in it, by the `id` of the equation."""
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    inside: dict[int, dict[int, Role]] = {}
    for number, loop in enumerate(loops):
        for weights, use in _products(loop):
            backward = _with_sum_like(weights, loops[number + 1 :])
            if backward is not None:
                elementwise = _share(backward, weights)
                forward = Later(use.side, weights in backward.invars, elementwise)
                inside.setdefault(id(loop), {})[id(use.eqn)] = Role(forward)
                for update in _updates(backward, weights):
                    inside.setdefault(id(backward), {})[id(update)] = Role(Later(0, False, elementwise, True))
    return {loop: Role(inside=roles) for loop, roles in inside.items()}


def _products(loop: JaxprEqn) -> Iterator[tuple[Atom, Use]]:
    """The constant matrices of a loop, as they are called around it, with their first products."""
    body = loop.params["jaxpr"].jaxpr
    uses = uses_of(body)
    for around, inside in zip(loop.invars, body.invars[: loop.params["num_consts"]], strict=False):
        of_matrix = uses.get(inside, [])
        if len(shape_of(inside)) == 2 and of_matrix and len(of_matrix[0].contracted) == 1:
            yield around, of_matrix[0]


def _with_sum_like(weights: Atom, loops: Sequence[JaxprEqn]) -> JaxprEqn | None:
    """The first loop that sums an array of the weights' shape, their gradient, turn by turn."""
    return next((loop for loop in loops if shape_of(weights) in map(shape_of, _sums(loop))), None)


def _updates(loop: JaxprEqn, weights: Atom) -> Iterator[JaxprEqn]:
    """The products of what changes from turn to turn whose results have the weights' shape, or that transposed."""
    body = loop.params["jaxpr"].jaxpr
    constants = body.invars[: loop.params["num_consts"]]
    shapes = shape_of(weights), shape_of(weights)[::-1]
    for eqn in body.eqns:
        is_like = eqn.primitive.name == "dot_general" and shape_of(eqn.outvars[0]) in shapes
        if is_like and not any(operand in constants for operand in eqn.invars):
            yield eqn


def _share(loop: JaxprEqn, weights: Atom) -> tuple[Operation, ...]:
    """Of the elementwise operations of a turn on arrays of the weights' shape those of one sum of it."""
    alike = Counter(map(shape_of, _sums(loop)))
    return tuple(operations(loop.params["jaxpr"].jaxpr.eqns)[shape_of(weights)][:: alike[shape_of(weights)]])


def _sums(loop: JaxprEqn) -> list[Var]:
    """The states of a loop that each turn adds something to."""
    body, num_consts = loop.params["jaxpr"].jaxpr, loop.params["num_consts"]
    made = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    states = zip(loop.outvars[: loop.params["num_carry"]], body.invars[num_consts:], body.outvars, strict=False)
    return [state for state, before, after in states if after is not before and _is_sum_of(after, before, made)]


def _is_sum_of(total: Atom, part: Var, made: Mapping[Var, JaxprEqn]) -> bool:
    """Whether additions alone lead from a part to a total."""
    atoms = [total]
    while atoms:
        atom = atoms.pop()
        if atom is part:
            return True
        if not isinstance(atom, Literal) and atom in made and made[atom].primitive.name in SUMS:
            atoms += made[atom].invars
    return False
