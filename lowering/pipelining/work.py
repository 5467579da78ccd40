"""What the equations of a micro-batch cost, by the places where it may be cut into stages.

Input: an inlined jaxpr without stages. Output: `Work`: forward equations are numbered in program order, and a backward
equation goes with the first of the forward equations whose values or parameters it needs; what the cost model charges
each number on one IPU, what it keeps for its gradients, and what crosses each cut.

Limits: the state of an optimiser is not known here. Loops whose trip count is data count as one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.ipus import MakeLowering
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var, eliminate_dead_code, name_stack
from ipujax.lowering.loop_state import new_counter, new_stack, push, slot_of
from ipujax.lowering.pipeline_op import PipelineSpec
from ipujax.lowering.placement import value_bytes, variables
from ipujax.lowering.popops.elementwise import Op, elementwise
from ipujax.lowering.poputil.mapping import map_linearly
from ipujax.runtime.clock_steps import clock_steps
from ipujax.runtime.compile import leaf_costs
from ipujax.runtime.effects import EffectsOf
from ipujax.runtime.graph import Graph
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.steps import while_names
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.timeline import timeline


@dataclass(frozen=True, slots=True)
class Work:
    """What the numbered forward equations cost, with the backward equations that go with them.

    Args:
        jaxpr: the jaxpr, without dead equations.
        numbers: for each equation the number it goes with, −1 where it goes where it is used.
        forward_cycles: of each number, float64[numbers].
        backward_cycles: of the backward equations that go with each, float64[numbers].
        push_cycles: of keeping what the gradients of each number need in a ring, float64[numbers].
        pop_cycles: of reading that again, float64[numbers].
        crossing_bytes: of each cut, before each number: bytes that go over it for one micro-batch, float64[numbers].
        parameter_bytes: of each parameter (first number that uses it, bytes).
        residual_bytes: of each number what is kept for its gradients, float64[numbers].
        has_gradients: whether there are backward equations.
    """

    jaxpr: ClosedJaxpr
    numbers: tuple[int, ...]
    forward_cycles: np.ndarray
    backward_cycles: np.ndarray
    push_cycles: np.ndarray
    pop_cycles: np.ndarray
    crossing_bytes: np.ndarray
    parameter_bytes: tuple[tuple[int, int], ...]
    residual_bytes: np.ndarray
    has_gradients: bool


def work_of(jaxpr: ClosedJaxpr, spec: PipelineSpec, target: Target, make: MakeLowering) -> Work:
    """Numbers the forward equations of a micro-batch, and finds what they cost.

    Args:
        jaxpr: computes one micro-batch; inlined.
        spec: how micro-batches go through it.
        target: one IPU.
        make: makes what lowers equations into a graph.
    """
    jaxpr = ClosedJaxpr(eliminate_dead_code(jaxpr.jaxpr), jaxpr.consts)
    body = jaxpr.jaxpr
    roles = dict(zip(body.invars, spec.roles, strict=True))
    same = {var for var, role in roles.items() if role == "same"} | set(body.constvars)
    trained = {var for var in same if var.aval.shape}  # and what comes of them; the others are settings
    forward: list[int] = []
    is_same: list[bool] = []
    for n, eqn in enumerate(body.eqns):
        read = variables(eqn.invars)
        is_same.append(not eqn.effects and all(var in same for var in read))
        if is_same[-1]:
            same.update(eqn.outvars)
        if any(var in trained for var in read):
            trained.update(eqn.outvars)
            if not is_same[-1] and not _is_backward(eqn):
                forward.append(n)
    numbers = _numbers(body.eqns, forward, is_same, same)
    return Work(
        jaxpr,
        tuple(numbers),
        *_cycles(jaxpr, numbers, is_same, len(forward), target, make),
        _crossing(body.eqns, numbers, len(forward)),
        _parameters(body.invars, body.eqns, numbers, roles),
        _residuals(body.eqns, numbers, is_same, len(forward)),
        any(number >= 0 and _is_backward(eqn) for eqn, number in zip(body.eqns, numbers, strict=True)),
    )


def _is_backward(eqn: JaxprEqn) -> bool:
    return "transpose(" in name_stack(eqn)


def _numbers(eqns: Sequence[JaxprEqn], forward: Sequence[int], is_same: Sequence[bool], same: set[Var]) -> list[int]:
    """The number each equation goes with."""
    numbers = [-1] * len(eqns)
    last: dict[Var, int] = {}  # the last number on whose stage a value is at hand
    for number, n in enumerate(forward):
        numbers[n] = number
        for var in variables(eqns[n].invars):
            last[var] = number
        for var in eqns[n].outvars:
            last[var] = number
    for n in reversed(range(len(eqns))):  # what is computed once is where its uses are
        if is_same[n]:
            uses = [last[var] for var in eqns[n].outvars if var in last]
            for var in variables(eqns[n].invars):
                last[var] = max([last.get(var, -1), *uses])
    for n, eqn in enumerate(eqns):
        if is_same[n]:
            known = [last[var] for var in variables(eqn.invars) if var in last]
            for var in eqn.outvars:
                last.setdefault(var, max(known, default=len(forward) - 1))
        elif numbers[n] < 0 and _is_backward(eqn):
            known = [last[var] for var in variables(eqn.invars) if last.get(var, -1) >= 0]
            numbers[n] = min(known, default=len(forward) - 1)
            last.update(dict.fromkeys(eqn.outvars, numbers[n]))
    return numbers


def _cycles(
    jaxpr: ClosedJaxpr,
    numbers: Sequence[int],
    is_same: Sequence[bool],
    count: int,
    target: Target,
    make: MakeLowering,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cycles of each number on one IPU: forward, backward, of keeping and of reading what is kept."""
    graph, body = Graph(target), jaxpr.jaxpr
    lowering = make(graph, {})
    env = {var: graph.add_variable(var.aval.shape, var.aval.dtype, "operand") for var in body.invars}
    for var, value in zip(body.constvars, jaxpr.consts, strict=True):
        env[var] = graph.add_constant(value, "constant")
    added: list[tuple[int, int, ProgramSequence]] = []  # of what, of which number
    for eqn, number in zip(body.eqns, numbers, strict=True):
        given, prog = [lowering.read(env, atom) for atom in eqn.invars], ProgramSequence()
        env.update(zip(eqn.outvars, lowering.equation(eqn, given, prog), strict=True))
        added.append((int(_is_backward(eqn)), number, prog))
    start = ProgramSequence()
    counter = new_counter(graph, 0, start, "stash")
    for var, number in _kept(body.eqns, numbers, is_same):
        pushing, reading = ProgramSequence(), ProgramSequence()
        stack = new_stack(graph, env[var], 2, start, "stash")
        push(graph, stack, env[var], counter, pushing, "stash")
        slot_of(graph, stack, counter, reading, "stash")
        added += [(2, number, pushing), (3, number, reading)]
    made = {var: (eqn, number) for eqn, number in zip(body.eqns, numbers, strict=True) for var in eqn.outvars}
    for var in dict.fromkeys(variables(body.outvars)):
        aval: Any = var.aval
        if var in made and jnp.issubdtype(aval.dtype, jnp.inexact):
            (eqn, number), adding = made[var], ProgramSequence()
            held = elementwise(graph, Op("neg", lax.neg, aval.dtype), [env[var]], start, "accumulator")
            elementwise(graph, Op("add", lax.add, aval.dtype), [held, env[var]], adding, "accumulator", held)
            added.append((int(_is_backward(eqn)), number, adding))
    for variable in graph.variables:
        map_linearly(graph, Tensor.of(variable))
    effects, cycles = EffectsOf(graph), np.zeros((4, count))
    for kind, number, prog in added:
        if number >= 0 and prog.children():
            steps, slots = clock_steps(prog, leaf_costs(graph, prog), effects, target)
            trips = {name: 1 for names in while_names(prog).values() for name in names}
            cycles[kind, number] += timeline(prog, steps, target.num_ipus, slots, trips).cycles
    return cycles[0], cycles[1], cycles[2], cycles[3]


