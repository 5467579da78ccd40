"""Finds the products of dense layers: which matrix is the weights, and which other passes will use it.

    forward   y  = x · W      first use of W
    backward  dx = dy · Wᵀ    W again, contracted along its other dimension
    update    dW = xᵀ · dy    what W was multiplied by again, contracted along all but the dimension it shares with W

Input: a jaxpr. Output: for each such product its `Role`. Where the weights are to lie is then decided once, with all of
them in mind.
Limits: weights are matrices and inputs of the jaxpr, and are read as they are, not through a view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ipujax.lowering.followers import operations
from ipujax.lowering.jax_compat import Atom, Jaxpr, JaxprEqn, Literal, Var, shape_of
from ipujax.lowering.poplin.following import Operation
from ipujax.lowering.poplin.joint import Later
from ipujax.lowering.role import Role


@dataclass(frozen=True, slots=True)
class Use:
    """One operand of a product without batch dimensions."""

    eqn: JaxprEqn
    side: int
    contracted: tuple[int, ...]

    @property
    def other(self) -> Atom:
        return self.eqn.invars[1 - self.side]


def layer_roles(jaxpr: Jaxpr) -> Mapping[int, Role]:
    """The roles of the products of a jaxpr, by the `id` of the equation."""
    uses = uses_of(jaxpr)
    layers = list(_layers(jaxpr, uses))
    alike = Counter(shape_of(weights) for weights, *_ in layers)
    found: dict[int, Role] = {}
    for weights, forward, update in layers:
        backward = [use for use in uses[weights][1:] if use.contracted == (1 - forward.contracted[0],)]
        # Those of all weights of a shape come mixed: each has its share.
        elementwise = _elementwise(jaxpr, weights, update.eqn)[:: alike[shape_of(weights)]]
        found.setdefault(id(forward.eqn), Role(Later(forward.side, bool(backward), elementwise)))
        for use in backward:
            found.setdefault(id(use.eqn), Role(Later(use.side, False, ())))
        # An update has what is left of its left operand first: the dimension that inputs and weights share, or not.
        shared_first = update.side == 0
        found.setdefault(
            id(update.eqn),
            Role(Later(update.side, False, elementwise, True), weights, shared_first != (forward.contracted[0] == 0)),
        )
    return found


def _layers(jaxpr: Jaxpr, uses: Mapping[Var, list[Use]]) -> Iterator[tuple[Var, Use, Use]]:
    """The weights of each layer with the products of its forward pass and of its update."""
    for weights in jaxpr.invars:
        of_weights = uses.get(weights, [])
        if len(shape_of(weights)) == 2 and of_weights and len(of_weights[0].contracted) == 1:
            update = _update(weights, of_weights[0], uses)
            if update is not None:
                yield weights, of_weights[0], update


def _elementwise(jaxpr: Jaxpr, weights: Var, update: JaxprEqn) -> tuple[Operation, ...]:
    """The elementwise operations on arrays of the weights' shape that follow an update."""
    first = next(n for n, eqn in enumerate(jaxpr.eqns) if eqn is update) + 1
    return tuple(operations(jaxpr.eqns[first:])[shape_of(weights)])


def uses_of(jaxpr: Jaxpr) -> dict[Var, list[Use]]:
    """In which products the variables of a jaxpr are operands, in order."""
    uses: dict[Var, list[Use]] = {}
    for use in _uses(jaxpr):
        operand = use.eqn.invars[use.side]
        if not isinstance(operand, Literal):
            uses.setdefault(operand, []).append(use)
    return uses


def _uses(jaxpr: Jaxpr) -> Iterator[Use]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            contracted, batch = eqn.params["dimension_numbers"]
            if not batch[0]:
                yield from (Use(eqn, side, tuple(contracted[side])) for side in range(2))


def _update(weights: Var, forward: Use, uses: Mapping[Var, list[Use]]) -> Use | None:
    """The product that computes the gradient of weights, by what the forward pass multiplies them by."""
    x = forward.other
    if isinstance(x, Literal) or x is weights:
        return None
    (shared,) = forward.eqn.params["dimension_numbers"][0][1 - forward.side]
    rest = tuple(d for d in range(len(shape_of(x))) if d != shared)
    sizes = prod(shape_of(weights))
    return next(
        (
            use
            for use in uses.get(x, [])
            if tuple(sorted(use.contracted)) == rest and prod(shape_of(use.eqn.outvars[0])) == sizes
        ),
        None,
    )
