"""Which elementwise results are computed again where they are read, instead of being stored.

A cast, a product with a row statistic or the mask of a ReLU takes few instructions, and is often as wide as what it is
computed from or wider.

Input: equations, and a rule of what is worth it. Output: for a value, whether it is computed again.
Source: XLA's fusion, which duplicates producers too.
Limits: a few equations at most are repeated for one value; nothing is weighed against the price of a byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from ipujax.lowering.jax_compat import JaxprEqn, Var, shape_of
from ipujax.lowering.jaxpr import variables_read
from ipujax.runtime.tensor import element_bytes

_ARITHMETIC = ("neg", "add", "sub", "mul", "add_any", "max", "min", "abs", "square", "integer_pow")
_CHOICES = ("convert_element_type", "eq", "ne", "ge", "gt", "le", "lt", "and", "or", "not", "select_n")
_CHEAP = frozenset((*_ARITHMETIC, *_CHOICES))
_MOST_STEPS = 3  # assumed: about what a store and a load take, with what the bytes are worth

_COMPARING = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "max", "min"))  # two values with each other
_SELECTING = frozenset(("reduce_max", "reduce_min", "argmax", "argmin"))

# Bytes of an element of a value, and for each of what it is computed from how many of its bytes there are to one.
IsWorthIt = Callable[[Var, int, Mapping[Var, int]], bool]


def compared_twice(eqns: Sequence[JaxprEqn], source: Callable[[Var], Var]) -> set[Var]:
    """Values that several equations compare with others, as a maximum and the search for its place do.

    Computed again by each, they may be rounded once in a fused multiply-add here and twice there.

    Args:
        eqns: all equations.
        source: what a value is a view of, but for dimensions of size 1.
    """
    comparisons = Counter[Var]()
    for eqn in eqns:
        name, read = eqn.primitive.name, variables_read(eqn)
        if name in _SELECTING or (name in _COMPARING and len(read) > 1):
            comparisons.update(set(map(source, read)))
    return {var for var, count in comparisons.items() if count > 1}


class Repeated:
    """The values that are computed again.

    Args:
        eqns: all equations.
        maker: the number of the equation that makes a value.
        stored: values that are not.
        source: what a value is a view of, but for dimensions of size 1.
        is_worth_it: whether one is computed again, from what.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        maker: Mapping[Var, int],
        stored: set[Var],
        source: Callable[[Var], Var],
        is_worth_it: IsWorthIt,
    ) -> None:
        self._eqns, self._maker, self._stored, self._source = eqns, maker, stored, source
        self._is_worth_it = is_worth_it
        self._leaves: dict[Var, tuple[frozenset[Var], int] | None] = {}

    def __contains__(self, var: Var) -> bool:
        return self._found(var) is not None

    def _found(self, var: Var) -> tuple[frozenset[Var], int] | None:
        """What a repeated value is computed from that is stored, and in how many equations; None if it is stored."""
        if var not in self._leaves:
            self._leaves[var] = self._search(var)
        return self._leaves[var]

    def _search(self, var: Var) -> tuple[frozenset[Var], int] | None:
        if var in self._stored or var not in self._maker:
            return None
        eqn = self._eqns[self._maker[var]]
        if eqn.primitive.name not in _CHEAP:
            return None
        leaves, steps = frozenset[Var](), 1
        for atom in map(self._source, variables_read(eqn)):
            found = self._found(atom)
            leaves |= {atom} if found is None else found[0]
            steps += 0 if found is None else found[1]
        elements = max(1, prod(shape_of(var)))
        widths = {leaf: self._bytes(leaf) // elements for leaf in leaves}
        return (leaves, steps) if steps <= _MOST_STEPS and self._is_worth_it(var, _width(var), widths) else None

    def _bytes(self, var: Var) -> int:
        """What is stored of a value: of a broadcast its operand."""
        if var in self._maker:
            eqn = self._eqns[self._maker[var]]
            if eqn.primitive.name == "broadcast_in_dim":
                if not isinstance(eqn.invars[0], Var):
                    return 0
                var = eqn.invars[0]
        return prod(shape_of(var)) * _width(var)


def _width(var: Var) -> int:
    aval: Any = var.aval
    return element_bytes(aval.dtype)
