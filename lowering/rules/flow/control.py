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
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.jaxpr import Body, scan_body, while_body, while_condition
from ipujax.lowering.layout import MemoryOrder, add_like, map_linearly, memory_order
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
    push,
    slot_of,
)
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.reductions.reduce import reduce
from ipujax.lowering.rules.base.context import Context, Rule
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
    """Adds a stack of `rows` off chip, of which `body` stores row `counter` in each iteration."""
    stack, stores = store_of_stack(ctx.graph, ctx.name, row, rows, counter, on_host=on_host)
    for step in (*stores.copies, *stores.transfers):
        body.add(step)
    return stack, stores


class RowStreams:
    """Rows of stacks that one loop reads: row `counter` in each iteration, from `start` on in steps of `step`."""

    def __init__(self, ctx: Context, body: ProgramSequence, counter: Tensor, start: int, step: int) -> None:
        self._ctx = ctx
        self._body = body
        self._counter = counter
        self._step = step
        self._ahead = new_counter(ctx.builder, start) if ctx.graph.io_view is not None else None
        self._fetched: list[tuple[Tensor, Tensor]] = []  # (stack, its row on I/O tiles)

    def row(self, stack: Tensor, in_groups: bool) -> Tensor:
        """The iteration's row of a stack in streaming memory, with its columns in groups or not."""
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
    """Loop with a fixed trip count that reads and writes slices of stacks."""
    inside = scan_body(params)  # parameters that it does not read, such as `unroll`, are advice for XLA
    jaxpr = inside.jaxpr
    graph = ctx.graph
    name = ctx.name
    carries = _states(ctx, operands, inside)
    stacks = list(operands[inside.operands.stacks])
    for n, stack in enumerate(stacks):
        if not is_off_chip(ctx, stack):
            map_for_slicing(graph, stack, (0,))
            # A stack that is read once is not worth a copy.
            stacks[n] = moved_for_slicing(Builder(graph, ctx.prog, name), stack) if length > 1 else stack
    first, step = (length - 1, -1) if reverse else (0, 1)
    counter = new_counter(Builder(graph, ctx.prog, name), first)
    body = ProgramSequence()
    slices: list[Tensor] = []
    streams = RowStreams(ctx, body, counter, first, step)
    for stack, in_groups in zip(stacks, grouped_inputs(jaxpr.jaxpr)[inside.inputs.stacks], strict=True):
        is_remote = is_off_chip(ctx, stack)
        slices.append(
            streams.row(stack, in_groups) if is_remote else slot_of(Builder(graph, body, name), stack, counter)
        )
    streams.fetch_ahead()
    with graph.inside_loop(length):
        results = ctx.lower_jaxpr(jaxpr, [*operands[inside.operands.constants], *carries, *slices], body, carries)
    pushed: list[Tensor] = []
    last_steps: list[Program] = []
    is_put, is_sent = put_results(jaxpr.jaxpr), sent_rows(jaxpr.jaxpr)
    for value, is_row_put, is_row_sent in list(zip(results, is_put, is_sent, strict=True))[inside.results.stacks]:
        if is_row_put or is_row_sent:
            stack, stores = store_rows(ctx, body, value, counter, length, on_host=is_row_sent)
            pushed.append(stack)
            last_steps += stores.last
            continue
        pushed.append(new_stack(Builder(graph, ctx.prog, name), value, length))
        push(Builder(graph, body, name), pushed[-1], value, counter)
    assign(Builder(graph, body, name), results[inside.results.carries], carries)
    advance(Builder(graph, body, name), counter, step)
    ctx.prog.add(Repeat(length, body, graph.origin))
    streams.finish()
    for step_after in last_steps:
        ctx.prog.add(step_after)
    return [*carries, *pushed]


def while_rule(
    ctx: Context,
    *operands: Tensor,
    **params: Any,
) -> Sequence[Tensor]:
    """Loop that runs while a computed scalar is true."""
    # A batched loop has a predicate for each element of the batch: it runs while any is true, and changes only those.
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
        results = ctx.lower_jaxpr(inside.jaxpr, [*consts, *carries], body, () if is_batched else carries)
    if is_batched:
        # The body needs the predicate of each element, the condition only whether any is true.
        (running,) = ctx.lower_jaxpr(tested.jaxpr, [*tested_consts, *carries], body)
        results = [_where(ctx.into(body), running, new, old) for new, old in zip(results, carries, strict=True)]
        predicate = reduce(ctx.builder.into(condition).named("any"), predicate, range(predicate.ndim), "or")
    map_linearly(ctx.graph, predicate)
    assign(ctx.builder.into(body), results, carries)
    ctx.prog.add(RepeatWhile(condition, predicate, body, ctx.graph.origin))
    return carries


def _states(ctx: Context, operands: Sequence[Tensor], body: Body) -> list[Tensor]:
    """Carries of a loop: its initial operands themselves where nothing else reads them, else new variables."""
    states: list[Tensor] = []
    in_groups_of_inputs = grouped_inputs(body.jaxpr.jaxpr)[body.inputs.carries]
    for n, (x, in_groups) in enumerate(zip(operands[body.operands.carries], in_groups_of_inputs, strict=True)):
        place = ctx.into_tensors[n]
        if is_off_chip(ctx, x):
            states.append(x)
        elif place is not None and place.node is x.node and sum(operand.node is x.node for operand in operands) == 1:
            states.append(place)
        else:
            # Accumulators are cleared once a step, in PopART in the fragment of its optimisers.
            is_cleared = ctx.result_roles[n] == GRADIENTS and ctx.graph.origin.part == PLUMBING
            origin = replace(ctx.graph.origin, part=UPDATE) if is_cleared else ctx.graph.origin
            with ctx.graph.debug_origin(origin):
                states.append(new_state(ctx.builder, x, n, in_groups))
    return states


def _where(ctx: Context, running: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in those elements of the batch, the leading dimensions, that still run."""
    is_running = running.broadcast_in_dim(new.shape, tuple(range(running.ndim)))
    return elementwise(ctx.builder.named("where"), Op("select_n", lax.select_n, new.dtype), [is_running, old, new])


def cond_rule(
    ctx: Context, selector: Tensor, *operands: Tensor, branches: Sequence[ClosedJaxpr], **params: Any
) -> Sequence[Tensor]:
    """One of several branches; JAX has clamped the selector into range. Results in streaming memory share a buffer."""
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
        # All branches write one variable, mapped as one of their results.
        out = add_like(ctx.graph, _placed_simply(ctx.graph, candidates), ctx.name)
        for prog, value in zip(programs, candidates, strict=True):
            map_linearly(ctx.graph, value)
            prog.add(Copy(value, out, f"{ctx.name}/result", ctx.graph.origin))
        outs.append(out)
    ctx.prog.add(Switch(selector, tuple(programs[:-1]), programs[-1], ctx.graph.origin))
    return outs


def _placed_simply(graph: Graph, candidates: Sequence[Tensor]) -> Tensor:
    """First candidate with a memory order and a mapping, else the first."""
    return next((x for x in candidates if memory_order(x) and graph.is_mapped(x)), candidates[0])


RULES: dict[str, Rule] = {"scan": scan_rule, "while": while_rule, "cond": cond_rule}
