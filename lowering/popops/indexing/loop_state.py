"""State of loops on tiles: carried values, counters, and stacks of which an iteration reads or writes one slot.

A carried value has a variable of its own, written in place. A stack is one buffer, updated in place, with the stacked
dimension uncut on every tile, so that no slice moves between tiles.
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
from ipujax.lowering.popops.indexing.dynamic_slices import (
    dynamic_slice,
    dynamic_update_slice_in_place,
    is_sliced_in_place,
    map_for_slicing,
    on_opposite_tiles,
    slices_of_tiles,
)
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.vertices.kernel import Op
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Builder, Copy, Graph, WriteUndef
from ipujax.runtime.tensor import (
    Blocked,
    Tensor,
    TileMapping,
    blocked_mapping,
    concat,
    element_bytes,
    even_cuts,
    on_one_tile,
)

_COUNTER = np.dtype(np.int32)
_ADD = Op("add", lax.add, _COUNTER)


def new_state(builder: Builder, initial: Tensor, number: int, in_groups: bool = False) -> Tensor:
    """Adds a state of a loop: a variable that starts as `initial` and is overwritten in each iteration.

    It gets the layout of `initial`, if a planner chose that. Else it stays unmapped, and its first use in the loop
    maps it.

    Args:
        builder: graph, the program before the loop, and the debug name.
        initial: value before the first iteration.
        number: number of the state among those of the loop, for its name.
        in_groups: whether columns are to be stored in groups of channels, as products read them fastest.
    """
    graph = builder.graph
    title = f"{builder.name}/carry{number}"
    order = MemoryOrder.with_channels(initial.shape, initial.ndim - 1)
    if in_groups and memory_order(initial) != order:
        state = order.of_view(graph.add_variable(order.variable_shape, initial.dtype, title))
    elif _is_mapped_linearly(graph, initial):
        state = graph.add_variable(initial.shape, initial.dtype, title)
    else:
        state = variable_like(graph, initial, title)
    builder.prog.add(Copy(initial, state, f"{builder.name}/init", graph.origin))
    return state


def assign(builder: Builder, values: Sequence[Tensor], states: Sequence[Tensor]) -> None:
    """Overwrites all states, variables in full, at once: a value that reads a state is copied first."""
    pairs = [(v, s) for v, s in zip(values, states, strict=True) if v.node != s.node]
    overwritten = {variable for _, state in pairs for variable in state.variables()}
    safe_values = [set_aside(builder, v) if must_be_set_aside(v, s, overwritten) else v for v, s in pairs]
    for value, (_, state) in zip(safe_values, pairs, strict=True):
        map_linearly(builder.graph, value)
        map_like(builder.graph, state, value)
    for moves in _joined(builder.graph, [(value, state) for value, (_, state) in zip(safe_values, pairs, strict=True)]):
        value, state = moves[0]
        if len(moves) > 1:
            value, state = (concat([x.flatten() for x in side], 0) for side in zip(*moves, strict=True))
        overwrite(builder.named("carry"), value, state)


def _joined(graph: Graph, moves: Sequence[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Groups copies of one dtype to share a superstep, where their bytes on a tile cost less than the sync saved."""
    most_bytes = graph.target.internal_sync_cycles / graph.byte_cost_cycles * graph.target.tiles_per_ipu
    joined: dict[np.dtype, list[tuple[Tensor, Tensor]]] = {}
    alone: list[list[tuple[Tensor, Tensor]]] = []
    for value, state in moves:
        if value.size * element_bytes(value.dtype) > most_bytes:
            alone.append([(value, state)])
        else:
            joined.setdefault(value.dtype, []).append((value, state))
    return [*joined.values(), *alone]


def _is_mapped_linearly(graph: Graph, tensor: Tensor) -> bool:
    """True if a tensor has the linear mapping, which no planner chose."""
    layout = layout_like(graph, tensor)
    return layout is not None and layout[1] is linear_mapping(graph, tensor.size, tensor.dtype)


def set_aside(builder: Builder, value: Tensor) -> Tensor:
    """Copies a value to a new variable of equal layout."""
    graph = builder.graph
    map_linearly(graph, value)
    copy = add_like(graph, value, f"{builder.name}/aside")
    builder.prog.add(Copy(value, copy, f"{builder.name}/aside", graph.origin))
    return copy


