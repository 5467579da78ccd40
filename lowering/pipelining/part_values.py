"""Values that the parts of a pipeline read and hand on, while their functions are built.

    same for all micro-batches   on each IPU that reads them, copied before all tasks
    micro-batches, keys          a slice of the batch, loaded from the host, or folded, by the counter of the part
    states                       the variable of the stage that holds them
    values of other parts        a stash of the same stage, or variables where values of another stage arrive

A stash is a ring of as many slots as the schedule has micro-batches in flight there; arriving values have as many
landing variables as can be on their way at once. Input: a `StagedPipeline` and its tensors. Output: tensors on the IPU
of a part, and the `Send`s that follow each task.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from jax.random import fold_in

from ipujax.lowering.host_rows import TaskMoves, load_of_batch
from ipujax.lowering.ipus import Ipus, IpuView
from ipujax.lowering.jax_compat import Atom, Var
from ipujax.lowering.layout import map_linearly
from ipujax.lowering.pipelining.partition import TaskKind
from ipujax.lowering.pipelining.parts import StagePart
from ipujax.lowering.pipelining.staged import StagedPipeline
from ipujax.lowering.popops import (
    advance,
    advance_around,
    map_for_slicing,
    moved_for_slicing,
    new_counter,
    new_stack,
    push,
    set_aside,
    slot_of,
)
from ipujax.lowering.schedules import FORWARD
from ipujax.runtime.graph import Builder, Function, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor, Variable
from ipujax.runtime.tensor.roles import STORED

_MAX_LANDINGS = 3  # landing variables in rotation; if more values can be in transit, they wait in a ring


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A pipeline that is being lowered.

    Args:
        staged: its parts, their schedule and IPUs.
        ipus: the lowering of each IPU.
        operands: tensor of each input of a micro-batch.
    """

    staged: StagedPipeline
    ipus: Ipus
    operands: Mapping[Var, Tensor]

    @property
    def prog(self) -> ProgramSequence:
        """The program before all tasks."""
        return self.ipus.prog

    @property
    def name(self) -> str:
        """Debug name."""
        return self.staged.spec.name


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Variables that receive a value of another stage.

    Args:
        landing: variables that successive micro-batches are copied to, in rotation.
        read: variable that the part reads, copied from the micro-batch's landing variable if there are several.
        receive: function that pushes the one landing variable into a ring, if more values can be on their way.
        ring: that ring, which the part reads instead.
    """

    landing: list[Tensor]
    read: Tensor
    receive: Function | None = None
    ring: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """A value that goes to another stage after its part has run.

    Args:
        value: what is copied.
        arrival: where to.
        source_ipu: IPU of the value.
        destination_ipu: IPU of the other stage.
        reader: task of the first part that reads it there.
    """

    value: Tensor
    arrival: Arrival
    source_ipu: int
    destination_ipu: int
    reader: TaskKind


@dataclass(frozen=True, slots=True, eq=False)
class PartBuilder:
    """One part while its function is built.

    Args:
        part: the part.
        view: the view of its IPU.
        prog: program before all tasks, in which counters start.
        name: debug name.
        body: program of the function.
        counters: counters of micro-batches, by the number that they start from.
        slots: slots of micro-batches in rings, by the depth of the ring.
    """

    part: StagePart
    view: IpuView
    prog: ProgramSequence
    name: str
    body: ProgramSequence = field(default_factory=ProgramSequence)
    counters: dict[int, Tensor] = field(default_factory=dict)
    slots: dict[int, Tensor] = field(default_factory=dict)

    @property
    def ipu(self) -> int:
        """Number of its IPU."""
        return self.view.ipu

    @property
    def inside(self) -> Builder:
        """Builder of the program of the function."""
        return Builder(self.view, self.body, self.name)

    @property
    def outside(self) -> Builder:
        """Builder of the program before all tasks."""
        return Builder(self.view, self.prog, self.name)

    def counted(self) -> Tensor:
        """Number of the micro-batch that the part works on."""
        return self._counter(0, self.name)

    def counted_ahead(self) -> Tensor:
        """Number of the micro-batch after that which the part works on."""
        return self._counter(1, f"{self.name}/ahead")

    def counted_stored(self) -> Tensor:
        """Number of the micro-batch that the part has worked on, after its call."""
        return self._counter(-1, f"{self.name}/stored")

    def slot(self, depth: int) -> Tensor | None:
        """Slot of the micro-batch in a ring; None in a ring of one slot."""
        if depth == 1:
            return None
        if depth not in self.slots:
            self.slots[depth] = new_counter(Builder(self.view, self.prog, f"{self.name}/slot of {depth}"), 0)
        return self.slots[depth]

    def read_ring(self, ring: Tensor) -> Tensor:
        """Value of the micro-batch in a ring."""
        return slot_of(self.inside, ring, self.slot(ring.shape[0]))

    def count(self) -> None:
        """Counts a micro-batch, at the end of the part."""
        for counter in self.counters.values():
            advance(self.inside, counter, 1)
        for depth, slot in self.slots.items():
            advance_around(self.inside, slot, depth)

    def _counter(self, start: int, name: str) -> Tensor:
        if start not in self.counters:
            self.counters[start] = new_counter(Builder(self.view, self.prog, name), start)
        return self.counters[start]


@dataclass(frozen=True, slots=True, eq=False)
class HandedOn:
    """Values that parts hand on: in stashes to later parts of their stage, and by sends to other stages.

    Args:
        pipeline: the pipeline.
        volatile: variables that are overwritten before all readers of their value have read it, as those of states.
        sends: values that are sent after each task.
        stashes: rings, by value and stage.
        arrivals: variables for values of other stages, by value and stage.
    """

    pipeline: Pipeline
    volatile: set[Variable]
    sends: dict[TaskKind, list[Send]] = field(default_factory=dict)
    stashes: dict[tuple[Var, int], Tensor] = field(default_factory=dict)
    arrivals: dict[tuple[Var, int], Arrival] = field(default_factory=dict)

    def read(self, var: Var, builder: PartBuilder) -> Tensor:
        """A value of an earlier part, in a part that reads it."""
        key = var, builder.part.stage
        if key in self.stashes:
            return builder.read_ring(self.stashes[key])
        arrival = self.arrivals[key]
        return arrival.read if arrival.ring is None else builder.read_ring(arrival.ring)

    def kept(self, value: Tensor, builder: PartBuilder) -> Tensor:
        """A value that stays until it is copied after the part has run: set aside if its variable does not."""
        return value if self.volatile.isdisjoint(value.variables()) else set_aside(builder.inside, value)

    def stash_and_send(self, var: Var, value: Tensor, builder: PartBuilder) -> None:
        """Stashes a value that a part has computed or read for later parts of its stage, and sends it to others.

        Only the first part of a stage that has the value stashes it, and only the part that defines it sends it.
        """
        part = builder.part
        staged = self.pipeline.staged
        is_definer = staged.defining_part.get(var) is part
        later_readers = [other for other in staged.readers.get((var, part.stage), ()) if staged.is_after(other, part)]
        other_stages = (
            [stage for other, stage in staged.readers if other is var and stage != part.stage] if is_definer else []
        )
        is_first = is_definer or staged.readers[var, part.stage][0] is part  # part of its stage that has the value
        if not is_first or not (later_readers or other_stages):
            return
        map_linearly(builder.view, value)
        if later_readers:
            depth = max(staged.plan.depth(part.task, reader.task) for reader in later_readers)
            self._stash(var, value, builder, depth)
        if other_stages:
            value = self.kept(value, builder)
        for stage in other_stages:
            self._add_send(var, value, builder, staged.readers[var, stage][0])

    def _stash(self, var: Var, value: Tensor, builder: PartBuilder, depth: int) -> None:
        """Adds a ring of `depth` slots, and to the part the push of a value into it."""
        ring = new_stack(builder.outside, value, depth)
        self.stashes[var, builder.part.stage] = ring
        self._note_activations(ring, builder)
        push(builder.inside, ring, value, builder.slot(depth))

    def _add_send(self, var: Var, value: Tensor, builder: PartBuilder, reader: StagePart) -> None:
        """Adds the variables in which a value arrives at another stage, and notes that it is sent after the part.

        `reader` is the first part there that reads it.
        """
        staged = self.pipeline.staged
        ipu = staged.ipus[reader.stage]
        task = builder.part.task
        name = f"{builder.name}/to stage {staged.partition.numbers[reader.stage]}"
        receiver = PartBuilder(reader, self.pipeline.ipus.view(ipu), self.pipeline.prog, name)
        arrival = self._new_arrival(value, receiver, task)
        for variable in (*arrival.landing, arrival.read, *(() if arrival.ring is None else (arrival.ring,))):
            self._note_activations(variable, builder)
        self.volatile.update(arrival.read.variables())  # the next arrival overwrites it
        self.arrivals[var, reader.stage] = arrival
        self.sends.setdefault(task, []).append(Send(value, arrival, builder.ipu, ipu, reader.task))

    def _new_arrival(self, value: Tensor, receiver: PartBuilder, sender: TaskKind) -> Arrival:
        """Adds variables for a value that arrives from a task: as many as can be in transit, or a ring for more."""
        staged = self.pipeline.staged
        ipus = self.pipeline.ipus
        reader = receiver.part.task
        # Micro-batches whose value may have been sent and not been read. Where IPUs meet in lockstep these are those
        # between both tasks in the schedule; with buffered exchange a sender may be ahead by more.
        is_buffered = ipus.graph.target.global_exchange == "buffered"
        in_transit = staged.plan.buffers(sender, reader) if is_buffered else staged.plan.depth(sender, reader)
        count = min(in_transit, staged.spec.micro_batches)
        template = ipus.add_like(value, receiver.ipu, receiver.name)  # for its layout alone

        def new_variable() -> Tensor:
            """A variable laid out like a value read from a ring, so that parts are lowered alike under any schedule."""
            return new_stack(receiver.outside, template, 1).reshape(value.shape)

        if count <= _MAX_LANDINGS:
            landing = [new_variable() for _ in range(count)]
            return Arrival(landing, landing[0] if count == 1 else new_variable())
        # One variable to land in, from which each value is pushed to a ring at once.
        landed = new_variable()
        ring = new_stack(receiver.outside, landed, staged.plan.depth(sender, reader))
        return Arrival([landed], landed, self._receive_function(landed, ring, receiver), ring)

    def _receive_function(self, landed: Tensor, ring: Tensor, receiver: PartBuilder) -> Function:
        """The function that pushes a landed value into a ring, called after each copy to `landed`."""
        # It counts micro-batches by itself: it runs when values land, not when the receiving part does.
        pushing = PartBuilder(receiver.part, receiver.view, receiver.prog, f"{receiver.name}/receive")
        slot = pushing.slot(ring.shape[0])
        push(pushing.inside, ring, landed, slot)
        pushing.count()
        return self.pipeline.ipus.graph.add_function(pushing.body, pushing.name)

    def _note_activations(self, tensor: Tensor, builder: PartBuilder) -> None:
        """Gives the role of activations to a value that a forward part hands on in training."""
        if self.pipeline.staged.partition.training and builder.part.task.kind == FORWARD:
            self.pipeline.ipus.graph.note_role(tensor, STORED)


@dataclass(frozen=True, slots=True, eq=False)
class PartInputs:
    """Values that parts read, each on the IPU of the part.

    Args:
        pipeline: the pipeline.
        same: values that are the same for all micro-batches, on any IPU.
        viewed: (variable, IPU) for variables of these that an IPU reads as several views.
        states: variable of each state.
        handed: values of earlier parts.
        moves: gets the loads of micro-batches from the host.
        copies: copies of `viewed` variables on other IPUs.
        stacks: batches on chip, on the IPUs of stages that read them.
    """

    pipeline: Pipeline
    same: Mapping[Var, Tensor]
    viewed: Collection[tuple[Variable, int]]
    states: Mapping[Var, Tensor]
    handed: HandedOn
    moves: TaskMoves[TaskKind]
    copies: dict[tuple[Variable, int], Variable] = field(default_factory=dict)
    stacks: dict[tuple[Var, int], Tensor] = field(default_factory=dict)

    def read(self, var: Var, builder: PartBuilder, in_groups: bool = False) -> Tensor:
        """A value on the IPU of a part that reads it.

        Args:
            var: an input of the micro-batch, or a value of an earlier part.
            builder: the part.
            in_groups: whether a micro-batch from the host is stored with its columns in groups.
        """
        staged = self.pipeline.staged
        role = staged.roles.get(var)
        if var in self.same:
            return self._same_on(self.same[var], builder.ipu)
        if role == "batch" and var not in staged.streamed:  # all micro-batches are on chip
            return slot_of(builder.inside, self._stack(var, builder), builder.counted())
        # The first part of a stage that reads a micro-batch loads it, and stashes it for later ones.
        if role == "batch" and (var, builder.part.stage) not in self.handed.stashes:
            return self._load(var, builder, in_groups)
        if role == "key":
            key = self.pipeline.ipus.copy_to(self.pipeline.operands[var], builder.ipu)
            return self.pipeline.ipus.emit(builder.ipu, fold_in, [key, builder.counted()], builder.body, builder.name)
        return self.states[var] if var in staged.states_of(builder.part) else self.handed.read(var, builder)

    def value(self, atom: Atom, env: Mapping[Var, Tensor], builder: PartBuilder) -> Tensor:
        """The value of a result in a part: one that it has computed or read, or else an input."""
        if not isinstance(atom, Var):
            return self.pipeline.ipus.lowering(builder.ipu).read({}, atom)
        return env[atom] if atom in env else self.read(atom, builder)

    def hand_on(self, var: Var, value: Tensor, builder: PartBuilder) -> None:
        """Hands a value on to other parts that read it, unless they read it from outside themselves."""
        staged = self.pipeline.staged
        is_from_outside = staged.roles.get(var) in ("batch", "key") and var not in staged.streamed
        if var not in self.same and not is_from_outside:
            self.handed.stash_and_send(var, value, builder)

    def _same_on(self, value: Tensor, ipu: int) -> Tensor:
        """A value that is the same for all micro-batches on an IPU that reads it: it is copied there, once.

        Of a variable of which the IPU reads several views (`viewed`), all of it is copied, for the views to share.
        """
        ipus = self.pipeline.ipus
        for variable in value.variables():
            is_foreign = ipus.variable_ipu(variable) not in (None, ipu) and not variable.is_constant
            if is_foreign and (variable, ipu) in self.viewed and (variable, ipu) not in self.copies:
                (self.copies[variable, ipu],) = ipus.copy_to(Tensor.of(variable), ipu).variables()
        return ipus.copy_to(value, ipu, self.copies)

    def _stack(self, var: Var, builder: PartBuilder) -> Tensor:
        """A batch on an IPU that reads it, [micro-batches, *shape], spread so that each micro-batch is on all tiles."""
        ipu = builder.ipu
        if (var, ipu) not in self.stacks:
            batch = self.pipeline.operands[var]
            count = self.pipeline.staged.spec.micro_batches
            stack = batch.reshape((count, batch.shape[0] // count, *batch.shape[1:]))
            local = self.pipeline.ipus.copy_to(stack, ipu)
            # Before the loop over micro-batches: an unmapped batch is mapped such that slices do not move, one with
            # another mapping is copied to such a one.
            map_for_slicing(builder.view, local, (0,))
            outside = Builder(builder.view, self.pipeline.prog, self.pipeline.name)
            self.stacks[var, ipu] = moved_for_slicing(outside, local)
        return self.stacks[var, ipu]

    def _load(self, var: Var, builder: PartBuilder, in_groups: bool) -> Tensor:
        """A micro-batch, loaded from the host before the first part of a stage that reads it."""
        batch = self.pipeline.operands[var]
        numbers = builder.counted(), builder.counted_ahead
        move = load_of_batch(builder.view, f"{builder.name}/batch", batch, in_groups, *numbers)
        self.moves.loads.setdefault(builder.part.task, []).append(move)
        return move.row
