"""Choice of the arguments whose columns are stored in groups, as products store their results.

Operands and results of products, and values combined with them element by element (a weight with its gradient and
the optimiser state), move in fewer pieces if all have one memory order. Two values are in one class if an equation
maps elements of one to the same elements of the other, passes one to a nested jaxpr as the other, gathers or
scatters rows between them, transposes matrices, or slices or joins rows, on one replica or several (the shards of
an optimiser), or columns, as those of the gates of a recurrent layer: each is then stored with its own columns in
groups. Source of groups: as `layout.memory_order`.
Limits: a class ends at other views, loops of unknown length and branches; costs are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipujax.lowering.jax_compat import Atom, Jaxpr, JaxprEqn, Var, jaxprs_in_params
from ipujax.lowering.primitives import record_of

_KEEPING_ROWS = frozenset(("dynamic_slice", "reduce_scatter", "all_gather"))


class _Classes:
    """Disjoint sets of variables."""

    def __init__(self) -> None:
        self._parents: dict[Var, Var] = {}
        self._marked: set[Var] = set()

    def representative(self, var: Var) -> Var:
        """The variable that stands for a variable's class, of those that are stored alike (union-find)."""
        path = []
        while var in self._parents:
            path.append(var)
            var = self._parents[var]
        # Path compression: later look-ups take one step.
        self._parents.update(dict.fromkeys(path, var))
        return var

    def join(self, first_atom: Atom, second_atom: Atom) -> None:
        if isinstance(first_atom, Var) and isinstance(second_atom, Var):
            first = self.representative(first_atom)
            second = self.representative(second_atom)
            if first is not second:
                self._parents[first] = second

    def mark(self, atom: Atom) -> None:
        if isinstance(atom, Var):
            self._marked.add(atom)

    def are_marked(self, variables: Sequence[Var]) -> list[bool]:
        """For each variable whether one of its class is marked."""
        marked = {self.representative(var) for var in self._marked}
        return [self.representative(var) in marked for var in variables]


def grouped_inputs(jaxpr: Jaxpr) -> list[bool]:
    """For each input whether its columns are stored in groups, as products read and write them.

    That is so for matrices that products use, or that are combined with such, found by classes of values.
    """
    classes = _Classes()
    _add_equations(jaxpr, classes)
    are_marked = classes.are_marked(jaxpr.invars)
    return [
        _matrix_shape(var) is not None and is_marked for var, is_marked in zip(jaxpr.invars, are_marked, strict=True)
    ]


def _add_equations(jaxpr: Jaxpr, classes: _Classes) -> None:
    """Adds the equations of a jaxpr, and of those inside, to classes of values whose columns are stored alike.

    Columns are the last dimension. A product reads and writes them in groups of channels, and its operands and results
    are marked. Operands and results of other equations that keep columns are joined, so that a value between two
    products is not rearranged. Literals are in no class.
    """
    for eqn in jaxpr.eqns:
        if record_of(eqn).cost == "product":
            for atom in (*eqn.invars, *eqn.outvars):
                classes.mark(atom)
        for atom, other in _values_with_equal_columns(eqn):
            classes.join(atom, other)
        for inner in jaxprs_in_params(eqn.params):
            body: Jaxpr = getattr(inner, "jaxpr", inner)
            _join_boundary(eqn, body, classes)
            _add_equations(body, classes)


def _values_with_equal_columns(eqn: JaxprEqn) -> list[tuple[Atom, Atom]]:
    """Pairs of values that an equation reads or computes whose columns can be stored in the same groups."""
    record = record_of(eqn)
    name = eqn.primitive.name
    pairs: list[tuple[Atom, Atom]] = []
    if record.is_elementwise or name == "optimization_barrier":
        pairs = [(atom, out) for out in eqn.outvars for atom in eqn.invars]
        return [(atom, out) for atom, out in pairs if _matrix_shape(atom) == _matrix_shape(out)]
    # A transposed matrix keeps its groups, which are then of its rows: products read them along either dimension.
    if record.view == "permuted":
        ((operand,), (result,)) = eqn.invars, eqn.outvars
        is_matrix_kept = sorted(_matrix_shape(operand) or ()) == sorted(_matrix_shape(result) or ())
        return [(operand, result)] if is_matrix_kept else []
    # Parts of whole columns keep them, and parts along the columns have a part of the groups.
    if name in ("slice", "split", "concatenate"):
        return [(eqn.invars[0], atom) for atom in (*eqn.invars, *eqn.outvars)]
    if record.view == "in order" or name in _KEEPING_ROWS:
        pairs = [(eqn.invars[0], eqn.outvars[0])]
    elif record.rows is not None:  # a look-up or an update of rows: table, indices, updates
        table, _, *updates = eqn.invars
        pairs = [(table, rows) for rows in (*updates, *eqn.outvars)]
    return [(atom, other) for atom, other in pairs if _columns(atom) == _columns(other)]


def _join_boundary(eqn: JaxprEqn, body: Jaxpr, classes: _Classes) -> None:
    """Joins operands and results of an equation with inputs and outputs of a jaxpr inside that has as many.

    Others correspond by rules of the primitive, as in a loop of unknown length or a branch: these classes end there.
    """
    for outer, nested in ((eqn.invars, body.invars), (eqn.outvars, body.outvars)):
        if len(outer) == len(nested):
            for atom, var in zip(outer, nested, strict=True):
                if _matrix_shape(atom) == _matrix_shape(var):
                    classes.join(atom, var)


def _columns(atom: Atom) -> int:
    shape = _matrix_shape(atom)
    return shape[-1] if shape else 0


def _matrix_shape(atom: Atom) -> tuple[int, ...] | None:
    """Last two sizes of an array; None for fewer dimensions."""
    aval: Any = atom.aval
    return tuple(aval.shape[-2:]) if len(aval.shape) > 1 else None
