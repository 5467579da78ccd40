"""One replica's program prepared for tracing: each step as a function of the arrays of variables.

Input: a graph and a program. Output: `EngineProgram`, which runs steps on `Values` in a trace. Vertices are computed
unsplit wherever the kinds of their axes allow it (`runtime/engine/collapse.py`), else as they are split
(`runtime/engine/split.py`).

Control flow becomes `lax.scan`, `while_loop`, `cond` and `switch`. Only variables that are written inside and read
later pass through them: XLA then updates a loop's buffers in place, and never copies what a branch leaves alone. A
function that is called in a loop and around it, as the parts of a pipeline are, stays one: XLA inlines none of its
calls, and does not compile it anew with each surrounding (measured: half of the time for pipelines of four small
stages, the same time a step). Others are inlined: layers in a row took longer otherwise.

Limits: see `runtime/engine/engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback
from jax.experimental.xla_metadata import set_xla_metadata

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.engine.collapse import collapsible, executed_groups, merged, one_slot
from ipujax.runtime.engine.split import apply, run_group, signatures
from ipujax.runtime.engine.values import State, Values
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import (
    Branch,
    Call,
    Copy,
    Execute,
    Function,
    Graph,
    HostStream,
    If,
    Loop,
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
    WriteUndef,
    distinct,
    own_tensors,
)
from ipujax.runtime.host import CallStream, GuardedHost, HostCall, HostCalls
from ipujax.runtime.tensor import Tensor, Variable, dtype_name

Streams = dict[HostStream, jax.Array]
Live = frozenset[Variable]
Record = Callable[[Program, Any], None]
_MANY = 16  # executions in a row that become a loop; fewer are left for XLA to fuse
_MAX_SCAN = (1 << 31) - 1  # iterations of one `lax.scan`, which counts in int32


@dataclass(frozen=True, slots=True)
class _OneFunction:
    """A function of the program as one of JAX.

    Args:
        wanted: what may be read after it, of what it writes.
        takes: variables it is given.
        gives: variables it returns.
        run: it, from arrays to arrays.
    """

    wanted: Live
    takes: list[Variable]
    gives: list[Variable]
    run: Callable[[State], State]


class EngineProgram:
    """A program prepared for tracing: facts that do not depend on values."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        exact_splits: bool,
        record: Record | None,
        kept: Collection[Variable] = (),
        host: GuardedHost | None = None,
        calls: HostCalls | None = None,
    ) -> None:
        self._graph, self._record, self._host, self._exact_splits = graph, record, host, exact_splits
        self._calls = calls or HostCalls(guarded=False)
        # Operands that wait for the last one of a call, and its results until they are taken: all in one sequence.
        self._arrived: dict[HostCall, list[jax.Array]] = {}
        self._answers: dict[HostCall, Any] = {}
        self._program = program
        self._effects = EffectsOf(graph)
        self._order = {variable: number for number, variable in enumerate(graph.variables)}
        self._stands_for = {} if exact_splits else {v: one_slot(v) for v in collapsible(graph, program, kept)}
        self._groups = {
            group: (run, signatures(run))
            for group in executed_groups(graph, program)
            for run in [merged(group, self._stands_for, exact_splits)]
        }
        self._constants = self._constants_read(program)
        # Where the value of a stream waits: a variable of its own, so that loops and branches hand it on like others.
        self._inputs = _stream_variables(program, StreamIn)
        self._outputs = _stream_variables(program, StreamOut)
        self._has_failed = Variable((), jnp.dtype(bool), "host has failed")
        self._side_states: dict[Program, list[Variable]] = {}
        self._called_around = called_around(program)
        self._functions: dict[object, list[_OneFunction]] = {}
        self._compared = _compared_variables(graph, program)

    def _constants_read(self, program: Program) -> list[Variable]:
        """Constants in the order of the graph, made arrays once, outside of all control flow."""
        tensors = [tensor for node in distinct(program) for tensor in own_tensors(node)]
        tensors += [access.tensor for group in executed_groups(self._graph, program) for access in group.accesses]
        used = {variable for tensor in tensors for variable in tensor.variables() if variable.is_constant}
        return sorted(used, key=self._order.__getitem__)

    def run(self, inputs: Mapping[HostStream, Any]) -> Streams:
        """Runs the whole program."""
        values = self.values()
        for stream, variable in self._inputs.items():
            values[variable] = checked_input(stream, inputs, self.transfer_shape(stream))
        remote = self._graph.off_chip.values()
        for buffer in remote:
            if (source := buffer.filled_from) is not None:
                value = checked_input(source, inputs, self.transfer_shape(source))
                values[buffer.memory] = values.of_all(value) if source.broadcast else value
        self.go(self._program, values, frozenset())
        sent = {stream: values[variable] for stream, variable in self._outputs.items()}
        return sent | {buffer.read_into: values[buffer.memory] for buffer in remote if buffer.read_into is not None}

    def transfer_shape(self, stream: HostStream) -> tuple[int, ...]:
        """The shape of one transfer of a stream."""
        return stream.shape

    def memory(self, held: Mapping[Variable, Any]) -> Values:
        """Values of constants, and of variables as they are before a run."""
        values = self.values()
        values.update({variable: jnp.asarray(array) for variable, array in held.items()})
        return values

    def held(self, values: Values, variables: Collection[Variable]) -> dict[Variable, jax.Array]:
        """The arrays of variables as they are handed to others."""
        return {variable: values[variable] for variable in variables}

    def values(self) -> Values:
        """Values of constants alone."""
        return Values({v: jnp.asarray(v.value) for v in self._constants})

    def go(self, program: Program, values: Values, live: Live) -> None:
        """Runs a program on values, which are changed; `live` is what may be read after it."""
        steps = list(steps_of(program, self._is_whole))
        for step, live_after in zip(steps, self._live_after(steps, live), strict=True):
            self._step(step, values, live_after)

    def _is_whole(self, program: Program) -> bool:
        """Whether a program is one step: a call that stays a call. Calls with host transfers are inlined."""
        stays = isinstance(program, Call) and program.function in self._called_around
        return stays and self._record is None and not self._side_state(program)

    def _live_after(self, steps: list[Program], live: Live) -> list[Live]:
        """What may be read after each step, for steps of control flow; nothing for the others, which need not know."""
        first = next((n for n, step in enumerate(steps) if isinstance(step, _CONTROL)), len(steps))
        now, result = set(live), [Live()] * len(steps)
        for number in range(len(steps) - 1, first - 1, -1):
            if isinstance(steps[number], _CONTROL):
                result[number] = frozenset(now)
            effects = self._effects(steps[number])
            now -= effects.kills
            now |= effects.reads
        return result

    def _state(self, programs: Collection[Program], live: Live) -> list[Variable]:
        """The variables that the programs write and that are read later, in a fixed order."""
        written = frozenset().union(*(self._effects(program).writes for program in programs)) & live
        variables = [self._stands_for.get(v, v) for v in sorted(written, key=self._order.__getitem__)]
        return list(dict.fromkeys([*variables, *(v for program in programs for v in self._side_state(program))]))

    def _side_state(self, program: Program) -> list[Variable]:
        """What a program changes beside the variables of the graph: output streams, off-chip memory, the host."""
        if program not in self._side_states:
            found: dict[Variable, None] = {}
            for node in distinct(program):
                if isinstance(node, RemoteOut):
                    found[node.buffer.memory] = None
                elif isinstance(node, (StreamIn, StreamOut)) and (self._host is not None or _is_call(node)):
                    found[self._has_failed] = None
                elif isinstance(node, StreamOut):
                    found[self._outputs[node.stream]] = None
            self._side_states[program] = list(found)
        return self._side_states[program]

    def _step(self, step: Program, values: Values, live: Live) -> None:
        """Runs one step on values, which are changed; `live` is what may be read after it."""
        match step:
            case Execute(compute_set) if self._effects(step).writes & self._compared:
                self._as_function(compute_set, step, values, self._effects(step).writes)
            case Copy() if self._effects(step).writes & self._compared:
                self._as_function(step, step, values, self._effects(step).writes)
            case Execute() | Copy():
                self._move_or_compute(step, values)
            case WriteUndef(destination):
                if destination.is_whole_variable:
                    (variable,) = destination.variables()
                    values.pop(self._stands_for.get(variable, variable), None)
            case StreamIn(stream, destination):
                value = self._received(stream, values)
                values.store(destination, values.of_all(value) if stream.broadcast else value)
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
                pass  # steps are in order anyway
            case Call():
                self._call(step, values, live)
            case Repeat():
                self._repeat(step, values, live)
            case RepeatWhile():
                self._repeat_while(step, values, live)
            case If(predicate, then, otherwise):
                decided = values.scalar(predicate)
                self._branch(step, decided, lax.cond, (then, otherwise), values, live)
            case Switch(selector, cases, default):
                number, choose = _case(step, values.scalar(selector)), lambda number, *runs: lax.switch(number, runs)
                self._branch(step, number, choose, (*cases, default), values, live)
            case _:
                raise AssertionError(f"unknown program node {step!r}")

    def _move_or_compute(self, step: Execute | Copy, values: Values) -> None:
        if isinstance(step, Copy):
            values.store(step.destination, values.load(step.source))
            return
        groups = [self._groups[group] for group in self._graph.groups[step.compute_set]]
        for written in [w for group, vertices in groups for w in run_group(group, vertices, values)]:
            apply(written, values)

    def _received(self, stream: HostStream, values: Values) -> jax.Array:
        """The next value of a stream to the device."""
        if isinstance(stream, CallStream) and stream.call is not None:
            return self._answers[stream.call][stream.number]
        if self._host is None:
            return values[self._inputs[stream]]
        value, values[self._has_failed] = self._host.pull(stream, self.transfer_shape(stream))
        return value

    def _send(self, stream: HostStream, value: jax.Array, values: Values) -> None:
        """Hands on the next value of a stream; the last operand of a call makes the call."""
        if isinstance(stream, CallStream) and (call := stream.call) is not None:
            arrived = self._arrived.setdefault(call, [])
            arrived.append(value)
            if len(arrived) == call.num_operands:
                self._answers[call] = self._called(call, self._arrived.pop(call), values)
        elif self._host is None:
            values[self._outputs[stream]] = value
        else:
            values[self._has_failed] = self._host.push(stream, value)

    def _called(self, call: HostCall, operands: list[jax.Array], values: Values) -> Any:
        """The results of a call of the host's."""
        results, values[self._has_failed] = self._calls.traced(call, operands)
        return results

    def _call(self, step: Call, values: Values, live: Live) -> None:
        self._as_function(step.function, step, values, self._effects(step).writes & live)

    def _as_function(self, key: object, step: Call | Execute | Copy, values: Values, wanted: Live) -> None:
        """Runs a step as a function that XLA does not inline; `key` is equal for steps that do the same."""
        known = self._functions.setdefault(key, [])
        function = next((function for function in known if wanted <= function.wanted), None)
        if function is None:
            function = self._one_function(step, wanted)
            known.append(function)
        with set_xla_metadata(inlineable="false"):
            state = function.run([values[v] for v in function.takes])
        values.update(zip(function.gives, state, strict=True))

    def _one_function(self, step: Call | Execute | Copy, wanted: Live) -> _OneFunction:
        """The function of a step as one of JAX, which gives some of the variables that it writes."""
        effects, constants = self._effects(step), self._constants_read(step)
        read = effects.reads | (effects.writes - effects.kills)
        takes = [v for v in sorted(read, key=self._order.__getitem__) if v.by_replica or not v.is_constant]
        takes = list(dict.fromkeys(self._stands_for.get(v, v) for v in takes))
        gives = self._state([step], wanted)

        def run(state: State) -> State:
            with set_xla_metadata(inlineable=None):  # what is called inside may be inlined
                inner = Values({v: jnp.asarray(v.value) for v in constants if not v.by_replica})
                inner.update(zip(takes, state, strict=True))
                if isinstance(step, Call):
                    self.go(step.function.body, inner, wanted)
                else:
                    self._move_or_compute(step, inner)
                return [inner[v] for v in gives]

        return _OneFunction(wanted, takes, gives, jax.jit(run))

    def _repeat(self, step: Repeat, values: Values, live: Live) -> None:
        if step.count == 1:
            self.go(step.body, values, live)
        if step.count <= 1:
            return
        if step.count > _MAX_SCAN:
            half, rest = divmod(step.count, 2)
            return self.go(Sequence(Repeat(2, Repeat(half, step.body)), Repeat(rest, step.body)), values, live)
        live |= self._effects(step.body).reads
        variables = self._state([step.body], live)

        def iteration(state: State, _: None) -> tuple[State, None]:
            inner = values.with_state(variables, state)
            self.go(step.body, inner, live)
            return inner.ending(variables, values), None

        state, _ = lax.scan(iteration, [values[v] for v in variables], None, length=step.count)
        values.update(zip(variables, state, strict=True))

    def _repeat_while(self, step: RepeatWhile, values: Values, live: Live) -> None:
        again = Sequence(step.body, step.condition)
        predicate = frozenset(step.predicate.variables())
        live |= predicate | self._effects(again).reads
        self.go(step.condition, values, live)
        variables = self._state([again], live)

        def iteration(state: tuple[jax.Array, jax.Array, State]) -> tuple[jax.Array, jax.Array, State]:
            inner = values.with_state(variables, state[2])
            self.go(again, inner, live)
            return self._goes_on(step, inner), state[1] + 1, inner.ending(variables, values)

        start = self._goes_on(step, values), jnp.zeros((), jnp.int32), [values[v] for v in variables]
        _, trips, state = lax.while_loop(lambda state: state[0], iteration, start)
        self._record_outcome(step, trips)
        values.update(zip(variables, state, strict=True))

    def _goes_on(self, step: RepeatWhile, values: Values) -> jax.Array:
        """Whether a loop goes on to another iteration; it ends once the host has failed."""
        goes_on = values.scalar(step.predicate) ^ step.until
        return goes_on & ~values[self._has_failed] if self._side_state(step) else goes_on

    def _record_outcome(self, step: Program, what: jax.Array) -> None:
        """Records what a step did, if there is a recorder."""
        if self._record is not None:
            io_callback(partial(self._record, step), None, what, ordered=True)

    def _branch(
        self,
        step: Program,
        decided: jax.Array,
        choose: Callable[..., State],
        programs: tuple[Program, ...],
        values: Values,
        live: Live,
    ) -> None:
        """Runs the one of several programs that a scalar chooses."""
        variables = self._state(programs, live)

        def run(program: Program) -> State:
            inner = values.copied()
            self.go(program, inner, live)
            return inner.ending(variables, values)

        self._record_outcome(step, decided)
        state = choose(decided, *(partial(run, program) for program in programs))
        values.update(zip(variables, state, strict=True))


