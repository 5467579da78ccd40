"""The equations of a plan: the parts of the chain in the order of its actions.

Input: `ChainSteps`, and the actions of a plan. Output: the unchanged equations of the forward part, and those of the
backward part: copies of forward equations, named like those that `jax.checkpoint` repeats, and the gradient, which
reads the latest copy of a value. Unused copies are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ipujax.lowering.jax_compat import Atom, DropVar, JaxprEqn, Var
from ipujax.lowering.jaxpr import variables_read
from ipujax.lowering.recomputation.chain_steps import ChainSteps
from ipujax.lowering.recomputation.segment_table import StepAction
from ipujax.lowering.source_info import as_recomputed


def replay(steps: ChainSteps, actions: Sequence[StepAction]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Makes the equations of a recomputation plan: of the forward part, and of the gradient with recomputed values.

    The plan's first actions, one for each step, are the forward part, whose equations are unchanged: which values it
    stores follows from what the backward part reads. Of the others each adds a step's gradient, or runs a step again.
    """
    replayed = _Replay(steps)
    for action, number in actions[len(steps.chain) :]:
        if action == "backward":
            replayed.add_gradient(number)
        else:
            replayed.add_copies(number)
    backward = _without_unused(replayed.eqns, replayed.copied, steps.flow.external)
    return [eqn for eqns in steps.forward for eqn in eqns], backward


class _Replay:
    """The backward part, action by action; `copied` has the results of copies in `eqns`."""

    def __init__(self, steps: ChainSteps) -> None:
        """Begins a backward part without equations, in which nothing has been recomputed."""
        self._steps = steps
        self._flow = steps.flow
        self._copy: dict[Var, Var] = {}  # latest copy of each value
        # (view, copy of what it views, or None for the original) → the view of that copy.
        self._viewed: dict[tuple[Var, Var | None], Var] = {}
        self._forward_vars = {var for eqn in steps.flow.forward for var in eqn.outvars}
        self.eqns: list[JaxprEqn] = []
        self.copied: set[Var] = set()

    def add_copies(self, number: int) -> None:
        """Adds the forward equations of a step again, views included, so that the run equals the first one."""
        for eqn in self._steps.forward[number]:
            if self._flow.is_forward_view(eqn):
                self._add_view(eqn, self._copy_of(eqn.outvars[0]))
            elif not (self._steps.fixed.issuperset(eqn.outvars) or eqn.effects):
                pairs = zip(eqn.outvars, self._add_copy(eqn), strict=True)
                self._copy.update((old, new) for old, new in pairs if old in self._flow.definition)

    def add_gradient(self, number: int) -> None:
        """Adds the backward part of a step."""
        for eqn in self._steps.backward[number]:
            self.eqns.append(eqn.replace(invars=[self._latest(atom) for atom in eqn.invars]))

    def _add_copy(self, eqn: JaxprEqn) -> list[Var]:
        """Adds a copy of an equation that reads the latest copies; returns its results."""
        operands = [self._latest(atom) for atom in eqn.invars]
        outvars = [v if isinstance(v, DropVar) else Var(v.aval) for v in eqn.outvars]
        is_forward = self._forward_vars.issuperset(eqn.outvars)
        copy = eqn.replace(invars=operands, outvars=outvars)
        self.eqns.append(as_recomputed(copy) if is_forward else copy)
        self.copied.update(outvars)
        return outvars

    def _copy_of(self, atom: Atom) -> Var | None:
        """The latest copy of the value that a variable views, None for the original."""
        value = self._flow.forward_value(atom)
        return None if value is None or value in self._steps.fixed else self._copy.get(value)

    def _add_view(self, eqn: JaxprEqn, copy: Var | None) -> None:
        """Adds a view of the latest copy of what an equation views, which is `copy`."""
        self._viewed.update(((old, copy), new) for old, new in zip(eqn.outvars, self._add_copy(eqn), strict=True))

    def _latest(self, atom: Atom) -> Atom:
        """What an equation of the backward part is to read for an atom of the forward part: its latest recomputed copy.

        Of a view it is the same view of that copy, which is added if there is none yet; an atom without copy stays, but
        for a view that no forward equation defines: the gradient took it, and it is added where it is read.
        """
        if not isinstance(atom, Var):
            return atom
        copy = self._copy_of(atom)
        if (atom, copy) in self._viewed:
            return self._viewed[atom, copy]
        if atom not in self._flow.views or (copy is None and atom in self._forward_vars):
            return copy or atom
        self._add_view(self._flow.views[atom], copy)
        return self._viewed[atom, copy]


def _without_unused(eqns: Sequence[JaxprEqn], copied: Collection[Var], external: Collection[Var]) -> list[JaxprEqn]:
    """The equations without copies that neither they nor others (`external`) read."""
    used = set(external)
    used_eqns: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        is_copy = any(var in copied for var in eqn.outvars)
        if not is_copy or not used.isdisjoint(eqn.outvars):
            used_eqns.append(eqn)
            used.update(variables_read(eqn))
    return used_eqns[::-1]
