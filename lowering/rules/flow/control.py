"""Rules for control flow: loops and branches stay loops and branches of the control program.

Carried values and stacks are stored as `loop_state` defines.

A loop reads or writes a stack in streaming memory by rows, one in each iteration. With I/O tiles, these fetch the row
of the next iteration while the current one computes: one row is on the I/O tiles, one on the tiles that compute.
Limits: one iteration ahead, for any `Options.prefetch_depth`: a link moves one row after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from ipujax.lowering.host_rows import RowMove, as_row_of, on_io_tiles, store_of_stack, takes_row
from ipujax.lowering.jax_compat import ClosedJaxpr, Var
from ipujax.lowering.jaxpr import Body, scan_body, while_body, while_condition
from ipujax.lowering.layout import MemoryOrder, add_like, map_like, map_linearly, memory_order
from ipujax.lowering.passes import put_results, sent_rows
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.popops import (
    Op,
    advance,
    assign,
    map_for_slicing,
    moved_for_slicing,
    new_counter,
    new_stack,
    new_state,
    push_to_all,
    slots_of,
)
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.reductions.reduce import reduce
from ipujax.lowering.rules.base.context import Context, RowSum, Rule
from ipujax.runtime.graph import (
    Builder,
    Copy,
    Graph,
    Program,
    RemoteIn,
    Repeat,
    RepeatWhile,
    Sequence as ProgramSequence,
    Switch,
    Wait,
)
from ipujax.runtime.tensor import PLUMBING, UPDATE, Tensor
from ipujax.runtime.tensor.roles import GRADIENTS


def is_off_chip(ctx: Context, stack: Tensor) -> bool:
    """True for a stack in streaming memory."""
    return not set(ctx.graph.off_chip).isdisjoint(stack.variables())


def store_rows(
    ctx: Context, body: ProgramSequence, row: Tensor, counter: Tensor, rows: int, *, on_host: bool
) -> tuple[Tensor, RowMove]:
    """Adds a stack in streaming memory of which a loop stores a row in each iteration.

    Args:
        ctx: context of the loop.
        body: sequence of an iteration, which gets the steps that store the row.
        row: the row.
        counter: number of the iteration's row, int32[].
        rows: number of rows of the stack.
        on_host: whether it is in the host's memory.

    Returns:
        The stack, [rows, …], and the row's move, whose last steps the caller adds after the loop.
    """
    stack, stores = store_of_stack(ctx.graph, ctx.name, row, rows, counter, on_host=on_host)
    for step in (*stores.copies, *stores.transfers):
        body.add(step)
    return stack, stores


class RowStreams:
    """Rows of stacks in streaming memory that one loop reads, row `counter` in each iteration.

    First `row` is called for each stack, then `fetch_ahead` once, and `finish` once the loop is in the program.

    Args:
        ctx: context of the loop.
        body: sequence of an iteration.
        counter: number of the iteration's row, int32[].
        start: number of the first row.
        step: 1, or −1 for a loop from the last row to the first.
    """

    def __init__(self, ctx: Context, body: ProgramSequence, counter: Tensor, start: int, step: int) -> None:
        """Begins without stacks; where the IPU has I/O tiles, adds a second counter by which these fetch ahead."""
        self._ctx = ctx
        self._body = body
        self._counter = counter
        self._step = step
        # Number of the row to fetch, one iteration ahead of `counter`; None without I/O tiles.
        self._ahead = new_counter(ctx.builder, start) if ctx.graph.io_view is not None else None
        self._fetched: list[tuple[Tensor, Tensor]] = []  # (stack, its row on I/O tiles)

    def row(self, stack: Tensor, *, in_groups: bool) -> Tensor:
        """Adds to the body of a loop the load of the iteration's row of a stack in streaming memory; returns the row.

        A row that I/O tiles take is fetched one iteration ahead, see `fetch_ahead`: here it is only copied from them.

        Args:
            stack: the stack, rows along its first dimension.
            in_groups: whether the columns of the row are stored in groups.
        """
        ctx = self._ctx
        row = MemoryOrder.for_argument(stack.shape[1:], in_groups).add_variable(ctx.graph, stack.dtype, ctx.name)
        if not takes_row(ctx.graph, row):
            self._body.add(self._transfer(stack, row, self._counter))
            return row
        fetched = on_io_tiles(ctx.graph, ctx.name, MemoryOrder.for_argument(row.shape, in_groups), row.dtype)
        self._fetched.append((stack, fetched))
        self._body.add(Copy(fetched, row, f"{ctx.name}/row", ctx.graph.origin))
        return row

    def fetch_ahead(self) -> None:
        """Fetches the first rows before the loop, and the next ones in it, behind the copies of `row`."""
        if self._ahead is None or not self._fetched:
            return
        for prog in (self._ctx.prog, self._body):
            for stack, fetched in self._fetched:
                prog.add(self._transfer(stack, fetched, self._ahead, overlaps=True))
            advance(Builder(self._ctx.graph, prog, self._ctx.name), self._ahead, self._step)

    def advance_counter(self) -> None:
        """Counts the iteration, at the end of the body: vertices that use rows can run beside those that slice them."""
        advance(Builder(self._ctx.graph, self._body, self._ctx.name), self._counter, self._step)

    def finish(self) -> None:
        """Waits for the rows fetched beyond the end."""
        for _, fetched in self._fetched:
            self._ctx.prog.add(Wait(fetched, self._ctx.graph.origin))

    def _transfer(self, stack: Tensor, row: Tensor, number: Tensor, *, overlaps: bool = False) -> RemoteIn:
        (memory,) = stack.variables()
        graph = self._ctx.graph
        buffer = graph.off_chip[memory]
        return RemoteIn(buffer, as_row_of(memory, row), number.reshape((1,)), graph.origin, overlaps)


def scan_rule(
    ctx: Context,
    *operands: Tensor,
    length: int,
    reverse: bool,
    **params: Any,
) -> Sequence[Tensor]:
    """Loop with a fixed trip count that reads and writes slices of stacks.

    Args:
        ctx: the equation.
        operands: constants, carries and stacks, as `scan_body` tells.
        length: trip count.
        reverse: whether the first iteration reads and writes the last slot of all stacks.
        params: the other parameters of the primitive, the jaxpr of the body among them.
    """
    # The jaxpr of an iteration, and which operands and results are constants, carries and stacks of rows. Parameters
    # that it does not read, such as `unroll`, are advice for XLA.
    inside = scan_body(params)
    graph = ctx.graph
    carries = _states(ctx, operands, inside)
    stacks = [_sliceable_stack(ctx, stack, length) for stack in operands[inside.operands.stacks]]
    slots = range(length)[::-1] if reverse else range(length)
    start = ProgramSequence()
    body = ProgramSequence(start)
    in_body = Builder(graph, body, ctx.name)
    slices, row_streams = _read_rows(ctx, body, inside, stacks, slots)
    constants = operands[inside.operands.constants]
    with graph.inside_loop(length):
        results = ctx.lower_jaxpr(inside.jaxpr, [*constants, *carries, *slices], body, carries)
    if row_streams is not None:
        row_streams.advance_counter()
    result_stacks, last_steps = _store_slices(ctx, (start, body), inside, results, carries, slots)
    assign(in_body, results[inside.results.carries], carries)
    ctx.prog.add(Repeat(length, body, graph.origin))
    if row_streams is not None:
        row_streams.finish()
    for last_step in last_steps:
        ctx.prog.add(last_step)
    return [*carries, *result_stacks]


def _read_rows(
    ctx: Context, body: ProgramSequence, inside: Body, stacks: Sequence[Tensor], slots: range
) -> tuple[list[Tensor], RowStreams | None]:
    """Adds to the body of a `scan` what reads the iteration's row of each stack; returns the rows.

    Args:
        ctx: context of the loop.
        body: sequence of an iteration.
        inside: jaxpr of the body, and which of its inputs are rows.
        stacks: the stacks, [trip count, …].
        slots: number of the row that each iteration reads.

    Returns:
        The rows; and the streams of those in streaming memory, to be finished after the loop, None without stacks.
    """
    if not stacks:
        return [], None
    in_body = Builder(ctx.graph, body, ctx.name)
    counter = new_counter(ctx.builder, slots.start)  # the caller has `row_streams` advance it, behind the iteration
    row_streams = RowStreams(ctx, body, counter, slots.start, slots.step)
    # Operands of products: a product reads columns in groups of channels, and a row from streaming memory is received
    # in that order of its elements.
    are_in_groups = grouped_inputs(inside.jaxpr.jaxpr)[inside.inputs.stacks]
    on_chip = iter(slots_of(in_body, [stack for stack in stacks if not is_off_chip(ctx, stack)], counter))
    rows = [
        row_streams.row(stack, in_groups=in_groups) if is_off_chip(ctx, stack) else next(on_chip)
        for stack, in_groups in zip(stacks, are_in_groups, strict=True)
    ]
    row_streams.fetch_ahead()
    return rows, row_streams


def _sliceable_stack(ctx: Context, stack: Tensor, length: int) -> Tensor:
    """A stack that a loop of `length` iterations reads, or a copy of it where slices would move between tiles."""
    if is_off_chip(ctx, stack):
        return stack
    map_for_slicing(ctx.graph, stack, (0,))
    # A stack that is read once is not worth a copy.
    return moved_for_slicing(ctx.builder, stack) if length > 1 else stack


def _store_slices(
    ctx: Context,
    bodies: tuple[ProgramSequence, ProgramSequence],
    inside: Body,
    results: Sequence[Tensor],
    carries: Sequence[Tensor],
    slots: range,
) -> tuple[list[Tensor], list[Program]]:
    """Adds stacks of the results of a `scan`, of which its body stores a row in each iteration.

    Args:
        ctx: context of the loop.
        bodies: the start of an iteration, and all of it. A result that is carried too is stored at the start of the
            next iteration, beside the first vertices, which leave tiles idle.
        inside: jaxpr of the body, and which of its results are rows of stacks.
        results: tensors of all its results.
        carries: states of the loop.
        slots: number of the row that each iteration stores.

    Returns:
        The stacks, and steps to add after the loop.
    """
    if not results[inside.results.stacks]:
        return [], []
    at_start, in_body = (Builder(ctx.graph, body, ctx.name) for body in bodies)
    stacks: list[Tensor] = []
    last_steps: list[Program] = []
    # The counter advances before the stores, in one compute set with vertices that do not read it: it starts a step
    # before the first row.
    counter = new_counter(ctx.builder, slots.start - slots.step)
    advance(in_body, counter, slots.step)
    jaxpr = inside.jaxpr.jaxpr
    row_sums = ctx.row_sums[inside.results.stacks]
    carried = {var: n for n, var in enumerate(jaxpr.outvars[inside.results.carries]) if isinstance(var, Var)}
    # For each result whether its row goes to streaming memory, and whether to the host's memory.
    rows = list(zip(jaxpr.outvars, results, put_results(jaxpr), sent_rows(jaxpr), strict=True))
    pushed: list[tuple[Tensor, Tensor]] = []  # stacks on chip, and their values
    pushed_later: list[tuple[Tensor, Tensor]] = []  # likewise, in the next iteration
    summed: list[tuple[RowSum, Tensor, Tensor]] = []  # sums, their stacks and the rows that are added to them
    for (var, value, is_put, is_sent), row_sum in zip(rows[inside.results.stacks], row_sums, strict=True):
        state = carries[carried[var]] if isinstance(var, Var) and var in carried and len(slots) > 1 else None
        if is_put or is_sent:
            stack, stores = store_rows(ctx, bodies[1], value, counter, len(slots), on_host=is_sent)
            last_steps += stores.last
        elif row_sum is not None:
            stack = row_sum.stack_for(value, len(slots))
            summed.append((row_sum, stack, value))
        elif state is not None:
            map_linearly(ctx.graph, value)
            map_like(ctx.graph, state, value)
            # On other tiles than the state, which the first vertices of an iteration leave idle.
            stack = new_stack(ctx.builder, state, len(slots), is_elsewhere=True)
            pushed_later.append((stack, state))
            last_steps.append(Copy(state, stack[slots[-1]], f"{ctx.name}/push", ctx.graph.origin))
        else:
            stack = new_stack(ctx.builder, value, len(slots))
            pushed.append((stack, value))
        stacks.append(stack)
    totals = slots_of(in_body, [stack for _, stack, _ in summed], counter)
    for (row_sum, stack, value), total in zip(summed, totals, strict=True):
        row_sum.add(value, total, in_body.prog)
        pushed.append((stack, total))
    push_to_all(in_body, pushed, counter)
    # The first iteration stores the initial state where the second one overwrites it, since slots are clamped.
    push_to_all(at_start, pushed_later, counter)
    return stacks, last_steps


def while_rule(
    ctx: Context,
    *operands: Tensor,
    **params: Any,
) -> Sequence[Tensor]:
    """Loop that runs while a computed scalar is true; returns its carries.

    A batched loop has a predicate for each element of the batch: it runs while any is true, and changes the carries of
    those elements alone.

    Args:
        ctx: the equation.
        operands: constants of the condition, constants of the body, carries before the loop.
        params: parameters of the primitive, the jaxprs of condition and body.
    """
    inside = while_body(params)
    tested = while_condition(params)
    tested_consts = operands[tested.operands.constants]
    carries = _states(ctx, operands, inside)
    condition = ProgramSequence()
    body = ProgramSequence()
    with ctx.graph.inside_loop(None):
        (predicate,) = ctx.lower_jaxpr(tested.jaxpr, [*tested_consts, *carries], condition)
        is_batched = predicate.ndim > 0
        consts = operands[inside.operands.constants]
        # Old carries of a batch are read once more after the body, so it may not overwrite them.
        results = ctx.lower_jaxpr(inside.jaxpr, [*consts, *carries], body, () if is_batched else carries)
    if is_batched:
        # The body needs the predicate of each element, the condition only whether any is true.
        (running,) = ctx.lower_jaxpr(tested.jaxpr, [*tested_consts, *carries], body)
        results = [
            _select_running(ctx.into(body), running, new, old) for new, old in zip(results, carries, strict=True)
        ]
        predicate = reduce(ctx.builder.into(condition).named("any"), predicate, range(predicate.ndim), "or")
    map_linearly(ctx.graph, predicate)
    assign(ctx.builder.into(body), results, carries)
    ctx.prog.add(RepeatWhile(condition, predicate, body, ctx.graph.origin))
    return carries


def _states(ctx: Context, operands: Sequence[Tensor], body: Body) -> list[Tensor]:
    """Carries of a loop, which its body overwrites: the operands themselves if nothing else reads them, else copies.

    One in streaming memory is never copied: the pass `offload` has given it a buffer that the loop may overwrite.

    Args:
        ctx: the equation of the loop.
        operands: all its operands.
        body: jaxpr of the body, and which operands and inputs are carries.
    """
    states: list[Tensor] = []
    # Whether the body reads a carry with its columns in groups of channels, as products do.
    are_in_groups = grouped_inputs(body.jaxpr.jaxpr)[body.inputs.carries]
    for n, (x, in_groups) in enumerate(zip(operands[body.operands.carries], are_in_groups, strict=True)):
        # Set, to the operand itself, where nothing after the loop reads the operand, see `LastReads.may_overwrite`.
        place = ctx.into_tensors[n]
        is_read_once = sum(operand.node is x.node for operand in operands) == 1
        if is_off_chip(ctx, x):
            states.append(x)
        elif place is not None and place.node is x.node and is_read_once:
            states.append(place)
        else:
            # A loop over micro-batches begins with cleared accumulators of gradients. PopART clears them in the
            # fragment of its optimisers, so their copy counts as a part of the update, not of the loop. Such a loop has
            # whole forward and backward parts inside, and so is plumbing; one within a backward part has that part.
            is_accumulator = ctx.result_roles[n] == GRADIENTS and ctx.graph.origin.part == PLUMBING
            origin = replace(ctx.graph.origin, part=UPDATE) if is_accumulator else ctx.graph.origin
            with ctx.graph.debug_origin(origin):
                states.append(new_state(ctx.builder, x, n, in_groups))
    return states


def _select_running(ctx: Context, running: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` for those elements of the batch, along the leading dimensions, that still run, `old` for the others."""
    is_running = running.broadcast_in_dim(new.shape, tuple(range(running.ndim)))
    return elementwise(ctx.builder.named("where"), Op("select_n", lax.select_n, new.dtype), [is_running, old, new])


