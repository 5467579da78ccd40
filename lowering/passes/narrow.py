"""Pass `narrow`: the backward part reads results of the forward part in their narrowest form.

For the gradient of a normalisation JAX saves two arrays in single precision, each a few instructions away from a
half-precision array and row statistics. A gradient computes them again, from values that take fewer bytes or are
saved anyway; so do stacks of loops and stashes of pipelines. Values that cross phases of execution are not computed
again: their sources would be loaded in each later phase. Nor are values that are compared with one another, as with
their maximum, which may be rounded otherwise the second time. Limits: those of `repeat_cheap`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import (
    Rewrite,
    everywhere,
    phase_of,
    stage_name,
    value_bytes,
    variables,
    variables_read,
    with_inner,
)
from ipujax.lowering.passes.derived_rows import with_derived_rows
from ipujax.lowering.passes.repeat_cheap import Repeated, compared_twice
from ipujax.lowering.primitives import record_of
from ipujax.runtime.tensor import MIN_BYTES_PER_TILE


def narrow(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr whose gradients compute wide values again instead of saving them."""
    return everywhere(_narrowed)(jaxpr)


def _narrowed(jaxpr: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
    """The jaxpr whose gradients compute wide values again, from narrower ones that are saved instead."""
    body = jaxpr.jaxpr
    eqns = with_derived_rows([with_inner(eqn, rewrite) for eqn in body.eqns])
    definition = {var: n for n, eqn in enumerate(eqns) for var in eqn.outvars if not isinstance(var, DropVar)}
    recomputed = _values_to_recompute(eqns, definition, _stored_values(body, eqns, definition))
    return ClosedJaxpr(body.replace(eqns=_Recomputation(eqns, definition, recomputed).run()), jaxpr.consts)


def _stored_values(body: Jaxpr, eqns: Sequence[JaxprEqn], definition: Mapping[Var, int]) -> set[Var]:
    """Values of a body that gradients must read as they are, never compute again.

    These are the results, values of gradients and of equations with effects, values that are read in another phase of
    execution, and those that several equations compare, which could round differently. `definition` has the number of
    the equation that defines a value.
    """
    stored = set(variables(body.outvars)) | compared_twice(eqns, _itself)
    phases = [phase_of(eqn) for eqn in eqns]
    for eqn, phase in zip(eqns, phases, strict=True):
        if eqn.effects or _is_backward(eqn):
            stored.update(eqn.outvars)
        stored.update(var for var in variables_read(eqn) if var in definition and phases[definition[var]] != phase)
    return stored


def _values_to_recompute(eqns: Sequence[JaxprEqn], definition: Mapping[Var, int], stored: set[Var]) -> Repeated:
    """Forward values that gradients compute again, as that saves bytes between forward and backward part.

    A value is worth it if it takes more bytes than those of its sources, the stored values that it is computed again
    from, that would be saved only for it.

    Args:
        eqns: equations of a body.
        definition: number of the equation that defines a value.
        stored: values that may not be computed again.
    """
    # Values that gradients read are saved anyway, so that as sources they cost nothing: but for those whose own sources
    # take no more bytes, which will be computed again themselves.
    cheap = Repeated(
        eqns, definition, stored, _itself, lambda _, num_bytes, sources: sum(sources.values()) <= num_bytes
    )
    read_by_gradients = {var for eqn in eqns if _is_backward(eqn) for var in variables_read(eqn)}
    saved = {var for var in read_by_gradients if var not in cheap}

    def is_worth_it(var: Var, num_bytes: int, sources: Mapping[Var, int]) -> bool:
        return sum(source_bytes for source, source_bytes in sources.items() if source not in saved) < num_bytes

    return Repeated(eqns, definition, stored, _itself, is_worth_it)


def _itself(var: Var) -> Var:
    """Source of a value for `Repeated`, which here looks through no views."""
    return var


class _Recomputation:
    """Rewrites equations such that those of gradients read copies of the values in `recomputed`.

    A copy is computed before its first reader, a small constant at the start of the gradient: else the first of equal
    layers would compute among its own equations what all share, and `outline` would not find that layers are repeated.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], definition: Mapping[Var, int], recomputed: Repeated) -> None:
        self._eqns = eqns
        self._definition = definition
        self._recomputed = recomputed
        self._rewritten: list[JaxprEqn] = []
        self._copies: dict[tuple[Var, int | None], Var] = {}  # (value, stage of its readers) → its copy
        self._starts: dict[_Part, int] = {}  # where the gradient of each part starts among the rewritten equations
        # Equations that come at these starts, by their result.
        self._constants: defaultdict[_Part, dict[Var, JaxprEqn]] = defaultdict(dict)

    def run(self) -> list[JaxprEqn]:
        """Returns the equations, with gradients that read recomputed copies."""
        for eqn in self._eqns:
            if _is_backward(eqn):
                self._starts.setdefault(_part_of(eqn), len(self._rewritten))
            if _is_backward(eqn) and any(var in self._recomputed for var in variables_read(eqn)):
                invars = [
                    self._value_for(eqn, atom) if isinstance(atom, Var) and atom in self._recomputed else atom
                    for atom in eqn.invars
                ]
                eqn = eqn.replace(invars=invars)
            self._rewritten.append(eqn)
        for part, start in sorted(self._starts.items(), key=lambda item: item[1], reverse=True):
            self._rewritten[start:start] = self._constants[part].values()
        return self._rewritten

    def _value_for(self, reader: JaxprEqn, atom: Atom) -> Atom:
        """What an equation of a gradient, `reader`, shall read in place of a forward value: a copy, or that value.

        The equations that compute the copy are added, the first time that one of the reader's stage needs it.
        """
        if not isinstance(atom, Var) or atom not in self._definition:
            return atom
        eqn = self._eqns[self._definition[atom]]
        is_view = record_of(eqn).is_in_order
        if _is_backward(eqn) or not (is_view or atom in self._recomputed):
            return atom
        key = atom, stage_name(reader).stage
        if key not in self._copies:
            invars = [self._value_for(reader, operand) for operand in eqn.invars]
            # A view takes no bytes beside the saved value that it views; a broadcast would be saved at full width.
            if is_view and invars == eqn.invars and record_of(eqn).view != "repeated":
                return atom
            copy = self._copies[key] = Var(atom.aval)
            # Views and elementwise equations have one result, which is `atom`.
            repeated = eqn.replace(invars=invars, outvars=[copy], source_info=reader.source_info)
            constants = self._constants[_part_of(reader)]
            if _is_small_constant(repeated, constants):
                constants[copy] = repeated
            else:
                self._rewritten.append(repeated)
        return self._copies[key]


_Part = tuple[int | None, Hashable]  # stage of a pipeline, phase of execution


def _part_of(eqn: JaxprEqn) -> _Part:
    """Part of a program in which an equation must stay."""
    return stage_name(eqn).stage, phase_of(eqn)


def _is_small_constant(eqn: JaxprEqn, constants: Mapping[Var, JaxprEqn]) -> bool:
    """True if a result depends on literals and constants of its part alone, and takes few bytes wherever it is.

    A constant of another part may come later than the start of this one.
    """
    takes_few_bytes = record_of(eqn).is_in_order or value_bytes(eqn.outvars[0].aval) <= MIN_BYTES_PER_TILE
    return takes_few_bytes and constants.keys() >= set(variables_read(eqn))


def _is_backward(eqn: JaxprEqn) -> bool:
    """True if an equation belongs to a gradient, or to the recomputation for one."""
    name = stage_name(eqn)
    return name.is_backward or name.is_recomputed
