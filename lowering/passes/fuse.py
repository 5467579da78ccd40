"""Pass `fuse`: elementwise equations over one index space become one equation `fused`, which one vertex computes.

Reductions of what a group computes are part of it: a vertex reduces its own block. A cheap value that only groups read
is computed again by each of them, see `repeat_cheap`: it is neither stored nor loaded.

An equation joins the group of an equation whose result it reads if both have the same index space (shapes but for
dimensions of size 1) and run in one place, on the same side of a gradient. Reshapes that only add or drop dimensions of
size 1 are seen through; broadcasts stay outside, for they are views that cost nothing. What only the group reads is
never stored. The jaxpr of a `fused` equation holds the equations as they were, each rounding to its own dtype.

Loops, branches and functions are fused inside. What has pipeline stages is not: its parts are, once they are cut.
Source: `popops::map` of PopLibs makes one codelet of an expression; XLA fuses by the same rule on a CPU and more on a
GPU. Limits: siblings that only share an operand are not fused (they may share a compute set).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
    Rewrite,
    everywhere,
    has_stages,
    phase_of,
    stage_name,
    variables_read,
    with_inner,
)
from ipujax.lowering.passes.dce import dce
from ipujax.lowering.passes.grouping import grouped
from ipujax.lowering.passes.repeat_cheap import Repeated, compared_twice
from ipujax.lowering.popops import MONOIDS, OP_COSTS
from ipujax.lowering.source_info import name_stack

_RESHAPING = frozenset(("bitcast_convert_type",))  # between widths the shape changes
_UNIT_VIEWS = frozenset(("reshape", "squeeze", "broadcast_in_dim", "expand_dims"))
_NAMED = 4  # operations in the name of a group
_HOLDERS = frozenset(("scan", "while", "cond", "function_call", "replicated"))  # whose jaxprs are lowered one by one


def _compute(*operands: Any, jaxpr: ClosedJaxpr, name: str) -> Sequence[Any]:
    return jaxpr_as_fun(jaxpr)(*operands)


def _shapes(*operands: Any, jaxpr: ClosedJaxpr, name: str) -> Sequence[Any]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.out_avals]


fused_p = make_primitive("fused", _compute, _shapes, None)


def fuse(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr with groups of elementwise equations as one equation each."""
    return jaxpr if has_stages(jaxpr.jaxpr) else dce(fuser()(jaxpr))


def fuser() -> Rewrite:
    """The same for several jaxprs that each run in one place, with stages or not: one they all hold stays one."""

    return everywhere(lambda body, inside: ClosedJaxpr(fuse_equations(body.jaxpr, inside).jaxpr, body.consts))


