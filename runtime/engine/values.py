"""Arrays of variables while a program is traced, and all outside that it uses: the host, a log of decisions, clocks.

Variables for values of host streams are made here. A call of the host for each decision of data-dependent control would
take about 0.1 ms: `DecisionLog` writes rows of a node and its outcome to an array instead, which the host takes when it
is full, and at the end of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from ipujax.runtime.engine.orders import reordered
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import ComputeSet, HostStream, Program, StreamIn, StreamOut, distinct
from ipujax.runtime.host import CallStream, GuardedHost, HostCalls
from ipujax.runtime.tensor import Orders, Tensor, Variable, dtype_name, read, write

Arrays = MutableMapping[Variable, jax.Array]
_ROWS = 4096  # 32 KiB; a call of the host for so many rows takes no time


class DecisionLog:
    """Decisions of the runs of programs that are traced with it.

    Args:
        most_decisions: number after which a run ends, with results that mean nothing; None for no limit.

    Attributes:
        rows, count: variables for rows that the host has not taken, int32[rows, 2], and their number, int32[].
    """

    def __init__(self, most_decisions: int | None = None) -> None:
        self.rows = Variable((_ROWS, 2), jnp.dtype(jnp.int32), "decisions")
        self.count = Variable((), jnp.dtype(jnp.int32), "number of decisions")
        self._most_decisions = most_decisions
        self._nodes: dict[Program, int] = {}
        self._total = 0
        self._decisions: dict[Program, list[int]] = {}

    @property
    def decisions(self) -> dict[Program, list[int]]:
        """Trip count of each run of a loop, 1 or 0 of an `If`, case of a `Switch` (number of cases for its default)."""
        jax.effects_barrier()  # they arrive by callbacks, which may run after the results are ready
        return self._decisions

    def clear(self) -> None:
        """Forget all decisions."""
        self._decisions = {}
        self._total = 0

    def write(self, node: Program, outcome: jax.Array, values: Arrays, has_failed: Variable, is_on: Any = True) -> None:
        """Trace the decision of a node.

        Args:
            node: the node.
            outcome: int32[] or bool[].
            values: hold the rows, which change, and `has_failed`, which ends loops.
            has_failed: variable of `EnginePlan`.
            is_on: bool[], whether the decision counts.
        """
        number = self._nodes.setdefault(node, len(self._nodes))
        row = jnp.stack([jnp.int32(number), outcome.astype(jnp.int32)])
        rows = values[self.rows].at[values[self.count]].set(row)
        count = values[self.count] + jnp.asarray(is_on, jnp.int32)
        state = jax.lax.cond(count == _ROWS, self._sent, lambda *state: state, rows, count, values[has_failed])
        values.update(zip((self.rows, self.count, has_failed), state, strict=True))

    def end(self, values: Arrays) -> None:
        """Trace the end of a run."""
        self._sent(values[self.rows], values[self.count], jnp.zeros((), bool))

    def _sent(self, rows: jax.Array, count: jax.Array, has_failed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        is_over = io_callback(self._take, jax.ShapeDtypeStruct((), bool), rows, count, ordered=True)
        return rows, jnp.zeros_like(count), has_failed | is_over

    def _take(self, rows: Any, count: Any) -> np.ndarray:
        """Add rows to the decisions; return whether the run should end."""
        decisions = np.asarray(rows)[: int(count)]
        self._total += len(decisions)
        nodes = list(self._nodes)
        for number in np.unique(decisions[:, 0]).tolist():
            outcomes = decisions[decisions[:, 0] == number, 1].tolist()
            self._decisions.setdefault(nodes[number], []).extend(outcomes)
        return np.asarray(self._most_decisions is not None and self._total > self._most_decisions)


State = list[jax.Array]


class Values(dict[Variable, jax.Array]):
    """Arrays of variables. Until it is written, a variable has its constant, or zeros.

    Args:
        orders: orders of the arrays that are not row-major; their keys here are `ElementOrder.array`.
        arrays: the arrays.
    """

    def __init__(self, orders: Orders, arrays: Mapping[Variable, jax.Array] | Iterable[Any] = ()) -> None:
        super().__init__(arrays)
        self.orders = orders

    def __contains__(self, variable: object) -> bool:
        return isinstance(variable, Variable)

    def __missing__(self, variable: Variable) -> jax.Array:
        if variable.value is not None:
            return jnp.asarray(variable.value)
        return jnp.zeros(variable.shape, variable.dtype)

    def copied(self) -> Values:
        """Return a copy; the arrays themselves are shared, since JAX never changes them."""
        return Values(self.orders, self)

    def as_carry(self, variables: list[Variable], outer: Values) -> State:
        """Return the arrays of variables at the end of a loop body or branch, in the shapes they have in `outer`."""
        del outer
        return [self[v] for v in variables]

    def load(self, tensor: Tensor) -> jax.Array:
        """Return the elements of a tensor."""
        return read(reordered(tensor, self.orders), self)

    def store(self, tensor: Tensor, new: jax.Array) -> None:
        """Write `new` to the elements of a tensor."""
        self.update(write(reordered(tensor, self.orders), self, new))

    def scalar(self, tensor: Tensor) -> jax.Array:
        """Return the value of a tensor of one element, which control flow depends on."""
        return self.load(tensor).reshape(())

    def broadcast(self, value: jax.Array) -> jax.Array:
        """Return a value that is the same in all replicas, with the axis of replicas if there is one."""
        return value

    def with_state(self, variables: list[Variable], state: State) -> Values:
        """Return a copy with the arrays of `state` for `variables`."""
        values = self.copied()
        values.update(zip(variables, state, strict=True))
        return values


def stream_variables(program: Program, kind: type[StreamIn] | type[StreamOut]) -> dict[HostStream, Variable]:
    """Return a variable for each stream of a kind of node, in the order of the nodes."""
    nodes = (node for node in distinct(program) if isinstance(node, kind) and not is_call(node))
    streams = dict.fromkeys(node.stream for node in nodes)
    return {stream: Variable(stream.shape, stream.dtype, stream.name) for stream in streams}


def is_call(node: StreamIn | StreamOut) -> bool:
    """Return whether a node moves an operand or a result of a Python function."""
    return isinstance(node.stream, CallStream)


def check_input(stream: HostStream, inputs: Mapping[HostStream, Any], shape: tuple[int, ...]) -> jax.Array:
    """Return the value of a stream; refuse a missing one, or another shape or dtype than those of a transfer."""
    expected = f"{dtype_name(stream.dtype)}{list(shape)}"
    if stream not in inputs:
        raise ArgumentError(f"stream {stream.name} has no value", expected=expected)
    value = jnp.asarray(inputs[stream])
    if value.shape != shape or value.dtype != stream.dtype:
        got = f"{dtype_name(value.dtype)}{list(value.shape)}"
        raise ArgumentError(f"value of stream {stream.name} has the wrong shape or dtype", expected=expected, got=got)
    return value


class StepClock(Protocol):
    """Clocks that are traced with a program, see `timeline.cycle_counter`."""

    variable: Variable
    readings: frozenset[ComputeSet]

    def before(self, step: Program, arrays: Values) -> None: ...

    def decide(self, loop: Program, arrays: Values) -> None: ...

    def settle(self, arrays: Values) -> None: ...

    def write_counts(self, compute_set: ComputeSet, arrays: Values) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """The host and the devices that a traced program exchanges values with.

    Args:
        log: takes the decisions of data-dependent control, see `engine_function`.
        host: answers transfers as they happen; without it a stream has one value a run.
        calls: calls the host's functions.
        clock: clocks that codelets read; without it those codelets read zeros.
    """

    log: DecisionLog | None = None
    host: GuardedHost | None = None
    calls: HostCalls = field(default_factory=lambda: HostCalls(guarded=False))
    clock: StepClock | None = None
