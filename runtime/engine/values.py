"""Arrays of variables while a program is traced, and values of host streams, whose variables are made here.

What is outside of a traced program: the host, a log of decisions, clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ipujax.runtime.engine.decision_log import DecisionLog
from ipujax.runtime.engine.orders import reordered
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import ComputeSet, HostStream, Program, StreamIn, StreamOut, distinct
from ipujax.runtime.host import CallStream, GuardedHost, HostCalls
from ipujax.runtime.tensor import Orders, Tensor, Variable, dtype_name, read, write

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
