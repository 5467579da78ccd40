"""Least work of a function on a machine, which no plan of it avoids: what `profile.bound` is computed from.

Input: the jaxpr of a program before the passes that plan, and a target. Output: `LeastWork`, for one replica.
Equations that differ in no iteration of a loop count once, as a plan might compute them before it; of branches the
least counts; loops whose trip count is data, and operations on constants alone, count nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import Rewrite, bodies, everywhere, scan_body, sum_carries, with_inner
from ipujax.lowering.least_work.dependence_paths import Weights, longest_path
from ipujax.lowering.least_work.equation_floor import EquationCost, EquationFloor, equation_cost, least_of
from ipujax.lowering.passes.cse import cse
from ipujax.lowering.passes.dce import dce
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.popops.vertices.kernel_cycles import smallest_kernel_cycles
from ipujax.lowering.replicas import unwrapped
from ipujax.runtime.graph import LeastWork
from ipujax.runtime.target import Target

# Shares of a path's vertices that are tried, beside the mean tile's work: each is a bound, and the largest counts.
_TILE_SHARES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.0)


def least_work(jaxpr: ClosedJaxpr, target: Target) -> LeastWork:
    """Return the least work of a function: lower bounds for the time of any plan of it.

    Args:
        jaxpr: the function without calls, of one `replicated` equation if there are several replicas.
        target: the machine of one replica.
    """
    function = _without_repetition(unwrapped(jaxpr).jaxpr)
    costs = _costs(function, target)
    tiles = target.tiles_per_ipu
    floor = _floor(function, [_ARGUMENT] * len(function.in_avals), costs)  # of the mean tile
    smallest, exchange = smallest_kernel_cycles(target), _shortest_exchange(target)
    # Clocks of several IPUs advance side by side: the mean tile's work is no part of one path.
    shares = _TILE_SHARES if target.num_ipus == 1 else (1.0,)
    works: list[LeastWork] = []
    for share in shares:
        # By a smaller share a path is no longer: some shares need not be tried.
        if works and replace(works[-1], tile_share=share).cycles(tiles) <= max(work.cycles(tiles) for work in works):
            continue
        path = longest_path(function, Weights(target, share, smallest, exchange, costs))
        works.append(LeastWork(floor.cycles, exchange, share, path.supersteps, path.exchanges, path.cycles))
    return max(works, key=lambda work: work.cycles(tiles))


def _without_repetition(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return the jaxpr without equations that repeat others or that nothing reads, also in the loops of pipelines."""

    def without_equal(body: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
        eqns = [with_inner(eqn, rewrite) for eqn in body.jaxpr.eqns]
        return cse(ClosedJaxpr(body.jaxpr.replace(eqns=eqns), body.consts), 0.0)

    return dce(everywhere(without_equal)(inline(jaxpr)))


def _shortest_exchange(target: Target) -> float:
    """Return the cycles of an exchange of a word, without its sync: inside an IPU, or between two."""
    inside = target.exchange_startup_cycles + 1
    if target.num_ipus == 1:
        return float(inside)
    return float(min(inside, target.global_exchange_latency_seconds * target.clock_hz))


Costs = Mapping[int, EquationCost]  # of each equation, those in others included, by its identity


def _costs(jaxpr: ClosedJaxpr, target: Target, runs: int = 1) -> dict[int, EquationCost]:
    """Return the costs of a jaxpr's equations, those inside of others included, by identity; each runs `runs` times.

    A plan may do the runs of a product in a loop at once, of more rows or, where they are added up, of longer sums. The
    addition to such a sum is then part of the product, or of a reduction.
    """
    costs: dict[int, EquationCost] = {}
    for eqn in jaxpr.jaxpr.eqns:
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inside in bodies(eqn):
            costs |= _costs(inside.jaxpr, target, runs * max(1, length))
        costs.setdefault(id(eqn), equation_cost(eqn, target, runs))
        if eqn.primitive.name == "scan":  # an addition to a sum costs nothing by itself
            added = sum_carries(scan_body(eqn.params)).values()
            costs |= {id(add): EquationCost("view") for add in added}
    return costs


# Kinds of values: constants, those that are equal in all iterations of the loop around, those of one iteration.
_CONSTANT, _ARGUMENT, _OF_ITERATION = range(3)


def _floor(jaxpr: ClosedJaxpr, kinds: Sequence[int], costs: Costs) -> EquationFloor:
    """Return the least cycles of a jaxpr that is in no loop."""
    return reduce(add, _floors(jaxpr, kinds, costs), EquationFloor())


def _floors(jaxpr: ClosedJaxpr, kinds: Sequence[int], costs: Costs) -> tuple[EquationFloor, EquationFloor]:
    """Return the least cycles of one iteration of a loop's body, and those that count once for all iterations.

    `kinds` has for each input whether it is constant, equal in all iterations, or of one iteration; an equation's
    results are of the latest kind of its operands. What is constant is computed before the program runs.
    """
    body = jaxpr.jaxpr
    kind_of: dict[Any, int] = dict(zip(body.invars, kinds, strict=True))
    each, once = EquationFloor(), EquationFloor()
    for eqn in body.eqns:
        operands = [kind_of.get(atom, _CONSTANT) if isinstance(atom, Var) else _CONSTANT for atom in eqn.invars]
        kind = max(operands, default=_CONSTANT)
        kind_of.update(dict.fromkeys(eqn.outvars, kind))
        if kind == _CONSTANT:
            continue
        cycles = _equation(eqn, operands, costs)
        each, once = (each + cycles, once) if kind == _OF_ITERATION else (each, once + cycles)
    return each, once


def _equation(eqn: JaxprEqn, operands: Sequence[int], costs: Costs) -> EquationFloor:
    """Return the least cycles of one run of an equation, those of the jaxprs in it included.

    A loop has those of one iteration as often as it runs, and those of equations that are equal in all iterations once.
    `operands` are kinds of values: constant, equal in all iterations of the loop around, or of one iteration.
    """
    # Values of an iteration of the loop around are equal in all iterations of a loop inside.
    outside = [min(kind, _ARGUMENT) for kind in operands]
    if eqn.primitive.name == "scan":
        body = scan_body(eqn.params)
        kinds = body.of_operands(outside)
        for n in range(body.inputs.carries.start, len(kinds)):  # carries, and behind them rows of stacks
            kinds[n] = _OF_ITERATION
        each, once = _floors(body.jaxpr, kinds, costs)
        length = eqn.params["length"]
        return each.times(length) + (once if length else EquationFloor())
    if eqn.primitive.name == "while":  # maybe no iteration
        return EquationFloor()
    if inside := bodies(eqn):
        return least_of([_floor(body.jaxpr, body.of_operands(outside), costs) for body in inside])
    return costs[id(eqn)].floor
