"""What the equations of a micro-batch cost, by the places where it may be cut into stages.

Input: an inlined jaxpr without stages. Output: `Work`: the number of each equation, see `numbering`; what the cost
model charges each number on one IPU, what it keeps for its gradients, and what crosses each cut. Loops over layers are
cut into their turns, see `layers`; all turns cost what the first does.

Limits: the state of an optimiser is not known here. Loops whose trip count is data count as one turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.ipus import MakeLowering, value_bytes, variables
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var, eliminate_dead_code
from ipujax.lowering.pipelining.layers import in_pieces, spec_in_pieces
from ipujax.lowering.pipelining.numbering import is_backward, layer_loops, numbered
from ipujax.lowering.pipelining.primitive import PipelineSpec
from ipujax.lowering.pipelining.row_shards import Bounds, CutJaxpr
from ipujax.lowering.popops import Op, new_counter, new_stack, push, slot_of
from ipujax.lowering.popops.elementwise import elementwise
from ipujax.lowering.poputil import map_linearly
from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.compile import program_cycles
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """What the numbered forward equations cost, with the backward equations that go with them.

    Args:
        whole: the jaxpr, without dead equations.
        whole_spec: how micro-batches go through it.
        loops: the loops over layers in it, by the number of their equations, and where they may be cut.
        pieces: the jaxpr with these loops cut.
        spec: how micro-batches go through that.
        numbers: for each equation of the pieces the number it goes with, −1 where it goes where it is used.
        forward_cycles: of each number, float64[numbers].
        backward_cycles: of the backward equations that go with each, float64[numbers].
        push_cycles: of keeping what the gradients of each number need in a ring, float64[numbers].
        pop_cycles: of reading that again, float64[numbers].
        crossing_bytes: of each cut, before each number: bytes that go over it for one micro-batch, float64[numbers].
        parameter_bytes: of each parameter (first number that uses it, bytes).
        residual_bytes: of each number what is kept for its gradients, float64[numbers].
        has_gradients: whether there are backward equations.
    """

    whole: ClosedJaxpr
    whole_spec: PipelineSpec
    loops: Mapping[int, Bounds]
    pieces: CutJaxpr
    spec: PipelineSpec
    numbers: tuple[int, ...]
    forward_cycles: np.ndarray
    backward_cycles: np.ndarray
    push_cycles: np.ndarray
    pop_cycles: np.ndarray
    crossing_bytes: np.ndarray
    parameter_bytes: tuple[tuple[int, int], ...]
    residual_bytes: np.ndarray
    has_gradients: bool

    def piece_numbers(self) -> dict[tuple[int, int], int]:
        """The number of each piece of the equations of the whole, by equation and first row."""
        pairs = zip(self.pieces.sources, self.numbers, strict=True)
        return {(source.number, source.first): number for source, number in pairs if source is not None}


def work_of(jaxpr: ClosedJaxpr, spec: PipelineSpec, target: Target, make: MakeLowering) -> Work:
    """Numbers the forward equations of a micro-batch, and finds what they cost.

    Args:
        jaxpr: computes one micro-batch; inlined.
        spec: how micro-batches go through it.
        target: one IPU.
        make: makes what lowers equations into a graph.
    """
    whole = ClosedJaxpr(eliminate_dead_code(jaxpr.jaxpr), jaxpr.consts)
    loops = layer_loops(whole.jaxpr, spec)
    pieces = in_pieces(whole, spec, loops)
    body, cut_spec = pieces.jaxpr.jaxpr, spec_in_pieces(spec, pieces)
    numbering = numbered(body, cut_spec)
    numbers, is_same, count = numbering.numbers, numbering.is_same, numbering.count
    roles = dict(zip(body.invars, cut_spec.roles, strict=True))
    return Work(
        whole,
        spec,
        loops,
        pieces,
        cut_spec,
        numbers,
        *_cycles(pieces, numbers, is_same, count, target, make),
        _crossing(body.eqns, numbers, count),
        _parameters(body.invars, body.eqns, numbers, roles),
        _residuals(body.eqns, numbers, is_same, count),
        any(number >= 0 and is_backward(eqn) for eqn, number in zip(body.eqns, numbers, strict=True)),
    )


def _cycles(
    pieces: CutJaxpr,
    numbers: Sequence[int],
    is_same: Sequence[bool],
    count: int,
    target: Target,
    make: MakeLowering,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cycles of each number on one IPU: forward, backward, of keeping and of reading what is kept."""
    graph, jaxpr, body = Graph(target), pieces.jaxpr, pieces.jaxpr.jaxpr
    lowering = make(graph, {})
    env = {var: graph.add_variable(var.aval.shape, var.aval.dtype, "operand") for var in body.invars}
    for var, value in zip(body.constvars, jaxpr.consts, strict=True):
        env[var] = graph.add_constant(value, "constant")
    added: list[tuple[int, int, ProgramSequence]] = []  # of what, of which number
    alike: dict[tuple[int, int], tuple[Sequence[Tensor], ProgramSequence]] = {}  # of an equation's pieces, by rows
    for eqn, number, key in zip(body.eqns, numbers, _alike(pieces), strict=True):
        if key is None or key not in alike:
            given, prog = [lowering.read(env, atom) for atom in eqn.invars], ProgramSequence()
            done = lowering.equation(eqn, given, prog), prog
            alike |= {} if key is None else {key: done}
        results, prog = done if key is None else alike[key]
        env.update(zip(eqn.outvars, results, strict=True))
        added.append((int(is_backward(eqn)), number, prog))
    start = ProgramSequence()
    counter = new_counter(graph, 0, start, "stash")
    kept: dict[Tensor, tuple[ProgramSequence, ProgramSequence]] = {}
    for var, number in _kept(body.eqns, numbers, is_same):
        value = env[var]
        if value not in kept:
            pushing, reading = kept[value] = ProgramSequence(), ProgramSequence()
            stack = new_stack(graph, value, 2, start, "stash")
            push(graph, stack, value, counter, pushing, "stash")
            slot_of(graph, stack, counter, reading, "stash")
        added += [(2 + k, number, prog) for k, prog in enumerate(kept[value])]
    made = {var: (eqn, number) for eqn, number in zip(body.eqns, numbers, strict=True) for var in eqn.outvars}
    summed: dict[Tensor, ProgramSequence] = {}
    for var in dict.fromkeys(variables(body.outvars)):
        aval: Any = var.aval
        if var in made and jnp.issubdtype(aval.dtype, jnp.inexact):
            (eqn, number), value = made[var], env[var]
            if value not in summed:
                adding = summed[value] = ProgramSequence()
                held = elementwise(graph, Op("neg", lax.neg, aval.dtype), [value], start, "accumulator")
                elementwise(graph, Op("add", lax.add, aval.dtype), [held, value], adding, "accumulator", held)
            added.append((int(is_backward(eqn)), number, summed[value]))
    for variable in graph.variables:
        map_linearly(graph, Tensor.of(variable))
    effects, cycles = EffectsOf(graph), np.zeros((4, count))
    taken: dict[ProgramSequence, int] = {}
    for kind, number, prog in added:
        if number >= 0 and prog.children():
            if prog not in taken:
                taken[prog] = program_cycles(graph, prog, effects=effects)
            cycles[kind, number] += taken[prog]
    return cycles[0], cycles[1], cycles[2], cycles[3]


def _alike(pieces: CutJaxpr) -> list[tuple[int, int] | None]:
    """For each equation what pieces that cost the same have in common: the equation they are of, and their rows."""
    return [None if source is None or not source.rows else (source.number, source.rows) for source in pieces.sources]


def _kept(eqns: Sequence[JaxprEqn], numbers: Sequence[int], is_same: Sequence[bool]) -> list[tuple[Var, int]]:
    """What forward equations make and backward ones need, each with the first number that does."""
    made = {
        var
        for eqn, number, same in zip(eqns, numbers, is_same, strict=True)
        for var in eqn.outvars
        if number >= 0 and not same and not is_backward(eqn)
    }
    needed: dict[Var, int] = {}
    for eqn, number in zip(eqns, numbers, strict=True):
        if is_backward(eqn) and number >= 0:
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
