"""Costs of the segments of a micro-batch, between which it may be cut into stages.

Input: an inlined jaxpr without stages. Output: `Work`: the segment of each equation, see `segments`; what the cost
model charges each segment on one IPU, what it keeps for its gradients, and what crosses each cut. Loops over layers are
cut between iterations, see `layers`; every iteration costs what the first does.

Limits: the state of an optimiser is not known here. Loops whose trip num_segments is data count as one iteration.
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
from ipujax.lowering.layout import MemoryOrder, map_linearly
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.pipelining.layers import into_shards, spec_of_shards
from ipujax.lowering.pipelining.primitive import PipelineSpec
from ipujax.lowering.pipelining.row_shards import Bounds, CutJaxpr
from ipujax.lowering.pipelining.segments import find_segments, is_backward, layer_loops
from ipujax.lowering.popops import Op, new_counter, new_stack, push, slot_of
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.compile import program_cycles
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """Costs of segments: their forward equations and the backward equations that belong to them.

    Args:
        whole: the jaxpr, without dead equations.
        whole_spec: how micro-batches go through it.
        loops: the loops over layers in it, by the index of their equations, and where they may be cut.
        shards: the jaxpr with these loops cut.
        spec: how micro-batches go through that.
        segments: for each equation of the shards the segment it goes with, −1 where it goes where it is used.
        forward_cycles: of each segment, float64[segments].
        backward_cycles: of the backward equations that go with each, float64[segments].
        push_cycles: of keeping what the gradients of each segment need in a ring, float64[segments].
        pop_cycles: of reading that again, float64[segments].
        crossing_bytes: of each cut, before each segment: bytes that go over it for one micro-batch, float64[segments].
        parameter_bytes: of each parameter (segments that use it, in order, bytes).
        residual_bytes: of each segment what is kept for its gradients, float64[segments].
        has_gradients: whether there are backward equations.
    """

    whole: ClosedJaxpr
    whole_spec: PipelineSpec
    loops: Mapping[int, Bounds]
    shards: CutJaxpr
    spec: PipelineSpec
    segments: tuple[int, ...]
    forward_cycles: np.ndarray
    backward_cycles: np.ndarray
    push_cycles: np.ndarray
    pop_cycles: np.ndarray
    crossing_bytes: np.ndarray
    parameter_bytes: tuple[tuple[tuple[int, ...], int], ...]
    residual_bytes: np.ndarray
    has_gradients: bool

    def shard_segments(self) -> dict[tuple[int, int], int]:
        """The segment of each shard of the equations of the whole, by equation and first row."""
        pairs = zip(self.shards.sources, self.segments, strict=True)
        return {(source.number, source.first): segment for source, segment in pairs if source is not None}


def work_of(jaxpr: ClosedJaxpr, spec: PipelineSpec, target: Target, make: MakeLowering, byte_price: float) -> Work:
    """Numbers the forward equations of a micro-batch, and finds what they cost.

    Args:
        jaxpr: computes one micro-batch; inlined.
        spec: how micro-batches go through it.
        target: one IPU.
        make: makes what lowers equations into a graph.
        byte_price: cycles that a byte on the fullest tile is worth.
    """
    whole = ClosedJaxpr(eliminate_dead_code(jaxpr.jaxpr), jaxpr.consts)
    loops = layer_loops(whole.jaxpr, spec)
    shards = into_shards(whole, spec, loops)
    body, cut_spec = shards.jaxpr.jaxpr, spec_of_shards(spec, shards)
    found = find_segments(body, cut_spec)
    segments, is_same, num_segments = found.segments, found.is_same, found.num_segments
    roles = dict(zip(body.invars, cut_spec.roles, strict=True))
    return Work(
        whole,
        spec,
        loops,
        shards,
        cut_spec,
        segments,
        *_cycles(shards, segments, is_same, num_segments, Graph(target, byte_price_cycles=byte_price), make),
        _crossing(body.eqns, segments, is_same, num_segments),
        _parameters(body.invars, body.eqns, segments, is_same, roles),
        _residuals(_kept(body.eqns, segments, is_same), num_segments),
        any(segment >= 0 and is_backward(eqn) for eqn, segment in zip(body.eqns, segments, strict=True)),
    )


def _cycles(
    shards: CutJaxpr,
    segments: Sequence[int],
    is_same: Sequence[bool],
    num_segments: int,
    graph: Graph,
    make: MakeLowering,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cycles of each segment in a graph of one IPU: forward, backward, of keeping and of reading what is kept."""
    jaxpr, body = shards.jaxpr, shards.jaxpr.jaxpr
    lowering = make(graph, {})
    env = {
        var: MemoryOrder.for_argument(var.aval.shape, in_groups).add_variable(graph, var.aval.dtype, "operand")
        for var, in_groups in zip(body.invars, grouped_inputs(body), strict=True)
    }
    for var, value in zip(body.constvars, jaxpr.consts, strict=True):
        env[var] = graph.add_constant(value, "constant")
    added: list[tuple[int, int, ProgramSequence]] = []  # of what, of which segment
    alike: dict[tuple[int, int], tuple[Sequence[Tensor], ProgramSequence]] = {}  # of an equation's shards, by rows
    for eqn, segment, key in zip(body.eqns, segments, _alike(shards), strict=True):
        if key is None or key not in alike:
            given, prog = [lowering.read(env, atom) for atom in eqn.invars], ProgramSequence()
            done = lowering.equation(eqn, given, prog, {}), prog
            alike |= {} if key is None else {key: done}
        results, prog = done if key is None else alike[key]
        env.update(zip(eqn.outvars, results, strict=True))
        added.append((int(is_backward(eqn)), segment, prog))
    start = ProgramSequence()
    counter = new_counter(graph, 0, start, "stash")
    kept: dict[Tensor, tuple[ProgramSequence, ProgramSequence]] = {}
    for var, segment in _kept(body.eqns, segments, is_same):
        value = env[var]
        if value not in kept:
            pushing, reading = kept[value] = ProgramSequence(), ProgramSequence()
            stack = new_stack(graph, value, 2, start, "stash")
            push(graph, stack, value, counter, pushing, "stash")
            slot_of(graph, stack, counter, reading, "stash")
        added += [(2 + k, segment, prog) for k, prog in enumerate(kept[value])]
    made = {var: (eqn, segment) for eqn, segment in zip(body.eqns, segments, strict=True) for var in eqn.outvars}
    summed: dict[Tensor, ProgramSequence] = {}
    for var in dict.fromkeys(variables(body.outvars)):
        aval: Any = var.aval
        if var in made and jnp.issubdtype(aval.dtype, jnp.inexact):
            (eqn, segment), value = made[var], env[var]
            if value not in summed:
                adding = summed[value] = ProgramSequence()
                held = elementwise(graph, Op("neg", lax.neg, aval.dtype), [value], start, "accumulator")
                elementwise(graph, Op("add", lax.add, aval.dtype), [held, value], adding, "accumulator", held)
            added.append((int(is_backward(eqn)), segment, summed[value]))
    for variable in graph.variables:
        map_linearly(graph, Tensor.of(variable))
    effects, cycles = EffectsOf(graph), np.zeros((4, num_segments))
    taken: dict[ProgramSequence, int] = {}
    for kind, segment, prog in added:
        if segment >= 0 and prog.children():
            if prog not in taken:
                taken[prog] = program_cycles(graph, prog, effects=effects)
            cycles[kind, segment] += taken[prog]
    return cycles[0], cycles[1], cycles[2], cycles[3]


