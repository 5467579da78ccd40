"""Pass `recompute`: recomputes values that the gradient needs instead of storing them.

    h = tanh(x @ w)                      h = tanh(x @ w)
    …                                    …
    dw = xᵀ @ (dy * (1 - h²))            h2 = tanh(x @ w); dw = xᵀ @ (dy * (1 - h2²))

Each jaxpr with a gradient, bodies of loops too, is rewritten by itself. Values that `jax.checkpoint` stores and
recomputes stay unchanged. Random numbers are drawn again from the same keys.

    none      no recomputation
    all       all values, from the arguments, or the inputs of a stage or a phase
    standard  as PopART: values between cuts with few bytes to store, or phases; not the last ones before the loss
    auto      fewest cycles in a share of the bytes of storing all values

A training step has three parts. Backward equations are those that JAX names after a transposition, with those that a
`jax.checkpoint` recomputes; the update is all else that needs a gradient, which may have further forward and backward
parts, as if a second network is trained on the results of the first.

The equations of a plan are the unchanged ones of the forward part, then those of the backward part in the order of the
plan's actions: copies of forward equations, named like those that `jax.checkpoint` repeats, and the gradient, which
reads the latest copy of a value. Unused copies are left out.

Limits: a gradient whose effects would come in another order stays unchanged. A loop over layers is one operation, whose
gradient is another loop: the values that the first stores for each iteration of the second stay, or the entire loop is
run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, DropVar, JaxprEqn, Var
from ipujax.lowering.jaxpr import (
    PIPELINE,
    Rewrite,
    equations,
    everywhere,
    recompute_mode,
    stage_name,
    variables,
    variables_read,
    with_inner,
)
from ipujax.lowering.recomputation.chain import ChainPlans, RecomputePlan
from ipujax.lowering.recomputation.chain_steps import (
    ChainSteps,
    best_cuts,
    between_layers,
    between_phases,
    standard_cuts,
)
from ipujax.lowering.recomputation.flow import DataFlow
from ipujax.lowering.recomputation.segment_table import StepAction
from ipujax.lowering.source_info import as_recomputed, name_stack


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


@dataclass(frozen=True, slots=True)
class Parts:
    """A step in parts, each in order."""

    forward: tuple[JaxprEqn, ...]  # equations before the gradient
    backward: tuple[JaxprEqn, ...]  # the gradient
    update: tuple[JaxprEqn, ...]  # users of the gradient, and later equations that it does not need


def split(eqns: Sequence[JaxprEqn]) -> Parts | None:
    """Divides the equations of a training step into forward part, gradient and update.

    None if there is no gradient, or if to run the parts one after the other would reorder prints and other effects.
    """
    backward, users = _gradient_and_users(eqns)
    if not backward:
        return None
    # Equations after the first of the gradient that it does not need are moved behind it.
    forward = _forward_equations(eqns, backward, users)
    update = [n for n in range(len(eqns)) if n not in backward and n not in forward]
    parts = sorted(forward), sorted(backward), update
    effects_in_order = [n for part in parts for n in part if eqns[n].effects]
    if effects_in_order != sorted(effects_in_order):
        return None  # prints and callbacks would come in another order
    return Parts(*(tuple(eqns[n] for n in part) for part in parts))


def _gradient_and_users(eqns: Sequence[JaxprEqn]) -> tuple[set[int], set[int]]:
    """Numbers of the equations of a training step's gradient, and of its users, which depend on it, as the update.

    Backward equations that depend on a user are users too: they belong to the gradient of a later network.
    """
    backward: set[int] = set()
    users: set[int] = set()
    part_of: dict[Var, set[int]] = {}  # result → `backward` or `users`; what reads one and is not backward is a user
    for n, eqn in enumerate(eqns):
        operand_parts = [part_of[var] for var in variables_read(eqn) if var in part_of]
        is_backward = stage_name(eqn).is_backward and not any(part is users for part in operand_parts)
        if is_backward or operand_parts:
            members = backward if is_backward else users
            members.add(n)
            part_of.update(dict.fromkeys(eqn.outvars, members))
    return backward, users


def _forward_equations(eqns: Sequence[JaxprEqn], backward: Collection[int], users: Collection[int]) -> set[int]:
    """Numbers of the equations of the forward part: those that come before the gradient, and others that it needs.

    `backward` and `users` are the equations of the gradient and those that depend on it, which are excluded.
    """
    first_backward = min(backward)
    needed = {var for n in backward for var in variables_read(eqns[n])}
    forward: set[int] = set()
    for n in reversed(range(len(eqns))):
        is_other = n not in backward and n not in users
        if is_other and (n < first_backward or not needed.isdisjoint(eqns[n].outvars)):
            needed.update(variables_read(eqns[n]))
            forward.add(n)
    return forward


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Options of recomputation.

    Args:
        mode: one of `Options.recompute`; a user's scope may set another.
        shares: for each IPU of a replica, the share of the bytes of storing all values for a gradient that `auto` may
            take; 1 for IPUs after the last.
        whole_layers: whether `auto` repeats entire layers, for less code.
    """

    mode: str = "none"
    shares: tuple[float, ...] = ()
    whole_layers: bool = False

    def share(self, ipu: int | None = None) -> float:
        """The share of an IPU; for None the lowest."""
        if ipu is None:
            return min(self.shares, default=1.0)
        return self.shares[ipu] if ipu < len(self.shares) else 1.0


