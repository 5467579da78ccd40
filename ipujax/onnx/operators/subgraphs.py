"""If, Loop, Scan and SequenceMap: static ones are taken apart while tracing, all others are loops of `jax.lax`.

Subgraphs come as functions of their inputs. A loop whose trip count is known and whose body ends no iteration early is
`lax.scan`, which has gradients; one that stops by a traced condition is `lax.while_loop`. A loop is unrolled where its
values change shape from one iteration to the next, or where its body needs them static.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.bounded_values import BoundedSequence, fitted, merged
from ipujax.onnx.budget import MAX_COUNTED_ITERATIONS, Budget
from ipujax.onnx.element_types import index_dtype, narrowed
from ipujax.onnx.iterations import in_iteration
from ipujax.onnx.onnx_errors import OnnxError, TracedOperandError, WideValueError
from ipujax.onnx.operators.operand_types import static_integer
from ipujax.onnx.registry import MaxSizes, data_dependent_size, is_static, operator, static

Body = Callable[..., tuple[Any, ...]]


class LoopBody(Protocol):
    """A subgraph as a function; static values alone decide some of its outputs, which may be computed apart."""

    def __call__(self, *inputs: Any) -> tuple[Any, ...]: ...

    def are_decided(self, *inputs: Any) -> list[bool]: ...

    def with_outputs(self, positions: Sequence[int]) -> LoopBody: ...


def _traced(values: Any) -> Any:
    return narrowed(values, "a value of a subgraph")


def _flag(condition: Any) -> bool:
    return bool(np.asarray(condition).reshape(()))


@operator("If")
def if_else(
    condition: Any,
    *,
    then_branch: Body,
    else_branch: Body,
    max_sizes: MaxSizes,
) -> tuple[Any, ...]:
    """Evaluate one of two subgraphs; a static condition leaves the other untraced."""
    if is_static(condition):
        return then_branch() if _flag(condition) else else_branch()
    branches = (lambda: tuple(_traced(then_branch())), lambda: tuple(_traced(else_branch())))
    flag = jnp.reshape(condition, ())
    try:
        try:
            return jax.lax.cond(flag, *branches)
        except TypeError:  # of `cond` alone: results of other forms; evaluation wraps those of nodes
            return jax.lax.cond(flag, *_in_one_form(branches, max_sizes))
    except WideValueError:
        raise
    except OnnxError as error:
        raise _needs_static_condition(error) from error
    except TypeError as error:
        raise _needs_static_condition(OnnxError(str(error).partition("\n")[0])) from error


def _in_one_form(
    branches: Sequence[Callable[[], tuple[Any, ...]]], max_sizes: MaxSizes
) -> list[Callable[[], tuple[Any, ...]]]:
    """Return branches whose results have one form: padded, bounded sequences, optionals that say what they have."""
    first, second = (jax.eval_shape(branch) for branch in branches)
    forms = [merged(a, b, bound, name) for a, b, (name, bound) in zip(first, second, max_sizes, strict=False)]

    names = [name for name, _ in max_sizes]

    def in_form(branch: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
        return lambda: tuple(map(fitted, branch(), forms, names))

    return list(map(in_form, branches))


def _needs_static_condition(reason: OnnxError) -> TracedOperandError:
    """Return the error of a traced `If` one of whose branches does not fit: exporters leave such for other inputs."""
    hint = "name the graph input that the condition depends on in load(static=…)"
    hint += f"; or: {reason.hint}" if reason.hint and not isinstance(reason, TracedOperandError) else ""
    text = f"the condition must be static, for its branches cannot both be traced: {reason.what}"
    return TracedOperandError(text, expected="a condition known while tracing", got="a traced condition", hint=hint)


@dataclass(frozen=True, slots=True)
class _Iteration:
    """One iteration of a loop, traced in the abstract.

    Args:
        condition: its condition for the next one: a bool, or None if that is traced.
        is_uniform: the carried values have the same shapes afterwards.
        scanned: shapes and dtypes of the values that are collected.
        after: forms of the carried values after the iteration.
    """

    condition: bool | None
    is_uniform: bool
    scanned: tuple[jax.ShapeDtypeStruct, ...]
    after: tuple[Any, ...]


def _iteration(body: Body, carried: Sequence[Any]) -> _Iteration:
    conditions: list[bool | None] = []

    def step(index: Any, *values: Any) -> tuple[Any, ...]:
        condition, *results = body(index, np.asarray(True), *values)
        conditions.append(_flag(condition) if is_static(condition) else None)
        return tuple(_traced(results))

    abstract = jax.eval_shape(lambda: tuple(_traced(carried)))
    index = jax.eval_shape(lambda: jnp.asarray(np.int64(0)))
    results = jax.eval_shape(step, index, *abstract)
    after = results[: len(carried)]
    return _Iteration(conditions[0], _shapes(after) == _shapes(abstract), results[len(carried) :], after)


def _bounded(carried: Sequence[Any], after: Sequence[Any], max_sizes: MaxSizes) -> tuple[Any, ...]:
    """Return carried values whose sequences, which grow by an iteration, are buffers of a bound."""
    before = jax.eval_shape(lambda: tuple(_traced(carried)))
    values = []
    for value, old, new, (name, bound) in zip(_traced(carried), before, after, max_sizes, strict=False):
        grows = isinstance(new, tuple | BoundedSequence) and _shapes(old) != _shapes(new)
        values.append(fitted(value, merged(old, new, bound, name), name) if grows else value)
    return (*values, *carried[len(values) :])


def _shapes(values: Any) -> Any:
    leaves, tree = jax.tree.flatten(values)
    return tree, [(leaf.shape, leaf.dtype) for leaf in leaves]


@operator("Loop")
def loop(
    trip_count: Any,
    condition: Any,
    *carried: Any,
    body: LoopBody,
    max_sizes: MaxSizes,
    budget: Budget,
) -> tuple[Any, ...]:
    """Repeat a subgraph `(iteration, condition, *carried) → (condition, *carried, *collected)`."""
    limit = None
    if trip_count is not None and is_static(trip_count):
        limit = max(0, static_integer(trip_count, "M"))
    if condition is not None and is_static(condition) and not _flag(condition):
        limit = 0
    is_decided = limit == 0 or (is_static(trip_count) and is_static(condition))
    try:
        iteration = _iteration(body, carried)
    except TracedOperandError:
        if not is_decided:
            raise
        budget.check_unrolled(limit or 0, "iterations of a Loop that is unrolled")
        return _unrolled_loop(limit, carried, body, ())
    iterations = _known_iterations(limit, carried, body, iteration) if is_decided and iteration.is_uniform else None
    if iterations is not None:
        budget.check_repeats(iterations, "iterations of Loop")
        return _counted_loop(iterations, carried, body)
    if is_decided and (not iteration.is_uniform or _is_growing(carried)):
        budget.check_unrolled(limit or 0, "iterations of a Loop that is unrolled")
        return _unrolled_loop(limit, carried, body, iteration.scanned)
    if is_decided and limit is None and iteration.condition:
        hint = "a trip count, or a condition that a value of the loop decides"
        raise OnnxError("Loop never ends: its condition is always true, and it has no trip count", hint=hint)
    start = True if condition is None else condition
    if not iteration.is_uniform:
        carried = _bounded(carried, iteration.after, max_sizes)
        iteration = _iteration(body, carried)
    return _conditional_loop(trip_count, start, carried, body, iteration, max_sizes)


def _known_iterations(limit: int | None, carried: Sequence[Any], body: LoopBody, iteration: _Iteration) -> int | None:
    """Return how often a loop runs that is entered if its limit is not 0; None if that is not known."""
    if limit == 0 or iteration.condition:
        return limit
    return _counted_iterations(limit, carried, body) if iteration.condition is None else 1


def _counted_iterations(limit: int | None, carried: Sequence[Any], body: LoopBody) -> int | None:
    """Return how often a loop runs whose condition static values decide; None if traced ones do, or it runs too long.

    So is `while i < length` in files whose loops are no `for`: counter and length are carried, and known.
    """
    is_known = [is_static(value) and isinstance(value, np.ndarray) for value in carried]
    while True:
        carried_values = [value if is_one else jnp.zeros(()) for value, is_one in zip(carried, is_known, strict=True)]
        is_condition_known, *is_next = body.are_decided(np.int64(0), np.asarray(True), *carried_values)
        stays_known = [now and after for now, after in zip(is_known, is_next, strict=False)]
        if stays_known == is_known:
            break
        is_known = stays_known
    if not is_condition_known:
        return None
    positions = [n for n, is_one in enumerate(is_known) if is_one]
    deciding = body.with_outputs([0, *(1 + n for n in positions)])

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        index, _, values = state
        by_position = dict(zip(positions, values, strict=True))
        go_on, *after = deciding(index, np.asarray(True), *map(by_position.get, range(len(carried))))
        return index + 1, jnp.reshape(jnp.asarray(go_on), ()), tuple(map(jnp.asarray, after))

    max_iterations = MAX_COUNTED_ITERATIONS if limit is None else min(limit, MAX_COUNTED_ITERATIONS)
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        start = (jnp.asarray(0), jnp.asarray(True), tuple(jnp.asarray(carried[n]) for n in positions))
        count, go_on, _ = jax.lax.while_loop(lambda state: state[1] & (state[0] < max_iterations), step, start)
        return None if go_on and max_iterations != limit else int(count)


def _is_growing(carried: Sequence[Any]) -> bool:
    return any(isinstance(value, tuple) for value in carried)


def _counted_loop(iterations: int, carried: Sequence[Any], body: Body) -> tuple[Any, ...]:
    def step(state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        index, values = state
        with in_iteration(index):
            _, *results = body(index, np.asarray(True), *values)
        results = _traced(results)
        return (index + 1, tuple(results[: len(values)])), tuple(results[len(values) :])

    # The counter is carried: a billion of numbers to scan would take 4 GB.
    start = (jnp.zeros((), index_dtype()), tuple(_traced(carried)))
    (_, final), collected = jax.lax.scan(step, start, None, length=iterations)
    return (*final, *collected)


def _unrolled_loop(
    iterations: int | None, carried: Sequence[Any], body: Body, scanned: Sequence[jax.ShapeDtypeStruct]
) -> tuple[Any, ...]:
    values = tuple(carried)
    rows: list[tuple[Any, ...]] = []
    index = 0
    is_running: Any = np.asarray(True)
    while (iterations is None or index < iterations) and _flag(
        static(is_running, "the condition of the next iteration")
    ):
        with in_iteration(index):
            is_running, *results = body(np.asarray(index, np.int64), np.asarray(True), *values)
        values = tuple(results[: len(values)])
        rows.append(tuple(results[len(values) :]))
        index += 1
    empty = [np.zeros((0, *each.shape), each.dtype) for each in scanned]
    return (*values, *(map(_stacked, zip(*rows, strict=True)) if rows else empty))


def _stacked(values: Sequence[Any]) -> Any:
    return np.stack(values) if is_static(tuple(values)) else jnp.stack(values)


def _conditional_loop(
    trip_count: Any,
    condition: Any,
    carried: Sequence[Any],
    body: Body,
    iteration: _Iteration,
    max_sizes: MaxSizes,
) -> tuple[Any, ...]:
    """Repeat while a traced condition holds; collected values are padded with zeros to a bound."""
    bound = data_dependent_size(max_sizes[len(carried) :], "the collected values of Loop") if iteration.scanned else 0
    buffers = tuple(jnp.zeros((bound, *each.shape), each.dtype) for each in iteration.scanned)
    # No counter reaches the limit of its dtype.
    largest = np.iinfo(index_dtype()).max
    bounded = np.minimum(trip_count, largest) if isinstance(trip_count, np.ndarray) else trip_count
    limit = None if bounded is None else jnp.reshape(jnp.asarray(bounded), ())

    def is_running(state: tuple[Any, ...]) -> jax.Array:
        index, go_on, *_ = state
        return go_on if limit is None else jnp.logical_and(go_on, index < limit)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        index, _, values, collected = state
        with in_iteration(index):
            go_on, *results = body(index, np.asarray(True), *values)
        results = _traced(results)
        rows = results[len(values) :]
        stored = tuple(buffer.at[index].set(row, mode="drop") for buffer, row in zip(collected, rows, strict=True))
        return index + 1, jnp.reshape(jnp.asarray(go_on), ()), tuple(results[: len(values)]), stored

    first = jnp.zeros_like(jnp.asarray(np.int64(0)) if limit is None else limit)
    state = (first, jnp.reshape(jnp.asarray(condition), ()), tuple(_traced(carried)), buffers)
    _, _, values, collected = jax.lax.while_loop(is_running, step, state)
    return (*values, *collected)


@operator("Scan")
def scan(
    *inputs: Any,
    body: Body,
    num_scan_inputs: int,
    scan_input_axes: Sequence[int] | None = None,
    scan_input_directions: Sequence[int] | None = None,
    scan_output_axes: Sequence[int] | None = None,
    scan_output_directions: Sequence[int] | None = None,
    output_count: int,
) -> tuple[Any, ...]:
    """Run a subgraph over slices of the scanned inputs, `(*states, *slices) → (*states, *rows)`."""
    states = inputs[: len(inputs) - num_scan_inputs]
    scanned = inputs[len(states) :]
    scanned = _traced(scanned)
    axes = scan_input_axes or [0] * num_scan_inputs
    directions = scan_input_directions or [0] * num_scan_inputs
    rows = tuple(
        _in_order(jnp.moveaxis(x, axis, 0), way) for x, axis, way in zip(scanned, axes, directions, strict=True)
    )

    def step(state: tuple[Any, ...], slices: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        index, values = state
        with in_iteration(index):
            results = _traced(body(*values, *slices))
        return (index + 1, tuple(results[: len(values)])), tuple(results[len(values) :])

    start = (jnp.zeros((), index_dtype()), tuple(_traced(states)))
    (_, final), collected = jax.lax.scan(step, start, rows)
    output_axes = scan_output_axes or [0] * len(collected)
    output_directions = scan_output_directions or [0] * len(collected)
    results = zip(collected, output_axes, output_directions, strict=True)
    return (*final, *(jnp.moveaxis(_in_order(x, direction), 0, axis) for x, axis, direction in results))


def _in_order(x: Any, direction: int) -> Any:
    """Return rows first to last (0), or last to first (1)."""
    return jnp.flip(x, 0) if direction else x


@operator("SequenceMap")
def sequence_map(sequence: tuple[Any, ...], *further: Any, body: Body, output_count: int) -> tuple[Any, ...]:
    """Apply a subgraph to each element of a sequence; other sequences go along, tensors are the same for all."""
    rows = []
    for n, element in enumerate(sequence):
        with in_iteration(n):
            rows.append(body(element, *(each[n] if isinstance(each, tuple) else each for each in further)))
    return tuple(zip(*rows, strict=True)) if rows else ((),) * output_count
