"""State of loops on tiles: carried values, counters, and stacks of which an iteration reads or writes one slot.

A carried value has a variable of its own, written in place. A stack is one buffer, updated in place, with the stacked
dimension whole on every tile, so that no slice moves between tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import jax
import numpy as np
from jax import lax

from ipujax.lowering.layout import (
    MemoryOrder,
    add_like,
    layout_like,
    linear_mapping,
    map_like,
    map_linearly,
    mapping_like,
    memory_order,
    must_be_set_aside,
    overwrite,
    variable_like,
)
from ipujax.lowering.popops.indexing.dynamic import (
    dynamic_slice,
    dynamic_update_slice_in_place,
    is_sliced_in_place,
    map_for_slicing,
)
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.vertices.kernel import Op
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Copy, Graph, Sequence as ProgramSequence, WriteUndef
from ipujax.runtime.tensor import Blocked, Tensor, TileMapping, blocked_mapping, even_cuts, on_one_tile

_COUNTER = np.dtype(np.int32)
_ADD = Op("add", lax.add, _COUNTER)


def new_state(
    graph: Graph, initial: Tensor, prog: ProgramSequence, name: str, number: int, in_groups: bool = False
) -> Tensor:
    """A variable that starts as `initial` and is overwritten in each iteration.

    Without a layout to follow, or with one that nobody chose, it stays unmapped, so that its first use in the loop maps
    it.

    Args:
        graph: graph to add to.
        initial: its first value.
        prog: where it gets that value.
        name: debug name of the loop.
        number: which of its states it is.
        in_groups: whether its columns are kept in groups, whatever those of the first value are.
    """
    title, held = f"{name}/carry{number}", MemoryOrder.with_channels(initial.shape, initial.ndim - 1)
    if in_groups and memory_order(initial) != held:
        state = held.of_view(graph.add_variable(held.variable_shape, initial.dtype, title))
    elif _lies_linearly(graph, initial):
        state = graph.add_variable(initial.shape, initial.dtype, title)
    else:
        state = variable_like(graph, initial, title)
    prog.add(Copy(initial, state, f"{name}/init", graph.origin))
    return state


def assign(graph: Graph, values: Sequence[Tensor], states: Sequence[Tensor], prog: ProgramSequence, name: str) -> None:
    """Overwrites all states at once: a value that reads a state is set aside first.

    Args:
        graph: graph to add to.
        values: the next value of each state.
        states: variables, each seen whole.
        prog: program to add to.
        name: debug name of the loop.
    """
    pairs = [(v, s) for v, s in zip(values, states, strict=True) if v.node != s.node]
    own = {variable for _, state in pairs for variable in state.variables()}
    aside = [set_aside(graph, v, prog, name) if must_be_set_aside(v, s, own) else v for v, s in pairs]
    for value, (_, state) in zip(aside, pairs, strict=True):
        map_linearly(graph, value)
        map_like(graph, state, value)
        overwrite(graph, value, state, prog, f"{name}/carry")


def _lies_linearly(graph: Graph, tensor: Tensor) -> bool:
    """Whether a tensor lies where nobody chose to have it."""
    found = layout_like(graph, tensor)
    return found is not None and found[1] is linear_mapping(graph, tensor.size, tensor.dtype)


def set_aside(graph: Graph, value: Tensor, prog: ProgramSequence, name: str) -> Tensor:
    """A copy of a value in a variable of its own, laid out alike."""
    map_linearly(graph, value)
    copy = add_like(graph, value, f"{name}/aside")
    prog.add(Copy(value, copy, f"{name}/aside", graph.origin))
    return copy


# --- counters ---------------------------------------------------------------------------------------------------------


def new_counter(graph: Graph, start: int | np.ndarray, prog: ProgramSequence, name: str) -> Tensor:
    """A whole number on one tile, int32[], `start` when the loop begins; an array has one start a replica."""
    counter = graph.add_variable((), _COUNTER, f"{name}/counter", on_one_tile(1, 0))
    add = graph.add_constant if np.ndim(start) == 0 else graph.add_replica_constant
    initial = add(np.asarray(start, _COUNTER), "start", on_one_tile(1, 0))
    prog.add(Copy(initial, counter, f"{name}/counter", graph.origin))
    return counter


def advance(graph: Graph, counter: Tensor, step: int, prog: ProgramSequence, name: str) -> None:
    """Adds `step` to a counter."""
    constant = graph.add_constant(np.asarray(step, _COUNTER), "step")
    following = elementwise(graph, _ADD, [counter, constant], prog, f"{name}/counter")
    prog.add(Copy(following, counter, f"{name}/counter", graph.origin))


def advance_around(graph: Graph, slot: Tensor, slots: int, prog: ProgramSequence, name: str, step: int = 1) -> None:
    """Adds `step`, from 0 to `slots`, to the number of a slot of a ring, in place; behind the last comes the first.

    One vertex: Poplar's `popops::map` makes one codelet of an expression (assumed to cost what its selection does).
    """
    elementwise(graph, _wrapping(slots, step), [slot], prog, f"{name}/slot", slot)


@remembered
def _wrapping(slots: int, step: int) -> Op:
    def following(slot: jax.Array) -> jax.Array:
        return lax.select(slot + step >= slots, slot + (step - slots), slot + step)

    return Op("select_n", following, _COUNTER, ("ring", slots, step))


# --- stacks -----------------------------------------------------------------------------------------------------------


def slot_of(graph: Graph, stack: Tensor, slot: Tensor | None, prog: ProgramSequence, name: str) -> Tensor:
    """One slot of a stack, sliced where it lies if its variable is a stack of another shape.

    Args:
        graph: graph to add to.
        stack: [slots, *shape].
        slot: int32[], its number; None of a stack of one, which is not sliced.
        prog: program to add to.
        name: debug name of the loop.
    """
    if slot is None:
        return stack.reshape(stack.shape[1:])
    held, own = _as_sliced(graph, stack)
    part = dynamic_slice(graph, own, [slot], (1, *own.shape[1:]), prog, f"{name}/slice", dims=(0,))
    graph.note_role(part, graph.role_of(stack))
    one = held.without([0])
    return one.of_view(part.reshape(one.variable_shape))


def moved_for_slicing(graph: Graph, stack: Tensor, prog: ProgramSequence, name: str) -> Tensor:
    """A stack that no slice moves between tiles: a copy, where the stack itself is mapped otherwise.

    Args:
        graph: graph to add to.
        stack: [slots, *shape], mapped.
        prog: where the copy is made, before the loop.
        name: debug name of the loop.
    """
    held, own = _as_sliced(graph, stack)
    is_repeated = sum(variable.size for variable in stack.variables()) < stack.size
    if not stack.size or is_repeated or is_sliced_in_place(graph, own, (0,)):
        return stack
    copy = graph.add_variable(held.variable_shape, stack.dtype, f"{name}/stack")
    map_for_slicing(graph, copy, (0,))
    moved = held.of_view(copy)
    prog.add(Copy(stack, moved, f"{name}/stack", graph.origin))
    return moved


def _as_sliced(graph: Graph, stack: Tensor) -> tuple[MemoryOrder, Tensor]:
    """How a stack is kept, and its memory as it is sliced: in the shape of its variable if that is a stack as well."""
    held = slots_first(stack) or MemoryOrder.own(stack.shape)
    seen = held.of_variable(stack)
    layout = layout_like(graph, seen)
    own = seen.shape if layout is None else layout[0]
    if own[:1] != seen.shape[:1] or prod(own[1:]) != prod(seen.shape[1:]):  # a stack of no slots has any shape behind
        own = seen.shape
    return held, seen.reshape(own)


def slots_first(stack: Tensor) -> MemoryOrder | None:
    """How a stack is kept, if its slots lie one behind the other; None otherwise."""
    held = memory_order(stack)
    if held is None or len(held.sizes[0]) > 1:
        return None
    singles = [d for d in held.order if held.variable_shape[held.order.index(d)] == 1 and d != 0]
    order = (*(d for d in held.order if d not in singles), *singles)  # what is of size 1 may be anywhere
    return replace(held, order=(0, *singles, *order[1 : len(order) - len(singles)])) if order[0] == 0 else None


def new_stack(graph: Graph, value: Tensor, slots: int, prog: ProgramSequence, name: str) -> Tensor:
    """An empty stack for values laid out as one, [slots, *shape].

    Args:
        graph: graph to add to.
        value: one of them; what of it lies nowhere is placed.
        slots: how many it holds.
        prog: where its memory becomes live, before all loops that write it.
        name: debug name of the loop.
    """
    map_linearly(graph, value)
    held = memory_order(value) or MemoryOrder.own(value.shape)
    seen = held.of_variable(value)
    mapping = mapping_like(graph, seen)
    shape = seen.shape if isinstance(mapping, Blocked) else (seen.size,)
    stack = graph.add_variable((slots, *shape), value.dtype, f"{name}/stack", _stacked(graph, value, mapping, slots))
    prog.add(WriteUndef(stack))
    return held.behind(slots).of_view(stack.reshape((slots, *seen.shape)))


def push(graph: Graph, stack: Tensor, value: Tensor, slot: Tensor | None, prog: ProgramSequence, name: str) -> None:
    """Writes a value to a slot of a stack that `new_stack` made.

    Args:
        graph: graph to add to.
        stack: [slots, *shape].
        value: of the shape and the layout the stack was made for.
        slot: int32[], its number; None of a stack of one, which is overwritten.
        prog: program to add to.
        name: debug name of the loop.
    """
    own, held = Tensor.of(*stack.variables()), memory_order(stack)
    assert held is not None, "a stack is a view of one whole variable"
    update = held.without([0]).of_variable(value).reshape((1, *own.shape[1:]))
    if slot is None:
        prog.add(Copy(update, own, f"{name}/push", graph.origin))
    else:
        dynamic_update_slice_in_place(graph, own, update, [slot], prog, f"{name}/push", dims=(0,))


def _stacked(graph: Graph, value: Tensor, mapping: TileMapping | None, slots: int) -> Blocked:
    whole = even_cuts(slots, 1)
    if isinstance(mapping, Blocked):
        return blocked_mapping((whole, *mapping.cuts), mapping.tile[None] if slots else mapping.tile[None][:0])
    flat = mapping if mapping is not None else linear_mapping(graph, value.size, value.dtype)
    bounds = np.append(flat.starts, flat.size) if flat.size else np.zeros(1, np.int64)
    return blocked_mapping((whole, bounds), flat.tiles[None] if slots else flat.tiles[None][:0])
