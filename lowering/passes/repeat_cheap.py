"""Recomputation of cheap or widened elementwise results by each reader, instead of storing them.

A cast, a product with a row statistic or the mask of a ReLU takes few instructions, and is often as wide as its
operands or wider. A value that is wider than all the arrays it is computed from, as floats from halves in a softmax, is
computed again whatever it takes: floats exist inside of vertices only, as in PopLibs' codelets for halves.
Source: XLA's fusion, which duplicates producers too; poplibs `popnn/codelets/` for non-linearities of halves.
Limits: at most a few equations are repeated for one value; the cost per byte is not considered. Operations other than
elementwise ones and reductions, as a gather, read stored floats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ipujax.lowering.jax_compat import JaxprEqn, Var, shape_of
from ipujax.lowering.jaxpr import variables_read
from ipujax.lowering.primitives import record_of
from ipujax.runtime.tensor import element_bytes

MOST_EQNS = 3  # equations; assumed: about a store and a load, with the cost of the bytes
_MOST_WIDENED_EQNS = 8  # equations from narrower sources; assumed: those of a softmax and of a normalisation

# (value, its bytes an element, stored source → its bytes for each element of the value) → whether to compute it again.
IsWorthIt = Callable[[Var, int, Mapping[Var, int]], bool]


class _Sources(NamedTuple):
    """Stored values that a value is computed again from, and the number of equations that takes."""

    leaves: frozenset[Var]
    num_eqns: int


def compared_twice(eqns: Sequence[JaxprEqn], source: Callable[[Var], Var]) -> set[Var]:
    """Values that several equations compare with others, as a maximum and the search for its position do.

    They must be computed once: computed again by each reader, XLA may round them once in a fused multiply-add in one,
    and twice in another, so that the maximum equals no element. `source` is as in `Repeated`.
    """
    comparisons = Counter[Var]()
    for eqn in eqns:
        record = record_of(eqn)
        read = variables_read(eqn)
        if record.compares and (len(read) > 1 or not record.is_elementwise):
            comparisons.update(set(map(source, read)))
    return {var for var, count in comparisons.items() if count > 1}


class Repeated:
    """Set of the values of a body that their readers compute again."""

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        definition: Mapping[Var, int],
        stored: set[Var],
        source: Callable[[Var], Var],
        is_worth_it: IsWorthIt,
    ) -> None:
        """Decides nothing yet: whether a value is computed again is found when it is asked for, and then kept.

        Args:
            eqns: equations of a body.
            definition: number of the equation that defines a value.
            stored: values that are not computed again.
            source: value in place of which a view of it counts; a value itself if it is none.
            is_worth_it: compares a value with its stored sources.
        """
        self._eqns = eqns
        self._definition = definition
        self._stored = stored
        self._source = source
        self._is_worth_it = is_worth_it
        self._found: dict[Var, _Sources | None] = {}  # None for a value that is stored

    def __contains__(self, var: Var) -> bool:
        return self._sources_of(var) is not None

    def _sources_of(self, var: Var) -> _Sources | None:
        """Sources of a repeated value; None if it is stored."""
        if var not in self._found:
            self._found[var] = self._find_sources(var)
        return self._found[var]

    def _find_sources(self, var: Var) -> _Sources | None:
        """Stored values from which readers compute a value again; None for a value that is stored itself.

        It is computed again if it is elementwise and wider than all of them together, as a cast to float; or if it is
        cheap and `is_worth_it` says so. Both only if that takes few equations.
        """
        if var in self._stored or var not in self._definition:
            return None
        eqn = self._eqns[self._definition[var]]
        record = record_of(eqn)
        if not record.is_cheap and record.cost != "elementwise":
            return None
        leaves: frozenset[Var] = frozenset()
        num_eqns = 1
        for atom in map(self._source, variables_read(eqn)):
            nested = self._sources_of(atom)
            leaves |= {atom} if nested is None else nested.leaves
            num_eqns += 0 if nested is None else nested.num_eqns
        elements = max(1, prod(shape_of(var)))
        bytes_an_element = {leaf: self._bytes(leaf) // elements for leaf in leaves}  # of `var`: small leaves count none
        width = _width(var)
        is_widened = all(_width(leaf) < width for leaf, size in bytes_an_element.items() if size)
        if is_widened and sum(bytes_an_element.values()) <= width and num_eqns <= _MOST_WIDENED_EQNS:
            return _Sources(leaves, num_eqns)
        is_worth_it = record.is_cheap and num_eqns <= MOST_EQNS and self._is_worth_it(var, width, bytes_an_element)
        return _Sources(leaves, num_eqns) if is_worth_it else None

    def _bytes(self, var: Var) -> int:
        """Stored bytes of a value: those of its operand for a broadcast, none for a broadcast literal."""
        if var in self._definition:
            eqn = self._eqns[self._definition[var]]
            if record_of(eqn).view == "repeated":
                if not isinstance(eqn.invars[0], Var):
                    return 0
                var = eqn.invars[0]
        return prod(shape_of(var)) * _width(var)


def _width(var: Var) -> int:
    aval: Any = var.aval
    return element_bytes(aval.dtype)
