"""Convolution over tiles, with strides, padding, both dilations and groups, in any layout of its operands.

Operands keep the dimension order of the user, so that computed unsplit a convolution is the one that `jax.jit` runs.
Groups, of features or of the batch, become a dimension of their own by a view. Each vertex convolves a block: outputs
by batch, group, channel and field, reduced dimensions by channel and kernel; padding and dilation are indices of the
input that read zero. Padding may be negative, where XLA's own CPU convolution reads out of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from jax import lax

from ipujax.lowering.layout import MemoryOrder, Operand, choose_cheapest_alone, linear_mapping
from ipujax.lowering.poplin.operands import Result, is_free, memory_of, place_by_plan, result_variable, zeros
from ipujax.lowering.poplin.partials import check_partials, out_dtypes
from ipujax.lowering.poplin.product_codelets import ConvParams, Layout, convolution_codelet
from ipujax.lowering.poplin.product_plan import plan_convolution, trial_plans
from ipujax.lowering.poplin.rearranged import rearranged
from ipujax.lowering.poplin.serial_steps import add_in_steps
from ipujax.lowering.poplin.spec import BATCH, FIELD, GROUPS, IN_CHANNELS, OUT_CHANNELS, ConvSpec, Dims, Window
from ipujax.lowering.poplin.tile_plan import Plan, is_plan_of, record_unmet_bound, spec_of_all_steps
from ipujax.lowering.poplin.zero_padding import add_zero_padding
from ipujax.lowering.popops.maps.constants import immediate_of
from ipujax.runtime.cache import remembered_and_stored
from ipujax.runtime.errors import GraphError
from ipujax.runtime.exchange import exchange_cycles, sync_cycles
from ipujax.runtime.graph import (
    Access,
    Axis,
    Builder,
    Copy,
    Dim,
    Execute,
    Graph,
    Sequence as ProgramSequence,
    Term,
    VertexGroup,
    element,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, element_bytes


@dataclass(frozen=True, slots=True)
class _PlannedConv:
    """Plan of a convolution, the layout of its operands, and a window for each field dimension."""

    plan: Plan
    params: ConvParams
    windows: tuple[Window, ...]


def convolution(
    builder: Builder,
    x: Tensor,
    w: Tensor,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    out_dtype: Any = None,
    partials_dtype: Any = None,
    precision: Any = None,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """Convolves as `jax.lax.conv_general_dilated`, with its parameters, by the cheapest plan found for the target.

    Args:
        x: activations, dimensions in the order of `dimension_numbers.lhs_spec`.
        w: weights, dimensions in the order of `rhs_spec`.
        dimension_numbers: positions of (batch, features, field…), (out features, in features, field…), as results.
        window_strides: one for each field dimension, as the next three.
        padding: (low, high) in elements of the dilated input; may be negative.
        lhs_dilation: dilation of the input.
        rhs_dilation: dilation of the kernel.
        feature_group_count: groups of features, 1 if there are groups of the batch.
        batch_group_count: groups of the batch, 1 if there are groups of features.
        out_dtype: dtype of the result, default that of `x`.
        partials_dtype: dtype of partial results, default float32 for narrower floats, else `out_dtype`.
        precision: argument of JAX.
        available_memory_proportion: part of a tile's memory that the plan may use, default the target's.

    Returns:
        A new tensor, dimensions in the order of `out_spec`.

    Raises:
        GraphError: if there are both kinds of groups, groups do not divide the operands, channels do not match, or no
            codelet has such partials.
    """
    graph = builder.graph
    if min(feature_group_count, batch_group_count) > 1:
        raise GraphError(f"{builder.name}: feature groups and batch groups exclude each other", where=graph.origin)
    check_partials(graph, x.dtype, w.dtype, x.dtype if out_dtype is None else out_dtype, partials_dtype, builder.name)
    out_dtype, partials_dtype = out_dtypes(x.dtype if out_dtype is None else out_dtype, partials_dtype)
    groups = max(feature_group_count, batch_group_count)
    params = _conv_params(dimension_numbers, groups, precision, groups_in_batch=batch_group_count > 1)
    x = _split_groups(graph, x, params.lhs, groups, builder.name)
    w = _split_groups(graph, w, params.rhs, groups, builder.name)
    windows = _windows_of(x, w, params, padding, window_strides, lhs_dilation, rhs_dilation)
    extents = _matching_extents(graph, x, w, params, windows, groups, builder.name)
    out_shape = _out_shape(dimension_numbers.out_spec, extents)
    if 0 in (*extents, *(window.size for window in windows)):  # no result, or sums of no products
        return zeros(graph, out_shape, out_dtype, builder.name)
    x, windows = _without_skipped(builder, x, params.lhs, windows)
    spec = _conv_spec(graph, x, w, params, extents, windows, out_dtype, partials_dtype)
    plan = plan_convolution(spec, graph.target, available_memory_proportion)
    operands = Operand.of(graph, x), Operand.of(graph, w)
    plan = _choose_plan(
        plan, graph.target, available_memory_proportion, *operands, params, tuple(windows), graph.byte_cost_cycles
    )
    record_unmet_bound(graph, plan, available_memory_proportion, builder.name)
    result = _add_steps(builder, x, w, _PlannedConv(plan, params, tuple(windows)))
    return result.reshape(out_shape)  # the group dimension becomes a part of the output channels again


def _is_choice(chosen: Plan, plan: Plan, target: Target, *_: Any) -> bool:
    """Return whether a stored plan can be a choice for another plan's convolution."""
    return is_plan_of(chosen, spec_of_all_steps(plan), target)


