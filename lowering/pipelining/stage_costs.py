"""Costs of the segments of a micro-batch, between which it may be cut into stages.

Input: an inlined jaxpr without stages. Output: `SegmentedBatch`: the segment of each equation, see `segments`, where
loops over layers are cut between iterations, see `layers`. `Work`: the cycles of each segment on one IPU, the bytes of
its residuals, and the bytes that cross each cut; every iteration of a loop costs as much as the first.

Limits: the state of an optimiser is not known here. Loops whose trip count is data count as one iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.ipus import MakeLowering, value_bytes, variables
from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Var, eliminate_dead_code
from ipujax.lowering.layout import MemoryOrder, map_linearly
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.pipelining.layers import into_shards, spec_of_shards
from ipujax.lowering.pipelining.pipeline_cost import Planning
from ipujax.lowering.pipelining.primitive import PipelineSpec
from ipujax.lowering.pipelining.row_shards import Bounds, CutJaxpr
from ipujax.lowering.pipelining.segments import Segments, find_segments, is_backward, layer_loops
from ipujax.lowering.popops import Op, new_counter, new_stack, push, slot_of
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.compile import leaf_costs, program_cycles
from ipujax.runtime.graph import Builder, Graph, Sequence as ProgramSequence
from ipujax.runtime.memory import code_of_exchanges, received_at_once
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class SegmentedBatch:
    """A micro-batch in segments, without their costs.

    Args:
        jaxpr: the micro-batch, without dead equations.
        spec: how micro-batches go through it.
        loops: bounds at which its loops over layers may be cut, by the index of their equations.
        shards: the jaxpr with these loops cut.
        segmented: the segments of the equations of the shards.
    """

    jaxpr: ClosedJaxpr
    spec: PipelineSpec
    loops: Mapping[int, Bounds]
    shards: CutJaxpr
    segmented: Segments

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return self.segmented.num_segments

    @property
    def has_gradients(self) -> bool:
        """Whether there are backward equations."""
        return any(segment >= 0 and is_backward(eqn) for eqn, segment, _ in self.segmented.rows())

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of the variables in which results are added, or averaged, over micro-batches."""
        return sum(
            prod(aval.shape) * jnp.dtype(self.spec.accumulator_dtype(aval)).itemsize
            for kind, aval in zip(self.spec.reduce, self.jaxpr.out_avals, strict=True)
            if kind in ("sum", "mean", "running_mean") and jnp.issubdtype(aval.dtype, jnp.inexact)
        )

    def shard_segments(self) -> dict[tuple[int, int], int]:
        """The segment of each shard, by equation of the uncut jaxpr and first row."""
        pairs = zip(self.shards.sources, self.segmented.segments, strict=True)
        return {(source.number, source.first): segment for source, segment in pairs if source is not None}


def segmented_batch(jaxpr: ClosedJaxpr, spec: PipelineSpec) -> SegmentedBatch:
    """Finds the segments of a micro-batch."""
    live_jaxpr = ClosedJaxpr(eliminate_dead_code(jaxpr.jaxpr), jaxpr.consts)
    loops = layer_loops(live_jaxpr.jaxpr, spec)
    shards = into_shards(live_jaxpr, spec, loops)
    segmented = find_segments(shards.jaxpr.jaxpr, spec_of_shards(spec, shards))
    return SegmentedBatch(live_jaxpr, spec, loops, shards, segmented)