def index_space(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without dimensions of size 1."""
    return tuple(n for n in shape if n != 1)


class Fused(NamedTuple):
    """A jaxpr with fused equations, and for each of its equations the number of one of those it was made of."""

    jaxpr: Jaxpr
    sources: list[int]


def fuse_equations(jaxpr: Jaxpr, inside: Rewrite, places: Sequence[Hashable] | None = None) -> Fused:
    """Groups the equations of one jaxpr.

    Args:
        jaxpr: its equations, in order.
        inside: does the same to the jaxprs of loops, branches and functions.
        places: for each equation where it runs: only what runs at one place goes together.
    """
    eqns, sources = list[JaxprEqn](), list[int]()
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name in _HOLDERS:
            eqn = with_inner(eqn, inside)
        explicit = _explicit(eqn)
        eqns += explicit
        sources += [number] * len(explicit)
    own_places = [None if places is None else places[n] for n in sources]
    body = _Body(jaxpr, eqns, own_places)
    done, numbers = list[JaxprEqn](), list[int]()
    for group in reversed(body.groups):
        together = body.together(group)
        if together is not None:
            done.append(together)
            numbers.append(sources[group[-1]])
    return Fused(jaxpr.replace(eqns=done[::-1]), numbers[::-1])


class _Body:
    """The equations of one jaxpr, in groups; these are put together from the last to the first."""

    def __init__(self, whole: Jaxpr, eqns: Sequence[JaxprEqn], places: Sequence[Hashable]) -> None:
        self._whole, self._eqns, self._places = whole, eqns, places
        self._maker = {var: n for n, eqn in enumerate(eqns) for var in eqn.outvars if not isinstance(var, DropVar)}
        own = [_key(eqn) for eqn in eqns]
        keys = [key and (key, place) for key, place in zip(own, places, strict=True)]
        reads = [self._read_by(eqn, key is not None) for eqn, key in zip(eqns, keys, strict=True)]
        for earlier, later in pairwise(n for n, eqn in enumerate(eqns) if eqn.effects):
            reads[later].append(earlier)
        self.groups = grouped(reads, keys)
        group_of = {n: g for g, group in enumerate(self.groups) for n in group}
        self._needed = {atom for atom in whole.outvars if isinstance(atom, Var)}
        stored = {self.source(var) for var in self._needed} | compared_twice(eqns, self.source)
        for eqn, key in zip(eqns, keys, strict=True):
            if key is None and not is_unit_view(eqn):
                stored.update(eqn.outvars, map(self.source, variables_read(eqn)))

        def is_worth_it(var: Var, width: int, leaves: Mapping[Var, int]) -> bool:
            # What nobody else needs is not stored in place of something as narrow.
            own, makers = group_of[self._maker[var]], [self._maker.get(leaf) for leaf in leaves if leaf not in stored]
            others = all(number is None or group_of[number] != own for number in makers)
            return sum(leaves.values()) < width + others

        self._repeated = Repeated(eqns, self._maker, stored, self.source, is_worth_it)

    def _read_by(self, eqn: JaxprEqn, sees_through_views: bool) -> list[int]:
        """The equations that one must follow: those that make its operands, or what these are views of."""
        read = map(self.source, variables_read(eqn)) if sees_through_views else variables_read(eqn)
        return [self._maker[var] for var in read if var in self._maker]

    def source(self, atom: Var) -> Var:
        """What a value is a view of, but for dimensions of size 1."""
        while atom in self._maker and is_unit_view(self._eqns[self._maker[atom]]):
            (atom,) = variables_read(self._eqns[self._maker[atom]])
        return atom

    def together(self, group: Sequence[int]) -> JaxprEqn | None:
        """The one equation for a group; None where nothing needs it."""
        members = [self._eqns[n] for n in group]
        is_alone, is_elementwise = len(group) == 1, _key(members[0]) is not None
        if is_alone and (not is_elementwise or not self._reads_repeated(group[0])):
            (eqn,) = members
            if not self._needed.intersection(eqn.outvars) and (is_elementwise or is_unit_view(eqn)):
                return None  # groups see through it, or repeat it
            made = eqn
        else:
            results = [var for eqn in members for var in eqn.outvars if var in self._needed]
            if not results:
                return None
            made = self._fused(group, results)
        self._needed.update(variables_read(made))
        return made

    def _reads_repeated(self, number: int) -> bool:
        return any(self._repeats(self.source(var), number) for var in variables_read(self._eqns[number]))

    def _repeats(self, var: Var, reader: int) -> bool:
        """Whether a reader computes a value itself: where it is made, and not far from there."""
        return var in self._repeated and self._places[self._maker[var]] == self._places[reader]

    def _fused(self, group: Sequence[int], results: Sequence[Var]) -> JaxprEqn:
        """One equation for a group; it has the place in the user's code of the last one that is no reduction."""
        inner: dict[Var, Var] = {}  # in the body: operands, what is computed, and views of both
        operands: list[Var] = []
        body: list[JaxprEqn] = []

        def read(atom: Atom) -> Atom:
            if isinstance(atom, Literal):
                return atom
            if atom not in inner:
                number = self._maker.get(atom)
                if number is not None and (is_unit_view(self._eqns[number]) or self._repeats(atom, group[-1])):
                    define(self._eqns[number])
                else:
                    operands.append(atom)
                    inner[atom] = Var(atom.aval)
            return inner[atom]

        def define(eqn: JaxprEqn) -> None:
            invars, (out,) = [read(atom) for atom in eqn.invars], eqn.outvars
            inner[out] = Var(out.aval)
            body.append(eqn.replace(invars=invars, outvars=[inner[out]]))

        members = [self._eqns[n] for n in group]
        for eqn in members:
            if eqn.outvars[0] not in inner:
                define(eqn)
        jaxpr = part_of(self._whole, [inner[var] for var in operands], [inner[var] for var in results], body)
        place = ([eqn for eqn in members if eqn.primitive.name not in MONOIDS] or members)[-1]
        params = {"jaxpr": jaxpr, "name": _title(members, place)}
        return new_jaxpr_eqn(operands, list(results), fused_p, params, set(), place.source_info)


def _explicit(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An elementwise equation with the broadcasts of its operands, which primitives do themselves, as equations."""
    shape = shape_of(eqn.outvars[0]) if len(eqn.outvars) == 1 else ()
    if not _is_fusible(eqn) or eqn.primitive.name in _RESHAPING:
        return [eqn]
    before, operands = list[JaxprEqn](), list[Atom]()
    for atom in eqn.invars:
        if isinstance(atom, Var) and shape_of(atom) != shape:
            aval: Any = atom.aval
            wide = Var(aval.update(shape=shape))
            dims = tuple(range(len(shape) - len(aval.shape), len(shape)))
            params = {"shape": shape, "broadcast_dimensions": dims, "sharding": None}
            before.append(new_jaxpr_eqn([atom], [wide], lax.broadcast_in_dim_p, params, set(), eqn.source_info))
            atom = wide
        operands.append(atom)
    return [*before, eqn.replace(invars=operands)]


def _key(eqn: JaxprEqn) -> Hashable | None:
    """What equations of a group have in common; None for one that cannot be in a group."""
    is_reduction, operands = eqn.primitive.name in MONOIDS, list(variables_read(eqn))
    if not (is_reduction or _is_fusible(eqn)) or len(eqn.outvars) != 1 or eqn.effects or not operands:
        return None
    shape = shape_of(operands[0] if is_reduction else eqn.outvars[0])
    fits = all(shape_of(var) == shape for var in operands)
    plain = all(_is_plain(atom.aval) for atom in (*operands, *eqn.outvars))
    scalars = all(np.ndim(atom.val) == 0 for atom in eqn.invars if isinstance(atom, Literal))
    reduces = not is_reduction or (prod(shape) > 0 and any(shape[d] != 1 for d in eqn.params["axes"]))
    name = stage_name(eqn)  # of which the stage does not matter: its place does
    apart = name.is_backward, name.is_recomputed, phase_of(eqn)
    return (index_space(shape), apart) if fits and plain and scalars and reduces else None


def _is_fusible(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in OP_COSTS and eqn.primitive.name != "copy"


def _is_plain(aval: Any) -> bool:
    """Whether a value is an array of numbers, no array of keys."""
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and aval.dtype != jax.dtypes.float0


def is_unit_view(eqn: JaxprEqn) -> bool:
    """Whether an equation adds or drops dimensions of size 1, and nothing else."""
    if eqn.primitive.name not in _UNIT_VIEWS or not isinstance(eqn.invars[0], Var) or len(eqn.invars) > 1:
        return False
    return index_space(shape_of(eqn.invars[0])) == index_space(shape_of(eqn.outvars[0]))


def _title(members: Sequence[JaxprEqn], place: JaxprEqn) -> str:
    """The first few operations of a group; those of another scope than its place have their own before them."""
    names: dict[str, None] = {}
    for eqn in members:
        scope = name_stack(eqn)
        names["/".join(([scope] if scope != name_stack(place) else []) + [eqn.primitive.name])] = None
    return "+".join([*list(names)[:_NAMED], *(["…"] if len(names) > _NAMED else [])])
