"""Several replicas as one JAX function: every array has a leading axis of replicas.

Input: a program prepared for one replica. Output: `ReplicatedProgram`, the same for all of them.

    program ::= (steps apart | meeting)…
    meeting ::= host stream | copy between replicas | collective | control with a meeting inside

Steps between two meetings are one replica's program under one `vmap`, without an axis name: decisions on which replicas
disagree then take both ways and keep what each replica chose, and loops run until the last replica is done. Meetings
work on the stacked arrays; all replicas come by (`rules_replicas` sees to that), so control around them follows replica
0. Constants that all replicas share, and what the host broadcasts, have no such axis until they are written to memory.

Limits: a recorder is told what replica 0 decides, and each replica then runs in code of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.divergence import meets
from ipujax.runtime.engine_program import EngineProgram, Live, Values, steps_of
from ipujax.runtime.program import (
    Collective,
    CrossReplicaCopy,
    HostStream,
    If,
    Program,
    Repeat,
    RepeatWhile,
    StreamIn,
    StreamOut,
    Switch,
)
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor, read, write
from ipujax.runtime.variable import Variable


class StackedValues(Values):
    """Arrays of variables with a leading axis of replicas, which constants and zeros have too."""

    def __init__(self, replicas: int, values: Any = ()) -> None:
        super().__init__(values)
        self._replicas = replicas

    def __missing__(self, variable: Variable) -> jax.Array:
        value = super().__missing__(variable)
        return value if variable.by_replica else jnp.broadcast_to(value, (self._replicas, *variable.shape))

    def copied(self) -> Values:
        return StackedValues(self._replicas, self)


class ReplicatedProgram(EngineProgram):
    """A program of several replicas prepared for tracing.

    Args:
        alone: the program prepared for one replica, whose facts hold for all.
        replicas: how many.
    """

    def __init__(self, alone: EngineProgram, replicas: int) -> None:
        vars(self).update(vars(alone))
        self._alone, self._replicas = alone, replicas
        self._unheard = copy.copy(alone)  # as `alone`, for replicas whose decisions nobody is told
        self._unheard._record = None
        broadcast = {variable for stream, variable in self._inputs.items() if stream.broadcast}
        self._shared = {v for v in self._constants if not v.by_replica} | broadcast | {self._has_failed}

    def transfer_shape(self, stream: HostStream) -> tuple[int, ...]:
        return stream.shape if stream.broadcast else (self._replicas, *stream.shape)

    def values(self) -> Values:
        values = StackedValues(self._replicas, super().values())
        values[self._has_failed] = jnp.zeros((), bool)
        return values

    def go(self, program: Program, values: Values, live: Live) -> None:
        for part, live_after in self._parts(list(steps_of(program, () if self._exact_splits else Collective)), live):
            if type(part) is ProgramSequence:
                self._apart(part, values, live_after)
            else:
                _MEETINGS[type(part)](self, part, values, live_after)

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

    def _apart(self, program: Program, values: Values, live: Live) -> None:
        """Runs steps in which replicas do not meet."""
        changed = self._state([program], live)
        if self._record is not None:
            ends = [self._one(r, program, values, live, changed) for r in range(self._replicas)]
            values.update({v: jnp.stack(held) for v, held in zip(changed, zip(*ends, strict=True), strict=True)})
            return
        variables = list(values)

        def alone(held: list[jax.Array]) -> list[jax.Array]:
            inner = Values(zip(variables, held, strict=True))
            self._alone.go(program, inner, live)
            return [inner[v] for v in changed]

        values.update(zip(changed, self._mapped(alone, values, variables), strict=True))

    def _one(
        self, replica: int, program: Program, values: Values, live: Live, changed: list[Variable]
    ) -> list[jax.Array]:
        """What some variables hold after one replica ran steps by itself."""
        inner = Values({v: held if v in self._shared else held[replica] for v, held in values.items()})
        (self._unheard if replica else self._alone).go(program, inner, live)
        return [inner[v] for v in changed]

    def _mapped(self, fun: Callable[..., Any], values: Values, variables: Sequence[Variable], *more: jax.Array) -> Any:
        """A function of one replica's arrays, and maybe others, applied to those of all."""
        axes = [None if v in self._shared else 0 for v in variables]
        mapped = jax.vmap(fun, in_axes=(axes, *(0 for _ in more)), axis_size=self._replicas)
        return mapped([values[v] for v in variables], *more)

    # --- meetings ---

    def _load(self, tensor: Tensor, values: Values) -> jax.Array:
        """The elements of a tensor in all replicas."""
        variables = tensor.variables()
        return self._mapped(lambda held: read(tensor, dict(zip(variables, held, strict=True))), values, variables)

    def _store(self, tensor: Tensor, values: Values, new: jax.Array) -> None:
        """Writes a tensor in all replicas."""
        variables = tensor.variables()

        def one(held: list[jax.Array], new: jax.Array) -> list[jax.Array]:
            after = write(tensor, dict(zip(variables, held, strict=True)), new)
            return [after[v] for v in variables]

        values.update(zip(variables, self._mapped(one, values, variables, new), strict=True))

    def _meet_stream_in(self, step: StreamIn, values: Values, live: Live) -> None:
        del live
        if self._host is None:
            value = values[self._inputs[step.stream]]
        else:
            value, values[self._has_failed] = self._host.pull(step.stream, self.transfer_shape(step.stream))
        if step.stream.broadcast:
            value = jnp.broadcast_to(value, (self._replicas, *value.shape))
        self._store(step.destination, values, value)

    def _meet_stream_out(self, step: StreamOut, values: Values, live: Live) -> None:
        del live
        value = self._load(step.source, values)
        if self._host is None:
            values[self._outputs[step.stream]] = value
        else:
            values[self._has_failed] = self._host.push(step.stream, value)

    def _cross_replica_copy(self, step: CrossReplicaCopy, values: Values, live: Live) -> None:
        del live
        sources = step.sources(self._replicas)
        sent = self._load(step.source, values)
        received = sent[np.array([0 if source is None else source for source in sources])]
        if None in sources:
            is_new = np.array([source is not None for source in sources]).reshape(-1, *(1 for _ in step.source.shape))
            received = jnp.where(is_new, received, self._load(step.destination, values))
        self._store(step.destination, values, received)

    def _collective(self, step: Collective, values: Values, live: Live) -> None:
        del live
        results = step.compute([self._load(tensor, values) for tensor in step.inputs])
        for tensor, value in zip(step.outputs, results, strict=True):
            self._store(tensor, values, value)

    def _decided(self, tensor: Tensor, values: Values) -> jax.Array:
        return self._load(tensor, values)[0].reshape(())


_MEETINGS: dict[type[Program], Callable[..., None]] = {
    StreamIn: ReplicatedProgram._meet_stream_in,
    StreamOut: ReplicatedProgram._meet_stream_out,
    CrossReplicaCopy: ReplicatedProgram._cross_replica_copy,
    Collective: ReplicatedProgram._collective,
    Repeat: EngineProgram._repeat,
    RepeatWhile: EngineProgram._repeat_while,
    If: EngineProgram._if,
    Switch: EngineProgram._switch,
}
