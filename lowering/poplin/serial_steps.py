"""Products in several steps, one after the other: in a loop, or each with code of its own.

Input: an operand that steps divide along one dimension, and a function that adds one step. An iteration slices its part
of the operand on the operand's own tiles, and writes its result to a slot of a stack. An operand of which tiles do not
store equal shares of each part is first copied to such a mapping. Without a loop nothing is sliced; results are copied
to one variable.
Source: serial splits of PopLibs' plans (`poplin/ConvPlan.cpp`), a loop with dynamic slices too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ipujax.lowering.layout import MemoryOrder, linear_mapping, mapping_like
from ipujax.lowering.layout.mapping import copied_if_huge
from ipujax.lowering.popops import advance, map_for_slicing, new_counter, new_stack, push, slot_of, slots_first
from ipujax.runtime.graph import Builder, Copy, Repeat, Sequence as ProgramSequence
from ipujax.runtime.tensor import Blocked, Tensor, concat


def add_in_steps(
    builder: Builder,
    operand: Tensor,
    steps: int,
    add_step: Callable[[Tensor, ProgramSequence], Tensor],
    *,
    dim: int,
    channel: int,
    out_dim: int,
    out_channel: int,
    is_loop: bool,
) -> Tensor:
    """Adds steps over equal parts of an operand, which need less memory; returns their results, one after the other.

    Args:
        operand: the operand that steps divide.
        steps: number of steps.
        add_step: adds a step to a sequence, from its part of the operand; returns its result.
        dim: dimension of the operand that is divided.
        channel: dimension of its channels, by which it is stored.
        out_dim: dimension of results along which they follow one another.
        out_channel: dimension of channels of the results.
        is_loop: whether the steps are a loop, or follow one another with code of their own.
    """
    if not is_loop:
        results = [add_step(part, builder.prog) for part in _equal_parts(builder, operand, dim, steps)]
        return _join_results(builder, results, out_dim, out_channel)
    # A loop reads its part from a stack, by a counter, and writes its result to another one.
    stack = _stack_of(builder, operand, dim, channel=channel, steps=steps)
    body = ProgramSequence()
    counter = new_counter(builder, 0)
    result = add_step(slot_of(builder.into(body), stack, counter), body)
    stacked = new_stack(builder, result, steps)
    push(builder.into(body), stacked, result, counter)
    advance(builder.into(body), counter, 1)
    builder.prog.add(Repeat(steps, body, builder.graph.origin))
    # The slots, which are first, belong directly before the dimension that they divide.
    order = [*range(1, out_dim + 1), 0, *range(out_dim + 1, stacked.ndim)]
    shape = tuple(steps * n if d == out_dim else n for d, n in enumerate(result.shape))
    return stacked.transpose(order).reshape(shape)


def _stack_of(builder: Builder, operand: Tensor, dim: int, *, channel: int, steps: int) -> Tensor:
    """Parts of an operand, divided along `dim`, as a stack that is sliced without exchange.

    That is the operand itself if each tile has its share of all parts, else a copy, with its channels in groups.
    `channel` is the operand's dimension of channels; the stack has the number of the part as its first dimension.
    """
    graph = builder.graph
    stack = _divide_operand(builder, operand, dim, steps)
    order = slots_first(stack)  # of its dimensions in memory, with that of the parts outermost
    mapping = None if order is None else mapping_like(graph, order.of_variable(stack))
    if isinstance(mapping, Blocked) and len(mapping.cuts[0]) == 2:  # all parts are in one block, of two bounds
        return stack
    # A part without data: the stack has its dtype, its order in memory, and for each slot its mapping. Nothing reads or
    # writes it, so that it takes no memory.
    part_order = MemoryOrder.with_channels(stack.shape[1:], channel)
    part = part_order.of_view(graph.add_variable(part_order.variable_shape, operand.dtype, f"{builder.name}/part"))
    copy = new_stack(builder, part, steps)
    builder.prog.add(Copy(stack, copy, f"{builder.name}/parts", graph.origin))
    return copy


def _divide_operand(builder: Builder, operand: Tensor, dim: int, steps: int) -> Tensor:
    """Parts of an operand in a leading dimension; maps an unmapped operand so that each part is spread evenly."""
    shape = operand.shape
    divided = operand.reshape((*shape[:dim], steps, shape[dim] // steps, *shape[dim + 1 :]))
    divided = copied_if_huge(builder, divided)
    stack = divided.transpose([dim, *(d for d in range(divided.ndim) if d != dim)])
    map_for_slicing(builder.graph, stack, (0,))
    return stack


def _equal_parts(builder: Builder, operand: Tensor, dim: int, steps: int) -> list[Tensor]:
    stack = _divide_operand(builder, operand, dim, steps)
    limits = stack.shape[1:]
    return [stack.slice([n, *[0] * len(limits)], [n + 1, *limits]).reshape(limits) for n in range(steps)]


def _join_results(builder: Builder, results: Sequence[Tensor], dim: int, channel: int) -> Tensor:
    """Copies the results of steps to one variable, of which any view can be taken."""
    graph = builder.graph
    joined = concat(results, dim)
    order = MemoryOrder.with_channels(joined.shape, channel)
    mapping = linear_mapping(graph, joined.size, joined.dtype)
    out = graph.add_variable(order.variable_shape, joined.dtype, builder.name, mapping)
    builder.prog.add(Copy(order.of_variable(joined), out, f"{builder.name}/join", graph.origin))
    return order.of_view(out)
