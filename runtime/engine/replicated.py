"""Several replicas as one JAX function: what replicas may disagree on has a leading axis of them, the rest has not.

Input: a program prepared for one replica. Output: `ReplicatedProgram`, the same for all of them.

    program ::= (steps apart | meeting)…
    meeting ::= host stream | copy between replicas | collective | control with a meeting inside

Steps between two meetings are one replica's program under one `vmap`, without an axis name: decisions on which replicas
disagree then take both ways and keep what each replica chose, and loops run until the last replica is done. Meetings
work on the arrays of all; every replica reaches them (a rule of `verify.replicas`), so control around them follows
replica 0. What is the same on all replicas (`divergence`) is computed once: parameters of data-parallel training, say,
between the reduction of their gradients and their next use. Where replicas are spread over processes
(`runtime/host/instances.py`) the axis is of those that are here; copies and collectives bring all together.

Limits: with a recorder, the decisions of the first replica here are recorded, and each replica runs in code of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.analysis import Divergence, joins_replicas
from ipujax.runtime.engine.single import EngineProgram, Live, steps_of
from ipujax.runtime.engine.values import State, Values
from ipujax.runtime.graph import (
    Branch,
    Collective,
    CrossReplicaCopy,
    HostStream,
    Loop,
    Program,
    RemoteIn,
    RemoteOut,
    Sequence as ProgramSequence,
    distinct,
    iteration,
)
from ipujax.runtime.host import HostCall, Instances
from ipujax.runtime.tensor import Tensor, Variable, read, write


class StackedValues(Values):
    """Arrays of variables; those in `stacked` have a leading axis of replicas, the others are the same on all.

    Args:
        replicas: how many.
        stacked: see above.
        differing: what replicas may disagree on at this point of the program, by `divergence`.
        values: the arrays.
    """

    def __init__(
        self, replicas: int, stacked: Iterable[Variable], differing: Iterable[Variable], values: Any = ()
    ) -> None:
        super().__init__(values)
        self.replicas, self.stacked, self.differing = replicas, set(stacked), set(differing)

    def __missing__(self, variable: Variable) -> jax.Array:
        assert not variable.by_replica, "constants of replicas are there from the start"
        value = super().__missing__(variable)
        return self.of_all(value) if variable in self.stacked else value

    def copied(self) -> StackedValues:
        return StackedValues(self.replicas, self.stacked, self.differing, self)

    def of_all(self, value: jax.Array) -> jax.Array:
        """What all replicas have, once for each."""
        return jnp.broadcast_to(value, (self.replicas, *value.shape))

    def stack(self, variables: Iterable[Variable]) -> None:
        """Gives variables an axis of replicas that have none."""
        for variable in variables:
            if variable not in self.stacked:
                self[variable] = self.of_all(self[variable])
                self.stacked.add(variable)

    def keep_once(self, variables: Iterable[Variable]) -> None:
        """Takes the axis of replicas from variables that are the same on all."""
        for variable in variables:
            if variable in self.stacked:
                self.put(variable, self[variable][0], is_stacked=False)

    def put(self, variable: Variable, value: jax.Array, *, is_stacked: bool) -> None:
        """Sets the array of a variable, and whether it has an axis of replicas."""
        self[variable] = value
        (self.stacked.add if is_stacked else self.stacked.discard)(variable)

    def ending(self, variables: list[Variable], outer: Values) -> State:
        assert isinstance(outer, StackedValues)
        return [self.of_all(self[v]) if v in outer.stacked and v not in self.stacked else self[v] for v in variables]

    def mapped(
        self, fun: Callable[..., Any], variables: Sequence[Variable], *more: jax.Array, out_axes: Any = 0
    ) -> Any:
        """A function of one replica's arrays, and maybe others, applied to those of all."""
        axes = [0 if v in self.stacked else None for v in variables]
        mapped = jax.vmap(fun, in_axes=(axes, *(0 for _ in more)), out_axes=out_axes, axis_size=self.replicas)
        return mapped([self[v] for v in variables], *more)

    def load(self, tensor: Tensor) -> jax.Array:
        """The elements of a tensor in all replicas."""
        variables = tensor.variables()
        return self.mapped(lambda held: read(tensor, dict(zip(variables, held, strict=True))), variables)

    def store(self, tensor: Tensor, new: jax.Array) -> None:
        """Writes a tensor in all replicas; what is the same on all afterwards is kept once."""
        variables = tensor.variables()

        def one(held: list[jax.Array], new: jax.Array) -> list[jax.Array]:
            written = write(tensor, dict(zip(variables, held, strict=True)), new)
            return [written[v] for v in variables]

        for variable, value in zip(variables, self.mapped(one, variables, new), strict=True):
            differs = variable in self.differing
            self.put(variable, value if differs else value[0], is_stacked=differs)

    def scalar(self, tensor: Tensor) -> jax.Array:
        return self.load(tensor)[0].reshape(())