@remembered_and_stored(_is_choice)
def _choose_plan(
    plan: Plan,
    target: Target,
    available_memory_proportion: float | None,
    lhs: Operand,
    rhs: Operand,
    params: ConvParams,
    windows: tuple[Window, ...],
    cycles_per_byte: float,
) -> Plan:
    """Chooses by trial the cheapest plan for operands of these views and mappings.

    Args:
        plan: the best by the estimate, which leaves out what views and mappings cost.
        target: the machine.
        available_memory_proportion: part of a tile's memory that plans may use, None for the target's.
        lhs: the activations; mapped ones may be copied to equal parts of all tiles first (`spreads_lhs`).
        rhs: the weights.
        params: layouts of operands and result.
        windows: one for each field dimension.
        cycles_per_byte: cost of a byte of memory.
    """

    def add(builder: Builder, tensors: Sequence[Tensor], plan: Plan) -> Tensor:
        x, w = tensors
        return _add_steps(Builder(builder.graph, builder.prog, "trial"), x, w, _PlannedConv(plan, params, windows))

    plans = trial_plans(plan, target, available_memory_proportion, cycles_per_byte)
    bounds = [float(plan.lower_bound_cycles) for plan in plans]
    # Mapped activations of one variable: each plan once more with a copy of them before it. A trial has no others with
    # their mapping.
    if lhs.mapping is not None and lhs.view is not None:
        copy_cycles = _spreading_cycles(lhs, target)
        bounds += [bound + copy_cycles for bound in bounds]
        plans += tuple(replace(plan, spreads_lhs=True) for plan in plans)
    share = target.available_memory_proportion if available_memory_proportion is None else available_memory_proportion
    # A proportion of 0 asks for the plan of least memory, at any cost in cycles.
    return choose_cheapest_alone(plans, bounds, (lhs, rhs), add, target, cycles_per_byte, asks_for_least=share == 0)


def _spreading_cycles(operand: Operand, target: Target) -> float:
    """Lower bound of the cycles of `_copy_spread`."""
    part_bytes = prod(operand.shape) * element_bytes(operand.dtype) // target.tiles_per_ipu
    return float(sync_cycles(1, target) + exchange_cycles(0, part_bytes, target))


def _conv_params(
    numbers: lax.ConvDimensionNumbers, groups: int, precision: Any, *, groups_in_batch: bool
) -> ConvParams:
    """Layouts of operands and result with a group dimension, which divides the batch or the channels."""
    lhs = _operand_layout(numbers.lhs_spec, groups, divides_batch=groups_in_batch)
    rhs = _operand_layout(numbers.rhs_spec, groups, divides_batch=True)
    out = _operand_layout(numbers.out_spec, groups, divides_batch=False)
    return ConvParams(numbers, lhs, rhs, out, groups_in_batch, precision)


def _matching_extents(
    graph: Graph, x: Tensor, w: Tensor, params: ConvParams, windows: Sequence[Window], groups: int, name: str
) -> Dims[int]:
    """Length of each dimension that a plan cuts; refuses weights that have other input channels than `x`."""
    lhs = params.lhs
    rhs = params.rhs
    batch = x.shape[lhs.batch]
    channels = x.shape[lhs.channel]
    if channels != w.shape[rhs.channel]:
        got = w.shape[rhs.channel]
        raise GraphError(f"{name}: input channels of the weights", where=graph.origin, expected=channels, got=got)
    out_channels = w.shape[rhs.batch]  # JAX names the weights' dimensions so: output channels are their "batch"
    field = tuple(window.outputs for window in windows)
    kernel = tuple(window.kernel for window in windows)
    return Dims(batch, groups, out_channels, channels, field, kernel)