def cond_rule(
    ctx: Context, selector: Tensor, *operands: Tensor, branches: Sequence[ClosedJaxpr], **params: Any
) -> Sequence[Tensor]:
    """Runs one of several branches; returns the results, which all branches write to the same variables.

    Args:
        ctx: the equation.
        selector: number of the branch, int32[]; JAX has clamped it into range.
        operands: operands of each branch.
        branches: jaxprs of the branches.
        params: parameters of the primitive without meaning here.
    """
    map_linearly(ctx.graph, selector)
    programs = [ProgramSequence() for _ in branches]
    results = [ctx.lower_jaxpr(branch, operands, prog) for branch, prog in zip(branches, programs, strict=True)]
    outs = []
    for number in range(len(ctx.out_avals)):
        candidates = [branch[number] for branch in results]
        if is_off_chip(ctx, candidates[0]):
            assert all(x.node == candidates[0].node for x in candidates), "branches store to one buffer"
            outs.append(candidates[0])
            continue
        # All branches write one variable, mapped as one of their results, since any may run.
        out = add_like(ctx.graph, _simplest_layout(ctx.graph, candidates), ctx.name)
        for prog, value in zip(programs, candidates, strict=True):
            map_linearly(ctx.graph, value)
            prog.add(Copy(value, out, f"{ctx.name}/result", ctx.graph.origin))
        outs.append(out)
    ctx.prog.add(Switch(selector, tuple(programs[:-1]), programs[-1], ctx.graph.origin))
    return outs


def _simplest_layout(graph: Graph, candidates: Sequence[Tensor]) -> Tensor:
    """First candidate with a memory order and a mapping, which a new variable can have too; else the first."""
    return next((x for x in candidates if memory_order(x) and graph.is_mapped(x)), candidates[0])


RULES: dict[str, Rule] = {"scan": scan_rule, "while": while_rule, "cond": cond_rule}
