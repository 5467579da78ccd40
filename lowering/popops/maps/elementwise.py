"""Elementwise operations over tensors of one shape, tile by tile in a layout of the operands.

Results get the layout of the operand for which the vertices and the exchange of the other operands are estimated
cheapest; a linear one where that is cheaper, or where no operand has a regular layout. Unmapped operands are mapped to
the tiles that use them. An operand that is repeated along dimensions is read once by a vertex. Constant scalars become
immediates of the vertex, and an operation on constants alone is folded at compile time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ipujax.lowering.layout import (
    MemoryOrder,
    linear_mapping,
    map_alike,
    map_linearly,
    memory_order,
    neighbour_mappings,
    weighted_cost,
    weighted_cost_with_data,
)
from ipujax.lowering.layout.place import along
from ipujax.lowering.popops.maps.constants import with_immediates
from ipujax.lowering.popops.maps.elementwise_layout import (
    Grid,
    Layout,
    View,
    choose_layout,
    flat_cycles,
    grid_of,
    has_operands_in,
    kept_layout,
    place_operands,
    unrepeated_view,
)
from ipujax.lowering.popops.maps.emission import emit_or_replay
from ipujax.lowering.popops.reductions.partials import reduce_partials_in_place
from ipujax.lowering.popops.reductions.reduce import num_slots, partial_results, reduce
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.kernel import Frozen, Input, Kernel, Op, Reduction, Step, thawed
from ipujax.lowering.popops.vertices.kernel_codelet import kernel_codelet
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Builder, Copy, Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor, TileMapping, Variable, blocked_mapping, element_bytes


def elementwise(builder: Builder, op: Op, operands: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Applies an operation to tensors of one shape; returns `out`, or a new tensor of `op.out_dtype`.

    Args:
        op: the operation.
        operands: tensors of equal rank with equal sizes or 1 in each dimension, or of shape (); they are broadcast.
        out: tensor to overwrite with the result, of the broadcast shape; it may be an operand, but overlap none
            otherwise.

    Raises:
        GraphError: if shapes differ.
    """
    shape = _common_shape(builder.graph, operands, builder.name)
    tensors = [t if t.shape == shape else t.broadcast_in_dim(shape, range(t.ndim)) for t in operands]
    # Values are numbered: the operands first, then the result of the only step.
    operand_numbers = tuple(range(len(tensors)))
    result_number = len(tensors)
    return apply_steps(builder, [Step(op, operand_numbers)], [result_number], tensors, shape, [out])[0]


def kept_result(graph: Graph, operands: Sequence[Tensor], shape: tuple[int, ...], dtype: Any, name: str) -> Tensor:
    """New tensor for an elementwise result, in the order in memory and on the tiles of one of its operands.

    Args:
        graph: graph to add to.
        operands: operands of the operation, in its order; they count if no element of them is repeated.
        shape: shape of the result.
        dtype: its dtype.
        name: its debug name.

    Source: PopLibs' choice of the operand, see `kept_layout`.
    """
    full = [x.reshape(shape) for x in operands if x.size == prod(shape)]
    order = _commonest_order(full, (), shape)  # of the dimensions of `shape` in memory
    in_order = [order.of_variable(x) for x in full]
    layout = kept_layout(graph, in_order, [unrepeated_view(x) for x in in_order], order.variable_shape, dtype)
    result = graph.add_variable(layout.shape, dtype, name, layout.mapping)
    return order.of_view(result.reshape(order.variable_shape))


def apply_steps(
    builder: Builder,
    steps: Sequence[Step],
    results: Sequence[int],
    operands: Sequence[Tensor],
    shape: tuple[int, ...],
    outs: Sequence[Tensor | None],
    reductions: Sequence[Reduction] = (),
) -> list[Tensor]:
    """Applies several operations in one vertex a tile, and reduces some of their values.

    Args:
        steps: the operations; operand n is value n, the result of step k is value len(operands) + k.
        results: numbers of the values to return.
        operands: tensors of one shape.
        shape: shape of the operands.
        outs: for each result the tensor to overwrite with it, as `out` of `elementwise`, or None.
        reductions: reductions to return.

    Returns:
        For each result its `out` or a new tensor of `shape`; then for each reduction a new tensor of the shape without
        its axes.
    """
    operation = _Operation(tuple(steps), tuple(results), shape, tuple(reductions))

    def add(sequence: ProgramSequence) -> list[Tensor]:
        return operation.add(builder.into(sequence), operands, outs)

    # Results, one for each of `outs`, then reductions.
    tensors = emit_or_replay(builder, operation, [*operands, *outs], add)
    return [*(x if out is None else out for x, out in zip(tensors, outs, strict=False)), *tensors[len(outs) :]]


