"""One replica's program in a trace: each step as a function of the arrays of variables.

Input: an `EnginePlan`. Output: `EngineProgram`, which runs steps on `Values` in a trace.

Control flow becomes `lax.scan`, `while_loop`, `cond` and `switch`. Only variables that are written inside and read
later pass through them: XLA then updates a loop's buffers in place, and copies no array that a branch does not write. A
function that is called in a loop and around it, as the parts of a pipeline are, stays a function: XLA inlines none of
its calls, and compiles it once (measured: half of the compile time for pipelines of four small stages, the same time a
step). Others are inlined: layers in a row took longer otherwise.

Limits: see `runtime/engine/engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from ipujax.runtime.engine.collapse import computed_once
from ipujax.runtime.engine.engine_plan import EnginePlan, Live, constants_of, steps_of
from ipujax.runtime.engine.split import run_group, store_blocks
from ipujax.runtime.engine.values import Outside, State, Values, check_input, is_call
from ipujax.runtime.graph import (
    Branch,
    Call,
    Copy,
    Decision,
    Execute,
    Function,
    HostStream,
    If,
    Program,
    RemoteIn,
    RemoteOut,
    Repeat,
    RepeatWhile,
    Sequence,
    StreamIn,
    StreamOut,
    Switch,
    Sync,
    Wait,
    WholeOperation,
    WriteUndef,
    distinct,
)
from ipujax.runtime.host import CallStream, HostCall
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.tensor import Tensor, Variable

Streams = dict[HostStream, jax.Array]
_MAX_SCAN = (1 << 31) - 1  # iterations of one `lax.scan`, which counts in int32


@dataclass(frozen=True, slots=True)
class _TracedFunction:
    """A step or function of the program as a function of JAX.

    Args:
        live: variables that it writes and that may be read after it.
        operands: variables whose arrays it takes.
        results: variables whose arrays it returns.
        run: the function, from arrays to arrays.
    """

    live: Live
    operands: list[Variable]
    results: list[Variable]
    run: Callable[[State], State]


class _LoopCarry(NamedTuple):
    """Carry of a `while_loop`.

    Args:
        continues: whether there is another iteration, bool[].
        trips: iterations so far, int32[].
        state: arrays of the variables that the loop changes.
    """

    continues: jax.Array
    trips: jax.Array
    state: State


class EngineProgram:
    """A program prepared for tracing.

    Args:
        plan: all that does not depend on the arrays of a run.
        outside: what the program talks to.
    """

    def __init__(self, plan: EnginePlan, outside: Outside) -> None:
        self.plan = plan
        self.outside = outside
        # Operands wait for the last one of their call, results for their stream: all within one sequence.
        self._call_operands: dict[HostCall, list[jax.Array]] = {}
        self._call_results: dict[HostCall, Any] = {}
        self._side_states: dict[Program, list[Variable]] = {}
        self._functions: dict[Function, list[_TracedFunction]] = {}

    def run(self, inputs: Mapping[HostStream, Any]) -> Streams:
        """Trace the whole program; inputs and results as of `engine_function`."""
        values = self.values()
        for stream, variable in self.plan.inputs.items():
            values[variable] = check_input(stream, inputs, self.transfer_shape(stream))
        remote = self.plan.graph.off_chip.values()
        for buffer in remote:
            if (source := buffer.filled_from) is not None:
                value = check_input(source, inputs, self.transfer_shape(source))
                value = values.broadcast(value) if source.broadcast else value
                values[buffer.memory] = self._reshaped(value, source.shape, buffer.memory.shape)
        self.run_program(self.plan.program, values, frozenset())
        self.end(values)
        sent = {stream: values[variable] for stream, variable in self.plan.outputs.items()}
        read = {buffer.read_into: buffer.memory for buffer in remote if buffer.read_into is not None}
        return sent | {
            stream: self._reshaped(values[memory], memory.shape, stream.shape) for stream, memory in read.items()
        }

    @staticmethod
    def _reshaped(value: jax.Array, shape: tuple[int, ...], new_shape: tuple[int, ...]) -> jax.Array:
        """Return a value with its last dimensions, those of `shape`, reshaped; replicas may come before them."""
        outer = value.shape[: value.ndim - len(shape)]
        return value if shape == new_shape else value.reshape((*outer, *new_shape))

    def transfer_shape(self, stream: HostStream) -> tuple[int, ...]:
        """Return the shape of one transfer of a stream."""
        return stream.shape

    def load_values(self, arrays: Mapping[Variable, Any]) -> Values:
        """Return the values before a run: constants, and the arrays given."""
        values = self.values()
        values.update({variable: jnp.asarray(array) for variable, array in arrays.items()})
        return values

    def export(self, values: Values, variables: Collection[Variable]) -> dict[Variable, jax.Array]:
        """Return the arrays of variables after a run, in the shapes that `load_values` takes."""
        return {variable: values[variable] for variable in variables}

    def values(self) -> Values:
        """Return the values of constants alone."""
        # Arrays are made here once, outside of all control flow.
        return Values(self.plan.orders, {v: jnp.asarray(v.value) for v in self.plan.constants})

    def run_program(self, program: Program, values: Values, live: Live) -> None:
        """Trace a program on `values`, which change; `live` are the variables that may be read after it."""
        steps = list(steps_of(program, self._is_whole))
        for step, live_after in zip(steps, self.plan.live_after(steps, live), strict=True):
            if self.outside.clock is not None:
                self.outside.clock.before(step, values)
            self._step(step, values, live_after)
        if self.outside.clock is not None:
            self.outside.clock.settle(values)

    def end(self, values: Values) -> None:
        """Trace what follows the last step of a run."""
        if self.outside.log is not None:
            self.outside.log.end(values)

    def _is_whole(self, program: Program) -> bool:
        """Return whether a program is one step: a whole operation, or a call that stays a call."""
        if isinstance(program, WholeOperation):
            return not self.plan.exact_splits and self.outside.log is None and self.outside.clock is None
        # Calls with transfers that a host answers, or that write off the tiles, are inlined.
        stays = isinstance(program, Call) and program.function in self.plan.called_around
        return stays and self.outside.log is None and not self._side_state(program)

    def _state(self, programs: Collection[Program], live: Live) -> list[Variable]:
        """Return the variables that programs write and that may be read later, in a fixed order."""
        written = frozenset().union(*(self.plan.effects(program).writes for program in programs)) & live
        variables = [self.plan.array_of(v) for v in self.plan.in_order(written)]
        return list(dict.fromkeys([*variables, *(v for program in programs for v in self._side_state(program))]))

    def _side_state(self, program: Program) -> list[Variable]:
        """Return the variables for output streams, off-chip memory, a failed host and a log that a program changes."""
        if program not in self._side_states:
            variables: dict[Variable, None] = {}  # an ordered set
            for node in distinct(program):
                if isinstance(node, RemoteOut):
                    variables[node.buffer.memory] = None
                elif isinstance(node, (StreamIn, StreamOut)) and (self.outside.host is not None or is_call(node)):
                    variables[self.plan.has_failed] = None
                elif isinstance(node, StreamOut):
                    variables[self.plan.outputs[node.stream]] = None
                elif isinstance(node, Decision) and self.outside.log is not None:
                    variables |= dict.fromkeys((self.outside.log.rows, self.outside.log.count, self.plan.has_failed))
            if self.outside.clock is not None:
                variables[self.outside.clock.variable] = None
            self._side_states[program] = list(variables)
        return self._side_states[program]

    def _step(self, step: Program, values: Values, live: Live) -> None:
        """Trace one step on `values`, which change; `live` are the variables that may be read after it."""
        match step:
            case Execute() | Copy():
                self._move_or_compute(step, values)
                for variable in self.plan.effects(step).kills & self.plan.compared:
                    array = self.plan.array_of(variable)
                    values[array] = computed_once(values[array])
            case WriteUndef(destination):
                if destination.is_whole_variable:
                    (variable,) = destination.variables()
                    # Without an array the variable reads as zeros, and XLA need not keep the old value.
                    values.pop(self.plan.array_of(variable), None)
            case StreamIn(stream, destination):
                value = self._receive(stream, values)
                values.store(destination, values.broadcast(value) if stream.broadcast else value)
            case StreamOut(source, stream):
                self._send(stream, values.load(source), values)
            case RemoteIn(buffer, destination, offset):
                rows = values[buffer.memory]
                if offset is not None:
                    rows = rows.at[_row_numbers(offset, values)].get(mode="fill", fill_value=0)
                values.store(destination, rows)
            case RemoteOut(source, buffer, offset):
                rows = values.load(source)
                if offset is not None:
                    rows = values[buffer.memory].at[_row_numbers(offset, values)].set(rows, mode="drop")
                values[buffer.memory] = rows
            case Sync() | Wait():
                pass  # a trace keeps the order of steps
            case Call():
                self._call(step, values, live)
            case WholeOperation(inputs=inputs, outputs=outputs):
                results = step.compute([values.load(tensor) for tensor in inputs])
                for tensor, result in zip(outputs, results, strict=True):
                    values.store(tensor, result)
            case Repeat():
                self._repeat(step, values, live)
            case RepeatWhile():
                self._repeat_while(step, values, live)
            case If(predicate, then, otherwise):
                outcome = values.scalar(predicate)
                self._branch(step, outcome, lax.cond, (then, otherwise), values, live)
            case Switch(selector, cases, default):
                number = case_number(step, values.scalar(selector))
                programs = (*cases, default)
                self._branch(step, number, lambda number, *runs: lax.switch(number, runs), programs, values, live)
            case _:
                raise AssertionError(f"unknown program node {step!r}")

    def _move_or_compute(self, step: Execute | Copy, values: Values) -> None:
        """Copy a tensor, or run the vertex groups of a compute set, or write a reading of the clock in their place."""
        if isinstance(step, Copy):
            values.store(step.destination, values.load(step.source))
            return
        clock = self.outside.clock
        if clock is not None and step.compute_set in clock.readings:
            clock.write_counts(step.compute_set, values)
            return
        groups = [self.plan.groups[group] for group in self.plan.graph.groups[step.compute_set]]
        # A list: all groups read before any of them writes.
        for written in [w for group, vertices in groups for w in run_group(group, vertices, values)]:
            store_blocks(written, values)

    def _receive(self, stream: HostStream, values: Values) -> jax.Array:
        """Return the next value of a stream to the device."""
        if isinstance(stream, CallStream) and stream.call is not None:
            return self._call_results[stream.call][stream.number]
        if self.outside.host is None:
            return values[self.plan.inputs[stream]]
        value, values[self.plan.has_failed] = self.outside.host.pull(stream, self.transfer_shape(stream))
        return value

    def _send(self, stream: HostStream, value: jax.Array, values: Values) -> None:
        """Send the next value of a stream to the host; the last operand of a call makes the call."""
        if isinstance(stream, CallStream) and (call := stream.call) is not None:
            operands = self._call_operands.setdefault(call, [])
            operands.append(value)
            if len(operands) == call.num_operands:
                self._call_results[call] = self._call_host(call, self._call_operands.pop(call), values)
        elif self.outside.host is None:
            values[self.plan.outputs[stream]] = value
        else:
            values[self.plan.has_failed] = self.outside.host.push(stream, value)

    def _call_host(self, call: HostCall, operands: list[jax.Array], values: Values) -> Any:
        results, values[self.plan.has_failed] = self.outside.calls.trace_call(call, operands)
        return results

    def _call(self, step: Call, values: Values, live: Live) -> None:
        """Trace a call as one of a function that XLA does not inline."""
        live = self.plan.effects(step).writes & live
        functions = self._functions.setdefault(step.function, [])
        # A function that returns more than this call needs serves as well.
        function = next((function for function in functions if live <= function.live), None)
        if function is None:
            function = self._make_function(step, live)
            functions.append(function)
        with set_xla_metadata(inlineable="false"):
            state = function.run([values[v] for v in function.operands])
        values.update(zip(function.results, state, strict=True))

    def _make_function(self, step: Call, live: Live) -> _TracedFunction:
        """Return a call as a function of JAX, with the `live` variables that it writes as results."""
        effects = self.plan.effects(step)
        constants = constants_of(self.plan.graph, step, self.plan.order)
        # A variable written in part is an operand as well: the rest of it comes out as it went in.
        read = effects.reads | (effects.writes - effects.kills)
        operands = [v for v in self.plan.in_order(read) if v.by_replica or not v.is_constant]
        operands = list(dict.fromkeys([*map(self.plan.array_of, operands), *self._received(step)]))
        # Whoever runs the step accounts for it in the clocks; with clocks, calls are inlined.
        clock = None if self.outside.clock is None else self.outside.clock.variable
        results = [v for v in self._state([step], live) if v is not clock]

        def run(state: State) -> State:
            with set_xla_metadata(inlineable=None):  # calls inside may be inlined
                inner = Values(self.plan.orders, {v: jnp.asarray(v.value) for v in constants if not v.by_replica})
                inner.update(zip(operands, state, strict=True))
                self.run_program(step.function.body, inner, live)
                return [inner[v] for v in results]

        return _TracedFunction(live, operands, results, jax_jit(run))

    def _received(self, program: Program) -> list[Variable]:
        """Return the variables off the tiles that a program without host reads: remote buffers and input streams."""
        variables = []
        for node in distinct(program):
            if isinstance(node, RemoteIn):
                variables.append(node.buffer.memory)
            elif isinstance(node, StreamIn):
                variables.append(self.plan.inputs[node.stream])
        return variables

    def _repeat(self, step: Repeat, values: Values, live: Live) -> None:
        """Trace a loop as a `scan` whose carry is the variables that it writes and that are read after or in it."""
        if step.count == 1:
            self.run_program(step.body, values, live)
        if step.count <= 1:
            return
        if step.count > _MAX_SCAN:
            half, rest = divmod(step.count, 2)
            return self.run_program(Sequence(Repeat(2, Repeat(half, step.body)), Repeat(rest, step.body)), values, live)
        # The next iteration reads the writes of this one.
        live |= self.plan.effects(step.body).reads
        variables = self._state([step.body], live)

        def iteration(state: State, _: None) -> tuple[State, None]:
            inner = values.with_state(variables, state)
            self.run_program(step.body, inner, live)
            return inner.as_carry(variables, values), None

        state, _ = lax.scan(iteration, [values[v] for v in variables], None, length=step.count)
        values.update(zip(variables, state, strict=True))

    def _repeat_while(self, step: RepeatWhile, values: Values, live: Live) -> None:
        """Trace a loop of data as a `while_loop`, and record its trip count for the profile of the run."""
        # The condition runs once before the loop, then at the end of each iteration: the test of a `while_loop` cannot
        # change variables.
        body_and_test = Sequence(step.body, step.condition)
        predicate = frozenset(step.predicate.variables())
        live |= predicate | self.plan.effects(body_and_test).reads
        self.run_program(step.condition, values, live)
        self._decide(step, values)
        variables = self._state([body_and_test], live)

        def iteration(carry: _LoopCarry) -> _LoopCarry:
            inner = values.with_state(variables, carry.state)
            self.run_program(body_and_test, inner, live)
            self._decide(step, inner)
            return _LoopCarry(self._continues(step, inner), carry.trips + 1, inner.as_carry(variables, values))

        start = _LoopCarry(self._continues(step, values), jnp.zeros((), jnp.int32), [values[v] for v in variables])
        end = lax.while_loop(lambda carry: carry.continues, iteration, start)
        values.update(zip(variables, end.state, strict=True))
        self._record_outcome(step, end.trips, values)

    def _decide(self, step: RepeatWhile, values: Values) -> None:
        if self.outside.clock is not None:
            self.outside.clock.decide(step, values)

    def _continues(self, step: RepeatWhile, values: Values) -> jax.Array:
        """Return whether a loop has another iteration, bool[]; it has none once the host has failed."""
        is_true = values.scalar(step.predicate) ^ step.until
        return is_true & ~values[self.plan.has_failed] if self._side_state(step) else is_true

    def _record_outcome(self, step: Program, outcome: jax.Array, values: Values) -> None:
        if self.outside.log is not None:
            self.outside.log.write(step, outcome, values, self.plan.has_failed)

    def _branch(
        self,
        step: Program,
        outcome: jax.Array,
        choose: Callable[..., State],
        programs: tuple[Program, ...],
        values: Values,
        live: Live,
    ) -> None:
        """Trace programs of which a scalar, `outcome`, chooses one by `choose(outcome, *functions)`."""
        variables = self._state(programs, live)

        def run(program: Program) -> State:
            inner = values.copied()
            self.run_program(program, inner, live)
            return inner.as_carry(variables, values)

        self._record_outcome(step, outcome, values)
        state = choose(outcome, *(partial(run, program) for program in programs))
        values.update(zip(variables, state, strict=True))


def case_number(step: Branch, selector: jax.Array) -> jax.Array:
    """Return the number of the chosen program, int32[]; the default has the number of cases."""
    if not isinstance(step, Switch):
        return jnp.where(selector, 0, 1).astype(jnp.int32)
    count = len(step.cases)
    if step.values is None:
        return jnp.where((selector >= 0) & (selector < count), selector, count).astype(jnp.int32)
    result = jnp.full((), count, jnp.int32)
    for number, value in enumerate(step.values):
        result = jnp.where(selector == jnp.asarray(value, selector.dtype), number, result)
    return result


def _row_numbers(offset: Tensor, values: Values) -> jax.Array:
    """Return the row numbers of a remote buffer as int32; negative and larger numbers become one past every buffer."""
    rows = values.load(offset)
    # JAX would wrap a negative index around; one beyond the end is filled or dropped, as the caller's mode says.
    beyond = jnp.iinfo(jnp.int32).max
    if rows.dtype == jnp.uint32:
        return jnp.minimum(rows, jnp.uint32(beyond)).astype(jnp.int32)
    return jnp.where(rows < 0, beyond, rows)
