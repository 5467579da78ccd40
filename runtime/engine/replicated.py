"""Several replicas as one JAX function: what replicas may disagree on has a leading axis of them, the rest has not.

Input: a program prepared for one replica. Output: `ReplicatedProgram`, the same for all of them.

    program ::= (steps apart | meeting)…
    meeting ::= host stream | copy between replicas | collective | control with a meeting inside

Steps between two meetings are one replica's program under one `vmap`, without an axis name: decisions on which replicas
disagree then take both ways and keep what each replica chose, and loops run until the last replica is done. Meetings
work on the arrays of all; every replica comes by (`verify.replicas` sees to that), so control around them follows
replica 0. What is the same on all replicas (`divergence`) is computed once: parameters of data-parallel training, say,
between the reduction of their gradients and their next use. Where replicas are spread over processes
(`runtime/host/instances.py`) the axis is of those that are here; copies and collectives bring all together.

Limits: a recorder is told what the first replica here decides, and each replica then runs in code of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.analysis import Divergence, meets
from ipujax.runtime.engine.single import EngineProgram, Live, State, Values, steps_of
from ipujax.runtime.graph import (
    Collective,
    CrossReplicaCopy,
    HostStream,
    If,
    Program,
    RemoteIn,
    RemoteOut,
    Repeat,
    RepeatWhile,
    Sequence as ProgramSequence,
    StreamIn,
    StreamOut,
    Switch,
    distinct,
)
from ipujax.runtime.host import CallStream, HostCall, Instances
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
        self._unheard = copy.copy(alone)  # as `alone`, for replicas whose decisions nobody is told
        self._unheard._record = None
        self._divergence = Divergence(self._graph, self._effects)
        self._stood_for = {stand_in: variable for variable, stand_in in self._stands_for.items()}
        # What `divergence` knows nothing of; a stream's value has the axis unless the host gives one for all.
        streams = [v for stream, v in self._inputs.items() if not stream.broadcast] + list(self._outputs.values())
        remote = (node.buffer.memory for node in distinct(self._program) if isinstance(node, (RemoteIn, RemoteOut)))
        self._always_stacked = {*streams, *remote, *(v for v in self._constants if v.by_replica)}

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
            elif isinstance(part, (If, Switch, Repeat, RepeatWhile)):
                self._settle(part, values, after)
                _CONTROL[type(part)](self, part, values, live_after)
            else:
                _TRANSFERS[type(part)](self, part, values, after)
            values.differing = after

    def _is_apart(self, program: Program) -> bool:
        """Whether a sequence is one step: a collective, or a call that stays one in which replicas do not meet."""
        return isinstance(program, Collective) or (self._is_whole(program) and not meets(program))

    def _settle(self, control: Program, values: StackedValues, after: set[Variable]) -> None:
        """Gives what may differ at the end of a branch, or of any turn of a loop, the axis of replicas beforehand."""
        match control:
            case Repeat(_, body):
                self._divergence.loop(body, values.differing)
            case RepeatWhile(condition, _, body):
                self._divergence.visit(condition, values.differing)
                self._divergence.loop(ProgramSequence(body, condition), values.differing)
        written = self._effects(control).writes & (values.differing | after)
        values.stack(self._stands_for.get(v, v) for v in written)

    def _parts(self, steps: list[Program], live: Live) -> list[tuple[Program, Live]]:
        """Meetings, and what lies between them as a sequence, each with what may be read after it."""
        parts: list[Program] = []
        for step in steps:
            if meets(step):
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

            results = self._mapped(alone, values, variables, out_axes=[0 if d else None for d in differ])
        for variable, value, differs in zip(changed, results, differ, strict=True):
            values.put(variable, value, is_stacked=differs)

    def _one(
        self, replica: int, program: Program, values: StackedValues, live: Live, changed: list[Variable]
    ) -> list[jax.Array]:
        """What some variables hold after one replica ran steps by itself."""
        inner = Values({v: held[replica] if v in values.stacked else held for v, held in values.items()})
        (self._unheard if replica else self._alone).go(program, inner, live)
        return [inner[v] for v in changed]

    def _mapped(
        self,
        fun: Callable[..., Any],
        values: StackedValues,
        variables: Sequence[Variable],
        *more: jax.Array,
        out_axes: Any = 0,
    ) -> Any:
        """A function of one replica's arrays, and maybe others, applied to those of all."""
        axes = [0 if v in values.stacked else None for v in variables]
        mapped = jax.vmap(fun, in_axes=(axes, *(0 for _ in more)), out_axes=out_axes, axis_size=self._replicas)
        return mapped([values[v] for v in variables], *more)

    # --- meetings ---

    def _load(self, tensor: Tensor, values: StackedValues) -> jax.Array:
        """The elements of a tensor in all replicas."""
        variables = tensor.variables()

        def one(held: list[jax.Array]) -> jax.Array:
            return read(tensor, dict(zip(variables, held, strict=True)))

        return self._mapped(one, values, variables)

    def _store(self, tensor: Tensor, values: StackedValues, new: jax.Array, after: set[Variable]) -> None:
        """Writes a tensor in all replicas; what is the same on all afterwards is kept once."""
        variables = tensor.variables()

        def one(held: list[jax.Array], new: jax.Array) -> list[jax.Array]:
            written = write(tensor, dict(zip(variables, held, strict=True)), new)
            return [written[v] for v in variables]

        for variable, value in zip(variables, self._mapped(one, values, variables, new), strict=True):
            differs = variable in after
            values.put(variable, value if differs else value[0], is_stacked=differs)

    def _meet_stream_in(self, step: StreamIn, values: StackedValues, after: set[Variable]) -> None:
        if isinstance(step.stream, CallStream) and step.stream.call is not None:
            value = jnp.stack([answers[step.stream.number] for answers in self._answers[step.stream.call]])
        elif self._host is None:
            value = values[self._inputs[step.stream]]
        else:
            value, values[self._has_failed] = self._host.pull(step.stream, self.transfer_shape(step.stream))
        self._store(step.destination, values, values.of_all(value) if step.stream.broadcast else value, after)

    def _meet_stream_out(self, step: StreamOut, values: StackedValues, after: set[Variable]) -> None:
        del after
        value = self._load(step.source, values)
        if isinstance(step.stream, CallStream) and step.stream.call is not None:
            self._operand(step.stream.call, value, values)
        elif self._host is None:
            values[self._outputs[step.stream]] = value
        else:
            values[self._has_failed] = self._host.push(step.stream, value)

    def _operand(self, call: HostCall, value: jax.Array, values: Values) -> None:
        """Takes the next operand of a call, and makes it for one replica after the other with the last one."""
        arrived = self._arrived.setdefault(call, [])
        arrived.append(value)
        if len(arrived) == call.num_operands:
            self._answers[call] = []
            for replica in range(self._replicas):
                answers, values[self._has_failed] = self._calls.traced(call, [x[replica] for x in arrived])
                self._answers[call].append(answers)
            del self._arrived[call]

    def _cross_replica_copy(self, step: CrossReplicaCopy, values: StackedValues, after: set[Variable]) -> None:
        sources = step.sources(self._all_replicas)
        sent = self._instances.all_of(self._load(step.source, values))
        received = self._instances.own(sent[np.array([0 if source is None else source for source in sources])])
        if None in sources:
            is_new = np.array([source is not None for source in sources]).reshape(-1, *(1 for _ in step.source.shape))
            is_new_here = self._instances.own(jnp.asarray(is_new))
            received = jnp.where(is_new_here, received, self._load(step.destination, values))
        self._store(step.destination, values, received, after)

    def _collective(self, step: Collective, values: StackedValues, after: set[Variable]) -> None:
        results = step.compute([self._instances.all_of(self._load(tensor, values)) for tensor in step.inputs])
        for tensor, value in zip(step.outputs, results, strict=True):
            self._store(tensor, values, self._instances.own(value), after)

    def _decided(self, tensor: Tensor, values: Values) -> jax.Array:
        assert isinstance(values, StackedValues)
        return self._load(tensor, values)[0].reshape(())


_TRANSFERS: dict[type[Program], Callable[..., None]] = {
    StreamIn: ReplicatedProgram._meet_stream_in,
    StreamOut: ReplicatedProgram._meet_stream_out,
    CrossReplicaCopy: ReplicatedProgram._cross_replica_copy,
    Collective: ReplicatedProgram._collective,
}
_CONTROL: dict[type[Program], Callable[..., None]] = {
    Repeat: EngineProgram._repeat,
    RepeatWhile: EngineProgram._repeat_while,
    If: EngineProgram._if,
    Switch: EngineProgram._switch,
}
