"""Elementwise operations over tensors of one shape, tile by tile where the data lies.

Results lie like the operand for which the vertices and the exchange of the other operands are estimated cheapest;
without an operand that lies in a simple form, or where spreading everything is cheaper, they lie linearly. Operands
that lie nowhere yet are put where they are used. An operand that is repeated along dimensions is read once by a vertex.
Constant scalars become immediates of the vertex, and an operation on nothing else is done at compile time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ipujax.lowering.layout import (
    MemoryOrder,
    charged_price,
    linear_mapping,
    map_alike,
    map_linearly,
    memory_order,
    neighbour_mappings,
)
from ipujax.lowering.layout.place import along
from ipujax.lowering.popops.maps.constants import with_immediates
from ipujax.lowering.popops.maps.elementwise_layout import (
    choose_layout,
    flat_cycles,
    grid_of,
    narrow_view,
    place_operands,
)
from ipujax.lowering.popops.maps.emission import added
from ipujax.lowering.popops.reductions.partial_results import num_slots, partial_results
from ipujax.lowering.popops.reductions.partials import reduce_partials_in_place
from ipujax.lowering.popops.reductions.reduce import reduce
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.kernel import (
    Frozen,
    Input,
    Kernel,
    Op,
    Reduction,
    Step,
    kernel_codelet,
    thawed,
)
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Copy, Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor, TileMapping, Variable, blocked_mapping, element_bytes


def elementwise(
    graph: Graph, op: Op, operands: Sequence[Tensor], prog: ProgramSequence, name: str, out: Tensor | None = None
) -> Tensor:
    """Applies an operation to tensors of one shape (scalars and dimensions of size 1 are broadcast).

    Args:
        graph: graph to add to.
        op: the operation.
        operands: tensors of equal rank with equal sizes or 1 in each dimension, or of shape ().
        prog: program the compute set is added to.
        name: debug name.
        out: what the result is written to, of the broadcast shape; it may be one of the operands, but share no element
            with another part of one.

    Returns:
        A new tensor of the broadcast shape and `op.out_dtype`; `out` if that is given.

    Raises:
        GraphError: if shapes differ.
    """
    shape = _common_shape(graph, operands, name)
    tensors = [t if t.shape == shape else t.broadcast_in_dim(shape, range(t.ndim)) for t in operands]
    step = Step(op, tuple(range(len(tensors))))
    return apply_steps(graph, [step], [len(tensors)], tensors, shape, prog, name, [out])[0]


def apply_steps(
    graph: Graph,
    steps: Sequence[Step],
    results: Sequence[int],
    operands: Sequence[Tensor],
    shape: tuple[int, ...],
    prog: ProgramSequence,
    name: str,
    outs: Sequence[Tensor | None],
    reductions: Sequence[Reduction] = (),
) -> list[Tensor]:
    """Applies several operations in one vertex a tile, and reduces what they compute.

    Args:
        graph: graph to add to.
        steps: the operations; operand n is value n, the result of step k is value len(operands) + k.
        results: the values to return.
        operands: tensors of one shape.
        shape: that shape.
        prog: program the compute set is added to.
        name: debug name.
        outs: for each result what it is written to, as `elementwise` has it, or None.
        reductions: what to reduce and return.

    Returns:
        For each result a new tensor of `shape`, or what is given for it; then for each reduction a new tensor of the
        shape without its axes.
    """

    operation = _Operation(tuple(steps), tuple(results), shape, tuple(reductions))

    def plan(own: ProgramSequence) -> list[Tensor]:
        return operation.planned(graph, operands, outs, own, name)

    made = added(graph, operation, [*operands, *outs], prog, name, plan)
    return [*(x if out is None else out for x, out in zip(made, outs, strict=False)), *made[len(outs) :]]


@dataclass(frozen=True, slots=True)
class _Operation:
    """What `apply_steps` is asked for, but for its operands."""

    steps: tuple[Step, ...]
    results: tuple[int, ...]
    shape: tuple[int, ...]
    reductions: tuple[Reduction, ...]

    def planned(
        self,
        graph: Graph,
        operands: Sequence[Tensor],
        outs: Sequence[Tensor | None],
        prog: ProgramSequence,
        name: str,
    ) -> list[Tensor]:
        """Adds it, in the order of dimensions in memory."""
        held = _order(operands, outs, self.shape)
        turned = [None if out is None else held.of_variable(out) for out in outs]
        dims = [(r, [n for n, d in enumerate(held.view_dims) if d in r.axes]) for r in self.reductions]
        inside = [replace(reduction, axes=tuple(axes)) for reduction, axes in dims]
        space = _IndexSpace(graph, held.variable_shape, prog, name)
        made = space.add(self.steps, self.results, [held.of_variable(x) for x in operands], turned, inside)
        found = [held.of_view(x) if out is None else out for x, out in zip(made, outs, strict=False)]
        reduced = zip(self.reductions, made[len(outs) :], strict=True)
        return [*found, *(held.without(reduction.axes).of_view(x) for reduction, x in reduced)]


@dataclass(frozen=True, slots=True)
class _IndexSpace:
    """An index space in the order of dimensions in memory, and the program that operations over it are added to.

    Its methods take and return what `apply_steps` does.
    """

    graph: Graph
    shape: tuple[int, ...]
    prog: ProgramSequence
    name: str

    def add(
        self,
        steps: Sequence[Step],
        results: Sequence[int],
        operands: Sequence[Tensor],
        outs: Sequence[Tensor | None],
        reductions: Sequence[Reduction],
    ) -> list[Tensor]:
        """Adds operations: of constants at compile time, the others in vertices."""
        wanted = [*results, *(reduction.value for reduction in reductions)]
        left, values, kept = with_immediates(steps, wanted, operands)
        places: list[Tensor | None] = [*outs, *(None for _ in reductions)]
        folded: list[Reduction | None] = [*(None for _ in outs), *reductions]
        rows = list(enumerate(zip(values, places, folded, strict=True)))
        stored = {n: (value, out) for n, (value, out, r) in rows if isinstance(value, int) and r is None}
        reduced = {n: replace(r, value=value) for n, (value, _, r) in rows if isinstance(value, int) and r is not None}
        found = {n: self._constant(value, out, r) for n, (value, out, r) in rows if not isinstance(value, int)}
        if stored or reduced:
            numbers, into = tuple(v for v, _ in stored.values()), [out for _, out in stored.values()]
            made = self._in_vertices(left, numbers, kept, into, list(reduced.values()))
            found.update(zip((*stored, *reduced), made, strict=True))
        return [found[n] for n in range(len(values))]

    def _constant(self, value: Frozen, out: Tensor | None, reduction: Reduction | None) -> Tensor:
        constant = self.graph.add_constant(thawed(value), self.name).broadcast_in_dim(self.shape, ())
        if reduction is not None:
            return self._reduced(constant, reduction)
        return constant if out is None else _copied(self.graph, constant, out, self.prog, self.name)

    def _reduced(self, x: Tensor, how: Reduction) -> Tensor:
        return reduce(self.graph, x, how.axes, how.monoid, self.prog, self._name_of(how))

    def _name_of(self, reduction: Reduction) -> str:
        return f"{self.name}/{reduction.monoid}"

    def _in_vertices(
        self,
        steps: tuple[Step, ...],
        results: tuple[int, ...],
        operands: Sequence[Tensor],
        outs: Sequence[Tensor | None],
        reductions: Sequence[Reduction],
    ) -> list[Tensor]:
        """Adds operations in the layout that is cheapest."""
        graph, shape = self.graph, self.shape
        narrow = [narrow_view(x) for x in operands]
        flat = Kernel(1, tuple(Input(x.dtype, (0,)) for x in operands), steps, results)
        self._place_neighbours(flat, operands, outs, reductions)
        layout = choose_layout(graph, flat, operands, narrow, outs, shape, reductions)
        is_sized = bool(results) or any(view.is_whole for view in narrow)
        if not is_sized or not all(layout.can_reduce(shape, r.axes) for r in reductions):
            return self._reduced_apart(steps, results, operands, outs, reductions)
        place_operands(graph, operands, narrow, layout, shape)
        for out in outs:
            if out is not None:
                map_alike(graph, out.reshape(layout.shape), layout.mapping)
        found = [
            graph.add_variable(layout.shape, dtype, self.name, layout.mapping).reshape(shape) if out is None else out
            for out, dtype in zip(outs, flat.result_dtypes, strict=True)
        ]
        grid = grid_of(layout, operands, narrow, found, shape)
        inside = tuple(replace(r, axes=grid.axes_of(r.axes, shape)) for r in reductions)
        placement = blocked_mapping([axis.cuts for axis in grid.axes], grid.tile)
        partials = [
            partial_results(graph, placement, r.axes, flat.dtype_of(r.value), r.monoid, self._name_of(r))
            for r in inside
        ]
        inputs = grid.kernel_inputs()
        codelet = kernel_codelet(replace(flat, rank=len(grid.axes), inputs=inputs, reductions=inside))
        reduced = {axis for reduction in inside for axis in reduction.axes}
        axes, tile, accesses = grid.with_windows()
        axes = [replace(axis, kind="reduce") if n in reduced else axis for n, axis in enumerate(axes)]
        accesses += [*(along(view.tensor, view.axes) for view in grid.results), *(access for _, access in partials)]
        add_vertices(graph, codelet, axes, accesses, tile, self.prog, self.name)
        combined = [
            reduce_partials_in_place(graph, out, self.prog, self.name) if num_slots(placement, r.axes) > 1 else out
            for (out, _), r in zip(partials, inside, strict=True)
        ]
        return [*found, *combined]

    def _place_neighbours(
        self,
        kernel: Kernel,
        operands: Sequence[Tensor],
        outs: Sequence[Tensor | None],
        reductions: Sequence[Reduction],
    ) -> None:
        """Puts what is read at several offsets in boxes, where that is cheaper than to have it lie linearly."""
        graph = self.graph
        in_boxes = neighbour_mappings(graph, operands, self.shape, lambda n: flat_cycles(kernel, n, graph.target))
        if not in_boxes:
            return
        linear = {one: linear_mapping(graph, one.size, one.dtype) for one in in_boxes[0]}

        def charge(mappings: Mapping[Variable, TileMapping]) -> int:
            def add(scratch: Graph, prog: ProgramSequence) -> None:
                _map_all(scratch, mappings)
                space = _IndexSpace(scratch, self.shape, prog, self.name)
                space._in_vertices(kernel.steps, kernel.results, operands, outs, reductions)

            return charged_price(graph, add)

        proposals: list[Mapping[Variable, TileMapping]] = [linear, *in_boxes]
        _map_all(graph, min(proposals, key=charge))

    def _reduced_apart(
        self,
        steps: tuple[Step, ...],
        results: tuple[int, ...],
        operands: Sequence[Tensor],
        outs: Sequence[Tensor | None],
        reductions: Sequence[Reduction],
    ) -> list[Tensor]:
        """The same with what is reduced stored first, where it lies in no boxes whose sides are dimensions."""
        values = tuple(dict.fromkeys(r.value for r in reductions if r.value >= len(operands)))
        stored, places = (*results, *values), [*outs, *(None for _ in values)]
        made = self._in_vertices(steps, stored, operands, places, ()) if stored else []
        of_value = {**dict(enumerate(operands)), **dict(zip(values, made[len(outs) :], strict=True))}
        return [*made[: len(outs)], *(self._reduced(of_value[r.value], r) for r in reductions)]


def _order(operands: Sequence[Tensor], outs: Sequence[Tensor | None], shape: tuple[int, ...]) -> MemoryOrder:
    """The order of dimensions in which most bytes lie in memory; of two with as many, not that of `shape`."""
    own = MemoryOrder.own(shape)
    tensors = [x for x in (*operands, *(out for out in outs if out is not None)) if x.size > 1]
    orders = [own if found is not None and found.is_own else found for found in map(memory_order, tensors)]
    held: Counter[MemoryOrder] = Counter({own: 0})
    for tensor, order in zip(tensors, orders, strict=True):
        if order is not None:
            held[order] += tensor.size * element_bytes(tensor.dtype)
    most = max(held, key=lambda order: (held[order], order != own))
    can_cut = (order == most or most.can_cut(x) for x, order in zip(tensors, orders, strict=True))
    return most if most == own or all(can_cut) else own


def _map_all(graph: Graph, mappings: Mapping[Variable, TileMapping]) -> None:
    for variable, mapping in mappings.items():
        map_alike(graph, Tensor.of(variable), mapping)


def _copied(graph: Graph, source: Tensor, destination: Tensor, prog: ProgramSequence, name: str) -> Tensor:
    for tensor in (source, destination):
        map_linearly(graph, tensor)
    prog.add(Copy(source, destination, name, graph.origin))
    return destination


def _common_shape(graph: Graph, operands: Sequence[Tensor], name: str) -> tuple[int, ...]:
    rank = max(t.ndim for t in operands)
    shapes = [t.shape for t in operands if t.ndim]
    shape = tuple(max((n for n in sizes if n != 1), default=1) for sizes in zip(*shapes, strict=False))
    alike = all(n in (1, m) for given in shapes for n, m in zip(given, shape, strict=False))
    if not alike or any(len(given) != rank for given in shapes):
        raise GraphError(f"{name}: operands differ in shape", where=graph.origin, got=[t.shape for t in operands])
    return shape