@dataclass(frozen=True, slots=True)
class _Operation:
    """Parameters of `apply_steps` apart from its operands."""

    steps: tuple[Step, ...]
    results: tuple[int, ...]
    shape: tuple[int, ...]
    reductions: tuple[Reduction, ...]

    def add(self, builder: Builder, operands: Sequence[Tensor], outs: Sequence[Tensor | None]) -> list[Tensor]:
        """Adds the operation to a program, in the order of dimensions in memory; arguments as of `apply_steps`.

        Returns the results, then the reductions, all with their dimensions in the order of `shape` again.
        """
        order = _commonest_order(operands, outs, self.shape)
        variable_operands = [order.of_variable(x) for x in operands]
        variable_outs = [None if out is None else order.of_variable(out) for out in outs]
        # Number n of a dimension in memory, whose number in `shape` is d.
        variable_reductions = [
            replace(r, axes=tuple(n for n, d in enumerate(order.view_dims) if d in r.axes)) for r in self.reductions
        ]
        space = _IndexSpace(builder, order.variable_shape)
        tensors = space.add(self.steps, self.results, variable_operands, variable_outs, variable_reductions)
        results = [order.of_view(x) if out is None else out for x, out in zip(tensors, outs, strict=False)]
        reduced = zip(self.reductions, tensors[len(outs) :], strict=True)
        return [*results, *(order.without(reduction.axes).of_view(x) for reduction, x in reduced)]


