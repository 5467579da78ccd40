"""Costs of the segments of a micro-batch, between which it may be cut into stages.

Input: an inlined jaxpr without stages. Output: `Work`: the segment of each equation, see `segments`; the cycles of each
segment on one IPU, the bytes of its residuals, and the bytes that cross each cut. Loops over layers are cut between
iterations, see `layers`; every iteration costs as much as the first.

Limits: the state of an optimiser is not known here. Loops whose trip count is data count as one iteration.
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
from ipujax.runtime.graph import Builder, Graph, Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """Costs of segments: their forward equations and the backward equations that belong to them."""

    jaxpr: ClosedJaxpr  # the micro-batch, without dead equations
    jaxpr_spec: PipelineSpec  # how micro-batches go through it
    loops: Mapping[int, Bounds]  # bounds at which its loops over layers may be cut, by the index of their equations
    shards: CutJaxpr  # the jaxpr with these loops cut
    spec: PipelineSpec  # how micro-batches go through the shards
    segments: tuple[int, ...]  # segment of each equation of the shards, −1 for one that belongs to its users
    forward_cycles: np.ndarray  # of each segment, float64[segments]
    backward_cycles: np.ndarray  # of the backward equations of each segment, float64[segments]
    push_cycles: np.ndarray  # of pushing the residuals of each segment to a ring, float64[segments]
    pop_cycles: np.ndarray  # of reading them from the ring, float64[segments]
    crossing_bytes: np.ndarray  # sent for one micro-batch over the cut before each segment, float64[segments]
    # (segments that use it, in order, bytes) of each parameter.
    parameter_bytes: tuple[tuple[tuple[int, ...], int], ...]
    residual_bytes: np.ndarray  # of the residuals of each segment, float64[segments]
    has_gradients: bool  # whether there are backward equations

    def shard_segments(self) -> dict[tuple[int, int], int]:
        """The segment of each shard, by equation of the uncut jaxpr and first row."""
        pairs = zip(self.shards.sources, self.segments, strict=True)
        return {(source.number, source.first): segment for source, segment in pairs if source is not None}


def work_of(
    jaxpr: ClosedJaxpr, spec: PipelineSpec, target: Target, replicas: int, make_lowering: MakeLowering, byte_cost: float
) -> Work:
    """Segments of a micro-batch, and their costs on one IPU of each replica: all that the search for stages reads."""
    live_jaxpr = ClosedJaxpr(eliminate_dead_code(jaxpr.jaxpr), jaxpr.consts)
    loops = layer_loops(live_jaxpr.jaxpr, spec)
    shards = into_shards(live_jaxpr, spec, loops)
    body = shards.jaxpr.jaxpr
    cut_spec = spec_of_shards(spec, shards)
    segmented = find_segments(body, cut_spec)
    segments = segmented.segments
    is_same = segmented.is_same
    num_segments = segmented.num_segments
    roles = dict(zip(body.invars, cut_spec.roles, strict=True))
    return Work(
        live_jaxpr,
        spec,
        loops,
        shards,
        cut_spec,
        segments,
        *_cycles(shards, segments, is_same, num_segments, Graph(target, replicas, byte_cost), make_lowering),
        _crossing(body.eqns, segments, is_same, num_segments),
        _parameters(body.invars, body.eqns, segments, is_same, roles),
        _residual_bytes(_residuals(body.eqns, segments, is_same), num_segments),
        any(segment >= 0 and is_backward(eqn) for eqn, segment in zip(body.eqns, segments, strict=True)),
    )


def _cycles(
    shards: CutJaxpr,
    segments: Sequence[int],
    is_same: Sequence[bool],
    num_segments: int,
    graph: Graph,
    make_lowering: MakeLowering,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cycles of each segment: forward, backward, of pushing and of reading residuals, float64[segments] each."""
    jaxpr = shards.jaxpr
    body = shards.jaxpr.jaxpr
    lowering = make_lowering(graph, {})
    env = {
        var: MemoryOrder.for_argument(var.aval.shape, in_groups).add_variable(graph, var.aval.dtype, "operand")
        for var, in_groups in zip(body.invars, grouped_inputs(body), strict=True)
    }
    for var, value in zip(body.constvars, jaxpr.consts, strict=True):
        env[var] = graph.add_constant(value, "constant")
    added: list[tuple[int, int, ProgramSequence]] = []  # row of `cycles`, segment, program
    lowered_shards: dict[tuple[int, int], tuple[Sequence[Tensor], ProgramSequence]] = {}
    for eqn, segment, key in zip(body.eqns, segments, _shard_keys(shards), strict=True):
        if key is None or key not in lowered_shards:
            operands = [lowering.read(env, atom) for atom in eqn.invars]
            prog = ProgramSequence()
            lowered_eqn = lowering.equation(eqn, operands, prog, {}), prog
            lowered_shards |= {} if key is None else {key: lowered_eqn}
        results, prog = lowered_eqn if key is None else lowered_shards[key]
        env.update(zip(eqn.outvars, results, strict=True))
        added.append((int(is_backward(eqn)), segment, prog))
    initial = ProgramSequence()
    counter = new_counter(Builder(graph, initial, "stash"), 0)
    stash_programs: dict[Tensor, tuple[ProgramSequence, ProgramSequence]] = {}
    for var, segment in _residuals(body.eqns, segments, is_same):
        value = env[var]
        if value not in stash_programs:
            pushing, reading = stash_programs[value] = ProgramSequence(), ProgramSequence()
            stack = new_stack(Builder(graph, initial, "stash"), value, 2)  # of any depth: the schedule is not known yet
            push(Builder(graph, pushing, "stash"), stack, value, counter)
            slot_of(Builder(graph, reading, "stash"), stack, counter)
        added += [(2 + k, segment, prog) for k, prog in enumerate(stash_programs[value])]
    definitions = {var: (eqn, segment) for eqn, segment in zip(body.eqns, segments, strict=True) for var in eqn.outvars}
    sum_programs: dict[Tensor, ProgramSequence] = {}
    for var in dict.fromkeys(variables(body.outvars)):
        aval: Any = var.aval
        if var in definitions and jnp.issubdtype(aval.dtype, jnp.inexact):
            eqn, segment = definitions[var]
            value = env[var]
            if value not in sum_programs:
                adding = sum_programs[value] = ProgramSequence()
                accumulator = elementwise(
                    Builder(graph, initial, "accumulator"), Op("neg", lax.neg, aval.dtype), [value]
                )
                elementwise(
                    Builder(graph, adding, "accumulator"),
                    Op("add", lax.add, aval.dtype),
                    [accumulator, value],
                    accumulator,
                )
            added.append((int(is_backward(eqn)), segment, sum_programs[value]))
    # Variables that no rule has mapped, so that the costs of all programs are defined.
    for variable in graph.variables:
        map_linearly(graph, Tensor.of(variable))
    effects = EffectsOf(graph)
    cycles = np.zeros((4, num_segments))
    cycles_of_program: dict[ProgramSequence, int] = {}
    for kind, segment, prog in added:
        if segment >= 0 and prog.children():
            if prog not in cycles_of_program:
                cycles_of_program[prog] = program_cycles(graph, prog, effects=effects)
            cycles[kind, segment] += cycles_of_program[prog]
    return cycles[0], cycles[1], cycles[2], cycles[3]