_CONTROL = (Loop, Branch, Call)


def steps_of(program: Program, is_whole: Callable[[Program], bool]) -> Iterator[Program]:
    """The steps of a program in order, without the sequences and calls around them but for those left whole.

    A compute set that is executed many times in a row is a loop, so that it is traced once.
    """
    for _, same in groupby(_one_by_one(program, is_whole), lambda step: getattr(step, "compute_set", step)):
        steps = list(same)
        if isinstance(steps[0], Execute) and len(steps) >= _MANY:
            yield Repeat(len(steps), steps[0])
        else:
            yield from steps


def _one_by_one(program: Program, is_whole: Callable[[Program], bool]) -> Iterator[Program]:
    if isinstance(program, (Sequence, Call)) and not is_whole(program):
        for child in program.children():
            yield from _one_by_one(child, is_whole)
    else:
        yield program


def _compared_variables(graph: Graph, program: Program) -> frozenset[Variable]:
    """The variables that codelets compare, each of which must have one value.

    XLA computes a cheap value anew in each fusion that reads it, in one with and in another without a fused
    multiply-add. A largest element then equals no element of what it was chosen from. A function that is not inlined
    computes such a value once.
    """
    groups = (group for group in executed_groups(graph, program) if group.codelet.compares)
    reads = (access for group in groups for access in group.accesses)
    return frozenset(v for access in reads for v in access.tensor.variables() if not v.is_constant)