@dataclass(frozen=True, slots=True)
class _IndexSpace:
    """Index space in the order of dimensions in memory, and the program that operations over it are added to.

    Arguments and results of its methods are those of `apply_steps`.
    """

    builder: Builder
    shape: tuple[int, ...]

    def add(
        self,
        steps: Sequence[Step],
        results: Sequence[int],
        operands: Sequence[Tensor],
        outs: Sequence[Tensor | None],
        reductions: Sequence[Reduction],
    ) -> list[Tensor]:
        """Adds operations: folds those of constants, and adds the others in vertices.

        Results and reductions are added at once; dimensions are in the order of `self.shape`.

        Args:
            steps: the operations; operand n is value n, the result of step k is value len(operands) + k.
            results: numbers of the values to return.
            operands: tensors of `self.shape`.
            outs: for each result the tensor to overwrite with it, or None for a new one.
            reductions: reductions of values.

        Returns:
            The tensor of each result, then that of each reduction.
        """
        numbers = [*results, *(reduction.value for reduction in reductions)]
        unfolded, values, tensors = with_immediates(steps, numbers, operands)
        # By position n among results and reductions: a value that was folded is a constant, any other is an int, its
        # number among the values of `unfolded`.
        outs_and_reductions = [*((out, None) for out in outs), *((None, reduction) for reduction in reductions)]
        constants = {
            n: self._add_constant(value, *outs_and_reductions[n])
            for n, value in enumerate(values)
            if not isinstance(value, int)
        }
        stored = {n: value for n, value in enumerate(values[: len(outs)]) if isinstance(value, int)}
        reduced = [
            replace(reduction, value=value)
            for reduction, value in zip(reductions, values[len(outs) :], strict=True)
            if isinstance(value, int)
        ]
        added: list[Tensor] = []
        if stored or reduced:
            stored_outs = [outs[n] for n in stored]
            added = self._add_in_vertices(unfolded, tuple(stored.values()), tensors, stored_outs, reduced)
        remaining = iter(added)
        return [constants[n] if n in constants else next(remaining) for n in range(len(values))]

    def _add_constant(self, value: Frozen, out: Tensor | None, reduction: Reduction | None) -> Tensor:
        constant = self.builder.graph.add_constant(thawed(value), self.builder.name).broadcast_in_dim(self.shape, ())
        if reduction is not None:
            return self._add_reduction(constant, reduction)
        return constant if out is None else _add_copy(self.builder, constant, out)

    def _add_reduction(self, x: Tensor, reduction: Reduction) -> Tensor:
        return reduce(self.builder.named(reduction.monoid), x, reduction.axes, reduction.monoid)

    def _add_in_vertices(
        self,
        steps: tuple[Step, ...],
        results: tuple[int, ...],
        operands: Sequence[Tensor],
        outs: Sequence[Tensor | None],
        reductions: Sequence[Reduction],
    ) -> list[Tensor]:
        """Adds operations in the cheapest layout; where that cannot reduce values, they are stored first.

        Args:
            steps: the operations; operand n is value n, the result of step k is value len(operands) + k.
            results: numbers of the values to return.
            operands: tensors of `self.shape`, none of them a constant.
            outs: for each result the tensor to overwrite with it, or None for a new one.
            reductions: reductions of values, with their axes in `self.shape`.

        Returns:
            The tensor of each result, then that of each reduction.
        """
        graph = self.builder.graph
        shape = self.shape
        views = [unrepeated_view(x) for x in operands]
        # The operations over elements as one dimension, whatever the index space.
        flat = Kernel(1, tuple(Input(x.dtype, (0,)) for x in operands), steps, results)
        self._place_neighbours(flat, operands, outs, reductions)
        layout = choose_layout(graph, flat, operands, views, outs, shape, reductions)
        # A vertex knows the size of its block from a result or from an operand that is not repeated.
        is_sized = bool(results) or any(view.is_whole for view in views)
        if not is_sized or not all(layout.can_reduce(shape, r.axes) for r in reductions):
            return self._store_then_reduce(steps, results, operands, outs, reductions)
        # Where no operand is moved for the layout, nothing is gained by storing values before they are reduced.
        if not reductions or has_operands_in(graph, layout, operands, views):
            return self._add_in_layout(flat, layout, views, operands, outs, reductions)

        # To reduce in these vertices all operands move; reduced apart, the reduced values alone do.
        def cost_of(add: Callable[[_IndexSpace], object]) -> int:
            return weighted_cost_with_data(graph, lambda builder: add(replace(self, builder=builder)))

        def add_at_once(space: _IndexSpace) -> list[Tensor]:
            return space._add_in_layout(flat, layout, views, operands, outs, reductions)

        def add_apart(space: _IndexSpace) -> list[Tensor]:
            return space._store_then_reduce(steps, results, operands, outs, reductions)

        return min((add_at_once, add_apart), key=cost_of)(self)

    def _add_in_layout(
        self,
        flat: Kernel,
        layout: Layout,
        views: Sequence[View],
        operands: Sequence[Tensor],
        outs: Sequence[Tensor | None],
        reductions: Sequence[Reduction],
    ) -> list[Tensor]:
        """Adds operations and reductions in vertices of one layout, which can reduce.

        Args:
            flat: the operations, over one dimension.
            layout: mapping of the index space to tiles, and the shape that the mapping is of.
            views: `unrepeated_view` of each operand.
            operands: tensors of `self.shape`.
            outs: for each result the tensor to overwrite with it, or None for a new one.
            reductions: reductions with their axes in `self.shape`.
        """
        graph = self.builder.graph
        shape = self.shape
        place_operands(graph, operands, views, layout, shape)
        for out in outs:
            if out is not None:
                map_alike(graph, out.reshape(layout.shape), layout.mapping)
        tensors = [
            graph.add_variable(layout.shape, dtype, self.builder.name, layout.mapping).reshape(shape)
            if out is None
            else out
            for out, dtype in zip(outs, flat.result_dtypes, strict=True)
        ]
        grid = grid_of(layout, operands, views, tensors, shape)
        return [*tensors, *self._add_grid(flat, grid, reductions)]

    def _add_grid(self, flat: Kernel, grid: Grid, reductions: Sequence[Reduction]) -> list[Tensor]:
        """Adds the vertices of a grid of blocks, then the combination of their partial results.

        Args:
            flat: the kernel, of operands as variables.
            grid: the blocks, one a vertex.
            reductions: what it reduces, over axes of its results.

        Returns:
            The result of each reduction.
        """
        grid_reductions = tuple(replace(r, axes=grid.axes_of(r.axes, self.shape)) for r in reductions)
        placement = blocked_mapping([axis.cuts for axis in grid.axes], grid.tile)
        partials = [  # for each reduction the tensor that it writes, and the vertices' access to that
            partial_results(
                self.builder.graph,
                placement,
                r.axes,
                flat.dtype_of(r.value),
                r.monoid,
                f"{self.builder.name}/{r.monoid}",
            )
            for r in grid_reductions
        ]
        inputs = grid.kernel_inputs()
        codelet = kernel_codelet(replace(flat, rank=len(grid.axes), inputs=inputs, reductions=grid_reductions))
        reduced = {axis for reduction in grid_reductions for axis in reduction.axes}
        axes, tile, accesses = grid.with_windows()  # those of the operands; results and partial results follow
        axes = [replace(axis, kind="reduce") if n in reduced else axis for n, axis in enumerate(axes)]
        accesses += [*(along(view.tensor, view.axes) for view in grid.results), *(access for _, access in partials)]
        add_vertices(self.builder, codelet, axes, accesses, tile)
        return [
            # Several slots: the reduced dimensions are cut, and each block has a partial result.
            reduce_partials_in_place(self.builder, out) if num_slots(placement, r.axes) > 1 else out
            for (out, _), r in zip(partials, grid_reductions, strict=True)
        ]

    def _place_neighbours(
        self,
        kernel: Kernel,
        operands: Sequence[Tensor],
        outs: Sequence[Tensor | None],
        reductions: Sequence[Reduction],
    ) -> None:
        """Maps variables that are read at several offsets to blocks, where that is cheaper than a linear mapping."""
        graph = self.builder.graph
        blocked = neighbour_mappings(graph, operands, self.shape, lambda n: flat_cycles(kernel, n, graph.target))
        if not blocked:
            return
        # Each proposal maps the same variables.
        linear = {variable: linear_mapping(graph, variable.size, variable.dtype) for variable in blocked[0]}

        def cost(mappings: Mapping[Variable, TileMapping]) -> int:
            def add(builder: Builder) -> None:
                _map_variables(builder.graph, mappings)
                space = _IndexSpace(builder, self.shape)
                space._add_in_vertices(kernel.steps, kernel.results, operands, outs, reductions)

            return weighted_cost(graph, add)

        # Halos make closed formulas inexact, so that each proposal is added to a scratch graph and costed there.
        proposals: list[Mapping[Variable, TileMapping]] = [linear, *blocked]
        _map_variables(graph, min(proposals, key=cost))

    def _store_then_reduce(
        self,
        steps: tuple[Step, ...],
        results: tuple[int, ...],
        operands: Sequence[Tensor],
        outs: Sequence[Tensor | None],
        reductions: Sequence[Reduction],
    ) -> list[Tensor]:
        """Adds operations that store their values, then reductions of these: for a layout that cannot reduce them.

        An operand that a result overwrites is reduced before the operations.

        Args:
            steps: the operations, on values by number: operands first, then the results of the steps.
            results: numbers of the values to return.
            operands: tensors of `self.shape`.
            outs: for each result the tensor to overwrite with it, or None for a new one.
            reductions: reductions of values, with their axes in `self.shape`.

        Returns:
            The tensor of each result, then that of each reduction.
        """
        overwritten = {variable for out in outs if out is not None for variable in out.variables()}
        read_first = {
            r: self._add_reduction(operands[r.value], r)
            for r in reductions
            if r.value < len(operands) and not overwritten.isdisjoint(operands[r.value].variables())
        }
        values = tuple(dict.fromkeys(r.value for r in reductions if r.value >= len(operands)))  # computed ones
        stored = (*results, *values)
        stored_outs = [*outs, *(None for _ in values)]  # reduced values get new tensors
        tensors = self._add_in_vertices(steps, stored, operands, stored_outs, ()) if stored else []
        of_value = {**dict(enumerate(operands)), **dict(zip(values, tensors[len(outs) :], strict=True))}
        reduced = (read_first[r] if r in read_first else self._add_reduction(of_value[r.value], r) for r in reductions)
        return [*tensors[: len(outs)], *reduced]