def _add_steps(builder: Builder, x: Tensor, w: Tensor, planned: _PlannedConv) -> Tensor:
    """Maps the operands and adds all steps of a plan; the result is in the layout `params.out`.

    Steps divide the batch of the activations, or the output channels of the weights.
    """
    plan = planned.plan
    params = planned.params
    over_batch = plan.step_axis == BATCH
    if plan.spreads_lhs:  # the plan reads a copy of the activations that is spread over all tiles
        x = _copy_spread(builder, x, params.lhs, "spread")
    _map_operands(builder.graph, x, w, planned)
    if plan.steps == 1:
        return _add_step(builder, x, w, planned)

    def add_step(part: Tensor, body: ProgramSequence) -> Tensor:
        return _add_step(builder.into(body), part if over_batch else x, w if over_batch else part, planned)

    operand, layout = (x, params.lhs) if over_batch else (w, params.rhs)
    return add_in_steps(
        builder,
        operand,
        plan.steps,
        add_step,
        dim=layout.batch,  # of the weights it is the output channel
        channel=layout.channel,
        out_dim=params.out.batch if over_batch else params.out.channel,
        out_channel=params.out.channel,
        is_loop=plan.is_loop,
    )


def _add_step(builder: Builder, x: Tensor, w: Tensor, planned: _PlannedConv) -> Tensor:
    """Adds one step of a plan."""
    return _add_vertices(builder, x, w, planned).combine_partials(builder, planned.plan)


def _operand_layout(spec: Sequence[int], groups: int, *, divides_batch: bool) -> Layout:
    """Layout of an operand; its group dimension, if any, comes before the dimension that it divides."""
    batch, channel, *field = spec
    if groups == 1:
        return Layout(batch, -1, channel, tuple(field))
    divided = batch if divides_batch else channel
    batch, channel, *field = (position + (position >= divided) for position in spec)
    return Layout(batch, divided, channel, tuple(field))


def _split_groups(graph: Graph, tensor: Tensor, layout: Layout, groups: int, name: str) -> Tensor:
    """View of an operand with its group dimension, if the layout has one; refuses groups that do not divide it."""
    if layout.group < 0:
        return tensor
    shape = tensor.shape
    dim = layout.group
    if shape[dim] % groups:
        got = f"{shape[dim]} in dimension {dim} of {list(shape)}"
        raise GraphError(f"{name}: groups do not divide the operand", where=graph.origin, expected=groups, got=got)
    return tensor.reshape((*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :]))


def _windows_of(
    x: Tensor,
    w: Tensor,
    params: ConvParams,
    padding: Sequence[tuple[int, int]],
    strides: Sequence[int],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
) -> list[Window]:
    """Window of a convolution along each dimension of its field: sizes of input and kernel, padding, strides."""
    sizes = [x.shape[d] for d in params.lhs.field]
    kernel = [w.shape[d] for d in params.rhs.field]
    # Of each field dimension its values, in the order of the members of `Window`.
    rows = zip(sizes, kernel, padding, strides, lhs_dilation, rhs_dilation, strict=True)
    return [Window(*row) for row in rows]


def _without_skipped(
    builder: Builder, x: Tensor, layout: Layout, windows: Sequence[Window]
) -> tuple[Tensor, list[Window]]:
    """Returns the activations without the elements that strides and dilations step over, and their windows.

    Mapped activations are copied to contiguous memory: read with a step, each element would be an exchange fragment.
    """
    graph = builder.graph
    starts = [0] * x.ndim
    strides = [1] * x.ndim
    used_windows = []
    for position, window in zip(layout.field, windows, strict=True):
        starts[position], strides[position], used_window = window.without_skipped()
        used_windows.append(used_window)
    if all(stride == 1 for stride in strides):
        return x, list(windows)
    used = x.slice(starts, x.shape, strides)
    if not graph.is_mapped(x) or immediate_of(x) is not None:  # nothing to copy: no data yet, or one constant
        return used, used_windows
    return _copy_spread(builder, used, layout, "used"), used_windows


