"""The equations of a plan: each part of the chain where the plan runs it.

Input: `Steps`, and the actions of a plan. Output: the equations of the forward part, which are those there were, and
those of the backward part: copies of forward equations, named as what `jax.checkpoint` repeats, and the gradient, which
reads the copy of a value that was made last. Copies that nothing reads are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ipujax.lowering.jax_compat import Atom, DropVar, JaxprEqn, Var
from ipujax.lowering.jaxpr import variables_read
from ipujax.lowering.recomputation.chain_steps import Steps
from ipujax.lowering.recomputation.segment_table import Action
from ipujax.lowering.source_info import as_recomputed


def replay(steps: Steps, actions: Sequence[tuple[Action, int]]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The equations of the forward and of the backward part.

    Args:
        steps: the chain; the first actions are those of its forward part, one a step.
        actions: what runs, in order.
    """
    run = _Replay(steps)
    for action, number in actions[len(steps.chain) :]:
        if action == "backward":
            run.gradient(number)
        else:
            run.again(number)
    copies = _without_unread(run.eqns, run.copied, steps.flow.outside)
    return [eqn for eqns in steps.forward for eqn in eqns], copies


class _Replay:
    def __init__(self, steps: Steps) -> None:
        self._steps, self._flow = steps, steps.flow
        self._copy: dict[Var, Var] = {}  # the last of each value
        self._viewed: dict[tuple[Var, Var | None], Var] = {}  # views of copies; of the originals in the gradient
        self._forward_made = {var for eqn in steps.flow.forward for var in eqn.outvars}
        self.eqns: list[JaxprEqn] = []
        self.copied: set[Var] = set()

    def again(self, number: int) -> None:
        """Runs the forward part of a step once more, views too, so that it is the same run of equations."""
        for eqn in self._steps.forward[number]:
            if self._flow.is_forward_view(eqn):
                self._view(eqn, self._copy_of(eqn.outvars[0]))
            elif not (self._steps.fixed.issuperset(eqn.outvars) or eqn.effects):
                named = zip(eqn.outvars, self._repeat(eqn), strict=True)
                self._copy.update((old, new) for old, new in named if old in self._flow.made)

    def gradient(self, number: int) -> None:
        """Runs the backward part of a step."""
        for eqn in self._steps.backward[number]:
            self.eqns.append(eqn.replace(invars=[self._read(atom) for atom in eqn.invars]))

    def _repeat(self, eqn: JaxprEqn) -> list[Var]:
        """Adds a copy of an equation; returns its results."""
        operands = [self._read(atom) for atom in eqn.invars]
        outvars = [v if isinstance(v, DropVar) else Var(v.aval) for v in eqn.outvars]
        is_forward = self._forward_made.issuperset(eqn.outvars)
        own = eqn.replace(invars=operands, outvars=outvars)
        self.eqns.append(as_recomputed(own) if is_forward else own)
        self.copied.update(outvars)
        return outvars

    def _copy_of(self, atom: Atom) -> Var | None:
        """The last copy of the value that a variable views, None for the original."""
        value = self._flow.value(atom)
        return None if value is None or value in self._steps.fixed else self._copy.get(value)

    def _view(self, eqn: JaxprEqn, copy: Var | None) -> None:
        """Adds a view of a copy."""
        self._viewed.update(((old, copy), new) for old, new in zip(eqn.outvars, self._repeat(eqn), strict=True))

    def _read(self, atom: Atom) -> Atom:
        """What to read for a variable: the last copy of a value, or a view of it."""
        if not isinstance(atom, Var):
            return atom
        copy = self._copy_of(atom)
        if (atom, copy) in self._viewed:
            return self._viewed[atom, copy]
        if atom not in self._flow.views or (copy is None and atom in self._forward_made):
            return copy or atom
        self._view(self._flow.views[atom], copy)
        return self._viewed[atom, copy]


def _without_unread(eqns: Sequence[JaxprEqn], copied: Collection[Var], outside: Collection[Var]) -> list[JaxprEqn]:
    """The equations but for copies that nothing reads."""
    read, kept = set(outside), list[JaxprEqn]()
    for eqn in reversed(eqns):
        is_copy = any(var in copied for var in eqn.outvars)
        if not is_copy or not read.isdisjoint(eqn.outvars):
            kept.append(eqn)
            read.update(variables_read(eqn))
    return kept[::-1]