def _commonest_order(operands: Sequence[Tensor], outs: Sequence[Tensor | None], shape: tuple[int, ...]) -> MemoryOrder:
    """Order of dimensions in which most bytes are stored; of two with equal bytes not that of `shape`.

    That of `shape` where some tensor has no affine view in the commonest order.
    """
    row_major = MemoryOrder.own(shape)
    tensors = [x for x in (*operands, *(out for out in outs if out is not None)) if x.size > 1]
    orders = [row_major if order is not None and order.is_own else order for order in map(memory_order, tensors)]
    stored_bytes: Counter[MemoryOrder] = Counter({row_major: 0})
    for tensor, order in zip(tensors, orders, strict=True):
        if order is not None:
            stored_bytes[order] += tensor.size * element_bytes(tensor.dtype)
    commonest = max(stored_bytes, key=lambda order: (stored_bytes[order], order != row_major))
    # Whether each tensor has a view, of one variable, with its dimensions in the commonest order.
    can_cut = (order == commonest or commonest.can_cut(x) for x, order in zip(tensors, orders, strict=True))
    return commonest if commonest == row_major or all(can_cut) else row_major


def _map_variables(graph: Graph, mappings: Mapping[Variable, TileMapping]) -> None:
    for variable, mapping in mappings.items():
        map_alike(graph, Tensor.of(variable), mapping)


def _add_copy(builder: Builder, source: Tensor, destination: Tensor) -> Tensor:
    for tensor in (source, destination):
        map_linearly(builder.graph, tensor)
    builder.prog.add(Copy(source, destination, builder.name, builder.graph.origin))
    return destination


def _common_shape(graph: Graph, operands: Sequence[Tensor], name: str) -> tuple[int, ...]:
    """Shape that operands are broadcast to; scalars have any."""
    rank = max(t.ndim for t in operands)
    shapes = [t.shape for t in operands if t.ndim]
    shape = tuple(max((n for n in sizes if n != 1), default=1) for sizes in zip(*shapes, strict=False))
    can_broadcast = all(n in (1, m) for sizes in shapes for n, m in zip(sizes, shape, strict=False))
    if not can_broadcast or any(len(sizes) != rank for sizes in shapes):
        raise GraphError(f"{name}: operands differ in shape", where=graph.origin, got=[t.shape for t in operands])
    return shape
