"""Pass `fuse`: elementwise equations over one index space become one equation `fused`, computed by one vertex.

An equation joins the group of a producer with the same index space (the shape without dimensions of size 1) on the
same IPU and side of a gradient; reductions of a group's results are part of it. Reshapes that only add or drop
dimensions of size 1 do not separate; broadcasts stay outside, as views without cost. Values that only the group
reads are not stored, and cheap ones are computed again by each group, see `repeat_cheap`. The jaxpr of a `fused`
equation has the original equations, each rounding to its own dtype. Nested jaxprs are fused too, one with pipeline
stages only after it is cut.
Source: `popops::map` of PopLibs makes one codelet of an expression; XLA fuses by the same rule on a CPU and more on
a GPU. Limits: siblings that only share an operand are not fused (they may share a compute set).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
    make_primitive,
    new_jaxpr_eqn,
    part_of,
    shape_of,
)
from ipujax.lowering.jaxpr import (
    STORES,
    Rewrite,
    everywhere,
    has_stages,
    phase_of,
    stage_name,
    variables,
    variables_read,
    with_inner,
)
from ipujax.lowering.passes.dce import dce
from ipujax.lowering.passes.grouping import grouped
from ipujax.lowering.passes.repeat_cheap import Repeated, compared_twice
from ipujax.lowering.primitives import record_of
from ipujax.lowering.source_info import name_stack

_MOST_NAMED = 4  # operations in the name of a group
_HOLDERS = frozenset(("scan", "while", "cond", "function_call", "replicated"))  # their jaxprs are lowered one by one


def _compute(*operands: Any, jaxpr: ClosedJaxpr, name: str) -> Sequence[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _shapes(*operands: Any, jaxpr: ClosedJaxpr, name: str) -> Sequence[Any]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.out_avals]


fused_p = make_primitive("fused", _compute, _shapes)


def fuse(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr with one equation for each group of elementwise equations."""
    return jaxpr if has_stages(jaxpr.jaxpr) else dce(fuser()(jaxpr))


def fuser() -> Rewrite:
    """Pass `fuse` for several jaxprs that each run in one place; a jaxpr that several contain stays one object."""
    return everywhere(lambda body, rewrite: ClosedJaxpr(fuse_equations(body.jaxpr, rewrite).jaxpr, body.consts))


