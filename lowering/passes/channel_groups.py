"""Which arguments of a program are kept with their columns in groups, as products keep their results.

What a product reads or makes, and what is combined with it element by element (a weight with its gradient and the state
of an optimiser), moves between tiles in fewer pieces if all of it is kept alike.

Input: a jaxpr. Output: for each of its inputs whether it is one of these. Values are in one class if an equation maps
elements of one to the same elements of the other, hands one to a jaxpr inside as the other, looks up or updates rows of
one by the other, transposes the matrices of one, or cuts or joins rows, on one replica or of several, as the shards of
an optimiser are: each is then kept with its own columns in groups.
Source of groups: as `layout.memory_order`.
Limits: a class ends at other views, loops of unknown length and branches; nothing is weighed.
"""

from __future__ import annotations

from typing import Any

from ipujax.lowering.jax_compat import Atom, Jaxpr, JaxprEqn, Var, jaxprs_in_params
from ipujax.lowering.popops import OP_COSTS, SCATTERS

_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
_ROWS = frozenset(("gather", *SCATTERS))  # of a table, with as many columns
_PARTS = frozenset(("reshape", "dynamic_slice", "reduce_scatter", "all_gather"))  # of rows


class _Classes:
    """Variables in classes that grow together."""

    def __init__(self) -> None:
        self._towards: dict[Var, Var] = {}
        self._marked: set[Var] = set()

    def of(self, var: Var) -> Var:
        """The variable that stands for the class."""
        seen = []
        while var in self._towards:
            seen.append(var)
            var = self._towards[var]
        self._towards.update(dict.fromkeys(seen, var))
        return var

    def join(self, one: Atom, other: Atom) -> None:
        if isinstance(one, Var) and isinstance(other, Var):
            first, second = self.of(one), self.of(other)
            if first is not second:
                self._towards[first] = second

    def mark(self, atom: Atom) -> None:
        if isinstance(atom, Var):
            self._marked.add(atom)

    def marked(self) -> set[Var]:
        """The variables that stand for the classes of marked ones."""
        return {self.of(var) for var in self._marked}


def grouped_inputs(jaxpr: Jaxpr) -> list[bool]:
    """Whether each input is kept with its columns in groups."""
    classes = _Classes()
    _collect(jaxpr, classes)
    marked = classes.marked()
    return [_matrix(var) is not None and classes.of(var) in marked for var in jaxpr.invars]


def _collect(jaxpr: Jaxpr, classes: _Classes) -> None:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _PRODUCTS:
            for atom in (*eqn.invars, *eqn.outvars):
                classes.mark(atom)
        elif eqn.primitive.name in OP_COSTS or eqn.primitive.name == "optimization_barrier":
            for out in eqn.outvars:
                for atom in eqn.invars:
                    if _matrix(atom) == _matrix(out):
                        classes.join(atom, out)
        elif eqn.primitive.name == "transpose":
            (one,), (other,) = eqn.invars, eqn.outvars
            if sorted(_matrix(one) or ()) == sorted(_matrix(other) or ()):
                classes.join(one, other)
        elif eqn.primitive.name in _PARTS:
            if _columns(eqn.invars[0]) == _columns(eqn.outvars[0]):
                classes.join(eqn.invars[0], eqn.outvars[0])
        elif eqn.primitive.name in _ROWS:
            table, _, *updates = eqn.invars
            for rows in (*updates, *eqn.outvars):
                if _columns(table) == _columns(rows):
                    classes.join(table, rows)
        for inner in jaxprs_in_params(eqn.params):
            inside: Jaxpr = getattr(inner, "jaxpr", inner)
            _hand_in(eqn, inside, classes)
            _collect(inside, classes)


def _hand_in(eqn: JaxprEqn, inside: Jaxpr, classes: _Classes) -> None:
    """Joins what an equation reads and makes with inputs and outputs of a jaxpr that has as many."""
    for given, own in ((eqn.invars, inside.invars), (eqn.outvars, inside.outvars)):
        if len(given) == len(own):
            for atom, var in zip(given, own, strict=True):
                if _matrix(atom) == _matrix(var):
                    classes.join(atom, var)


def _columns(atom: Atom) -> int:
    matrix = _matrix(atom)
    return matrix[-1] if matrix else 0


def _matrix(atom: Atom) -> tuple[int, ...] | None:
    """The last two sizes of an array, None where there are less."""
    aval: Any = atom.aval
    return tuple(aval.shape[-2:]) if len(aval.shape) > 1 else None