def _shard_keys(shards: CutJaxpr) -> list[tuple[int, int] | None]:
    """For each equation a key (uncut equation, number of rows) that shards of equal cost share; None for others."""
    return [None if source is None or not source.rows else (source.number, source.rows) for source in shards.sources]


def _residuals(eqns: Sequence[JaxprEqn], segments: Sequence[int], is_same: Sequence[bool]) -> list[tuple[Var, int]]:
    """Residuals: values from forward to backward equations, each with the first segment that needs it."""
    forward_values = {
        var
        for eqn, segment, same in zip(eqns, segments, is_same, strict=True)
        for var in eqn.outvars
        if segment >= 0 and not same and not is_backward(eqn)
    }
    needed: dict[Var, int] = {}
    for eqn, segment in zip(eqns, segments, strict=True):
        if is_backward(eqn) and segment >= 0:
            for var in variables(eqn.invars):
                if var in forward_values:
                    needed[var] = min(needed.get(var, segment), segment)
    return list(needed.items())


def _crossing(
    eqns: Sequence[JaxprEqn], segments: Sequence[int], is_same: Sequence[bool], num_segments: int
) -> np.ndarray:
    """Bytes over each cut of values that a micro-batch defines on one side and uses on the other, float64[segments]."""
    # Cut n is the one before segment n. Equations of no segment have a negative number.
    bytes_over = np.zeros(num_segments + 1)
    defining_segment = {
        var: segment
        for eqn, segment, same in zip(eqns, segments, is_same, strict=True)
        for var in eqn.outvars
        if segment >= 0 and not same
    }
    reach: dict[Var, tuple[int, int]] = {}
    for eqn, segment in zip(eqns, segments, strict=True):
        for var in variables(eqn.invars):
            if var in defining_segment and segment >= 0:
                low, high = reach.get(var, (defining_segment[var], defining_segment[var]))
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
    """Segments that use each parameter, or a value computed from it once for all micro-batches, and its bytes."""
    users: dict[Var, set[int]] = {var: set() for var in invars if roles[var] == "same"}
    parameters_of: dict[Var, set[Var]] = {
        var: {var} for var in users
    }  # the parameters that a value is computed from once
    for eqn, segment, same in zip(eqns, segments, is_same, strict=True):
        parameters_read = {parameter for var in variables(eqn.invars) for parameter in parameters_of.get(var, ())}
        if same:
            parameters_of.update(dict.fromkeys(eqn.outvars, parameters_read))
        elif segment >= 0:
            for parameter in parameters_read:
                users[parameter].add(segment)
    return tuple(
        (tuple(sorted(segments_of_users)), value_bytes(var.aval))
        for var, segments_of_users in users.items()
        if segments_of_users
    )


def _residual_bytes(residuals: Sequence[tuple[Var, int]], num_segments: int) -> np.ndarray:
    num_bytes = np.zeros(num_segments)
    for var, segment in residuals:
        num_bytes[segment] += value_bytes(var.aval)
    return num_bytes