@dataclass(frozen=True, slots=True)
class Work:
    """Costs of segments: their forward equations and the backward equations that belong to them."""

    forward_cycles: np.ndarray  # of each segment, float64[segments]
    backward_cycles: np.ndarray  # of the backward equations of each segment, float64[segments]
    push_cycles: np.ndarray  # of pushing the residuals of each segment to a ring, float64[segments]
    pop_cycles: np.ndarray  # of reading them from the ring, float64[segments]
    crossing_bytes: np.ndarray  # sent for one micro-batch over the cut before each segment, float64[segments]
    # (segments that use it, in order, bytes) of each parameter.
    parameter_bytes: tuple[tuple[tuple[int, ...], int], ...]
    residual_bytes: np.ndarray  # of the residuals of each segment, float64[segments]
    # (segments that run it, in order, bytes on the fullest tile) of the exchange code of each program.
    code_bytes: tuple[tuple[tuple[int, ...], int], ...]
    buffer_bytes: np.ndarray  # that a tile receives at once, at most, in each segment, float64[segments]
    has_gradients: bool  # whether there are backward equations
    accumulator_share: float  # bytes of accumulators, of gradients above all, for each byte of parameters


def work_of(batch: SegmentedBatch, planning: Planning) -> Work:
    """Costs of the segments of a micro-batch on one IPU of each replica: what the search for stages reads."""
    segmented = batch.segmented
    residuals = _residuals(segmented)
    costs = _segment_costs(batch.shards, segmented, residuals, planning)
    forward, backward, pushing, reading = costs.cycles
    roles = spec_of_shards(batch.spec, batch.shards).roles
    parameters = [var for var, role in zip(batch.shards.jaxpr.jaxpr.invars, roles, strict=True) if role == "same"]
    parameter_bytes = _parameter_bytes(parameters, segmented)
    return Work(
        forward_cycles=forward,
        backward_cycles=backward,
        push_cycles=pushing,
        pop_cycles=reading,
        crossing_bytes=_crossing_bytes(segmented),
        parameter_bytes=parameter_bytes,
        residual_bytes=_residual_bytes(residuals, segmented.num_segments),
        code_bytes=costs.code_bytes,
        buffer_bytes=costs.buffer_bytes,
        has_gradients=batch.has_gradients,
        accumulator_share=batch.accumulator_bytes / max(1, sum(num_bytes for _, num_bytes in parameter_bytes)),
    )


_FORWARD, _BACKWARD, _PUSH, _POP = range(4)  # rows of the table of cycles


class _Costed(NamedTuple):
    """A program of a segment: row of the table of cycles, segment (−1 if its costs count nowhere), and program."""

    row: int
    segment: int
    program: ProgramSequence


class _SegmentCosts(NamedTuple):
    """Costs of segments: cycles, forward, backward, of pushing and of reading residuals, and memory as of `Work`."""

    cycles: np.ndarray  # float64[4, segments]
    code_bytes: tuple[tuple[tuple[int, ...], int], ...]
    buffer_bytes: np.ndarray  # float64[segments]


def _segment_costs(
    shards: CutJaxpr, segmented: Segments, residuals: Sequence[tuple[Var, int]], planning: Planning
) -> _SegmentCosts:
    """Costs of each segment; `residuals` are those of `_residuals`, each with its segment.

    All are lowered into one graph, so that operands have the layouts that the equations before give them.
    """
    graph = planning.graph()
    initial = ProgramSequence()
    env, programs = _lower_equations(shards, segmented, graph, planning.make_lowering)
    programs += _stash_programs(residuals, env, graph, initial)
    programs += _sum_programs(shards.jaxpr.jaxpr.outvars, segmented, env, graph, initial)
    # Variables that no rule has mapped, so that the costs of all programs are defined.
    for variable in graph.variables:
        map_linearly(graph, Tensor.of(variable))
    effects = EffectsOf(graph)
    cycles = np.zeros((4, segmented.num_segments))  # rows: _FORWARD, _BACKWARD, _PUSH, _POP
    buffer_bytes = np.zeros(segmented.num_segments)
    # Several segments may have one program, as shards of a loop: it is costed once.
    cycles_of_program: dict[ProgramSequence, int] = {}
    received_bytes: dict[ProgramSequence, int] = {}
    code_bytes: dict[ProgramSequence, int] = {}
    segments_of_program: dict[ProgramSequence, set[int]] = {}
    for row, segment, prog in programs:
        if segment >= 0 and prog.children():
            if prog not in cycles_of_program:
                costs = leaf_costs(graph, prog)
                cycles_of_program[prog] = program_cycles(graph, prog, costs=costs, effects=effects)
                received_bytes[prog] = max(map(received_at_once, costs.values()), default=0)
                code_bytes[prog] = int(code_of_exchanges(costs.values(), graph.target).max())
            cycles[row, segment] += cycles_of_program[prog]
            buffer_bytes[segment] = max(buffer_bytes[segment], received_bytes[prog])
            segments_of_program.setdefault(prog, set()).add(segment)
    code = tuple((tuple(sorted(users)), code_bytes[prog]) for prog, users in segments_of_program.items())
    return _SegmentCosts(cycles, code, buffer_bytes)


