"""Pass `recompute`: values that the gradient needs are computed again in place of being kept.

    h = tanh(x @ w)                      h = tanh(x @ w)
    …                                    …
    dw = xᵀ @ (dy * (1 - h²))            h2 = tanh(x @ w); dw = xᵀ @ (dy * (1 - h2²))

Each jaxpr with a gradient, in the bodies of loops too, is rewritten by itself. What `jax.checkpoint` keeps and computes
again stays as it is. Random numbers are drawn again from the same keys.

    none      nothing is computed again
    all       all, from the arguments, or what enters a stage or a phase
    standard  PopART's: what lies between places with few bytes to keep, or phases; not what feeds the loss last
    auto      what takes fewest cycles in a share of the bytes that keeping all takes

Limits: a gradient whose effects would come in another order stays as it is. A loop over layers is one operation, whose
gradient is another loop: what the first keeps for each iteration of the second stays, or the whole loop is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import (
    PIPELINE,
    Rewrite,
    everywhere,
    recompute_mode,
    stage_name,
    variables,
    variables_read,
    with_inner,
)
from ipujax.lowering.recomputation.chain import ChainPlans, RecomputePlan
from ipujax.lowering.recomputation.chain_steps import Steps, best_cuts, between_layers, between_phases, standard_cuts
from ipujax.lowering.recomputation.flow import Flow
from ipujax.lowering.recomputation.gradient_parts import split
from ipujax.lowering.recomputation.replay import replay
from ipujax.lowering.recomputation.segment_table import Action
from ipujax.lowering.source_info import name_stack


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What to compute again.

    Args:
        mode: one of `Options.recompute`; a scope of the user's may say another.
        shares: for each IPU of a replica, of the bytes that it takes to keep all for a gradient, the share that
            `auto` may take; all of them for IPUs behind the last.
        whole_layers: whether `auto` repeats layers as a whole, for less code.
    """

    mode: str = "none"
    shares: tuple[float, ...] = ()
    whole_layers: bool = False

    def share(self, ipu: int | None = None) -> float:
        """The share of an IPU, the least of all for None."""
        if ipu is None:
            return min(self.shares, default=1.0)
        return self.shares[ipu] if ipu < len(self.shares) else 1.0


KEEP_ALL = Recomputation()


@dataclass(frozen=True, slots=True, eq=False)
class ChainTrade:
    """What computing again in one gradient saves and costs.

    Args:
        ipu: where it runs, None on all.
        plans: what can be planned; cycles are elements that are moved.
        all_bytes: to keep all.
        planned: what is planned.
    """

    ipu: int | None
    plans: ChainPlans
    all_bytes: int
    planned: RecomputePlan

    @property
    def least_bytes(self) -> int:
        """The least that a plan takes."""
        return self.plans.points[0][0]

    def cycles_with(self, share: float) -> int:
        """Cycles with a share of the bytes that it takes to keep all, or with as few as can be."""
        return self.plans.plan(max(self.least_bytes, int(share * self.all_bytes))).cycles


def recompute(
    jaxpr: ClosedJaxpr, recomputation: Recomputation = KEEP_ALL, trades: list[ChainTrade] | None = None
) -> ClosedJaxpr:
    """Returns an equal jaxpr that computes values again.

    Args:
        jaxpr: an inlined jaxpr.
        recomputation: what to compute again.
        trades: takes what `auto` saves and costs, of each gradient.
    """

    def rewritten(body: ClosedJaxpr, inside: Rewrite) -> ClosedJaxpr:
        before = [_inside(eqn, inside) for eqn in body.jaxpr.eqns]
        after = _recomputed(before, set(variables(body.jaxpr.outvars)), recomputation, trades)
        is_same = len(after) == len(body.jaxpr.eqns) and set(map(id, after)) == set(map(id, body.jaxpr.eqns))
        return body if is_same else ClosedJaxpr(body.jaxpr.replace(eqns=after), body.consts)

    return everywhere(rewritten)(jaxpr)


