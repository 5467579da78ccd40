"""The role of an equation: what its rule is told of the equations around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ipujax.lowering.jax_compat import Var
from ipujax.lowering.poplin.following import Operation
from ipujax.lowering.poplin.joint import Later


@dataclass(frozen=True, slots=True)
class Role:
    """What an equation is to a dense layer, to the array that its result is added to, or to what follows a product.

    Args:
        later: what follows a product of a layer: a forward pass the other passes, an update the optimizer, a backward
            pass neither.
        laid_as: the array as which the result is best laid: of an update the weights, of a scatter what it is added to.
        is_transposed: whether the result comes with that array's two dimensions exchanged.
        on_result: of a product the elementwise operations that follow it on arrays of its result's shape.
        inside: of a loop the roles of equations in it that it alone does not tell, by their `id`.
    """

    later: Later | None = None
    laid_as: Var | None = None
    is_transposed: bool = False
    on_result: tuple[Operation, ...] = ()
    inside: Mapping[int, Role] = field(default_factory=dict)


NO_ROLE = Role()
NO_ROLES: Mapping[int, Role] = MappingProxyType({})