def _lower_equations(
    shards: CutJaxpr, segmented: Segments, graph: Graph, make_lowering: MakeLowering
) -> tuple[dict[Var, Tensor], list[_Costed]]:
    """Tensors of all values, and the program of each equation; shards of a loop with equal rows have one program."""
    body = shards.jaxpr.jaxpr
    lowering = make_lowering(graph, {})
    env = {
        var: MemoryOrder.for_argument(var.aval.shape, in_groups).add_variable(graph, var.aval.dtype, "operand")
        for var, in_groups in zip(body.invars, grouped_inputs(body), strict=True)
    }
    for var, value in zip(body.constvars, shards.jaxpr.consts, strict=True):
        env[var] = graph.add_constant(value, "constant")
    programs: list[_Costed] = []
    # Results and program of the first shard of each key, which stand for those of all.
    lowered_shards: dict[tuple[int, int], tuple[Sequence[Tensor], ProgramSequence]] = {}
    for (eqn, segment, _), key in zip(segmented.rows(), _shard_keys(shards), strict=True):
        lowered = None if key is None else lowered_shards.get(key)
        if lowered is None:
            operands = [lowering.read(env, atom) for atom in eqn.invars]
            prog = ProgramSequence()
            lowered = lowering.equation(eqn, operands, prog, {}), prog
            if key is not None:
                lowered_shards[key] = lowered
        results, prog = lowered
        env.update(zip(eqn.outvars, results, strict=True))
        programs.append(_Costed(_BACKWARD if is_backward(eqn) else _FORWARD, segment, prog))
    return env, programs


def _stash_programs(
    residuals: Sequence[tuple[Var, int]], env: Mapping[Var, Tensor], graph: Graph, initial: ProgramSequence
) -> list[_Costed]:
    """Programs that push each residual to a ring and read it from there, for the costs of stages.

    Residuals of one value have the same programs, listed for the segment of each: any of them may store the value.
    """
    counter = new_counter(Builder(graph, initial, "stash"), 0)
    programs: list[_Costed] = []
    of_value: dict[Tensor, tuple[ProgramSequence, ProgramSequence]] = {}
    for var, segment in residuals:
        value = env[var]
        if value not in of_value:
            pushing, reading = of_value[value] = ProgramSequence(), ProgramSequence()
            stack = new_stack(Builder(graph, initial, "stash"), value, 2)  # of any depth: the schedule is not known yet
            push(Builder(graph, pushing, "stash"), stack, value, counter)
            slot_of(Builder(graph, reading, "stash"), stack, counter)  # its copy of the slot is what reading costs
        pushing, reading = of_value[value]
        programs += [_Costed(_PUSH, segment, pushing), _Costed(_POP, segment, reading)]
    return programs


