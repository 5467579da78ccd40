"""Several replicas as one JAX function: arrays on which replicas may disagree have a leading axis of replicas.

Input: a program prepared for one replica. Output: `ReplicatedProgram`, the same for all of them.

    program ::= (steps without meeting | meeting)…
    meeting ::= host stream | copy between replicas | collective | control with a meeting inside

Steps between two meetings are one replica's program under one `vmap`, without an axis name: a decision on which
replicas disagree then computes both branches and selects the result of each, and a loop runs until the last replica has
no iterations left. A meeting works on the arrays of all replicas; those that meet reach it together (a rule of
`verify.replicas`). Control flow around it follows replica 0 if all agree; if only those that meet do, the arrays of all
are computed while one replica is *active* in the loop or branch, and the others keep theirs. Values that are equal on
all replicas (`Divergence`) are computed once: parameters of data-parallel training, say, between the reduction of their
gradients and their next use. Where replicas are spread over processes (`runtime/host/instances.py`) the axis is of the
local ones; copies and collectives gather all of them.

Limits: with a log, the decisions of the first local replica are recorded, and each replica is traced separately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.runtime.analysis import Differing, Divergence, joins_replicas
from ipujax.runtime.engine.engine_plan import Live, steps_of
from ipujax.runtime.engine.orders import reordered
from ipujax.runtime.engine.single import EngineProgram, case_number
from ipujax.runtime.engine.values import State, Values
from ipujax.runtime.graph import (
    Branch,
    Collective,
    CrossReplicaCopy,
    HostStream,
    If,
    Loop,
    Program,
    RemoteIn,
    RemoteOut,
    RepeatWhile,
    Sequence as ProgramSequence,
    distinct,
)
from ipujax.runtime.host import HostCall, Instances
from ipujax.runtime.tensor import Orders, Tensor, Variable, read, write


class StackedValues(Values):
    """Arrays of variables; those in `stacked` have a leading axis of replicas, the others are equal on all replicas.

    Args:
        orders: as of `Values`.
        replicas: number of local replicas.
        stacked: variables whose arrays are [replicas, …].
        differing: variables on which replicas may disagree at this point of the program, by `Divergence`.
        values: the arrays.
        active: replicas that run the steps traced now, bool[replicas]; None for all.
    """

    def __init__(
        self,
        orders: Orders,
        replicas: int,
        stacked: Iterable[Variable],
        differing: Differing,
        values: Any = (),
        active: jax.Array | None = None,
    ) -> None:
        super().__init__(orders, values)
        self.replicas = replicas
        self.stacked = set(stacked)
        self.differing = dict(differing)
        self.active = active

    def __missing__(self, variable: Variable) -> jax.Array:
        assert not variable.by_replica, "a constant by replica must be among the first values"
        value = super().__missing__(variable)
        return self.broadcast(value) if variable in self.stacked else value

    def copied(self) -> StackedValues:
        return StackedValues(self.orders, self.replicas, self.stacked, self.differing, self, self.active)

    def running(self, active: jax.Array, variables: list[Variable], state: State) -> StackedValues:
        """Return a copy for steps of the active replicas, with the arrays of `state` for `variables`."""
        values = self.copied()
        values.update(zip(variables, state, strict=True))
        values.active = active
        return values

    def with_active_rows(self) -> StackedValues:
        """Return a copy in which the replicas that are not active have the arrays of one that is."""
        values = self.copied()
        if self.active is not None:
            rows = jnp.where(self.active, jnp.arange(self.replicas), jnp.argmax(self.active))
            values.update({v: self[v][rows] for v in self if v in self.stacked})
        return values

    def of_active(self, active: jax.Array, variables: list[Variable], new: State, old: State) -> State:
        """Return new arrays of active replicas, and old ones of the others."""
        return [
            jnp.where(active.reshape(-1, *(1 for _ in a.shape[1:])), a, b) if v in self.stacked else a
            for v, a, b in zip(variables, new, old, strict=True)
        ]

    def broadcast(self, value: jax.Array) -> jax.Array:
        return jnp.broadcast_to(value, (self.replicas, *value.shape))

    def stack(self, variables: Iterable[Variable]) -> None:
        """Add the axis of replicas to the variables that have none."""
        for variable in variables:
            if variable not in self.stacked:
                self[variable] = self.broadcast(self[variable])
                self.stacked.add(variable)

    def unstack(self, variables: Iterable[Variable]) -> None:
        """Remove the axis of replicas from variables that are equal on all."""
        for variable in variables:
            if variable in self.stacked:
                self.put(variable, self[variable][0], is_stacked=False)

    def put(self, variable: Variable, value: jax.Array, *, is_stacked: bool) -> None:
        """Set the array of a variable, and whether it has an axis of replicas."""
        self[variable] = value
        (self.stacked.add if is_stacked else self.stacked.discard)(variable)

    def as_carry(self, variables: list[Variable], outer: Values) -> State:
        assert isinstance(outer, StackedValues)
        return [self.broadcast(self[v]) if v in outer.stacked and v not in self.stacked else self[v] for v in variables]

    def map_replicas(self, fun: Callable[..., Any], variables: Sequence[Variable], *operands: jax.Array) -> Any:
        """Return `fun(arrays, *operands)` for all replicas; the arrays are those of `variables` of one replica."""
        axes = [0 if v in self.stacked else None for v in variables]
        mapped = jax.vmap(fun, in_axes=(axes, *(0 for _ in operands)), axis_size=self.replicas)
        return mapped([self[v] for v in variables], *operands)

    def load(self, tensor: Tensor) -> jax.Array:
        """Return the elements of a tensor, [replicas, *shape]."""
        ordered = reordered(tensor, self.orders)
        variables = ordered.variables()
        return self.map_replicas(lambda arrays: read(ordered, dict(zip(variables, arrays, strict=True))), variables)

    def store(self, tensor: Tensor, new: jax.Array) -> None:
        """Write `new`, [replicas, *shape], to the elements of a tensor."""
        ordered = reordered(tensor, self.orders)
        arrays_of = ordered.variables()

        def store_in_replica(arrays: list[jax.Array], new: jax.Array) -> list[jax.Array]:
            written = write(ordered, dict(zip(arrays_of, arrays, strict=True)), new)
            return [written[v] for v in arrays_of]

        stored = self.map_replicas(store_in_replica, arrays_of, new)
        for variable, array, value in zip(tensor.variables(), arrays_of, stored, strict=True):
            # A variable that is now equal on all replicas loses their axis.
            differs = variable in self.differing
            self.put(array, value if differs else value[0], is_stacked=differs)

    def scalars(self, tensor: Tensor) -> jax.Array:
        """Return the value of a tensor of one element on each replica, [replicas]."""
        return self.load(tensor).reshape(self.replicas)

    def scalar(self, tensor: Tensor) -> jax.Array:
        # Control flow on which all replicas agree follows replica 0.
        return self.load(tensor)[0].reshape(())


class ReplicatedProgram(EngineProgram):
    """A program of several replicas prepared for tracing.

    Args:
        single: the program prepared for one replica.
        replicas: number of replicas, of all instances.
        instances: processes among which they are shared.
    """

    def __init__(self, single: EngineProgram, replicas: int, instances: Instances) -> None:
        plan = single.plan
        outside = single.outside
        super().__init__(plan, outside)
        self._single = single
        # A log records the decisions of the first local replica; the others run without it.
        self._unlogged = EngineProgram(plan, replace(outside, log=None))
        self._all_replicas = replicas
        self._instances = instances
        self._replicas = instances.count_local(replicas)
        self._divergence = Divergence(plan.graph, plan.effects)
        # The engine keeps the array of another variable for some, see `EnginePlan.kept`: that variable → the program's.
        self._program_variable = {kept: variable for variable, kept in plan.kept.items()}
        # Arrays of these have the axis whatever `Divergence` says; values of streams have it unless broadcast.
        streams = [v for stream, v in plan.inputs.items() if not stream.broadcast] + list(plan.outputs.values())
        remote = (node.buffer.memory for node in distinct(plan.program) if isinstance(node, (RemoteIn, RemoteOut)))
        self._always_stacked = {
            *streams,
            *remote,
            *plan.graph.off_chip,
            *(v for v in plan.constants if v.by_replica),
            *(() if outside.clock is None else (outside.clock.variable,)),
        }

    def transfer_shape(self, stream: HostStream) -> tuple[int, ...]:
        return stream.shape if stream.broadcast else (self._replicas, *stream.shape)

    def values(self) -> StackedValues:
        before = self._divergence.before(self.plan.program)
        constants = {v: self._instances.take_local(x) if v.by_replica else x for v, x in super().values().items()}
        values = StackedValues(self.plan.orders, self._replicas, self._always_stacked, before, constants)
        values[self.plan.has_failed] = jnp.zeros((), bool)
        return values

    def load_values(self, arrays: Mapping[Variable, Any]) -> Values:
        values = self.values()
        for variable, array in arrays.items():
            values.put(variable, jnp.asarray(array), is_stacked=True)
        return values

    def export(self, values: Values, variables: Collection[Variable]) -> dict[Variable, jax.Array]:
        assert isinstance(values, StackedValues)
        values.stack(variables)
        return super().export(values, variables)

    def run_program(self, program: Program, values: Values, live: Live) -> None:
        """Run the parts of a program in order: values that all replicas have alike once, others for each of them.

        `values.differing` has the variables on which they may differ, at each point of the program.
        """
        assert isinstance(values, StackedValues)
        for part, live_after in self._parts(list(steps_of(program, self._is_step)), live):
            differing_after = dict(values.differing)
            self._divergence.visit(part, differing_after)
            if type(part) is ProgramSequence:
                self._run_without_meeting(part, values, live_after, differing_after)
            elif isinstance(part, Collective) and self.plan.exact_splits:
                # Round by round, as on the machine. `Divergence` knows the result of a whole collective only.
                self.run_program(ProgramSequence(*part.children()), values, live_after)
                values.unstack(v for tensor in part.outputs for v in tensor.variables() if v not in differing_after)
            else:
                if self.outside.clock is not None:
                    self.outside.clock.before(part, values)
                    self.outside.clock.settle(values)
                if isinstance(part, Branch | Loop):
                    self._stack_before(part, values, differing_after)
                else:
                    values.differing = differing_after  # by which the step stores its results
                self._step(part, values, live_after)
            values.differing = differing_after

    def _step(self, step: Program, values: Values, live: Live) -> None:
        """Run a step: copies between replicas, collectives and divergent control by rules of their own."""
        assert isinstance(values, StackedValues)
        match step:
            case CrossReplicaCopy():
                self._cross_replica_copy(step, values)
            case Collective(inputs=inputs, outputs=outputs, is_sum=True) if self._instances.count > 1:
                for source, tensor in zip(inputs, outputs, strict=True):
                    values.store(tensor, self._instances.sum(values.load(source)))
            case Collective(inputs=inputs, outputs=outputs):
                results = step.compute([self._instances.gather(values.load(tensor)) for tensor in inputs])
                for tensor, value in zip(outputs, results, strict=True):
                    values.store(tensor, self._instances.take_local(value))
            case RepeatWhile() if step in self._divergence.divergent:
                self._repeat_while_apart(step, values, live)
            case Branch() if step in self._divergence.divergent:
                self._branch_apart(step, values, live)
            case _:
                super()._step(step, values, live)

    def _is_step(self, program: Program) -> bool:
        """Return whether a sequence is one step: a collective, or a call without meeting that stays a call."""
        return isinstance(program, Collective) or (self._is_whole(program) and not joins_replicas(program))

    def _stack_before(self, control: Program, values: StackedValues, after: Differing) -> None:
        """Stack the variables that may differ at the end of a branch, or of any iteration of a loop."""
        # Arrays that a loop or branch carries have one shape from start to end.
        written = self.plan.effects(control).writes & (values.differing.keys() | after.keys())
        if isinstance(control, Loop):
            values.differing = dict(after)  # what may differ after some iterations may differ before the next
        values.stack(self.plan.array_of(v) for v in written)

    def _parts(self, steps: list[Program], live: Live) -> list[tuple[Program, Live]]:
        """Return meetings, and the steps between two as one sequence, each with the variables live after it."""
        parts: list[Program] = []
        for step in steps:
            if joins_replicas(step):
                parts.append(step)
            elif parts and type(parts[-1]) is ProgramSequence:
                parts[-1].add(step)
            else:
                parts.append(ProgramSequence(step))
        result: list[tuple[Program, Live]] = []
        for part in reversed(parts):
            result.append((part, live))
            effects = self.plan.effects(part)
            live = (live - effects.kills) | effects.reads
        return result[::-1]

    # --- steps between meetings ---

    def _run_without_meeting(self, program: Program, values: StackedValues, live: Live, after: Differing) -> None:
        """Trace steps without meeting; `after` are the variables on which replicas may disagree after them."""
        changed = self._state([program], live)
        differ = [self._program_variable.get(v, v) in after or v in self._always_stacked for v in changed]
        if self.outside.log is not None:
            # `vmap` has no rule for the ordered callbacks of a log.
            by_replica = [self._run_replica(r, program, values, live, changed) for r in range(self._replicas)]
            results = [
                jnp.stack(arrays) if d else arrays[0]
                for arrays, d in zip(zip(*by_replica, strict=True), differ, strict=True)
            ]
        else:
            variables = list(values)
            # A loop under `vmap` runs until its condition is false for all replicas. Those that are not active (another
            # branch, or no iterations left, in control around this step) could have values with which it never ends, so
            # they compute with the values of an active one; their results are dropped by the control around.
            if any(isinstance(node, RepeatWhile) for node in distinct(program)):
                values_before = values.with_active_rows()
            else:
                values_before = values

            def run_single(arrays: list[jax.Array]) -> list[jax.Array]:
                inner = Values(self.plan.orders, zip(variables, arrays, strict=True))
                self._single.run_program(program, inner, live)
                return [inner[v] for v in changed]

            # An array may have the axis of replicas although all have the same, as a copy of several values has.
            rows = values_before.map_replicas(run_single, variables)
            results = [x if d else x[0] for x, d in zip(rows, differ, strict=True)]
        for variable, value, differs in zip(changed, results, differ, strict=True):
            values.put(variable, value, is_stacked=differs)

    def _run_replica(
        self, replica: int, program: Program, values: StackedValues, live: Live, changed: list[Variable]
    ) -> list[jax.Array]:
        """Trace the steps of one replica alone; return the arrays of the variables in `changed`."""
        inner = Values(
            self.plan.orders, {v: array[replica] if v in values.stacked else array for v, array in values.items()}
        )
        before = [inner[v] for v in changed]

        def run() -> list[jax.Array]:
            (self._unlogged if replica else self._single).run_program(program, inner, live)
            return [inner[v] for v in changed]

        # Decisions of a replica that is not active are not recorded.
        return run() if replica or values.active is None else lax.cond(values.active[0], run, lambda: before)

    # --- decisions of some replicas ---

    def _repeat_while_apart(self, step: RepeatWhile, values: StackedValues, live: Live) -> None:
        """Trace a loop that replicas leave at different iterations: an iteration changes the arrays of those inside."""
        body_and_test = ProgramSequence(step.body, step.condition)
        live |= frozenset(step.predicate.variables()) | self.plan.effects(body_and_test).reads
        self.run_program(step.condition, values, live)
        self._decide(step, values)
        variables = self._state([body_and_test], live)

        def inside(inner: StackedValues) -> tuple[jax.Array, jax.Array]:
            is_true = inner.scalars(step.predicate) ^ step.until
            active = is_true if inner.active is None else is_true & inner.active
            return active, self._of_any(active)

        def iteration(state: tuple[jax.Array, jax.Array, jax.Array, State]) -> Any:
            active, _, trips, arrays = state
            inner = values.running(active, variables, arrays)
            self.run_program(body_and_test, inner, live)
            self._decide(step, inner)
            results = values.of_active(active, variables, inner.as_carry(variables, values), arrays)
            return *inside(inner), trips + active[0], results

        start = *inside(values), jnp.zeros((), jnp.int32), [values[v] for v in variables]
        *_, trips, arrays = lax.while_loop(lambda state: state[1], iteration, start)
        values.update(zip(variables, arrays, strict=True))
        self._record_outcome(step, trips, values)

    def _branch_apart(self, step: Branch, values: StackedValues, live: Live) -> None:
        """Trace the programs of a branch one after the other, each for the replicas that choose it."""
        programs = step.children()
        chosen = jax.vmap(partial(case_number, step))(values.scalars(step.decider))
        variables = self._state(programs, live)
        before = [values[v] for v in variables]
        arrays = before
        self._record_outcome(step, chosen[0] == 0 if isinstance(step, If) else chosen[0], values)
        for number, program in enumerate(programs):
            active = chosen == number
            if values.active is not None:
                active &= values.active

            def run(arrays: State, active: jax.Array = active, program: Program = program) -> State:
                # Each program begins with the values before the branch, not with those of another one.
                # What no replica has of its own, as the log of decisions, goes on.
                start = [b if v in values.stacked else a for v, a, b in zip(variables, arrays, before, strict=True)]
                inner = values.running(active, variables, start)
                self.run_program(program, inner, live)
                return values.of_active(active, variables, inner.as_carry(variables, values), arrays)

            arrays = lax.cond(self._of_any(active), run, lambda arrays: arrays, arrays)
        values.update(zip(variables, arrays, strict=True))

    def _of_any(self, active: jax.Array) -> jax.Array:
        """Return whether any replica is active, of all instances."""
        return self._instances.gather(active).any()

    def _record_outcome(self, step: Program, outcome: jax.Array, values: Values) -> None:
        if self.outside.log is None:
            return
        assert isinstance(values, StackedValues)
        is_on = True if values.active is None else values.active[0]
        self.outside.log.write(step, outcome, values, self.plan.has_failed, is_on)

    # --- meetings ---

    def _call_host(self, call: HostCall, operands: list[jax.Array], values: Values) -> list[jax.Array]:
        """Call the host for one replica after the other, in order; of several that share a call, for the first."""
        assert isinstance(values, StackedValues)
        sharing = min(call.sharing, self._replicas)
        by_call = []
        for replica in range(0, self._replicas, sharing):
            run = partial(self.outside.calls.trace_call, call, [x[replica] for x in operands])
            if values.active is None:
                results, has_failed = run()
            else:
                zeros = [jnp.zeros(shape, dtype) for shape, dtype in call.results]
                unchanged = zeros, values[self.plan.has_failed]
                results, has_failed = lax.cond(values.active[replica], run, lambda unchanged=unchanged: unchanged)
            values[self.plan.has_failed] = has_failed
            by_call.append(results)
        return [jnp.repeat(jnp.stack(arrays), sharing, 0) for arrays in zip(*by_call, strict=True)]

    def _cross_replica_copy(self, step: CrossReplicaCopy, values: Values) -> None:
        received = [self._received_one_way(copy, values) for copy in step.ways]  # all are read before any is written
        for copy, array in zip(step.ways, received, strict=True):
            values.store(copy.destination, array)

    def _received_one_way(self, step: CrossReplicaCopy, values: Values) -> jax.Array:
        """Return what each replica has in the destination of a copy one way, after it."""
        sources = step.sources(self._all_replicas)  # by destination; None for replicas that receive nothing
        sent = self._instances.gather(values.load(step.source))
        received = self._instances.take_local(sent[np.array([0 if source is None else source for source in sources])])
        if None in sources:
            receives = np.array([source is not None for source in sources])
            receives = receives.reshape(-1, *(1 for _ in step.source.shape))
            receives_here = self._instances.take_local(jnp.asarray(receives))
            received = jnp.where(receives_here, received, values.load(step.destination))
        return received
