"""Pass `narrow`: the backward part reads results of the forward part in their narrowest form.

For the gradient of a normalisation JAX saves two arrays in single precision, each a few instructions away from a
half-precision array and row statistics. A gradient computes them again, from values that take fewer bytes or are
saved anyway; so do stacks of loops and stashes of pipelines. Values that cross phases of execution are not computed
again: their sources would be loaded in each later phase. Nor are values that are compared with one another, as with
their maximum, which may be rounded otherwise the second time. Limits: those of `repeat_cheap`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, DropVar, JaxprEqn, Var
from ipujax.lowering.jaxpr import Rewrite, everywhere, phase_of, stage_name, variables_read, with_inner
from ipujax.lowering.passes.repeat_cheap import Repeated, compared_twice
from ipujax.lowering.primitives import record_of


def narrow(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr whose gradients compute wide values again instead of saving them."""
    return everywhere(_narrowed)(jaxpr)


def _narrowed(jaxpr: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
    """The jaxpr whose gradients compute wide values again, from narrower ones that are saved instead."""
    body = jaxpr.jaxpr
    eqns = [with_inner(eqn, rewrite) for eqn in body.eqns]
    definition = {var: n for n, eqn in enumerate(eqns) for var in eqn.outvars if not isinstance(var, DropVar)}
    backward_flags = [_is_backward(eqn) for eqn in eqns]
    stored = {atom for atom in body.outvars if isinstance(atom, Var)}
    stored |= {
        var
        for eqn, is_backward in zip(eqns, backward_flags, strict=True)
        if is_backward or eqn.effects
        for var in eqn.outvars
    }
    # Values that cross phases of execution are stored.
    phases = [phase_of(eqn) for eqn in eqns]
    stored |= {
        var
        for eqn, phase in zip(eqns, phases, strict=True)
        for var in variables_read(eqn)
        if var in definition and phases[definition[var]] != phase
    }

    def source(var: Var) -> Var:
        return var

    stored |= compared_twice(eqns, source)

    def is_worth_it(var: Var, width: int, leaves: Mapping[Var, int]) -> bool:
        return sum(bytes_ for leaf, bytes_ in leaves.items() if leaf not in saved) < width

    # Values that need not be saved because their own sources are no wider are no reason to save others.
    cheap = Repeated(eqns, definition, stored, source, lambda _, width, leaves: sum(leaves.values()) <= width)
    saved = {
        var for eqn, is_backward in zip(eqns, backward_flags, strict=True) if is_backward for var in variables_read(eqn)
    }
    saved = {var for var in saved if var not in cheap}
    recomputed = Repeated(eqns, definition, stored, source, is_worth_it)
    rewritten: list[JaxprEqn] = []
    copies: dict[tuple[Var, int | None], Var] = {}  # (value, stage of the reader) → its copy

    def for_gradient(atom: Atom, reader: JaxprEqn) -> Atom:
        """The value that a gradient reads in place of a forward value: a copy computed again, or the value itself."""
        if not isinstance(atom, Var) or atom not in definition or backward_flags[definition[atom]]:
            return atom
        eqn = eqns[definition[atom]]
        key = atom, stage_name(reader).stage
        is_view = record_of(eqn).is_in_order and len(eqn.invars) == 1
        if key not in copies and (is_view or atom in recomputed):
            invars = [for_gradient(operand, reader) for operand in eqn.invars]
            # A view takes no bytes beside the saved value that it views; a broadcast would be saved at full width.
            if is_view and invars == eqn.invars and record_of(eqn).view != "repeated":
                return atom
            # One copy for all readers of a stage.
            copies[key] = Var(atom.aval)
            rewritten.append(eqn.replace(invars=invars, outvars=[copies[key]], source_info=reader.source_info))
        return copies.get(key, atom)

    for eqn, is_backward in zip(eqns, backward_flags, strict=True):
        if is_backward and any(var in recomputed for var in variables_read(eqn)):
            eqn = eqn.replace(
                invars=[for_gradient(a, eqn) if isinstance(a, Var) and a in recomputed else a for a in eqn.invars]
            )
        rewritten.append(eqn)
    return ClosedJaxpr(body.replace(eqns=rewritten), jaxpr.consts)


def _is_backward(eqn: JaxprEqn) -> bool:
    """True if an equation belongs to a gradient, or to the recomputation for one."""
    name = stage_name(eqn)
    return name.is_backward or name.is_recomputed