def _copy_spread(builder: Builder, x: Tensor, layout: Layout, name: str) -> Tensor:
    """Copies activations, in groups of channels, to equal parts of all tiles; returns the copy in the same layout.

    A block that several tiles receive is so put together from many parts once, on the tiles of the copy.
    Source: poplibs `Convolution.cpp`, which rearranges activations before it broadcasts them to more than seven tiles.
    """
    graph = builder.graph
    order = MemoryOrder.with_channels(x.shape, layout.channel)
    mapping = linear_mapping(graph, x.size, x.dtype)
    copy = graph.add_variable(order.variable_shape, x.dtype, f"{builder.name}/{name}", mapping)
    builder.prog.add(Copy(order.of_variable(x), copy, f"{builder.name}/{name}", graph.origin))
    return order.of_view(copy)


def _conv_spec(
    graph: Graph,
    x: Tensor,
    w: Tensor,
    params: ConvParams,
    extents: Dims[int],
    windows: Sequence[Window],
    out_dtype: np.dtype[Any],
    partials_dtype: np.dtype[Any],
) -> ConvSpec:
    """What a plan of a convolution depends on: its sizes and dtypes, and the tiles and memory order of its operands."""
    field = range(3, 3 + len(windows))  # memory orders number the dimensions 0 to 2 as below, then those of the field
    return ConvSpec(
        extents=extents,
        in_field=tuple(window.size for window in windows),
        strides=tuple(window.stride for window in windows),
        lhs_dilation=tuple(window.lhs_dilation for window in windows),
        rhs_dilation=tuple(window.rhs_dilation for window in windows),
        lhs_dtype=x.dtype,
        rhs_dtype=w.dtype,
        out_dtype=out_dtype,
        partials_dtype=partials_dtype,
        lhs_is_free=is_free(graph, x),
        rhs_is_free=is_free(graph, w),
        lhs_memory=memory_of(x, _by_dimension(params.lhs, batch=0, group=1, channel=2, field=field)),
        # The weights' "batch" are the output channels, their "field" is the kernel.
        rhs_memory=memory_of(w, _by_dimension(params.rhs, group=0, batch=1, channel=2, field=field)),
    )


def _out_shape(out_spec: Sequence[int], extents: Dims[int]) -> tuple[int, ...]:
    """Shape of the result, in the order of dimensions that `out_spec` has the positions of."""
    values = (extents.batch, extents.groups * extents.out_channels, *extents.field)
    return tuple(value for _, value in sorted(zip(out_spec, values, strict=True)))


def _axes_of_dims(layout: Layout, batch: int, channel: int, field: Sequence[int]) -> list[int]:
    """Axis of the grid that each dimension of an operand runs along."""
    return _by_dimension(layout, batch=batch, group=GROUPS, channel=channel, field=field)


def _by_dimension(layout: Layout, *, batch: int, group: int, channel: int, field: Sequence[int]) -> list[int]:
    """Value of each dimension of an operand, from the values of each kind of dimension."""
    rows = {layout.batch: batch, layout.channel: channel, **dict(zip(layout.field, field, strict=True))}
    if layout.group >= 0:
        rows[layout.group] = group
    return [rows[position] for position in sorted(rows)]


def _add_vertices(builder: Builder, x: Tensor, w: Tensor, planned: _PlannedConv) -> Result:
    """Adds the compute set of the blocks; returns the tensor that they write, in the layout `params.out`."""
    graph = builder.graph
    plan = planned.plan
    params = planned.params
    windows = planned.windows
    spec = plan.spec
    grid = plan.grid()
    rank = len(spec.in_field)
    # Axes of the grid, numbered as the members of `Dims`: batch, groups, channels, the field, the kernel. An operand
    # and the result have a dimension of groups where there are several.
    field = range(FIELD, FIELD + rank)
    kernel = range(FIELD + rank, FIELD + 2 * rank)
    out_axes = _axes_of_dims(params.out, BATCH, OUT_CHANNELS, field)
    reduced = (IN_CHANNELS, *kernel)
    out = result_variable(graph, plan, grid, tuple(out_axes), reduced, OUT_CHANNELS, builder.name)
    # Along a field dimension a vertex reads the elements under its windows: those of index
    # (output · stride + kernel element · dilation − padding) / input dilation. Outside of the input it reads `fill`.
    window_dims = {
        position: Dim(
            (Term(field[d], spec.strides[d]), Term(kernel[d], spec.rhs_dilation[d])),
            -windows[d].padding[0],
            spec.lhs_dilation[d],
        )
        for d, position in enumerate(params.lhs.field)
    }
    x_axes = _axes_of_dims(params.lhs, BATCH, IN_CHANNELS, field)
    accesses = (
        Access(x, tuple(window_dims.get(position, element(axis)) for position, axis in enumerate(x_axes)), fill=0),
        Access(w, tuple(map(element, _axes_of_dims(params.rhs, OUT_CHANNELS, IN_CHANNELS, kernel)))),
        Access(out.tensor, (*out.slot, *map(element, out_axes))),
    )
    titles = ("batch", "group", "out_channel", "in_channel", *(f"field{d}" for d in range(rank)))
    titles = (*titles, *(f"kernel{d}" for d in range(rank)))
    axes = tuple(
        Axis(title, cut, "reduce" if number in reduced else "map")
        for number, (title, cut) in enumerate(zip(titles, grid.cuts, strict=True))
    )
    add_zero_padding(builder, plan, windows)
    codelet = convolution_codelet(plan.kind, plan.code(graph.target), out.tensor.dtype, params)
    compute_set = graph.add_compute_set(builder.name)
    graph.add_vertices(compute_set, VertexGroup(codelet, axes, accesses, grid.tile, origin=graph.origin))
    builder.prog.add(Execute(compute_set))
    return out