def _kept(eqns: Sequence[JaxprEqn], numbers: Sequence[int], is_same: Sequence[bool]) -> list[tuple[Var, int]]:
    """What forward equations make and backward ones need, each with the first number that does."""
    made = {
        var
        for eqn, number, same in zip(eqns, numbers, is_same, strict=True)
        for var in eqn.outvars
        if number >= 0 and not same and not _is_backward(eqn)
    }
    needed: dict[Var, int] = {}
    for eqn, number in zip(eqns, numbers, strict=True):
        if _is_backward(eqn) and number >= 0:
            for var in variables(eqn.invars):
                if var in made:
                    needed[var] = min(needed.get(var, number), number)
    return list(needed.items())


def _crossing(eqns: Sequence[JaxprEqn], numbers: Sequence[int], count: int) -> np.ndarray:
    """Bytes over each cut: of what is made on one side and used on the other, once a side."""
    bytes_over = np.zeros(count + 1)
    made = {var: number for eqn, number in zip(eqns, numbers, strict=True) for var in eqn.outvars if number >= 0}
    reach: dict[Var, tuple[int, int]] = {}
    for eqn, number in zip(eqns, numbers, strict=True):
        for var in variables(eqn.invars):
            if var in made and number >= 0:
                low, high = reach.get(var, (made[var], made[var]))
                reach[var] = min(low, number), max(high, number)
    for var, (low, high) in reach.items():
        bytes_over[low + 1] += value_bytes(var.aval)
        bytes_over[high + 1] -= value_bytes(var.aval)
    return np.cumsum(bytes_over)[:count]


def _parameters(
    invars: Sequence[Var], eqns: Sequence[JaxprEqn], numbers: Sequence[int], roles: dict[Var, str]
) -> tuple[tuple[int, int], ...]:
    first: dict[Var, int] = {}
    for eqn, number in zip(eqns, numbers, strict=True):
        for var in variables(eqn.invars):
            if number >= 0:
                first[var] = min(first.get(var, number), number)
    return tuple((first[var], value_bytes(var.aval)) for var in invars if roles[var] == "same" and var in first)


def _residuals(eqns: Sequence[JaxprEqn], numbers: Sequence[int], is_same: Sequence[bool], count: int) -> np.ndarray:
    kept = np.zeros(count)
    for var, number in _kept(eqns, numbers, is_same):
        kept[number] += value_bytes(var.aval)
    return kept
