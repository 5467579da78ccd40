"""Convolution over tiles, with strides, padding, both dilations and groups, in any layout of its operands.

Operands keep the dimension order of the user, so that computed unsplit a convolution is the one `jax.jit` runs.
Groups, of features or of the batch, become a dimension of their own by a view. Each vertex convolves a block: outputs
by batch, group, channel and field, reduced dimensions by channel and kernel; padding and dilation are indices of the
input that read zero. Padding may be negative, which XLA's own CPU convolution reads out of bounds for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from ipujax.lowering.layout import MemoryOrder, Operand, least_charged_alone, linear_mapping
from ipujax.lowering.poplin.bounds import keep_unmet_bound
from ipujax.lowering.poplin.codelets import ConvParams, Layout, convolution_codelet
from ipujax.lowering.poplin.operands import (
    Result,
    is_free,
    memory_of,
    place_by_plan,
    result_variable,
    zeros,
)
from ipujax.lowering.poplin.partials import check_partials, out_dtypes
from ipujax.lowering.poplin.product_plan import Plan, contenders, plan_convolution
from ipujax.lowering.poplin.serial_steps import in_steps
from ipujax.lowering.poplin.spec import BATCH, FIELD, GROUPS, IN_CHANNELS, OUT_CHANNELS, ConvSpec, Dims
from ipujax.lowering.poplin.window import Window
from ipujax.lowering.popops.maps.constants import immediate_of
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import (
    Access,
    Axis,
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
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class _Planned:
    """A convolution by a plan, in a layout of its operands, with a window for each field dimension."""

    plan: Plan
    params: ConvParams
    windows: tuple[Window, ...]


def convolution(
    graph: Graph,
    x: Tensor,
    w: Tensor,
    prog: ProgramSequence,
    name: str,
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
    """Convolves as `jax.lax.conv_general_dilated` does, with its parameters.

    Args:
        graph: graph to add to.
        x: activations, dimensions as `dimension_numbers.lhs_spec` says.
        w: weights, as `rhs_spec` says.
        prog: program the compute sets are added to.
        name: debug name.
        dimension_numbers: positions of (batch, features, field…), (out features, in features, field…), as results.
        window_strides: one for each field dimension, as the next three.
        padding: (low, high) in elements of the dilated input; may be negative.
        lhs_dilation: of the input.
        rhs_dilation: of the kernel.
        feature_group_count: groups of features, or
        batch_group_count: groups of the batch; one of them is 1.
        out_dtype: dtype of the result, default that of `x`.
        partials_dtype: dtype of partial results, default float32 for narrower floats, else `out_dtype`.
        precision: as JAX takes it.
        available_memory_proportion: of a tile's memory the plan may use, default the target's.

    Returns:
        A new tensor with dimensions as `out_spec` says.

    Raises:
        GraphError: if both kinds of groups are asked for, do not divide the operands, channels do not match, or for
            partials that no codelet has.
    """
    if min(feature_group_count, batch_group_count) > 1:
        raise GraphError(f"{name}: feature groups and batch groups exclude each other", where=graph.origin)
    check_partials(graph, x.dtype, w.dtype, x.dtype if out_dtype is None else out_dtype, partials_dtype, name)
    out_dtype, partials_dtype = out_dtypes(x.dtype if out_dtype is None else out_dtype, partials_dtype)
    groups = max(feature_group_count, batch_group_count)
    params = _params(dimension_numbers, groups, batch_group_count > 1, precision)
    x, w = _split_groups(graph, x, params.lhs, groups, name), _split_groups(graph, w, params.rhs, groups, name)
    windows = _windows(x, w, params, padding, window_strides, lhs_dilation, rhs_dilation)
    extents = _extents(graph, x, w, params, windows, groups, name)
    out_shape = _shape_of(dimension_numbers.out_spec, extents)
    if 0 in (*extents, *(window.size for window in windows)):
        return zeros(graph, out_shape, out_dtype, name)
    x, windows = _used_only(graph, x, params.lhs, windows, prog, name)
    dtypes = x.dtype, w.dtype, out_dtype, partials_dtype
    lhs, rhs, rank = params.lhs, params.rhs, len(windows)
    kept = (
        memory_of(x, _followed(lhs, 0, 1, 2, range(3, 3 + rank))),
        memory_of(w, _followed(rhs, 1, 0, 2, range(3, 3 + rank))),
    )
    spec = _spec(extents, windows, *dtypes, is_free(graph, x), is_free(graph, w), *kept)
    plan = plan_convolution(spec, graph.target, available_memory_proportion)
    operands = Operand.of(graph, x), Operand.of(graph, w)
    plan = _chosen(
        plan, graph.target, available_memory_proportion, *operands, params, tuple(windows), graph.byte_price_cycles
    )
    keep_unmet_bound(graph, plan, available_memory_proportion, name)
    return _in_steps(graph, x, w, _Planned(plan, params, tuple(windows)), prog, name).reshape(out_shape)


@remembered
def _chosen(
    plan: Plan,
    target: Target,
    available_memory_proportion: float | None,
    lhs: Operand,
    rhs: Operand,
    params: ConvParams,
    windows: tuple[Window, ...],
    byte_price: float,
) -> Plan:
    """The plan, or one that turns out cheaper for operands that lie and are seen as these."""

    def add(graph: Graph, tensors: Sequence[Tensor], plan: Plan, prog: ProgramSequence) -> Tensor:
        x, w = tensors
        return _in_steps(graph, x, w, _Planned(plan, params, windows), prog, "trial")

    plans = contenders(plan, target, available_memory_proportion, byte_price)
    bounds = [plan.likely_least_cycles for plan in plans]
    return least_charged_alone(plans, bounds, (lhs, rhs), add, target, byte_price)


def _params(numbers: lax.ConvDimensionNumbers, groups: int, groups_in_batch: bool, precision: Any) -> ConvParams:
    lhs = _layout(numbers.lhs_spec, groups, divides_batch=groups_in_batch)
    rhs = _layout(numbers.rhs_spec, groups, divides_batch=True)
    out = _layout(numbers.out_spec, groups, divides_batch=False)
    return ConvParams(numbers, lhs, rhs, out, groups_in_batch, precision)


def _extents(
    graph: Graph, x: Tensor, w: Tensor, params: ConvParams, windows: Sequence[Window], groups: int, name: str
) -> Dims[int]:
    lhs, rhs = params.lhs, params.rhs
    batch, channels = x.shape[lhs.batch], x.shape[lhs.channel]
    if channels != w.shape[rhs.channel]:
        got = w.shape[rhs.channel]
        raise GraphError(f"{name}: input channels of the weights", where=graph.origin, expected=channels, got=got)
    field, kernel = tuple(window.outputs for window in windows), tuple(window.kernel for window in windows)
    return Dims(batch, groups, w.shape[rhs.batch], channels, field, kernel)


def _in_steps(graph: Graph, x: Tensor, w: Tensor, planned: _Planned, prog: ProgramSequence, name: str) -> Tensor:
    """Maps the operands and adds all steps of a plan; the result is in the layout `params.out`."""
    plan, params = planned.plan, planned.params
    over_batch = plan.step_axis == BATCH
    _map_operands(graph, x, w, plan, params)
    if plan.steps == 1:
        return _step(graph, x, w, planned, prog, name)

    def add_step(part: Tensor, body: ProgramSequence) -> Tensor:
        return _step(graph, part if over_batch else x, w if over_batch else part, planned, body, name)

    operand, layout = (x, params.lhs) if over_batch else (w, params.rhs)
    out_dim = params.out.batch if over_batch else params.out.channel
    rest = (out_dim, params.out.channel, plan.is_loop, prog, name)
    return in_steps(graph, operand, layout.batch, layout.channel, plan.steps, add_step, *rest)


def _step(graph: Graph, x: Tensor, w: Tensor, planned: _Planned, prog: ProgramSequence, name: str) -> Tensor:
    """Adds one step of a plan."""
    return _add_vertices(graph, x, w, planned, prog, name).combined(graph, planned.plan, prog, name)


def _layout(spec: Sequence[int], groups: int, divides_batch: bool) -> Layout:
    """The layout of an operand whose group dimension, if any, stands before the dimension it divides."""
    batch, channel, *field = spec
    if groups == 1:
        return Layout(batch, -1, channel, tuple(field))
    at = batch if divides_batch else channel
    batch, channel, *field = (position + (position >= at) for position in spec)
    return Layout(batch, at, channel, tuple(field))


def _split_groups(graph: Graph, tensor: Tensor, layout: Layout, groups: int, name: str) -> Tensor:
    if layout.group < 0:
        return tensor
    shape, at = tensor.shape, layout.group
    if shape[at] % groups:
        got = f"{shape[at]} in dimension {at} of {list(shape)}"
        raise GraphError(f"{name}: groups do not divide the operand", where=graph.origin, expected=groups, got=got)
    return tensor.reshape((*shape[:at], groups, shape[at] // groups, *shape[at + 1 :]))


def _windows(
    x: Tensor, w: Tensor, params: ConvParams, padding: Sequence[tuple[int, int]], *geometry: Sequence[int]
) -> list[Window]:
    sizes, kernel = [x.shape[d] for d in params.lhs.field], [w.shape[d] for d in params.rhs.field]
    return [Window(*row) for row in zip(sizes, kernel, padding, *geometry, strict=True)]


def _used_only(
    graph: Graph, x: Tensor, layout: Layout, windows: Sequence[Window], prog: ProgramSequence, name: str
) -> tuple[Tensor, list[Window]]:
    """The activations without the elements that strides and dilations step over, and their windows.

    They are copied to one place first: read through the steps, each element of a row would be a piece of its own.
    """
    starts, strides, left = [0] * x.ndim, [1] * x.ndim, []
    for position, window in zip(layout.field, windows, strict=True):
        starts[position], strides[position], window = window.used_only()
        left.append(window)
    if all(stride == 1 for stride in strides):
        return x, list(windows)
    used = x.slice(starts, x.shape, strides)
    if not graph.is_mapped(x) or immediate_of(x) is not None:
        return used, left
    held = MemoryOrder.with_channels(used.shape, layout.channel)
    kept = graph.add_variable(held.variable_shape, x.dtype, f"{name}/used", linear_mapping(graph, used.size, x.dtype))
    prog.add(Copy(held.of_variable(used), kept, f"{name}/used", graph.origin))
    return held.of_view(kept), left


def _spec(extents: Dims[int], windows: Sequence[Window], *rest: Any) -> ConvSpec:
    rows = zip(*((w.size, w.stride, w.lhs_dilation, w.rhs_dilation) for w in windows), strict=True)
    return ConvSpec(extents, *(rows if windows else ((), (), (), ())), *rest)


def _shape_of(out_spec: Sequence[int], extents: Dims[int]) -> tuple[int, ...]:
    values = (extents.batch, extents.groups * extents.out_channels, *extents.field)
    return tuple(value for _, value in sorted(zip(out_spec, values, strict=True)))


def _axis_of(layout: Layout, batch: int, channel: int, field: Sequence[int]) -> list[int]:
    """The axis of the grid that each dimension of an operand follows."""
    return _followed(layout, batch, GROUPS, channel, field)


def _followed(layout: Layout, batch: int, group: int, channel: int, field: Sequence[int]) -> list[int]:
    """What each dimension of an operand follows, from what each kind of dimension does."""
    rows = {layout.batch: batch, layout.channel: channel, **dict(zip(layout.field, field, strict=True))}
    if layout.group >= 0:
        rows[layout.group] = group
    return [rows[position] for position in sorted(rows)]


def _add_vertices(graph: Graph, x: Tensor, w: Tensor, planned: _Planned, prog: ProgramSequence, name: str) -> Result:
    """Adds the compute set of the blocks; returns what they write, in the layout `params.out`."""
    plan, params, windows = planned.plan, planned.params, planned.windows
    spec, grid, rank = plan.spec, plan.grid(), len(plan.spec.in_field)
    field, kernel = range(FIELD, FIELD + rank), range(FIELD + rank, FIELD + 2 * rank)
    kept, reduced = _axis_of(params.out, BATCH, OUT_CHANNELS, field), (IN_CHANNELS, *kernel)
    out = result_variable(graph, plan, grid, tuple(kept), reduced, OUT_CHANNELS, name)
    window = {
        position: Dim(
            (Term(field[d], spec.strides[d]), Term(kernel[d], spec.rhs_dilation[d])),
            -windows[d].padding[0],
            spec.lhs_dilation[d],
        )
        for d, position in enumerate(params.lhs.field)
    }
    x_axes = _axis_of(params.lhs, BATCH, IN_CHANNELS, field)
    accesses = (
        Access(x, tuple(window.get(position, element(axis)) for position, axis in enumerate(x_axes)), fill=0),
        Access(w, tuple(map(element, _axis_of(params.rhs, OUT_CHANNELS, IN_CHANNELS, kernel)))),
        Access(out.tensor, (*out.slot, *map(element, kept))),
    )
    titles = ("batch", "group", "out_channel", "in_channel", *(f"field{d}" for d in range(rank)))
    titles = (*titles, *(f"kernel{d}" for d in range(rank)))
    axes = tuple(
        Axis(title, cut, "reduce" if number in reduced else "map")
        for number, (title, cut) in enumerate(zip(titles, grid.cuts, strict=True))
    )
    codelet = convolution_codelet(plan.kind, spec.code, out.tensor.dtype, params)
    compute_set = graph.add_compute_set(name)
    graph.add_vertices(compute_set, VertexGroup(codelet, axes, accesses, grid.tile, origin=graph.origin))
    prog.add(Execute(compute_set))
    return out


def _map_operands(graph: Graph, x: Tensor, w: Tensor, plan: Plan, params: ConvParams) -> None:
    """Maps operands that have no mapping: weights where they are used, activations where most of their use is."""
    rank = len(plan.spec.in_field)
    cuts, tile = list(plan.grid().cuts), plan.grid().tile
    over_batch, is_one = plan.step_axis == BATCH, plan.steps == 1  # what steps divide is placed to be sliced
    kernel = range(FIELD + rank, FIELD + 2 * rank)
    w_axes = _axis_of(params.rhs, OUT_CHANNELS, IN_CHANNELS, kernel)
    if is_one or over_batch:
        place_by_plan(graph, w, plan, [cuts[axis] for axis in w_axes], _for_operand(tile, w_axes))
    if not is_one and over_batch:
        return
    # Along a field dimension an input follows the axis that cuts it most: the output field, or the kernel.
    field = [f if tile.shape[f] >= tile.shape[f + rank] else f + rank for f in range(FIELD, FIELD + rank)]
    x_axes = _axis_of(params.lhs, BATCH, IN_CHANNELS, field)
    for axis, size in zip(field, plan.spec.in_field, strict=True):
        cuts[axis], kept = _scaled(cuts[axis], size)
        tile = tile.take(kept, axis)
    place_by_plan(graph, x, plan, [cuts[axis] for axis in x_axes], _for_operand(tile, x_axes))


def _for_operand(tile: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Tiles with an operand's dimensions first, then the axes that share it."""
    return np.transpose(tile, (*axes, *(axis for axis in range(tile.ndim) if axis not in axes)))


def _scaled(cuts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Boundaries scaled to another extent, and the blocks that still hold something."""
    bounds = cuts * size // cuts[-1]
    kept = np.flatnonzero(np.diff(bounds))
    return np.append(bounds[kept], size), kept