def _inside(eqn: JaxprEqn, rewrite: Rewrite) -> JaxprEqn:
    if eqn.primitive.name == PIPELINE:
        return eqn  # its stages are rewritten one by one when they are known
    return with_inner(eqn, rewrite)


def _recomputed(
    eqns: Sequence[JaxprEqn],
    wanted: Collection[Var],
    recomputation: Recomputation,
    trades: list[ChainTrade] | None,
) -> list[JaxprEqn]:
    parts = split(eqns) if modes(eqns, recomputation) - {"none"} else None
    if parts is None:
        return list(eqns)
    outside = {*wanted, *(var for eqn in parts.rest for var in variables_read(eqn))}
    before, after = recomputed_parts(parts.forward, parts.backward, outside, recomputation, trades)
    return [*before, *after, *_recomputed(parts.rest, wanted, recomputation, trades)]


def recomputed_parts(
    forward: Sequence[JaxprEqn],
    backward: Sequence[JaxprEqn],
    outside: Collection[Var],
    recomputation: Recomputation,
    trades: list[ChainTrade] | None = None,
    *,
    ipu: int | None = None,
    in_flight: int = 1,
    feeds_loss: bool = True,
    is_summed: bool = False,
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The equations of a forward part and of its gradient, which computes values of the former again.

    Args:
        forward: equations of the forward part.
        backward: those of the gradient.
        outside: variables that are always kept, or that others need of the gradient.
        recomputation: what to compute again.
        trades: takes what `auto` saves and costs.
        ipu: where both parts run.
        in_flight: inputs whose forward parts have run, and whose backward parts have not, at once.
        feeds_loss: whether the forward part ends in the loss.
        is_summed: whether what the gradient leaves is added at once to sums that are there already.
    """
    mode = next((_mode(eqn, recomputation) for eqn in backward), "none")
    share = recomputation.share(ipu)
    if mode == "none" or (mode == "auto" and share >= 1 and trades is None):
        return list(forward), list(backward)
    flow = Flow(forward, backward, outside)
    cuts = _CUTS[mode](flow)
    whole_layers = mode == "auto" and recomputation.whole_layers
    if whole_layers:
        cuts = between_layers(flow, cuts)
    steps = Steps(flow, cuts, is_summed=is_summed, whole_layers=whole_layers)
    if mode != "auto":
        return replay(steps, _all_again(len(steps.chain), saves_last=feeds_loss and mode == "standard"))
    plans = ChainPlans(steps.chain, 0, in_flight)
    everything = plans.keep_all()
    planned = everything
    if share < 1:
        planned = plans.plan(max(plans.points[0][0], int(share * everything.peak_bytes)))
    if trades is not None:
        trades.append(ChainTrade(ipu, plans, everything.peak_bytes, planned))
    is_everything = planned.actions == everything.actions
    return (list(forward), list(backward)) if is_everything else replay(steps, planned.actions)


def modes(eqns: Iterable[JaxprEqn], recomputation: Recomputation) -> set[str]:
    """The modes of gradients among some equations."""
    return {_mode(eqn, recomputation) for eqn in eqns if stage_name(eqn).is_backward}


def _mode(eqn: JaxprEqn, recomputation: Recomputation) -> str:
    return recompute_mode(name_stack(eqn)) or recomputation.mode


_CUTS: Mapping[str, Callable[[Flow], list[int]]] = {
    "all": between_phases,
    "standard": lambda flow: sorted({*standard_cuts(flow), *between_phases(flow)}),
    "auto": best_cuts,
}


def _all_again(count: int, saves_last: bool) -> list[tuple[Action, int]]:
    """Keeps what enters each step, and computes the rest again; not what is in the last one, if that is saved."""
    first: list[tuple[Action, int]] = [("keep", n) for n in range(count)]
    again: list[list[tuple[Action, int]]] = [[("save", n), ("backward", n)] for n in reversed(range(count))]
    if saves_last:
        first[-1], again[0] = ("save", count - 1), [("backward", count - 1)]
    return [*first, *chain.from_iterable(again)]