class ReplicatedProgram(EngineProgram):
    """A program of several replicas prepared for tracing.

    Args:
        alone: the program prepared for one replica, whose facts hold for all.
        replicas: how many.
        instances: processes among which they are shared.
    """

    def __init__(self, alone: EngineProgram, replicas: int, instances: Instances) -> None:
        vars(self).update(vars(alone))
        self._alone, self._all_replicas, self._instances = alone, replicas, instances
        self._replicas = instances.local(replicas)  # that are here
        self._unrecorded = copy.copy(alone)  # as `alone`, for replicas whose decisions are not recorded
        self._unrecorded._record = None
        self._divergence = Divergence(self._graph, self._effects)
        self._stood_for = {stand_in: variable for variable, stand_in in self._stands_for.items()}
        # What `divergence` knows nothing of; a stream's value has the axis unless the host gives one for all.
        streams = [v for stream, v in self._inputs.items() if not stream.broadcast] + list(self._outputs.values())
        remote = (node.buffer.memory for node in distinct(self._program) if isinstance(node, (RemoteIn, RemoteOut)))
        self._always_stacked = {
            *streams,
            *remote,
            *self._graph.off_chip,
            *(v for v in self._constants if v.by_replica),
        }

    def transfer_shape(self, stream: HostStream) -> tuple[int, ...]:
        return stream.shape if stream.broadcast else (self._replicas, *stream.shape)

    def values(self) -> StackedValues:
        before = {v for v in self._effects(self._program).reads if not v.is_constant}
        constants = {v: self._instances.own(x) if v.by_replica else x for v, x in super().values().items()}
        values = StackedValues(self._replicas, self._always_stacked, before, constants)
        values[self._has_failed] = jnp.zeros((), bool)
        return values

    def memory(self, held: Mapping[Variable, Any]) -> Values:
        values = self.values()
        for variable, array in held.items():
            values.put(variable, jnp.asarray(array), is_stacked=True)
        return values

    def held(self, values: Values, variables: Collection[Variable]) -> dict[Variable, jax.Array]:
        assert isinstance(values, StackedValues)
        values.stack(variables)
        return super().held(values, variables)

    def go(self, program: Program, values: Values, live: Live) -> None:
        assert isinstance(values, StackedValues)
        for part, live_after in self._parts(list(steps_of(program, self._is_apart)), live):
            after = set(values.differing)
            self._divergence.visit(part, after)
            if type(part) is ProgramSequence:
                self._apart(part, values, live_after, after)
            elif isinstance(part, Collective) and self._exact_splits:
                self.go(ProgramSequence(*part.children()), values, live_after)
                values.keep_once(v for tensor in part.outputs for v in tensor.variables() if v not in after)
            else:
                if isinstance(part, Branch | Loop):
                    self._settle(part, values, after)
                else:
                    values.differing = after
                self._step(part, values, live_after)
            values.differing = after

    def _step(self, step: Program, values: Values, live: Live) -> None:
        match step:
            case CrossReplicaCopy():
                self._cross_replica_copy(step, values)
            case Collective(inputs=inputs, outputs=outputs):
                results = step.compute([self._instances.all_of(values.load(tensor)) for tensor in inputs])
                for tensor, value in zip(outputs, results, strict=True):
                    values.store(tensor, self._instances.own(value))
            case _:
                super()._step(step, values, live)

    def _is_apart(self, program: Program) -> bool:
        """Whether a sequence is one step: a collective, or a call that stays one in which replicas do not meet."""
        return isinstance(program, Collective) or (self._is_whole(program) and not joins_replicas(program))

    def _settle(self, control: Program, values: StackedValues, after: set[Variable]) -> None:
        """Stacks what may differ at the end of a branch, or of any iteration of a loop, beforehand."""
        if isinstance(control, Loop):
            if control.test is not None:
                self._divergence.visit(control.test, values.differing)
            self._divergence.loop(iteration(control), values.differing)
        written = self._effects(control).writes & (values.differing | after)
        values.stack(self._stands_for.get(v, v) for v in written)

    def _parts(self, steps: list[Program], live: Live) -> list[tuple[Program, Live]]:
        """Meetings, and what lies between them as a sequence, each with what may be read after it."""
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
            effects = self._effects(part)
            live = (live - effects.kills) | effects.reads
        return result[::-1]

    # --- steps between meetings ---

    def _apart(self, program: Program, values: StackedValues, live: Live, after: set[Variable]) -> None:
        """Runs steps in which replicas do not meet."""
        changed = self._state([program], live)
        differ = [self._stood_for.get(v, v) in after or v in self._always_stacked for v in changed]
        if self._record is not None:
            ends = [self._one(r, program, values, live, changed) for r in range(self._replicas)]
            results = [
                jnp.stack(held) if d else held[0] for held, d in zip(zip(*ends, strict=True), differ, strict=True)
            ]
        else:
            variables = list(values)

            def alone(held: list[jax.Array]) -> list[jax.Array]:
                inner = Values(zip(variables, held, strict=True))
                self._alone.go(program, inner, live)
                return [inner[v] for v in changed]

            results = values.mapped(alone, variables, out_axes=[0 if d else None for d in differ])
        for variable, value, differs in zip(changed, results, differ, strict=True):
            values.put(variable, value, is_stacked=differs)

    def _one(
        self, replica: int, program: Program, values: StackedValues, live: Live, changed: list[Variable]
    ) -> list[jax.Array]:
        """What some variables hold after one replica ran steps by itself."""
        inner = Values({v: held[replica] if v in values.stacked else held for v, held in values.items()})
        (self._unrecorded if replica else self._alone).go(program, inner, live)
        return [inner[v] for v in changed]

    # --- meetings ---

    def _called(self, call: HostCall, operands: list[jax.Array], values: Values) -> list[jax.Array]:
        """Calls for one replica after the other."""
        answers = [
            super(ReplicatedProgram, self)._called(call, [x[r] for x in operands], values)
            for r in range(self._replicas)
        ]
        return [jnp.stack(each) for each in zip(*answers, strict=True)]

    def _cross_replica_copy(self, step: CrossReplicaCopy, values: Values) -> None:
        sources = step.sources(self._all_replicas)
        sent = self._instances.all_of(values.load(step.source))
        received = self._instances.own(sent[np.array([0 if source is None else source for source in sources])])
        if None in sources:
            is_new = np.array([source is not None for source in sources]).reshape(-1, *(1 for _ in step.source.shape))
            is_new_here = self._instances.own(jnp.asarray(is_new))
            received = jnp.where(is_new_here, received, values.load(step.destination))
        values.store(step.destination, received)