def _sum_programs(
    results: Sequence[Atom], segmented: Segments, env: Mapping[Var, Tensor], graph: Graph, initial: ProgramSequence
) -> list[_Costed]:
    """Programs that add each result to its accumulator, in the segment of the equation that defines it.

    Equal values, as of shards that have one program, share it, so that it is costed once.
    """
    definitions = {var: (eqn, segment) for eqn, segment, _ in segmented.rows() for var in eqn.outvars}
    programs: list[_Costed] = []
    of_value: dict[Tensor, ProgramSequence] = {}
    for var in dict.fromkeys(variables(results)):
        aval: Any = var.aval
        if var in definitions and jnp.issubdtype(aval.dtype, jnp.inexact):
            eqn, segment = definitions[var]
            value = env[var]
            if value not in of_value:
                of_value[value] = ProgramSequence()
                negated, added = Op("neg", lax.neg, aval.dtype), Op("add", lax.add, aval.dtype)
                # An accumulator is laid out as its value, as results of elementwise operations are.
                accumulator = elementwise(Builder(graph, initial, "accumulator"), negated, [value])
                into = Builder(graph, of_value[value], "accumulator")
                elementwise(into, added, [accumulator, value], accumulator)
            programs.append(_Costed(_BACKWARD if is_backward(eqn) else _FORWARD, segment, of_value[value]))
    return programs


def _shard_keys(shards: CutJaxpr) -> list[tuple[int, int] | None]:
    """For each equation a key (uncut equation, number of rows) that shards of equal cost share; None for others."""
    return [None if source is None or not source.rows else (source.number, source.rows) for source in shards.sources]


def _residuals(segmented: Segments) -> list[tuple[Var, int]]:
    """Residuals: values from forward to backward equations, each with the first segment that needs it."""
    # Gradients run from the last segment to the first, so the first that needs a value keeps it longest.
    forward_values = {
        var
        for eqn, segment, is_same in segmented.rows()
        for var in eqn.outvars
        if segment >= 0 and not is_same and not is_backward(eqn)
    }
    needed: dict[Var, int] = {}
    for eqn, segment, _ in segmented.rows():
        if is_backward(eqn) and segment >= 0:
            for var in variables(eqn.invars):
                if var in forward_values:
                    needed[var] = min(needed.get(var, segment), segment)
    return list(needed.items())


def _crossing_bytes(segmented: Segments) -> np.ndarray:
    """Bytes over each cut of values that a micro-batch defines on one side and uses on the other, float64[segments]."""
    # Cut n is the one before segment n.
    changes = np.zeros(segmented.num_segments + 1)  # of the bytes, from cut n − 1 to cut n
    defining_segment = {
        var: segment
        for eqn, segment, is_same in segmented.rows()
        for var in eqn.outvars
        if segment >= 0 and not is_same
    }
    reach: dict[Var, tuple[int, int]] = {}  # first and last segment that defines or reads a value
    for eqn, segment, _ in segmented.rows():
        for var in variables(eqn.invars):
            if var in defining_segment and segment >= 0:
                low, high = reach.get(var, (defining_segment[var], defining_segment[var]))
                reach[var] = min(low, segment), max(high, segment)
    for var, (low, high) in reach.items():  # it crosses the cuts low + 1 … high
        changes[low + 1] += value_bytes(var.aval)
        changes[high + 1] -= value_bytes(var.aval)
    return np.cumsum(changes)[: segmented.num_segments]


def _parameter_bytes(parameters: Sequence[Var], segmented: Segments) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Segments that use each parameter, or a value computed from it once for all micro-batches, and its bytes."""
    users: dict[Var, set[int]] = {var: set() for var in parameters}
    parameters_of: dict[Var, set[Var]] = {var: {var} for var in parameters}  # that a value is computed from once
    for eqn, segment, is_same in segmented.rows():
        parameters_read = {parameter for var in variables(eqn.invars) for parameter in parameters_of.get(var, ())}
        if is_same:
            parameters_of.update(dict.fromkeys(eqn.outvars, parameters_read))
        elif segment >= 0:
            for parameter in parameters_read:
                users[parameter].add(segment)
    return tuple((tuple(sorted(used)), value_bytes(var.aval)) for var, used in users.items() if used)


def _residual_bytes(residuals: Sequence[tuple[Var, int]], num_segments: int) -> np.ndarray:
    num_bytes = np.zeros(num_segments)
    for var, segment in residuals:
        num_bytes[segment] += value_bytes(var.aval)
    return num_bytes