def new_counter(builder: Builder, start: int | np.ndarray) -> Tensor:
    """Adds an integer on one tile, int32[], initially `start`; an array `start` has one value a replica."""
    graph = builder.graph
    # Most operations that leave tiles idle leave the last ones idle: the counter advances there beside them.
    last = graph.target.tiles_per_ipu - 1
    counter = graph.add_variable((), _COUNTER, f"{builder.name}/counter", on_one_tile(1, last))
    add = graph.add_constant if np.ndim(start) == 0 else graph.add_replica_constant
    initial = add(np.asarray(start, _COUNTER), "start", on_one_tile(1, last))
    builder.prog.add(Copy(initial, counter, f"{builder.name}/counter", graph.origin))
    return counter


def advance(builder: Builder, counter: Tensor, step: int) -> None:
    """Adds `step` to a counter, in place."""
    constant = builder.graph.add_constant(np.asarray(step, _COUNTER), "step")
    elementwise(builder.named("counter"), _ADD, [counter, constant], counter)


def advance_around(builder: Builder, slot: Tensor, slots: int, step: int = 1) -> None:
    """Adds `step` of 0 to `slots` to the slot number of a ring, in place; the first slot follows the last."""
    # One vertex: Poplar's `popops::map` makes one codelet of an expression (assumed to cost what its selection does).
    elementwise(builder.named("slot"), _ring_step(slots, step), [slot], slot)


@remembered
def _ring_step(slots: int, step: int) -> Op:
    def following(slot: jax.Array) -> jax.Array:
        return lax.select(slot + step >= slots, slot + (step - slots), slot + step)

    return Op("select_n", following, _COUNTER, ("ring", slots, step))


def slots_of(builder: Builder, stacks: Sequence[Tensor], slot: Tensor) -> list[Tensor]:
    """Slices slot number `slot`, int32[], of several mapped stacks, [slots, *shape]."""
    counts = slices_of_tiles(builder.graph, [_as_sliced(builder.graph, stack)[1] for stack in stacks], (0,))
    return [slot_of(builder, stack, slot, count) for stack, count in zip(stacks, counts, strict=True)]


def slot_of(builder: Builder, stack: Tensor, slot: Tensor | None, slices_of_tile: int = 1) -> Tensor:
    """Value in one slot of a stack, by a slice at a dynamic index.

    Args:
        builder: graph, program and name.
        stack: [slots, *shape].
        slot: number of the slot, int32[]; None for a stack of one slot, whose value is a view.
        slices_of_tile: most slices of this slot that a tile of the stack has, those of other stacks included.
    """
    graph = builder.graph
    if slot is None:
        return stack.reshape(stack.shape[1:])
    # A stack that is a view of a differently shaped variable is sliced in the variable.
    order, buffer = _as_sliced(graph, stack)
    sizes = 1, *buffer.shape[1:]
    part = dynamic_slice(builder.named("slice"), buffer, [slot], sizes, (0,), slices_of_tile=slices_of_tile)
    graph.note_role(part, graph.role_of(stack))
    slot_order = order.without([0])
    return slot_order.of_view(part.reshape(slot_order.variable_shape))


def moved_for_slicing(builder: Builder, stack: Tensor) -> Tensor:
    """Returns a stack, [slots, *shape], on tiles that a loop can slice it on: itself, or a copy of other layout.

    Where the mapping cuts dimension 0, each slice would move between tiles in each iteration. `builder` is that of the
    program before the loop, where the copy is made once.
    """
    graph = builder.graph
    order, buffer = _as_sliced(graph, stack)
    # A view that repeats elements, as a broadcast: a copy would take more memory than it.
    is_repeated = sum(variable.size for variable in stack.variables()) < stack.size
    if not stack.size or is_repeated or is_sliced_in_place(graph, buffer, (0,)):
        return stack
    variable = graph.add_variable(order.variable_shape, stack.dtype, f"{builder.name}/stack")
    map_for_slicing(graph, variable, (0,))
    copy = order.of_view(variable)
    builder.prog.add(Copy(stack, copy, f"{builder.name}/stack", graph.origin))
    return copy


def _as_sliced(graph: Graph, stack: Tensor) -> tuple[MemoryOrder, Tensor]:
    """Memory order of a stack, and a view of its memory that slots can be sliced from, [slots, …].

    The view has the shape of the variable, which its mapping is in, if its dimension 0 has the slots; else the shape
    that the order gives.
    """
    order = slots_first(stack) or MemoryOrder.own(stack.shape)
    buffer = order.of_variable(stack)
    layout = layout_like(graph, buffer)
    shape = buffer.shape if layout is None else layout[0]
    # The second test is for a stack of no slots, whose variable may have any shape after the slots.
    if shape[:1] != buffer.shape[:1] or prod(shape[1:]) != prod(buffer.shape[1:]):
        shape = buffer.shape
    return order, buffer.reshape(shape)