KEEP_ALL = Recomputation()


@dataclass(frozen=True, slots=True, eq=False)
class ChainTrade:
    """The trade-off of recomputation in one gradient.

    Args:
        ipu: IPU it runs on, None for all.
        plans: possible plans; cycles are elements that are moved.
        all_bytes: peak bytes without recomputation.
        planned: the chosen plan.
    """

    ipu: int | None
    plans: ChainPlans
    all_bytes: int
    planned: RecomputePlan

    @property
    def least_bytes(self) -> int:
        """Peak bytes of the smallest plan."""
        return self.plans.least_bytes

    def bytes_with(self, share: float) -> int:
        """Peak bytes with a share of those without recomputation, or with as few as possible."""
        return self.plans.plan(max(self.least_bytes, int(share * self.all_bytes))).peak_bytes


def recompute(
    jaxpr: ClosedJaxpr, recomputation: Recomputation = KEEP_ALL, trades: list[ChainTrade] | None = None
) -> ClosedJaxpr:
    """Returns an equal jaxpr in which gradients recompute values of their forward part rather than read stored ones.

    Args:
        jaxpr: the jaxpr; training steps inside of loops and branches are rewritten too.
        recomputation: which values are recomputed.
        trades: list to which the trade-off of bytes against cycles of each gradient is appended, in mode `auto`.
    """

    def with_recomputation(body: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
        eqns = [_rewrite_bodies(eqn, rewrite) for eqn in body.jaxpr.eqns]
        new_eqns = _recomputed(eqns, set(variables(body.jaxpr.outvars)), recomputation, trades)
        is_same = len(new_eqns) == len(body.jaxpr.eqns) and set(map(id, new_eqns)) == set(map(id, body.jaxpr.eqns))
        return body if is_same else ClosedJaxpr(body.jaxpr.replace(eqns=new_eqns), body.consts)

    return everywhere(with_recomputation)(jaxpr)


def _rewrite_bodies(eqn: JaxprEqn, rewrite: Rewrite) -> JaxprEqn:
    if eqn.primitive.name == PIPELINE:
        return eqn  # its stages are rewritten one by one when they are known
    return with_inner(eqn, rewrite)


def _recomputed(
    eqns: Sequence[JaxprEqn],
    results: Collection[Var],
    recomputation: Recomputation,
    trades: list[ChainTrade] | None,
) -> list[JaxprEqn]:
    """Rewrites the gradients in the equations of a body, one after the other, such that they recompute values.

    Args:
        eqns: equations of the body; returned as they are without a gradient.
        results: variables that the body returns.
        recomputation: which values are recomputed.
        trades: list to which the trade-off of each gradient is appended, in mode `auto`.
    """
    parts = split(eqns) if modes(eqns, recomputation) - {"none"} else None
    if parts is None:
        return list(eqns)
    external = {*results, *(var for eqn in parts.update for var in variables_read(eqn))}
    forward, backward = recomputed_parts(parts.forward, parts.backward, external, recomputation, trades)
    # The update may have gradients of its own, as of a second network.
    return [*forward, *backward, *_recomputed(parts.update, results, recomputation, trades)]


def recomputed_parts(
    forward: Sequence[JaxprEqn],
    backward: Sequence[JaxprEqn],
    external: Collection[Var],
    recomputation: Recomputation,
    trades: list[ChainTrade] | None = None,
    *,
    ipu: int | None = None,
    in_flight: int = 1,
    feeds_loss: bool = True,
    is_summed: bool = False,
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Rewrites one gradient such that it recomputes values of its forward part rather than reads stored ones.

    Args:
        forward: equations of the forward part.
        backward: equations of the gradient.
        external: variables of either that other equations read, or that are results.
        recomputation: which values are recomputed: the mode, and in mode `auto` the share of bytes that may be stored.
        trades: list to which the trade-off of bytes against cycles is appended, in mode `auto`.
        ipu: IPU of both parts, which has a share of its own; None outside of pipelines.
        in_flight: number of inputs at once whose forward parts have run and whose backward parts have not.
        feeds_loss: whether the forward part ends in the loss.
        is_summed: whether results of the gradient are added at once to accumulators that exist already.

    Returns:
        Equations of the forward part, and of the gradient with recomputed values.
    """
    mode = next((_mode(eqn, recomputation) for eqn in backward), "none")  # one for all of a gradient
    share = recomputation.share(ipu)
    if mode == "none" or (mode == "auto" and share >= 1 and trades is None):
        return list(forward), list(backward)
    flow = DataFlow(forward, backward, external)
    cuts = _CUTS[mode](flow)
    whole_layers = mode == "auto" and recomputation.whole_layers
    if whole_layers:
        cuts = between_layers(flow, cuts)
    steps = ChainSteps(flow, cuts, is_summed=is_summed, whole_layers=whole_layers)
    if mode != "auto":
        # PopART's standard mode does not repeat what follows the last cut before the loss: the gradient begins there at
        # once. In a stage before the last, others run between forward and backward part.
        replayed = replay(steps, _recompute_all(len(steps.chain), saves_last=feeds_loss and mode == "standard"))
        repeats_values = sum(map(len, replayed)) > len(forward) + len(backward)
        return replayed if repeats_values else (list(forward), list(backward))  # of no use, so in their order
    # 0 bytes of the result: it is the loss, or sent on.
    plans = ChainPlans(steps.chain, 0, in_flight)
    keep_all_plan = plans.keep_all()
    planned = keep_all_plan
    if share < 1:
        planned = plans.plan(max(plans.least_bytes, int(share * keep_all_plan.peak_bytes)))
    if trades is not None:
        trades.append(ChainTrade(ipu, plans, keep_all_plan.peak_bytes, planned))
    keeps_all = planned.actions == keep_all_plan.actions  # nothing to recompute: equations stay in their order
    return (list(forward), list(backward)) if keeps_all else replay(steps, planned.actions)


def modes(eqns: Iterable[JaxprEqn], recomputation: Recomputation) -> set[str]:
    """The modes of gradients among equations."""
    return {_mode(eqn, recomputation) for eqn in eqns if stage_name(eqn).is_backward}


def may_store_less(jaxpr: ClosedJaxpr) -> bool:
    """Whether "auto" has a plan that stores fewer bytes for a gradient; of pipelines, whose stages are open, it may."""
    trades: list[ChainTrade] = []
    recompute(jaxpr, Recomputation("auto"), trades)
    is_piped = any(eqn.primitive.name == PIPELINE for eqn in equations(jaxpr.jaxpr))
    return is_piped or any(trade.least_bytes < trade.all_bytes for trade in trades)


def _mode(eqn: JaxprEqn, recomputation: Recomputation) -> str:
    return recompute_mode(name_stack(eqn)) or recomputation.mode


_CUTS: Mapping[str, Callable[[DataFlow], list[int]]] = {
    "all": between_phases,
    "standard": lambda flow: sorted({*standard_cuts(flow), *between_phases(flow)}),
    "auto": best_cuts,
}


def _recompute_all(count: int, *, saves_last: bool) -> list[StepAction]:
    """Actions that store the input of each step and recompute the rest, but save all of the last if `saves_last`."""
    forward_actions = [StepAction("keep", n) for n in range(count)]
    backward_actions = [[StepAction("save", n), StepAction("backward", n)] for n in reversed(range(count))]
    if saves_last:
        forward_actions[-1] = StepAction("save", count - 1)
        backward_actions[0] = [StepAction("backward", count - 1)]
    return [*forward_actions, *chain.from_iterable(backward_actions)]
