"""Pass `fuse`: elementwise equations over one index space become one equation `fused`, which one vertex computes.

An equation joins the group of an equation whose result it reads if both have the same index space (shapes but for
dimensions of size 1) and run in one place, on the same side of a gradient. Reshapes that only add or drop dimensions of
size 1 are seen through; broadcasts stay outside, for they are views that cost nothing. What only the group reads is
never stored. The jaxpr of a `fused` equation holds the equations as they were, each rounding to its own dtype.

Loops, branches and functions are fused inside. What has pipeline stages is not: its parts are, once they are cut.
Source: `popops::map` of PopLibs makes one codelet of an expression; XLA fuses by the same rule on a CPU and more on a
GPU. Limits: siblings that only share an operand are not fused (they may share a compute set).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
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
from ipujax.lowering.jaxpr import Rewrite, has_stages, once, rewritten_params, stage_name
from ipujax.lowering.passes.dce import dce
from ipujax.lowering.passes.grouping import grouped
from ipujax.lowering.popops import OP_COSTS

_FUSIBLE = frozenset(OP_COSTS) - {"copy"}
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

    @once
    def inside(body: ClosedJaxpr) -> ClosedJaxpr:
        return ClosedJaxpr(fuse_equations(body.jaxpr, inside).jaxpr, body.consts)

    return inside


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
            eqn = eqn.replace(params=rewritten_params(eqn.params, inside))
        explicit = _explicit(eqn)
        eqns += explicit
        sources += [number] * len(explicit)
    maker = {var: n for n, eqn in enumerate(eqns) for var in eqn.outvars if not isinstance(var, DropVar)}
    reads = [_reads(eqn, maker, eqns) for eqn in eqns]
    for earlier, later in pairwise(n for n, eqn in enumerate(eqns) if eqn.effects):
        reads[later].append(earlier)
    own = [_key(eqn) for eqn in eqns]
    keys = own if places is None else [key and (key, places[n]) for key, n in zip(own, sources, strict=True)]
    needed = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    done, numbers = list[JaxprEqn](), list[int]()
    for group in reversed(grouped(reads, keys)):
        together = eqns[group[0]]
        if len(group) > 1:
            together = _together(jaxpr, [eqns[n] for n in group], maker, eqns, needed)
        elif is_unit_view(together) and together.outvars[0] not in needed:
            continue  # groups see through it
        needed.update(_variables(together))
        done.append(together)
        numbers.append(sources[group[-1]])
    return Fused(jaxpr.replace(eqns=done[::-1]), numbers[::-1])


def _explicit(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An elementwise equation with the broadcasts of its operands, which primitives do themselves, as equations."""
    shape = shape_of(eqn.outvars[0]) if len(eqn.outvars) == 1 else ()
    if eqn.primitive.name not in _FUSIBLE or eqn.primitive.name in _RESHAPING:
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
    if eqn.primitive.name not in _FUSIBLE or len(eqn.outvars) != 1 or eqn.effects:
        return None
    shape, variables = shape_of(eqn.outvars[0]), list(_variables(eqn))
    fits = all(shape_of(var) == shape for var in variables)
    plain = all(_is_plain(atom.aval) for atom in (*variables, *eqn.outvars))
    scalars = all(np.ndim(atom.val) == 0 for atom in eqn.invars if isinstance(atom, Literal))
    name = stage_name(eqn)  # of which the stage does not matter: its place does
    apart = name.is_backward, name.is_recomputed
    return (index_space(shape), apart) if fits and plain and scalars and variables else None


def _is_plain(aval: Any) -> bool:
    """Whether a value is an array of numbers, no array of keys."""
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and aval.dtype != jax.dtypes.float0


def _variables(eqn: JaxprEqn) -> Iterable[Var]:
    return (atom for atom in eqn.invars if isinstance(atom, Var))


def _reads(eqn: JaxprEqn, maker: dict[Var, int], eqns: Sequence[JaxprEqn]) -> list[int]:
    """The equations that one must follow: those that make its operands, or what these are views of."""
    sources = (_source(atom, maker, eqns) if _key(eqn) is not None else atom for atom in _variables(eqn))
    return [maker[var] for var in sources if var in maker]


def _source(atom: Var, maker: dict[Var, int], eqns: Sequence[JaxprEqn]) -> Var:
    """What a value is a view of, but for dimensions of size 1."""
    while atom in maker and is_unit_view(eqns[maker[atom]]):
        (source, *_) = eqns[maker[atom]].invars
        assert isinstance(source, Var)
        atom = source
    return atom


def is_unit_view(eqn: JaxprEqn) -> bool:
    """Whether an equation adds or drops dimensions of size 1, and nothing else."""
    if eqn.primitive.name not in _UNIT_VIEWS or not isinstance(eqn.invars[0], Var) or len(eqn.invars) > 1:
        return False
    return index_space(shape_of(eqn.invars[0])) == index_space(shape_of(eqn.outvars[0]))


def _together(
    whole: Jaxpr, members: Sequence[JaxprEqn], maker: dict[Var, int], eqns: Sequence[JaxprEqn], needed: set[Var]
) -> JaxprEqn:
    """One equation for a group; it has the last one's place in the user's code."""
    inner: dict[Var, Var] = {}  # in the body: operands, what is computed, and views of both
    operands: list[Var] = []
    body: list[JaxprEqn] = []

    def read(atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            return atom
        if atom in inner:
            return inner[atom]
        if atom in maker and is_unit_view(eqns[maker[atom]]):
            view = eqns[maker[atom]]
            body.append(view.replace(invars=[read(view.invars[0])], outvars=[define(atom)]))
        else:
            operands.append(atom)
            define(atom)
        return inner[atom]

    def define(var: Var) -> Var:
        inner[var] = Var(var.aval)
        return inner[var]

    for eqn in members:
        invars = [read(atom) for atom in eqn.invars]
        body.append(eqn.replace(invars=invars, outvars=[define(eqn.outvars[0])]))
    results = [eqn.outvars[0] for eqn in members if eqn.outvars[0] in needed]
    jaxpr = part_of(whole, [inner[var] for var in operands], [inner[var] for var in results], body)
    params = {"jaxpr": jaxpr, "name": _title(members)}
    return new_jaxpr_eqn(operands, results, fused_p, params, set(), members[-1].source_info)


def _title(members: Sequence[JaxprEqn]) -> str:
    """The first few operations of a group."""
    names = list(dict.fromkeys(eqn.primitive.name for eqn in members))
    return "+".join([*names[:_NAMED], *(["…"] if len(names) > _NAMED else [])])