def index_space(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without its dimensions of size 1."""
    return tuple(n for n in shape if n != 1)


class Fused(NamedTuple):
    """A jaxpr with fused equations, and for each of its equations the number of one that it replaces."""

    jaxpr: Jaxpr
    sources: list[int]


def fuse_equations(jaxpr: Jaxpr, rewrite: Rewrite, places: Sequence[Hashable] | None = None) -> Fused:
    """Fuses the elementwise equations of a jaxpr, and reductions after them, into one equation for each vertex.

    Args:
        jaxpr: the jaxpr.
        rewrite: fuses nested ones.
        places: the IPU of each equation, as only those of one IPU are grouped; None if all run in one place.

    Returns:
        The jaxpr, and for each of its equations the number of an original one that it replaces.
    """
    eqns: list[JaxprEqn] = []
    sources: list[int] = []  # number of the original of each
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name in _HOLDERS:
            eqn = with_inner(eqn, rewrite)
        with_broadcasts = _with_explicit_broadcasts(eqn)
        eqns += with_broadcasts
        sources += [number] * len(with_broadcasts)
    equation_places = [None if places is None else places[n] for n in sources]
    body = _Body(jaxpr, eqns, equation_places)
    fused: list[JaxprEqn] = []
    numbers: list[int] = []
    # Readers first: they decide which values their producers have to store.
    for group in reversed(body.groups):
        equation = body.equation_of(group)
        if equation is not None:
            fused.append(equation)
            numbers.append(sources[group[-1]])
    return Fused(jaxpr.replace(eqns=fused[::-1]), numbers[::-1])


def _reads_before_stores(eqns: Sequence[JaxprEqn]) -> Iterator[tuple[int, int]]:
    """Yields the numbers of each equation that reads a buffer, and of a later one that overwrites that in place."""
    readers: dict[Var, list[int]] = defaultdict(list)
    for number, eqn in enumerate(eqns):
        if eqn.primitive.name in STORES and isinstance(eqn.invars[0], Var):
            yield from ((reader, number) for reader in readers[eqn.invars[0]])
        for var in variables_read(eqn):
            readers[var].append(number)


class _Body:
    """Equations of one jaxpr, in groups that are put together from the last to the first."""

    def __init__(self, jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], places: Sequence[Hashable]) -> None:
        """Finds the groups of equations to fuse, and the values that readers compute again rather than load.

        Args:
            jaxpr: the jaxpr that is rewritten.
            eqns: its equations, with explicit broadcasts.
            places: the IPU of each of these, None where all run in one place.
        """
        self._jaxpr = jaxpr
        self._eqns = eqns
        self._places = places
        self._definition = {var: n for n, eqn in enumerate(eqns) for var in eqn.outvars if not isinstance(var, DropVar)}
        # Equations of one key may be fused; those without one stay alone.
        keys_without_place = [_group_key(eqn) for eqn in eqns]
        keys = [key and (key, place) for key, place in zip(keys_without_place, places, strict=True)]
        reads = [self._read_by(eqn, sees_through_views=key is not None) for eqn, key in zip(eqns, keys, strict=True)]
        # Equations with effects keep their order.
        for earlier, later in pairwise(n for n, eqn in enumerate(eqns) if eqn.effects):
            reads[later].append(earlier)
        for earlier, later in _reads_before_stores(eqns):
            reads[later].append(earlier)
        self.groups = grouped(reads, keys)
        self._group_of = {n: g for g, group in enumerate(self.groups) for n in group}
        # Values that must be stored for later equations, at first results: `equation_of` adds what each equation reads.
        self._needed = set(variables(jaxpr.outvars))
        # Values that no reader computes again: results, what equations that are fused with none read and define, and
        # what several equations compare, for which two computations might round otherwise.
        self._stored = {self.source(var) for var in self._needed} | compared_twice(eqns, self.source)
        for eqn, key in zip(eqns, keys, strict=True):
            if key is None and not is_unit_view(eqn):
                self._stored.update(eqn.outvars, map(self.source, variables_read(eqn)))
        self._repeated = Repeated(eqns, self._definition, self._stored, self.source, self._is_worth_repeating)

    def _is_worth_repeating(self, var: Var, width: int, leaves: Mapping[Var, int]) -> bool:
        """True if readers take fewer bytes from the sources of a value than from the value."""
        # At equal width repeating pays, unless a source in the value's own group is stored only for that.
        group = self._group_of[self._definition[var]]
        source_numbers = [self._definition.get(leaf) for leaf in leaves if leaf not in self._stored]
        reads_no_own_result = all(number is None or self._group_of[number] != group for number in source_numbers)
        return sum(leaves.values()) < width + reads_no_own_result

    def _read_by(self, eqn: JaxprEqn, *, sees_through_views: bool) -> list[int]:
        """Equations that this one must follow: those that define its operands, or the sources of these views."""
        read = map(self.source, variables_read(eqn)) if sees_through_views else variables_read(eqn)
        return [self._definition[var] for var in read if var in self._definition]

    def source(self, atom: Var) -> Var:
        """Value of which another is a view, apart from dimensions of size 1."""
        while atom in self._definition and is_unit_view(self._eqns[self._definition[atom]]):
            (atom,) = variables_read(self._eqns[self._definition[atom]])
        return atom

    def equation_of(self, group: Sequence[int]) -> JaxprEqn | None:
        """Makes the one equation of a group, which stores what later ones read; None if nothing reads its results.

        Groups are asked for from the last to the first: each adds what it reads to the values that must be stored.
        """
        members = [self._eqns[n] for n in group]
        is_alone = len(group) == 1
        is_elementwise = _group_key(members[0]) is not None
        # A single equation stays as it is, unless it repeats what it reads and so becomes several.
        if is_alone and (not is_elementwise or not self._reads_repeated(group[0])):
            (eqn,) = members
            if not self._needed.intersection(eqn.outvars) and (is_elementwise or is_unit_view(eqn)):
                return None  # its readers look through it, or repeat it
            replacement = eqn
        else:
            results = [var for eqn in members for var in eqn.outvars if var in self._needed]
            if not results:
                return None
            replacement = self._fused_equation(group, results)
        self._needed.update(variables_read(replacement))
        return replacement

    def _reads_repeated(self, number: int) -> bool:
        return any(self._repeats(self.source(var), number) for var in variables_read(self._eqns[number]))

    def _repeats(self, var: Var, reader: int) -> bool:
        """True if a reader computes a value itself: only on the IPU that defines it."""
        return var in self._repeated and self._places[self._definition[var]] == self._places[reader]

    def _fused_equation(self, group: Sequence[int], results: Sequence[Var]) -> JaxprEqn:
        """One `fused` equation in place of a group of equations, whose jaxpr has these and what they repeat.

        Views of dimensions of size 1, and cheap values computed elsewhere, are computed again inside; all other values
        that the group reads are operands.

        Args:
            group: numbers of the equations, rising.
            results: variables of the group that are read outside of it.

        Returns:
            The equation, with the source line of the last one of the group that is not a reduction.
        """
        # Filled by `read` and `define`, which call each other.
        inner: dict[Var, Var] = {}  # outer variable → variable of the fused jaxpr
        operands: list[Var] = []
        body: list[JaxprEqn] = []

        def read(atom: Atom) -> Atom:
            """Value inside the fused jaxpr for one outside: computed again inside, or a new operand."""
            if isinstance(atom, Literal):
                return atom
            if atom not in inner:
                number = self._definition.get(atom)
                if number is not None and (is_unit_view(self._eqns[number]) or self._repeats(atom, group[-1])):
                    define(self._eqns[number])
                else:
                    operands.append(atom)
                    inner[atom] = Var(atom.aval)
            return inner[atom]

        def define(eqn: JaxprEqn) -> None:
            """Adds a copy of an equation to the fused jaxpr, behind copies of those that are repeated for it."""
            invars = [read(atom) for atom in eqn.invars]
            (out,) = eqn.outvars
            inner[out] = Var(out.aval)
            body.append(eqn.replace(invars=invars, outvars=[inner[out]]))

        members = [self._eqns[n] for n in group]
        for eqn in members:
            if eqn.outvars[0] not in inner:  # else a view between members has needed it first
                define(eqn)
        fused_jaxpr = part_of(self._jaxpr, [inner[var] for var in operands], [inner[var] for var in results], body)
        line_equation = ([eqn for eqn in members if not record_of(eqn).is_reduction] or members)[-1]
        params = {"jaxpr": fused_jaxpr, "name": _title(members, line_equation)}
        return new_jaxpr_eqn(operands, list(results), fused_p, params, set(), line_equation.source_info)


def _with_explicit_broadcasts(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An elementwise equation with all operands of its result's shape, after equations that broadcast them to it.

    JAX lets scalars and shorter shapes stand for full ones; fused equations have one shape. Any other equation is
    returned alone.
    """
    shape = shape_of(eqn.outvars[0]) if len(eqn.outvars) == 1 else ()
    # A cast of bits changes the shape between widths.
    if not _is_fusible(eqn) or eqn.primitive.name == "bitcast_convert_type":
        return [eqn]
    broadcasts: list[JaxprEqn] = []
    operands: list[Atom] = []
    for atom in eqn.invars:
        if isinstance(atom, Var) and shape_of(atom) != shape:
            aval: Any = atom.aval
            wide = Var(aval.update(shape=shape))
            dims = tuple(range(len(shape) - len(aval.shape), len(shape)))
            params = {"shape": shape, "broadcast_dimensions": dims, "sharding": None}
            broadcasts.append(new_jaxpr_eqn([atom], [wide], jax.lax.broadcast_in_dim_p, params, set(), eqn.source_info))
            atom = wide
        operands.append(atom)
    return [*broadcasts, eqn.replace(invars=operands)]


def _group_key(eqn: JaxprEqn) -> Hashable | None:
    """What equations must have in common to be fused; None for an equation that is fused with no other.

    It is the index space that they loop over, whether they are backward or recomputed, and the phase of execution. An
    equation can be fused if it is elementwise or a reduction, has one result and no effects, and all operands have
    the shape of the index space: that of its result, or of what it reduces.
    """
    is_reduction = record_of(eqn).is_reduction
    operands = list(variables_read(eqn))
    if not (is_reduction or _is_fusible(eqn)) or len(eqn.outvars) != 1 or eqn.effects or not operands:
        return None
    shape = shape_of(operands[0] if is_reduction else eqn.outvars[0])
    fits = all(shape_of(var) == shape for var in operands)
    is_plain = all(_is_plain(atom.aval) for atom in (*operands, *eqn.outvars))
    has_scalar_literals = all(np.ndim(atom.val) == 0 for atom in eqn.invars if isinstance(atom, Literal))
    # A reduction over single elements is a view, and one without elements is a constant.
    reduces = not is_reduction or (prod(shape) > 0 and any(shape[d] != 1 for d in eqn.params["axes"]))
    name = stage_name(eqn)  # its stage does not count: callers add the IPU of the equation to the key
    separation = name.is_backward, name.is_recomputed, phase_of(eqn)
    return (index_space(shape), separation) if fits and is_plain and has_scalar_literals and reduces else None


def _is_fusible(eqn: JaxprEqn) -> bool:
    return record_of(eqn).cost == "elementwise"


def _is_plain(aval: Any) -> bool:
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and aval.dtype != jax.dtypes.float0


def is_unit_view(eqn: JaxprEqn) -> bool:
    """True if an equation only adds or drops dimensions of size 1."""
    if not record_of(eqn).is_in_order or not isinstance(eqn.invars[0], Var):
        return False
    return index_space(shape_of(eqn.invars[0])) == index_space(shape_of(eqn.outvars[0]))


def _title(members: Sequence[JaxprEqn], line_equation: JaxprEqn) -> str:
    """Names of the first operations of a group, with the scope of those from another scope than its source line."""
    names = dict[str, None]()  # each once, in order
    for eqn in members:
        scope = name_stack(eqn)
        name = eqn.primitive.name
        names[name if scope == name_stack(line_equation) else f"{scope}/{name}"] = None
    return "+".join([*list(names)[:_MOST_NAMED], *(["…"] if len(names) > _MOST_NAMED else [])])
