"""Pass `narrow`: the backward pass reads what the forward pass makes in its narrowest form.

JAX keeps for the gradient of a normalisation two arrays in single precision, of which each is a few instructions away
from the half-precision array and the row statistics it was computed from. What a gradient reads of this kind it
computes again, from values that take fewer bytes or are kept anyway: so do stacks of loops and stashes of pipelines.
What one phase hands to another is not: what it is computed from would be loaded in each phase behind.

Input and output: jaxprs; those inside loops, branches, functions and pipelines too.
Limits: those of `repeat_cheap`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, DropVar, JaxprEqn, Var
from ipujax.lowering.jaxpr import Rewrite, everywhere, phase_of, stage_name, variables_read, with_inner
from ipujax.lowering.passes.repeat_cheap import Repeated

_VIEWS = frozenset(("broadcast_in_dim", "reshape", "squeeze", "expand_dims"))


def narrow(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr whose gradients compute again what would be kept for them in a wider form."""
    return everywhere(_narrowed)(jaxpr)


def _narrowed(jaxpr: ClosedJaxpr, inside: Rewrite) -> ClosedJaxpr:
    body = jaxpr.jaxpr
    eqns = [with_inner(eqn, inside) for eqn in body.eqns]
    maker = {var: n for n, eqn in enumerate(eqns) for var in eqn.outvars if not isinstance(var, DropVar)}
    is_later = [_is_later(eqn) for eqn in eqns]
    stored = {atom for atom in body.outvars if isinstance(atom, Var)}
    stored |= {var for eqn, later in zip(eqns, is_later, strict=True) if later or eqn.effects for var in eqn.outvars}
    phases = [phase_of(eqn) for eqn in eqns]
    stored |= {
        var
        for eqn, phase in zip(eqns, phases, strict=True)
        for var in variables_read(eqn)
        if var in maker and phases[maker[var]] != phase
    }

    def source(var: Var) -> Var:
        return var

    def is_worth_it(var: Var, width: int, leaves: Mapping[Var, int]) -> bool:
        return sum(bytes_ for leaf, bytes_ in leaves.items() if leaf not in kept) < width

    cheap = Repeated(eqns, maker, stored, source, lambda _, width, leaves: sum(leaves.values()) <= width)
    kept = {var for eqn, later in zip(eqns, is_later, strict=True) if later for var in variables_read(eqn)}
    kept = {var for var in kept if var not in cheap}
    again = Repeated(eqns, maker, stored, source, is_worth_it)
    done: list[JaxprEqn] = []
    copies: dict[tuple[Var, int | None], Var] = {}  # by value and stage

    def copied(atom: Atom, reader: JaxprEqn) -> Atom:
        """What stands for a value of the forward pass in a gradient."""
        if not isinstance(atom, Var) or atom not in maker or is_later[maker[atom]]:
            return atom
        eqn, key = eqns[maker[atom]], (atom, stage_name(reader).stage)
        is_view = eqn.primitive.name in _VIEWS and len(eqn.invars) == 1
        if key not in copies and (is_view or atom in again):
            invars = [copied(operand, reader) for operand in eqn.invars]
            if is_view and invars == eqn.invars and not _is_broadcast(eqn):
                return atom
            copies[key] = Var(atom.aval)
            done.append(eqn.replace(invars=invars, outvars=[copies[key]], source_info=reader.source_info))
        return copies.get(key, atom)

    for eqn, later in zip(eqns, is_later, strict=True):
        if later and any(var in again for var in variables_read(eqn)):
            eqn = eqn.replace(invars=[copied(a, eqn) if isinstance(a, Var) and a in again else a for a in eqn.invars])
        done.append(eqn)
    return ClosedJaxpr(body.replace(eqns=done), jaxpr.consts)


def _is_later(eqn: JaxprEqn) -> bool:
    """Whether an equation belongs to a gradient, or to what a checkpoint computes again for one."""
    name = stage_name(eqn)
    return name.is_backward or name.is_recomputed


def _is_broadcast(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "broadcast_in_dim"