def _alike(shards: CutJaxpr) -> list[tuple[int, int] | None]:
    """For each equation what shards that cost the same have in common: the equation they are of, and their rows."""
    return [None if source is None or not source.rows else (source.number, source.rows) for source in shards.sources]


def _kept(eqns: Sequence[JaxprEqn], segments: Sequence[int], is_same: Sequence[bool]) -> list[tuple[Var, int]]:
    """Residuals: values from forward to backward equations, each with the first segment that needs it."""
    made = {
        var
        for eqn, segment, same in zip(eqns, segments, is_same, strict=True)
        for var in eqn.outvars
        if segment >= 0 and not same and not is_backward(eqn)
    }
    needed: dict[Var, int] = {}
    for eqn, segment in zip(eqns, segments, strict=True):
        if is_backward(eqn) and segment >= 0:
            for var in variables(eqn.invars):
                if var in made:
                    needed[var] = min(needed.get(var, segment), segment)
    return list(needed.items())


def _crossing(
    eqns: Sequence[JaxprEqn], segments: Sequence[int], is_same: Sequence[bool], num_segments: int
) -> np.ndarray:
    """Bytes over each cut: of what a micro-batch makes on one side and uses on the other, once a side."""
    bytes_over = np.zeros(num_segments + 1)
    made = {
        var: segment
        for eqn, segment, same in zip(eqns, segments, is_same, strict=True)
        for var in eqn.outvars
        if segment >= 0 and not same
    }
    reach: dict[Var, tuple[int, int]] = {}
    for eqn, segment in zip(eqns, segments, strict=True):
        for var in variables(eqn.invars):
            if var in made and segment >= 0:
                low, high = reach.get(var, (made[var], made[var]))
                reach[var] = min(low, segment), max(high, segment)
    for var, (low, high) in reach.items():
        bytes_over[low + 1] += value_bytes(var.aval)
        bytes_over[high + 1] -= value_bytes(var.aval)
    return np.cumsum(bytes_over)[:num_segments]


def _parameters(
    invars: Sequence[Var],
    eqns: Sequence[JaxprEqn],
    segments: Sequence[int],
    is_same: Sequence[bool],
    roles: dict[Var, str],
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Of each parameter the segments that use it, or what is computed from it once for all micro-batches, and bytes."""
    users: dict[Var, set[int]] = {var: set() for var in invars if roles[var] == "same"}
    of: dict[Var, set[Var]] = {var: {var} for var in users}  # the parameters that a value is computed from once
    for eqn, segment, same in zip(eqns, segments, is_same, strict=True):
        read = {parameter for var in variables(eqn.invars) for parameter in of.get(var, ())}
        if same:
            of.update(dict.fromkeys(eqn.outvars, read))
        elif segment >= 0:
            for parameter in read:
                users[parameter].add(segment)
    return tuple((tuple(sorted(found)), value_bytes(var.aval)) for var, found in users.items() if found)


def _residuals(kept: Sequence[tuple[Var, int]], num_segments: int) -> np.ndarray:
    found = np.zeros(num_segments)
    for var, segment in kept:
        found[segment] += value_bytes(var.aval)
    return found