def _map_operands(graph: Graph, x: Tensor, w: Tensor, planned: _PlannedConv) -> None:
    """Maps unmapped operands: weights to the tiles that use them, activations to those of most of their use."""
    plan = planned.plan
    params = planned.params
    rank = len(plan.spec.in_field)
    reordered = rearranged(plan.kind, plan.spec, graph.target)
    cuts = list(plan.grid().cuts)
    tile = plan.grid().tile
    # The operand that steps divide stays unmapped here: it is mapped for slicing. Steps divide the batch of `x`, or the
    # output channels of `w`.
    over_batch = plan.step_axis == BATCH
    is_one_step = plan.steps == 1
    kernel = range(FIELD + rank, FIELD + 2 * rank)
    w_axes = _axes_of_dims(params.rhs, OUT_CHANNELS, IN_CHANNELS, kernel)
    if is_one_step or over_batch:
        w_cuts = [cuts[axis] for axis in w_axes]
        place_by_plan(graph, w, plan, w_cuts, _for_operand(tile, w_axes), is_reordered=reordered.rhs)
    if not is_one_step and over_batch:
        return
    # Along a field dimension an input follows the axis that cuts it most: the output field, or the kernel, whose axes
    # are `rank` numbers behind those of the field.
    field = [f if tile.shape[f] >= tile.shape[f + rank] else f + rank for f in range(FIELD, FIELD + rank)]
    x_axes = _axes_of_dims(params.lhs, BATCH, IN_CHANNELS, field)
    for axis, size, window in zip(field, plan.spec.in_field, planned.windows, strict=True):
        if axis < FIELD + rank:
            bounds = _input_bounds(cuts[axis], window, is_innermost=axis == FIELD + rank - 1)
        else:
            bounds = cuts[axis] * size // cuts[axis][-1]  # the input in proportion to the kernel's cuts
        blocks = np.flatnonzero(np.diff(bounds))  # those that are not empty
        cuts[axis] = np.append(bounds[blocks], size)
        tile = tile.take(blocks, axis)
    x_cuts = [cuts[axis] for axis in x_axes]
    place_by_plan(graph, x, plan, x_cuts, _for_operand(tile, x_axes), is_reordered=reordered.lhs)


def _for_operand(tile: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Tiles with the dimensions of an operand first, then the axes that share it."""
    return np.transpose(tile, (*axes, *(axis for axis in range(tile.ndim) if axis not in axes)))


def _input_bounds(cuts: np.ndarray, window: Window, *, is_innermost: bool) -> np.ndarray:
    """Cuts of the input along a field dimension, from the `cuts` of the outputs, both with the ends.

    Two blocks share the elements between the first that the later one reads and the last that the earlier one does.
    Along the innermost dimension of the field they are all on the tiles of the earlier one, along others half of them.
    Source: poplibs `TensorUseTracker.cpp`, OptimizeHaloRegions, by which poplin::createInput maps.
    """
    # In positions of the dilated input.
    later_begin = cuts[1:-1] * window.stride - window.padding[0]
    earlier_end = later_begin - window.stride + (window.kernel - 1) * window.rhs_dilation + 1
    shared = np.maximum(0, earlier_end - later_begin)
    bounds = later_begin + (shared if is_innermost else shared // 2)
    # The first element of the input at or behind each position.
    inner = np.clip(-(-bounds // window.lhs_dilation), 0, window.size)
    return np.concatenate([[0], inner, [window.size]])
