"""Rules for control flow: loops and branches stay loops and branches of the control program.

A loop's carried values live in variables of their own, written in place at the end of each turn. What a loop stacks up
is one buffer, updated in place, with the stacked dimension whole on every tile, so that no slice moves between tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from ipujax.lowering.context import Context, Rule
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.popops.dynamic import dynamic_slice, dynamic_update_slice_in_place, map_for_slicing
from ipujax.lowering.popops.elementwise import Op, elementwise
from ipujax.lowering.popops.reduce import reduce
from ipujax.lowering.poputil.mapping import layout_like, linear_mapping, map_linearly, mapping_like
from ipujax.runtime.graph import Graph
from ipujax.runtime.mapping import Blocked, TileMapping, blocked_mapping, even_cuts, on_one_tile
from ipujax.runtime.program import Copy, Repeat, RepeatWhile, Switch, WriteUndef
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor

_COUNTER = np.dtype(np.int32)
_ADD = Op("add", lax.add, _COUNTER)


def scan_rule(
    ctx: Context,
    *operands: Tensor,
    jaxpr: ClosedJaxpr,
    length: int,
    reverse: bool,
    num_consts: int,
    num_carry: int,
    **params: Any,
) -> Sequence[Tensor]:
    """A loop with a fixed number of turns that reads and writes slices of stacks."""
    del params  # `unroll` and its like are advice for XLA
    consts = operands[:num_consts]
    carries = [new_state(ctx, x, n) for n, x in enumerate(operands[num_consts : num_consts + num_carry])]
    stacks = operands[num_consts + num_carry :]
    for stack in stacks:
        map_for_slicing(ctx.graph, stack, (0,))
    counter = _counter(ctx, length - 1 if reverse else 0)
    body = ProgramSequence()
    slices = [_slice_of(ctx.into(body), stack, counter) for stack in stacks]
    results = ctx.lower_jaxpr(jaxpr, [*consts, *carries, *slices], body)
    pushed = [_push(ctx, body, y, length, counter) for y in results[num_carry:]]
    assign(ctx.into(body), results[:num_carry], carries)
    step = ctx.graph.add_constant(np.asarray(-1 if reverse else 1, _COUNTER), "step")
    following = elementwise(ctx.graph, _ADD, [counter, step], body, f"{ctx.name}/counter")
    body.add(Copy(following, counter, f"{ctx.name}/counter", ctx.graph.origin))
    ctx.prog.add(Repeat(length, body, ctx.graph.origin))
    return [*carries, *pushed]


def while_rule(
    ctx: Context,
    *operands: Tensor,
    cond_jaxpr: ClosedJaxpr,
    body_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_nconsts: int,
) -> Sequence[Tensor]:
    """A loop that runs while a computed scalar is true.

    A batched loop has a predicate for each element of the batch: it runs while any is true, and changes only those.
    """
    cond_consts = operands[:cond_nconsts]
    body_consts = operands[cond_nconsts : cond_nconsts + body_nconsts]
    carries = [new_state(ctx, x, n) for n, x in enumerate(operands[cond_nconsts + body_nconsts :])]
    condition, body = ProgramSequence(), ProgramSequence()
    (predicate,) = ctx.lower_jaxpr(cond_jaxpr, [*cond_consts, *carries], condition)
    results = ctx.lower_jaxpr(body_jaxpr, [*body_consts, *carries], body)
    if predicate.ndim:
        (running,) = ctx.lower_jaxpr(cond_jaxpr, [*cond_consts, *carries], body)
        results = [_where(ctx.into(body), running, new, old) for new, old in zip(results, carries, strict=True)]
        predicate = reduce(ctx.graph, predicate, range(predicate.ndim), "or", condition, f"{ctx.name}/any")
    map_linearly(ctx.graph, predicate)
    assign(ctx.into(body), results, carries)
    ctx.prog.add(RepeatWhile(condition, predicate, body, ctx.graph.origin))
    return carries


def _where(ctx: Context, running: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in those elements of the batch, the leading dimensions, that still run."""
    chosen = running.broadcast_in_dim(new.shape, tuple(range(running.ndim)))
    return elementwise(
        ctx.graph, Op("select_n", lax.select_n, new.dtype), [chosen, old, new], ctx.prog, f"{ctx.name}/where"
    )


def cond_rule(
    ctx: Context, selector: Tensor, *operands: Tensor, branches: Sequence[ClosedJaxpr], **params: Any
) -> Sequence[Tensor]:
    """One of several branches; JAX has clamped the selector into range."""
    del params
    map_linearly(ctx.graph, selector)
    programs = [ProgramSequence() for _ in branches]
    results = [ctx.lower_jaxpr(branch, operands, prog) for branch, prog in zip(branches, programs, strict=True)]
    outs = []
    for number, aval in enumerate(ctx.out_avals):
        candidates = [branch[number] for branch in results]
        out = ctx.graph.add_variable(aval.shape, aval.dtype, ctx.name, _mapping_of_any(ctx.graph, candidates))
        for prog, value in zip(programs, candidates, strict=True):
            map_linearly(ctx.graph, value)
            prog.add(Copy(value, out, f"{ctx.name}/result", ctx.graph.origin))
        outs.append(out)
    ctx.prog.add(Switch(selector, tuple(programs[:-1]), programs[-1], ctx.graph.origin))
    return outs


