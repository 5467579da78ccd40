"""The program of a pipeline: each part of the model once, called when the schedule says so.

Input: a `StagedPipeline` and the tensors of its operands. Output: tensors of its results, and in the program

    shared      equations that are the same for all micro-batches; parameters on the IPUs that use them; zeroed
                accumulators
    blocks      ramp-up, Repeat of the steady state, ramp-down: for each slot loads of micro-batches from the host, the
                calls of its tasks, copies of their results to other IPUs, stores of stacked results on the host
    results     accumulators of several stages added, sums divided

A part is a function. It reads its micro-batch, values that other IPUs sent and the stash of its stage; it pushes to the
stash, accumulates and counts. A stash is a ring of as many slots as the schedule has micro-batches in flight there;
arriving values have as many landing variables as can be on their way at once. Layouts do not depend on the schedule, so
that all schedules split sums alike and give the same bits, except for sums over stages of one IPU, which have one
accumulator.

Source: PopART's pipeline transform, whose stashes are rings with counters too (reference parallel.md §2.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.host_rows import TaskMoves, load_of_batch, store_of_stack
from ipujax.lowering.ipus import Ipus, variables
from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var, is_float0
from ipujax.lowering.layout import map_linearly, mapping_like
from ipujax.lowering.passes import fuser
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.pipelining.partition import TaskKind
from ipujax.lowering.pipelining.parts import Arrival, PartBuilder, Send, StagePart
from ipujax.lowering.pipelining.primitive import combine, fold
from ipujax.lowering.pipelining.staged import StagedPipeline
from ipujax.lowering.popops import (
    assign,
    map_for_slicing,
    moved_for_slicing,
    new_stack,
    new_state,
    push,
    set_aside,
    slot_of,
)
from ipujax.lowering.recomputation import ChainTrade
from ipujax.lowering.schedules import FORWARD, SchedulePlan, Slot
from ipujax.runtime.graph import Builder, Call, Copy, Function, Program, Repeat, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor, Variable, concat
from ipujax.runtime.tensor.roles import GRADIENTS, STORED

_MAX_LANDINGS = 3  # landing variables in rotation; if more values can be in transit, they wait in a ring


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRun:
    """The part of a program that runs a pipeline.

    Args:
        program: its blocks: from its first task to its last.
        plan: its schedule.
        ipus: the IPU of each stage.
        tasks: the kind of task that each function is.
        trades: trade-offs of recomputation in its stages.
    """

    program: ProgramSequence
    plan: SchedulePlan
    ipus: tuple[int, ...]
    tasks: Mapping[Function, TaskKind]
    trades: tuple[ChainTrade, ...] = ()


# Index of a result, position among its terms, and the term.
Term = tuple[int, int, Atom]


def lower_pipeline(
    ipus: Ipus, staged: StagedPipeline, operands: Sequence[Tensor], prog: ProgramSequence, name: str
) -> tuple[list[Tensor], PipelineRun]:
    """Lowers a pipeline: its results, each on the IPU that `staged` names, and the part of the program that runs it."""
    lowering = _PipelineLowering(ipus, staged, operands, prog, name)
    results = lowering.run()
    tasks = {function: task for task, function in lowering.functions.items()}
    return results, PipelineRun(lowering.blocks, staged.plan, staged.ipus, tasks, staged.trades)


class _PipelineLowering:
    def __init__(
        self, ipus: Ipus, staged: StagedPipeline, operands: Sequence[Tensor], prog: ProgramSequence, name: str
    ) -> None:
        self.ipus = ipus
        self.staged = staged
        self.prog = prog
        self.name = name
        self.spec = staged.spec
        self.plan = staged.plan
        self.fuse = fuser()
        self.jaxpr = staged.partition.jaxpr
        body = self.jaxpr.jaxpr
        self.roles = dict(zip(body.invars, self.spec.roles, strict=True))
        self.operands = dict(zip(body.invars, operands, strict=True))
        self.next_of_state = {body.invars[operand]: body.outvars[result] for operand, result in self.spec.carries}
        self.same_values: dict[Var, Tensor] = {var: x for var, x in self.operands.items() if self.roles[var] == "same"}
        self.viewed: set[tuple[Variable, int]] = set()
        self.shared_copies: dict[tuple[Variable, int], Variable] = {}  # copies on other IPUs, for several views there
        self.stacks: dict[tuple[Var, int], Tensor] = {}  # batches on chip, on the IPUs of stages that read them
        self.is_streamed = dict(zip(body.invars, self.spec.streamed or (False,) * len(body.invars), strict=True))
        self.moves: TaskMoves[TaskKind] = TaskMoves()
        self.states: dict[Var, Tensor] = {}
        self.volatile: set[Variable] = set()  # overwritten before all readers have read their value
        self.stashes: dict[tuple[Var, int], Tensor] = {}
        self.arrivals: dict[tuple[Var, int], Arrival] = {}
        self.arriving: dict[TaskKind, list[Arrival]] = {}
        self.sends: dict[TaskKind, list[Send]] = {}
        self.accumulators: dict[tuple[int, int], Tensor] = {}  # by result and term
        self.functions: dict[TaskKind, Function] = {}
        self.copies: dict[tuple[int, ...], Program] = {}
        self.blocks = ProgramSequence()
        self.readers: dict[tuple[Var, int], list[StagePart]] = {}
        for part in staged.parts:
            for var in (*part.jaxpr.invars, *self._batches_handed_on(part)):
                self.readers.setdefault((var, part.stage), []).append(part)

    def run(self) -> list[Tensor]:
        self._lower_shared()
        self.viewed = self.staged.fully_viewed(self.same_values)
        for part in self.staged.parts:
            self._part(part)
        self._place_initial_states()
        self._blocks()
        return [self._result(number) for number in range(len(self.spec.reduce))]

    def _lower_shared(self) -> None:
        graph = self.ipus.graph
        body = self.jaxpr.jaxpr
        for var, value in zip(body.constvars, self.jaxpr.consts, strict=True):
            self.same_values[var] = graph.add_constant(value, "constant")
        for eqn, stage in self.staged.partition.shared:
            ipu = self.staged.ipus[stage]
            results = self.ipus.equation(eqn, self.same_values, ipu, self.prog)
            self.same_values.update(zip(variables(eqn.outvars), results, strict=True))
        for number, (var, stage) in enumerate(self.staged.partition.carried.items()):
            ipu = self.staged.ipus[stage]
            initial = self.ipus.copy_to(self.operands[var], ipu, self.prog)
            self.states[var] = new_state(Builder(self.ipus.view(ipu), self.prog, self.name), initial, number)
            self.volatile.update(self.states[var].variables())

    def _same(self, value: Tensor, ipu: int) -> Tensor:
        """A value that is the same for all micro-batches, on an IPU."""
        for variable in value.variables():
            is_elsewhere = self.ipus.variable_ipu(variable) not in (None, ipu) and not variable.is_constant
            if is_elsewhere and (variable, ipu) in self.viewed and (variable, ipu) not in self.shared_copies:
                (self.shared_copies[variable, ipu],) = self.ipus.copy_to(
                    Tensor.of(variable), ipu, self.prog
                ).variables()
        return self.ipus.copy_to(value, ipu, self.prog, self.shared_copies)

    def _place_initial_states(self) -> None:
        """Maps the initial values of states like the states, if they are unmapped."""
        for var, stage in self.staged.partition.carried.items():
            view = self.ipus.view(self.staged.ipus[stage])
            initial = self.operands[var]
            map_linearly(view, self.states[var])
            mapping = mapping_like(view, self.states[var])
            if (
                initial.is_whole_variable
                and mapping is not None
                and self.ipus.variable_ipu(initial.variables()[0]) is None
            ):
                view.set_tile_mapping(initial.variables()[0], mapping)

    def _part(self, part: StagePart) -> None:
        """Builds the function of a part."""
        ipu = self.staged.ipus[part.stage]
        stage, kind = part.task
        number = self.staged.partition.numbers[stage]
        builder = PartBuilder(part, self.ipus.view(ipu), self.prog, f"{self.name}/stage {number} {kind.name.lower()}")
        invars = [*part.jaxpr.invars, *self._batches_handed_on(part)]
        outvars = variables(part.jaxpr.outvars)
        in_groups = dict(zip(part.jaxpr.invars, grouped_inputs(part.jaxpr), strict=True))
        inputs = [self._input(var, builder, in_groups.get(var, False)) for var in invars]
        env = dict(zip(invars, inputs, strict=True))
        fused = self.fuse(ClosedJaxpr(part.jaxpr, ())).jaxpr
        other_terms = self._equations(fused, self._results_of(part), env, builder)
        states = [var for var, holder in self.staged.partition.carried.items() if self._holds(builder, holder)]
        env.update({var: self.states[var] for var in states})
        for var in (*states, *outvars, *invars):
            self._hand_on(var, env[var], builder)
        for number, position, term in other_terms:
            self._reduce(number, position, self._value(term, env, builder), builder)
        self._next_states(states, env, builder)
        for move in self.moves.loads.get(part.task, ()):
            map_linearly(self.ipus.view(ipu), move.row)
        builder.count()
        if builder.body.children():
            self.functions[part.task] = self.ipus.graph.add_function(builder.body, builder.name)

    def _batches_handed_on(self, part: StagePart) -> list[Var]:
        """Streamed batches of which a part hands on micro-batches as results or states, without reading them."""
        states = [
            self.next_of_state[var]
            for var, holder in self.staged.partition.carried.items()
            if self.staged.parts[holder] is part
        ]
        handed = dict.fromkeys(variables([*(term for _, _, term in self._results_of(part)), *states]))
        return [var for var in handed if self.is_streamed.get(var, False) and var not in part.jaxpr.invars]

    def _results_of(self, part: StagePart) -> list[Term]:
        """Terms of results that a part computes."""
        results = enumerate(self.staged.partition.results)
        rows = ((number, position, term) for number, terms in results for position, term in enumerate(terms))
        return [row for row in rows if self.staged.part_with(row[2]) is part]

    def _equations(self, body: Jaxpr, terms: list[Term], env: dict[Var, Tensor], builder: PartBuilder) -> list[Term]:
        """Lowers the equations of a part, and adds each term to its result as soon as it is computed.

        So the gradients of one layer are dead before those of the next are computed. Returns the terms of no equation.
        """
        computed = {var for eqn in body.eqns for var in variables(eqn.outvars)}
        pending = [row for row in terms if isinstance(row[2], Var) and row[2] in computed]
        pending_terms = {term for _, _, term in pending}

        def reduce(eqn: JaxprEqn) -> None:
            for number, position, term in () if pending_terms.isdisjoint(variables(eqn.outvars)) else pending:
                if term in eqn.outvars:
                    self._reduce(number, position, env[term], builder)

        results = [*body.outvars, *self.next_of_state.values()]
        self.ipus.lowering(builder.ipu).equations(body.eqns, env, builder.body, results, reduce)
        return [row for row in terms if row not in pending]

    def _holds(self, builder: PartBuilder, holder: int) -> bool:
        return builder.part is self.staged.parts[holder]

    def _value(self, atom: Atom, env: dict[Var, Tensor], builder: PartBuilder) -> Tensor:
        """The value of a result in a part."""
        if not isinstance(atom, Var):
            return self.ipus.lowering(builder.ipu).read({}, atom)
        return env[atom] if atom in env else self._input(atom, builder)

    def _input(self, var: Var, builder: PartBuilder, in_groups: bool = False) -> Tensor:
        """A value on the IPU of a part that reads it; `in_groups` is the order of a micro-batch from the host."""
        stage = builder.part.stage
        role = self.roles.get(var)
        if var in self.same_values:
            return self._same(self.same_values[var], builder.ipu)
        if role == "batch" and self.is_streamed[var] and (var, stage) not in self.stashes:
            return self._load(var, builder, in_groups)
        if role == "batch" and not self.is_streamed[var]:
            return slot_of(builder.inside, self._stack(var, builder.ipu), builder.counted())
        if role == "key":
            key = self.ipus.copy_to(self.operands[var], builder.ipu, self.prog)
            return self.ipus.emit(builder.ipu, fold, [key, builder.counted()], builder.body, builder.name)
        if var in self.states and self._holds(builder, self.staged.partition.carried[var]):
            return self.states[var]
        if (var, stage) in self.stashes:
            return self._from_ring(self.stashes[var, stage], builder)
        arrival = self.arrivals[var, stage]
        return arrival.read if arrival.ring is None else self._from_ring(arrival.ring, builder)

    def _stack(self, var: Var, ipu: int) -> Tensor:
        """A batch on an IPU that reads it, [micro-batches, *shape], its slices on all tiles."""
        if (var, ipu) not in self.stacks:
            batch = self.operands[var]
            count = self.spec.micro_batches
            stack = batch.reshape((count, batch.shape[0] // count, *batch.shape[1:]))
            view = self.ipus.view(ipu)
            local = self.ipus.copy_to(stack, ipu, self.prog)
            map_for_slicing(view, local, (0,))
            self.stacks[var, ipu] = moved_for_slicing(Builder(view, self.prog, self.name), local)
        return self.stacks[var, ipu]

    def _load(self, var: Var, builder: PartBuilder, in_groups: bool) -> Tensor:
        """A micro-batch, loaded from the host before the first part of a stage that reads it."""
        numbers = builder.counted(), builder.counted_ahead
        move = load_of_batch(builder.view, f"{builder.name}/batch", self.operands[var], in_groups, *numbers)
        self.moves.loads.setdefault(builder.part.task, []).append(move)
        return move.row

    def _from_ring(self, ring: Tensor, builder: PartBuilder) -> Tensor:
        return slot_of(builder.inside, ring, builder.slot(ring.shape[0]))

    def _hand_on(self, var: Var, tensor: Tensor, builder: PartBuilder) -> None:
        """Stashes a value for later parts of its stage and sends it to others, from the first part that has it."""
        if var in self.same_values or (self.roles.get(var) in ("batch", "key") and not self.is_streamed[var]):
            return
        part = builder.part
        is_definer = self.staged.defining_part.get(var) is part
        later_readers = [
            q for q in self.readers.get((var, part.stage), ()) if q is not part and self._is_after(q, part)
        ]
        other_stages = (
            [stage for other, stage in self.readers if other is var and stage != part.stage] if is_definer else []
        )
        is_first = is_definer or self.readers[var, part.stage][0] is part
        if not is_first or not (later_readers or other_stages):
            return
        map_linearly(builder.view, tensor)
        if later_readers:
            depth = max(self.plan.depth(part.task, q.task) for q in later_readers)
            outside = Builder(builder.view, self.prog, builder.name)
            ring = self.stashes[var, part.stage] = new_stack(outside, tensor, depth)
            self._note_activations(ring, builder)
            push(builder.inside, ring, tensor, builder.slot(depth))
        if other_stages and not self.volatile.isdisjoint(tensor.variables()):
            tensor = set_aside(builder.inside, tensor)
        for stage in other_stages:
            self._send(var, tensor, builder, self.readers[var, stage][0])

    def _note_activations(self, tensor: Tensor, builder: PartBuilder) -> None:
        """Gives the role of activations to a value that a forward part hands on in training."""
        if self.staged.partition.training and builder.part.task[1] == FORWARD:
            self.ipus.graph.note_role(tensor, STORED)

    def _is_after(self, part: StagePart, other: StagePart) -> bool:
        return self.staged.parts.index(part) > self.staged.parts.index(other)

    def _send(self, var: Var, tensor: Tensor, builder: PartBuilder, reader: StagePart) -> None:
        """Copies a value to another stage, where `reader` is the first part to read it."""
        ipu = self.staged.ipus[reader.stage]
        sender = builder.part.task
        read = reader.task
        view = self.ipus.view(ipu)
        name = f"{builder.name}/to stage {self.staged.partition.numbers[reader.stage]}"
        buffered = self.ipus.graph.target.global_exchange == "buffered"
        in_transit = self.plan.buffers(sender, read) if buffered else self.plan.depth(sender, read)
        count = min(in_transit, self.spec.micro_batches)
        template = self.ipus.add_like(tensor, ipu, name)  # for its layout alone

        def variable() -> Tensor:
            """A variable laid out like a value read from a ring, so that parts are lowered alike under any schedule."""
            return new_stack(Builder(view, self.prog, name), template, 1).reshape(tensor.shape)

        if count <= _MAX_LANDINGS:
            landing = [variable() for _ in range(count)]
            arrival = Arrival(landing, landing[0] if count == 1 else variable())
        else:
            landing = [variable()]
            ring = new_stack(Builder(view, self.prog, name), landing[0], self.plan.depth(sender, read))
            receiver = PartBuilder(reader, view, self.prog, f"{name}/receive")
            slot = receiver.slot(ring.shape[0])
            push(Builder(view, receiver.body, receiver.name), ring, landing[0], slot)
            receiver.count()
            function = self.ipus.graph.add_function(receiver.body, receiver.name)
            arrival = Arrival(landing, landing[0], function, ring)
        for variable_of_arrival in (*landing, arrival.read, *(() if arrival.ring is None else (arrival.ring,))):
            self._note_activations(variable_of_arrival, builder)
        self.volatile.update(arrival.read.variables())
        self.arrivals[var, reader.stage] = arrival
        self.arriving.setdefault(read, []).append(arrival)
        self.sends.setdefault(sender, []).append(Send(tensor, arrival, builder.ipu, ipu, read))

    def _reduce(self, number: int, position: int, value: Tensor, builder: PartBuilder) -> None:
        """Adds the value of a result for one micro-batch to its accumulator."""
        kind = self.spec.kind_of(number)
        aval = self.jaxpr.out_avals[number]
        if kind == "carry" or is_float0(aval):
            return
        name = f"{builder.name}/result {number}"
        map_linearly(builder.view, value)
        if kind == "stack":
            self.accumulators[number, position] = self._stacked(number, value, builder)
            return
        shared = self._shared_accumulator(number, builder.ipu) if kind in ("sum", "mean") else None
        if shared is not None:
            self.accumulators[number, position] = shared
            self.ipus.emit(builder.ipu, partial(combine, kind), [shared, value], builder.body, name, shared)
            return
        dtype = value.dtype if kind == "last" else self.spec.accumulator_dtype(aval)
        accumulator = self.accumulators[number, position] = self.ipus.add_like(
            value, builder.ipu, f"{name}/{kind}", dtype
        )
        self.ipus.graph.note_role(accumulator, "" if builder.part.task[1] == FORWARD else GRADIENTS)
        if kind == "last":
            builder.body.add(Copy(value, accumulator, name, self.ipus.graph.origin))
            return
        zero = builder.view.add_constant(np.zeros((), dtype), "0")
        map_linearly(builder.view, zero)
        self.prog.add(
            Copy(zero.broadcast_in_dim(accumulator.shape, ()), accumulator, f"{name}/zero", self.ipus.graph.origin)
        )
        values = [accumulator, value, *([builder.counted()] if kind == "running_mean" else [])]
        self.ipus.emit(builder.ipu, partial(combine, kind), values, builder.body, name, accumulator)

    def _stacked(self, number: int, value: Tensor, builder: PartBuilder) -> Tensor:
        """The stack of a result: on the IPU, or on the host if it is sent there after the part has run."""
        name = f"{builder.name}/result {number}"
        if not self.spec.sent or not self.spec.sent[number]:
            stack = new_stack(Builder(builder.view, self.prog, name), value, self.spec.micro_batches)
            push(Builder(builder.view, builder.body, name), stack, value, builder.counted())
            return stack
        value = value if self.volatile.isdisjoint(value.variables()) else set_aside(builder.inside, value)
        stored = builder.counted_stored()
        stack, stores = store_of_stack(builder.view, name, value, self.spec.micro_batches, stored, on_host=True)
        self.moves.stores.setdefault(builder.part.task, []).append(stores)
        return stack

    def _shared_accumulator(self, number: int, ipu: int) -> Tensor | None:
        """Accumulator of another stage on the same IPU for this result, as for a tied weight."""
        ipu_of_term = {
            position: self.ipus.variable_ipu(accumulator.variables()[0])
            for (n, position), accumulator in self.accumulators.items()
            if n == number
        }
        return next(
            (self.accumulators[number, position] for position, other in ipu_of_term.items() if other == ipu), None
        )

    def _next_states(self, states: Sequence[Var], env: dict[Var, Tensor], builder: PartBuilder) -> None:
        """Replaces the states that a stage holds, all at once."""
        pairs = [(self._value(self.next_of_state[var], env, builder), self.states[var]) for var in states]
        if pairs:
            values, variables = zip(*pairs, strict=True)
            assign(builder.inside, values, variables)

    def _blocks(self) -> None:
        """Adds calls and copies in the order of the schedule."""
        period = lcm(*(len(arrival.landing) for arrival in self.arrivals.values()))
        links = [(task, send.reader) for task, sends in self.sends.items() for send in sends]
        self.marks = self.staged.marks(self.name, self.functions, links)
        for block in self.plan.blocks_by(period):
            steps = ProgramSequence()
            for slot in block.slots:
                self._add_slot(slot, steps)
            if not steps.children():
                continue
            self.blocks.add(Repeat(block.count, steps, self.ipus.graph.origin) if block.count > 1 else steps)
        for step in (*self.moves.first(), self.blocks, *self.moves.last()):
            self.prog.add(step)

    def _add_slot(self, slot: Slot, steps: ProgramSequence) -> None:
        tasks = [(task, (task.stage, task.kind)) for task in slot if (task.stage, task.kind) in self.functions]
        for step in self.moves.before(key for _, key in tasks):
            steps.add(step)
        for task, key in tasks:
            for arrival in self.arriving.get(key, ()):
                if len(arrival.landing) > 1:
                    steps.add(self._copy([(arrival.landing[task.micro_batch % len(arrival.landing)], arrival.read)]))
            steps.add(Call(self.functions[key], self.ipus.graph.origin, self.marks[key]))
        self._add_sends([(send, task.micro_batch) for task, key in tasks for send in self.sends.get(key, ())], steps)
        for step in self.moves.after(key for _, key in tasks):
            steps.add(step)

    def _add_sends(self, sends: Sequence[tuple[Send, int]], steps: ProgramSequence) -> None:
        """Copies the results of the tasks of a slot in as few exchanges as possible, and receives them."""
        groups: dict[object, list[tuple[Tensor, Tensor]]] = {}
        buffered = self.ipus.graph.target.global_exchange == "buffered"
        for send, micro_batch in sends:
            link = (send.source_ipu, send.destination_ipu)
            crosses = link[0] != link[1]
            # In lockstep all IPUs exchange at once; else a copy delays only the two IPUs of its link.
            key = (send.value.dtype, crosses and (link if buffered else True))
            landing = send.arrival.landing
            groups.setdefault(key, []).append((send.value, landing[micro_batch % len(landing)]))
        for pairs in groups.values():
            steps.add(self._copy(pairs))
        for send, _ in sends:
            if send.arrival.receive is not None:
                steps.add(Call(send.arrival.receive, self.ipus.graph.origin))

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Program:
        """One copy of several tensors; the same node if the same tensors are copied again."""
        key = tuple(id(tensor) for pair in pairs for tensor in pair)
        if key not in self.copies:
            sources, destinations = zip(*pairs, strict=True)
            if len(pairs) > 1:
                sources = (concat([x.reshape((x.size,)) for x in sources]),)
                destinations = (concat([x.reshape((x.size,)) for x in destinations]),)
            self.copies[key] = Copy(sources[0], destinations[0], f"{self.name}/exchange", self.ipus.graph.origin)
        return self.copies[key]

    def _result(self, number: int) -> Tensor:
        kind = self.spec.kind_of(number)
        aval = self.jaxpr.out_avals[number]
        terms = self.staged.partition.results[number]
        body = self.jaxpr.jaxpr
        if is_float0(aval):
            shape = (self.spec.micro_batches, *aval.shape) if kind == "stack" else aval.shape
            return self.ipus.graph.add_constant(np.zeros((), bool), "float0").broadcast_in_dim(shape, ())
        if kind == "carry":
            return self.states[body.invars[self.spec.states[number]]]
        ipu = self.staged.result_ipu(terms)
        accumulators = (self.accumulators[number, position] for position in range(len(terms)))
        parts = list({part.node: part for part in accumulators}.values())
        if kind not in ("mean", "sum") or (kind == "sum" and len(parts) == 1):
            return parts[0]
        local = [self.ipus.copy_to(part, ipu, self.prog) for part in parts]
        divisor = self.spec.micro_batches if kind == "mean" else None

        def total_or_mean(*parts: jax.Array) -> jax.Array:
            total = sum(parts[1:], parts[0])
            return total if divisor is None else total / jnp.asarray(divisor, total.dtype)

        return self.ipus.emit(ipu, total_or_mean, local, self.prog, f"{self.name}/result {number}")