def called_around(program: Program) -> set[Function]:
    """The functions that are called in several bodies: in a loop and outside of it, say."""
    bodies: dict[Function, set[object]] = {}
    todo: list[tuple[Program, object]] = [(program, None)]
    seen = set(todo)
    while todo:
        node, body = todo.pop()
        if isinstance(node, Call):
            bodies.setdefault(node.function, set()).add(body)
            body = node.function
        elif isinstance(node, _CONTROL):
            body = node
        new = [(child, body) for child in node.children() if (child, body) not in seen]
        seen.update(new)
        todo += new
    return {function for function, places in bodies.items() if len(places) > 1}


def _case(step: Switch, selector: jax.Array) -> jax.Array:
    """The number of the case a value selects, that of the default being the number of cases."""
    count = len(step.cases)
    if step.values is None:
        return jnp.where((selector >= 0) & (selector < count), selector, count).astype(jnp.int32)
    found = jnp.full((), count, jnp.int32)
    for number, value in enumerate(step.values):
        found = jnp.where(selector == jnp.asarray(value, selector.dtype), number, found)
    return found


def _row_numbers(offset: Tensor, values: Values) -> jax.Array:
    """Rows of a remote buffer; what int32 cannot hold is beyond every buffer, and so is what is negative."""
    rows = values.load(offset)
    beyond = jnp.iinfo(jnp.int32).max
    if rows.dtype == jnp.uint32:
        return jnp.minimum(rows, jnp.uint32(beyond)).astype(jnp.int32)
    return jnp.where(rows < 0, beyond, rows)


def _stream_variables(program: Program, kind: type[StreamIn] | type[StreamOut]) -> dict[HostStream, Variable]:
    """A variable for each stream that a kind of node moves, in the order of the nodes."""
    nodes = (node for node in distinct(program) if isinstance(node, kind) and not _is_call(node))
    streams = dict.fromkeys(node.stream for node in nodes)
    return {stream: Variable(stream.shape, stream.dtype, stream.name) for stream in streams}


def _is_call(node: StreamIn | StreamOut) -> bool:
    return isinstance(node.stream, CallStream)


def checked_input(stream: HostStream, inputs: Mapping[HostStream, Any], shape: tuple[int, ...]) -> jax.Array:
    """The value of a stream, of the shape of a transfer.

    Raises:
        ArgumentError: no value, or one of another shape or dtype.
    """
    expected = f"{dtype_name(stream.dtype)}{list(shape)}"
    if stream not in inputs:
        raise ArgumentError(f"stream {stream.name} has no value", expected=expected)
    value = jnp.asarray(inputs[stream])
    if value.shape != shape or value.dtype != stream.dtype:
        got = f"{dtype_name(value.dtype)}{list(value.shape)}"
        raise ArgumentError(f"stream {stream.name} was given another value", expected=expected, got=got)
    return value