def slots_first(stack: Tensor) -> MemoryOrder | None:
    """Memory order of a stack, [slots, *shape], if its slots are one after the other in memory; None otherwise.

    Of a stack of one slot too, whose dimension of size 1 has no position of its own, the slot is outermost.
    """
    order = memory_order(stack)
    if order is None or len(order.sizes[0]) > 1:  # slots in groups
        return None
    # Dimensions of size 1 may be at any position without moving an element: they are set directly after the slots.
    singles = [d for d in order.order if order.variable_shape[order.order.index(d)] == 1 and d != 0]
    long_dims = [d for d in order.order if d not in singles]
    return replace(order, order=(0, *singles, *long_dims[1:])) if long_dims[0] == 0 else None


def new_stack(builder: Builder, value: Tensor, slots: int, *, is_elsewhere: bool = False) -> Tensor:
    """Adds an empty stack, [slots, *shape], for values of the layout of `value`, which it maps if need be; see `push`.

    Slots are outermost in memory, each in the memory order of the value; on its tiles, or where `is_elsewhere` on the
    opposite ones, so that they can store a value while its tiles compute.
    """
    graph = builder.graph
    map_linearly(graph, value)
    order = memory_order(value) or MemoryOrder.own(value.shape)
    memory = order.of_variable(value)
    mapping = mapping_like(graph, memory)
    shape = memory.shape if isinstance(mapping, Blocked) else (memory.size,)
    stack_mapping = _mapping_of_stack(graph, value, mapping, slots)
    if is_elsewhere:
        stack_mapping = on_opposite_tiles(graph, stack_mapping)
    stack = graph.add_variable((slots, *shape), value.dtype, f"{builder.name}/stack", stack_mapping)
    # Makes its memory live in the builder's program, before all loops that write it.
    builder.prog.add(WriteUndef(stack))
    return order.behind(slots).of_view(stack.reshape((slots, *memory.shape)))


def push_to_all(builder: Builder, pairs: Sequence[tuple[Tensor, Tensor]], slot: Tensor) -> None:
    """Writes to slot number `slot`, int32[], of each of several stacks its value; see `push`."""
    counts = slices_of_tiles(builder.graph, [Tensor.of(*stack.variables()) for stack, _ in pairs], (0,))
    for (stack, value), count in zip(pairs, counts, strict=True):
        push(builder, stack, value, slot, count)


def push(builder: Builder, stack: Tensor, value: Tensor, slot: Tensor | None, slices_of_tile: int = 1) -> None:
    """Writes a value to one slot of a stack, by an update of a slice at a dynamic index.

    Args:
        builder: graph, program and name.
        stack: a result of `new_stack`.
        value: of the layout for which the stack was made.
        slot: number of the slot, int32[]; None for a stack of one slot, which is a plain copy.
        slices_of_tile: most slices of this slot that a tile of the stack has, those of other stacks included.
    """
    buffer = Tensor.of(*stack.variables())  # `new_stack` has made slots its outermost dimension
    order = memory_order(stack)
    assert order is not None, "a stack is a view of one variable in full"
    slot_order = order.without([0])
    update = slot_order.of_variable(value).reshape((1, *buffer.shape[1:]))
    if slot is None:
        builder.prog.add(Copy(update, buffer, f"{builder.name}/push", builder.graph.origin))
    else:
        # A body does not read the stacks that it pushes to.
        writing = builder.named("push"), buffer, update, [slot], (0,)
        dynamic_update_slice_in_place(*writing, may_read_buffer=False, slices_of_tile=slices_of_tile)


def _mapping_of_stack(graph: Graph, value: Tensor, mapping: TileMapping | None, slots: int) -> Blocked:
    """The mapping of a value with an uncut dimension of slots before it; one of no slots has no tiles."""
    uncut = even_cuts(slots, 1)
    if isinstance(mapping, Blocked):
        return blocked_mapping((uncut, *mapping.cuts), mapping.tile[None] if slots else mapping.tile[None][:0])
    flat = mapping if mapping is not None else linear_mapping(graph, value.size, value.dtype)
    bounds = np.append(flat.starts, flat.size) if flat.size else np.zeros(1, np.int64)
    return blocked_mapping((uncut, bounds), flat.tiles[None] if slots else flat.tiles[None][:0])