def new_state(ctx: Context, initial: Tensor, number: int) -> Tensor:
    """A variable that starts as `initial` and is overwritten turn by turn.

    Without a layout to follow it stays unmapped, so that its first use in the loop maps it.
    """
    graph = ctx.graph
    state = graph.add_variable(initial.shape, initial.dtype, f"{ctx.name}/carry{number}")
    mapping = mapping_like(graph, initial)
    if mapping is not None:
        graph.set_tile_mapping(state.variables()[0], mapping)
    ctx.prog.add(Copy(initial, state, f"{ctx.name}/init", graph.origin))
    return state


def assign(ctx: Context, values: Sequence[Tensor], states: Sequence[Tensor]) -> None:
    """Overwrites all states at once: a value that reads a state is set aside first."""
    own = {variable for state in states for variable in state.variables()}
    pairs = [
        (v, s)
        for v, s in zip(values, states, strict=True)
        if v.variables() != s.variables() or v.shape != s.shape or not v.is_whole_variable
    ]
    aside = [_set_aside(ctx, v) if own & set(v.variables()) else v for v, _ in pairs]
    for value, (_, state) in zip(aside, pairs, strict=True):
        _map_alike(ctx.graph, state, value)
        ctx.prog.add(Copy(value, state, f"{ctx.name}/carry", ctx.graph.origin))


def _set_aside(ctx: Context, value: Tensor) -> Tensor:
    map_linearly(ctx.graph, value)
    mapping = mapping_like(ctx.graph, value) or linear_mapping(ctx.graph, value.size, value.dtype)
    copy = ctx.graph.add_variable(value.shape, value.dtype, f"{ctx.name}/aside", mapping)
    ctx.prog.add(Copy(value, copy, f"{ctx.name}/aside", ctx.graph.origin))
    return copy


def _map_alike(graph: Graph, state: Tensor, value: Tensor) -> None:
    """Maps a state that no use has mapped like the value that overwrites it."""
    if not graph.is_mapped(state):
        mapping = mapping_like(graph, value)
        if mapping is None:
            map_linearly(graph, state)
        else:
            graph.set_tile_mapping(state.variables()[0], mapping)
    map_linearly(graph, value)


def _counter(ctx: Context, start: int) -> Tensor:
    counter = ctx.graph.add_variable((), _COUNTER, f"{ctx.name}/counter", on_one_tile(1, 0))
    initial = ctx.graph.add_constant(np.asarray(start, _COUNTER), "start", on_one_tile(1, 0))
    ctx.prog.add(Copy(initial, counter, f"{ctx.name}/counter", ctx.graph.origin))
    return counter


def _slice_of(ctx: Context, stack: Tensor, counter: Tensor) -> Tensor:
    """Slot `counter` of a stack, sliced where it lies if its variable is a stack of another shape."""
    layout = layout_like(ctx.graph, stack)
    own = layout[0] if layout is not None and layout[0][:1] == stack.shape[:1] else stack.shape
    part = dynamic_slice(
        ctx.graph, stack.reshape(own), [counter], (1, *own[1:]), ctx.prog, f"{ctx.name}/slice", dims=(0,)
    )
    return part.reshape(stack.shape[1:])


def _push(ctx: Context, body: ProgramSequence, value: Tensor, length: int, counter: Tensor) -> Tensor:
    """Writes `value` to slot `counter` of a new stack in the body of a loop, and returns the stack."""
    graph = ctx.graph
    map_linearly(graph, value)
    mapping = mapping_like(graph, value)
    flat = not isinstance(mapping, Blocked)
    shape = (value.size,) if flat else value.shape
    stack = graph.add_variable(
        (length, *shape), value.dtype, f"{ctx.name}/stack", _stacked(graph, value, mapping, length)
    )
    ctx.prog.add(WriteUndef(stack))
    dynamic_update_slice_in_place(
        graph, stack, value.reshape((1, *shape)), [counter], body, f"{ctx.name}/push", dims=(0,)
    )
    return stack.reshape((length, *value.shape))


def _stacked(graph: Graph, value: Tensor, mapping: TileMapping | None, length: int) -> Blocked:
    whole = even_cuts(length, 1)
    if isinstance(mapping, Blocked):
        return blocked_mapping((whole, *mapping.cuts), mapping.tile[None] if length else mapping.tile[None][:0])
    flat = mapping if mapping is not None else linear_mapping(graph, value.size, value.dtype)
    bounds = np.append(flat.starts, flat.size) if flat.size else np.zeros(1, np.int64)
    return blocked_mapping((whole, bounds), flat.tiles[None] if length else flat.tiles[None][:0])


def _mapping_of_any(graph: Graph, candidates: Sequence[Tensor]) -> TileMapping:
    for value in candidates:
        mapping = mapping_like(graph, value)
        if mapping is not None:
            return mapping
    return linear_mapping(graph, candidates[0].size, candidates[0].dtype)


RULES: dict[str, Rule] = {"scan": scan_rule, "while": while_rule, "cond": cond_rule}
