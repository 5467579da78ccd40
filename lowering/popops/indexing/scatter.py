"""Combination of rows with rows of a table at computed indices, as the scatter family of `lax`.

Two forms. The table is cut, never the updates: every tile goes through all updates and keeps what of them falls in its
block, so that results of one row are combined in the order of `lax` and no partial results arise. Or the updates are
cut as well: each block of them is combined with a neutral table, these tables with each other by the monoid of the
operation, and the result with the table. The cheaper one that fits on tiles is taken. What fits in neither goes in
several steps, each of which combines some of the updates with what the one before it made, in the order of `lax`.

Batching dimensions and those that an update covers whole are cut first, since that divides the updates as well; then
the rows; of the updates the longest dimension of look-ups. A table that is one constant (the zeros of a gradient) is
made by the vertices and not read.

Source: poplibs `popops/EmbeddingPlan.cpp` (multiUpdateAdd splits the dictionary so); cycles from `indexing_cycles`.
Limits: cut updates reassociate sums and products. Those of floats of less than 32 bits are not cut: they are rounded
after each update as `lax` does. Neither are updates that replace, nor those of a function of the user's own. Steps are
made of the outermost dimension of look-ups alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.layout import (
    Grids,
    charged_price,
    least_charged,
    map_by_plan,
    map_like,
    map_linearly,
    total_elements,
)
from ipujax.lowering.layout.box_charge import Source, Span, Work, spans
from ipujax.lowering.layout.choose import (
    choose,
    crowding_cycles,
    cycles_in_place,
    estimated_cycles,
    grid_of,
    source_of,
)
from ipujax.lowering.layout.operand_parts import fewest_runs
from ipujax.lowering.layout.place import along, follow, mapped_variable, place_operand, placed_axes, whole_axis
from ipujax.lowering.popops.indexing.gather import has_few_lookups
from ipujax.lowering.popops.indexing.scatter_vertex import (
    SCATTERS as SCATTERS,
    ScatterSpec as ScatterSpec,
    scatter_codelet,
)
from ipujax.lowering.popops.maps.constants import immediate_of
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.reductions.partials import reduce_partials_in_place
from ipujax.lowering.popops.reductions.partials_cost import combined
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.elementwise_cycles import elementwise_cycles
from ipujax.lowering.popops.vertices.kernel import Op, freeze
from ipujax.lowering.popops.vertices.reducers import neutral
from ipujax.runtime.exchange import exchange_cycles, receive_cycles
from ipujax.runtime.graph import (
    Access,
    Axis,
    Codelet,
    Copy,
    Graph,
    Sequence as ProgramSequence,
    block,
    element,
)
from ipujax.runtime.memory import INSTRUCTION_BYTES
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Tensor, blocked_mapping, element_bytes, even_cuts

# How the table is combined with what the updates made of a neutral one, by monoid: name of the operation, function.
_COMBINE: dict[str, tuple[str, Callable[..., jax.Array]]] = {
    "add": ("add", lax.add),
    "signed_add": ("add", lax.add),
    "mul": ("mul", lax.mul),
    "min": ("min", lax.min),
    "max": ("max", lax.max),
}
_WITHOUT_TABLE = 3  # fields of a vertex that makes its table itself
_MOST_STEPS = 1 << 11  # each is a superstep of the program, assumed: 3 ms to compile
_FEW = 8  # updates that take less than this part of what planners may use are not what a tile lacks room for, assumed


@dataclass(frozen=True, eq=False, slots=True)
class ScatterPlan:
    """A scatter laid out on tiles.

    Args:
        add: adds it to a graph and a program, and returns the new table.
        cycles: what it is charged at least.
        is_exact: whether that is what it is charged.
        needed_bytes: of the busiest tile, all that it works on.
        update_bytes: part of it that is indices and updates.
        most_bytes: what planners may use of a tile.
    """

    add: Callable[[Graph, ProgramSequence], Tensor]
    cycles: float
    is_exact: bool
    needed_bytes: int
    update_bytes: int
    most_bytes: int

    @property
    def has_too_many_updates(self) -> bool:
        """Whether tiles lack room that fewer updates would leave."""
        return self.needed_bytes > self.most_bytes and self.update_bytes * _FEW > self.most_bytes


def plan_scatter(
    graph: Graph,
    table: Tensor,
    indices: Tensor,
    updates: Tensor,
    spec: ScatterSpec,
    name: str,
    in_place: bool = False,
) -> ScatterPlan:
    """Lays out a combination of updates with a table.

    Args:
        graph: graph to add to.
        table: tensor of shape `spec.table_shape` with at least one element.
        indices: integer tensor, index vectors in its last dimension.
        updates: tensor of shape `spec.update_shape` with at least one element.
        spec: which indices point where, and how to combine.
        name: debug name.
        in_place: whether the table, a writable tensor, is overwritten and returned.

    Returns:
        The cheapest plan that fits, the smallest if none does.
    """
    whole = _Form(table, indices, updates, spec, name, result="table" if in_place else "new")
    forms = [whole]
    cut = max((i for i, _ in spec.lookup_dims()), key=lambda i: indices.shape[i], default=None)
    if spec.monoid() is not None and cut is not None and indices.shape[cut] > 1:
        forms.append(replace(whole, cut=cut))
    if in_place and graph.is_mapped(table):
        forms.append(replace(whole, result="back"))
    plans = [form.plan(graph) for form in forms]
    fitting = [plan for plan in plans if plan.needed_bytes <= plan.most_bytes]
    if not fitting:
        return min(plans, key=lambda plan: plan.needed_bytes)
    bounds, is_exact = [plan.cycles for plan in fitting], [plan.is_exact for plan in fitting]
    return least_charged(fitting, bounds, lambda plan: charged_price(graph, plan.add), is_exact)


def plan_in_steps(
    graph: Graph,
    table: Tensor,
    indices: Tensor,
    updates: Tensor,
    spec: ScatterSpec,
    name: str,
    in_place: bool = False,
) -> ScatterPlan:
    """Lays out a scatter of too many updates in steps, as few powers of 2 as fit, up to a bound.

    Arguments as `plan_scatter`.
    """
    form = _Form(table, indices, updates, spec, name, result="back" if in_place else "new")
    steps, plan = 1, form.plan(graph)
    most = min(_MOST_STEPS, next((indices.shape[i] for i, _ in spec.lookup_dims() if indices.shape[i] > 1), 1))
    while plan.has_too_many_updates and steps < most:
        steps = min(2 * steps, most)
        plan = replace(form, steps=steps).plan(graph)
    return plan


@dataclass(frozen=True, eq=False, slots=True)
class _Form:
    """A scatter in steps, or one whose updates may be cut along dimension `cut` of the indices.

    `result` is a new variable, the table that vertices overwrite, or a new variable that is copied back to the table.
    """

    table: Tensor
    indices: Tensor
    updates: Tensor
    spec: ScatterSpec
    name: str
    steps: int = 1
    cut: int | None = None
    result: Literal["new", "table", "back"] = "new"

    def plan(self, graph: Graph) -> ScatterPlan:
        """The placement that is charged least, and what it takes."""
        space, order, work = self._space(), self.spec.cuttable(), self._work(graph)
        if self.cut is not None:
            order = [*order, self.table.ndim]
        rows = zip(work.fields, work.codelet.fields, strict=True)
        fields = tuple((read, element_bytes(field.dtype)) for read, field in rows)
        away, source = tuple(source == "elsewhere" for source in work.sources), self._table_source(graph)
        after = _After(fields, self.table.ndim, self.table.dtype, away, self.monoid, self.steps, source)
        operands = [tensor for tensor, _ in self._reads()]
        placement = self._where_table_is(graph, order)
        if placement is not None:
            cycles = cycles_in_place(placement, work, len(operands) - 1, after, graph)
        else:
            has_table = self._constant() is None and not self._overwrites
            taken = [0] if has_table and has_few_lookups(graph, self.indices) else []
            placement = choose(graph, space, order, work, operands, self._add, after, taken)
            cycles = estimated_cycles(placement, work, after, graph)
        if self.result == "back":
            cycles += graph.target.internal_sync_cycles
        grid, boxes = grid_of(placement), int(np.bincount(placement.tile.ravel()).max())
        target = graph.target
        return ScatterPlan(
            lambda graph, prog: self._add(graph, prog, placement),
            cycles,
            work.is_exact and boxes == 1 and after.table != "elsewhere" and self.result == "new",
            boxes * int(after.needed_bytes(grid)[0]),
            boxes * int(after.block_bytes(grid)[-3:-1].sum()),
            int(target.available_memory_proportion * target.bytes_per_tile),
        )

    @property
    def _overwrites(self) -> bool:
        """Whether the vertices themselves overwrite the table."""
        return self.result == "table" and self._constant() is None

    def _where_table_is(self, graph: Graph, order: Sequence[int]) -> Blocked | None:
        """The placement in which a table that is overwritten need not move; None where it has none such."""
        if not self._overwrites or not graph.is_mapped(self.table):
            return None
        return follow(graph, self.table, spans(self.table.shape, range(self.table.ndim)), self._space(), order)

    @property
    def monoid(self) -> str | None:
        """By what parts combine; None where updates are whole.

        A row of −0.0 that no update reaches stays so; of a table of 0.0 alone there is none.
        """
        monoid, constant = None if self.cut is None else self.spec.monoid(), immediate_of(self.table)
        is_zero = constant is not None and freeze(constant) == freeze(np.zeros((), self.table.dtype))
        is_signed = monoid == "add" and jnp.issubdtype(self.table.dtype, jnp.inexact) and not is_zero
        return "signed_add" if is_signed else monoid

    def _parts(self) -> list[tuple[Tensor, Tensor]]:
        """The indices and updates of each step."""
        if self.steps == 1:
            return [(self.indices, self.updates)]
        at, of_updates = next((i, u) for i, u in self.spec.lookup_dims() if self.indices.shape[i] > 1)
        cuts = even_cuts(self.indices.shape[at], self.steps).tolist()
        return [
            (_between(self.indices, at, start, end), _between(self.updates, of_updates, start, end))
            for start, end in pairwise(cuts)
        ]

    def _space(self) -> tuple[int, ...]:
        """The table's dimensions, then that of the updates that may be cut."""
        return self.table.shape if self.cut is None else (*self.table.shape, self.indices.shape[self.cut])

    def _constant(self) -> np.ndarray | None:
        """The constant that a vertex fills its table with; None where it reads the table."""
        return immediate_of(self.table) if self.monoid is None else neutral(self.monoid, self.table.dtype)

    def _table_source(self, graph: Graph) -> Literal["neutral", "constant", "free", "elsewhere"]:
        """What the result of the updates is still to be combined with."""
        constant, own = immediate_of(self.table), self._constant()
        if self.monoid is None or (constant is not None and own is not None and freeze(constant) == freeze(own)):
            return "neutral"
        if constant is not None:
            return "constant"
        return "free" if source_of(graph, self.table) == "free" else "elsewhere"

    def _reads(self) -> list[tuple[Tensor, tuple[Span, ...]]]:
        """The tensors that vertices read, with their spans of the index space."""
        depth, (index_axes, update_axes) = len(self._space()), self._axes()
        table = [(self.table, spans(self.table.shape, range(self.table.ndim)))] if self._constant() is None else []
        reads = [
            (tensor, spans(tensor.shape, [at[d] if at[d] < depth else None for d in range(tensor.ndim)]))
            for tensor, at in ((self.indices, index_axes), (self.updates, update_axes))
        ]
        return reads + table if self._overwrites else table + reads

    def _codelet(self) -> Codelet:
        constant = self._constant()
        frozen = None if constant is None else freeze(constant)
        is_part = self.monoid is not None
        dtype, index_dtype = self.table.dtype, self.indices.dtype
        return scatter_codelet(dtype, index_dtype, self.spec, frozen, is_part=is_part, in_place=self._overwrites)

    def _work(self, graph: Graph) -> Work:
        reads = self._reads()
        sources: list[Source] = [source_of(graph, tensor) for tensor, _ in reads]
        if self.steps > 1:
            sources[-2:] = ["free", "free"]  # moved first, if need be
        indices, updates = max(self._parts(), key=lambda part: part[0].size)
        longest = [read for _, read in replace(self, indices=indices, updates=updates, steps=1)._reads()]
        if self._overwrites:
            return Work(self._codelet(), tuple(longest), tuple(sources))
        out = spans(self.table.shape, range(self.table.ndim))
        return Work(self._codelet(), (*longest, out), (*sources, "here"))

    def _add(self, graph: Graph, prog: ProgramSequence, placement: Blocked) -> Tensor:
        """Adds all of it."""
        made = self._add_result(graph, prog, placement)
        if self.result == "new" or made is self.table:
            return made
        map_like(graph, self.table, made)
        prog.add(Copy(made, self.table, f"{self.name}/back", graph.origin))
        return self.table

    def _add_result(self, graph: Graph, prog: ProgramSequence, placement: Blocked) -> Tensor:
        source, made = self._table_source(graph), self._add_vertices(graph, prog, placement)
        if source == "neutral":
            return made
        assert self.monoid is not None
        mapping = graph.mappings[made.variables()[0]]
        if source == "free" and isinstance(mapping, Blocked):
            map_by_plan(graph, self.table, mapping.cuts, mapping.tile)
        new = self.result != "table"
        out = graph.add_variable(made.shape, made.dtype, self.name, mapping) if new else self.table
        map_like(graph, out, made)
        op = Op(*_COMBINE[self.monoid], made.dtype)
        return elementwise(graph, op, [self.table, made], prog, self.name, out)

    def _add_vertices(self, graph: Graph, prog: ProgramSequence, placement: Blocked) -> Tensor:
        """Adds the vertices of all steps, and the combination of parts."""
        form = self if self.steps == 1 else self._moved(graph, prog, placement)
        for tensor, read in form._reads():
            place_operand(graph, tensor, read, placement)
        table = self.table
        for indices, updates in form._parts():
            table = replace(self, table=table, indices=indices, updates=updates, steps=1)._step(graph, prog, placement)
        return table

    def _moved(self, graph: Graph, prog: ProgramSequence, placement: Blocked) -> _Form:
        """The same of indices and updates that lie where steps read them, so that each receives few fragments."""
        moved = []
        for tensor, read in self._reads()[-2:]:
            if source_of(graph, tensor) == "elsewhere" and immediate_of(tensor) is None:
                source, tensor = tensor, graph.add_variable(tensor.shape, tensor.dtype, f"{self.name}/moved")
                place_operand(graph, tensor, read, placement)
                map_linearly(graph, source)
                prog.add(Copy(source, tensor, f"{self.name}/move", graph.origin))
            moved.append(tensor)
        return replace(self, indices=moved[0], updates=moved[1])

    def _step(self, graph: Graph, prog: ProgramSequence, placement: Blocked) -> Tensor:
        rank = self.table.ndim
        index_axes, update_axes = self._axes()
        axes = placed_axes(placement)
        slots = axes[rank].blocks if self.cut is not None else 1
        if slots > 1:
            axes[rank] = Axis("lookups", axes[rank].cuts, "reduce")
        depth = len(axes)
        axes += [whole_axis(f"index{d}", self.indices.shape[d]) for d in index_axes if index_axes[d] >= depth]
        shared = {*range(depth), *index_axes.values()}
        axes += [whole_axis(f"update{d}", self.updates.shape[d]) for d in update_axes if update_axes[d] not in shared]
        out, written = self._result(graph, placement, slots)
        accesses = (
            *([along(self.table, range(rank))] if self._constant() is None and not self._overwrites else []),
            along(self.indices, [index_axes[d] for d in range(self.indices.ndim)]),
            along(self.updates, [update_axes[d] for d in range(self.updates.ndim)]),
            written,
        )
        tile = placement.tile.reshape([axis.blocks for axis in axes])
        origins = [f"d{d}" for d in self.spec.indexed]
        add_vertices(graph, self._codelet(), axes, accesses, tile, prog, self.name, origins)
        return out if slots == 1 else reduce_partials_in_place(graph, out, prog, self.name)

    def _result(self, graph: Graph, placement: Blocked, slots: int) -> tuple[Tensor, Access]:
        """The result, or one for each block of updates, and how vertices write it."""
        shape, dtype, rank = self.table.shape, self.table.dtype, self.table.ndim
        if self._overwrites:
            return self.table, along(self.table, range(rank))
        if slots == 1:
            out = mapped_variable(graph, shape, dtype, self.name, range(rank), placement)
            return out, along(out, range(rank))
        placed = blocked_mapping((even_cuts(slots, slots), *placement.cuts[:rank]), np.moveaxis(placement.tile, -1, 0))
        out = graph.add_variable((slots, *shape), dtype, f"{self.name}/partials", placed, self.monoid)
        return out, Access(out, (block(rank), *map(element, range(rank))))

    def _axes(self) -> tuple[dict[int, int], dict[int, int]]:
        """The axis of each dimension of indices and updates: one of the index space's, or a new one behind them."""
        spec, index_shape, depth = self.spec, self.indices.shape, len(self._space())
        numbers = spec.numbers
        placed = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
        if self.cut is not None:
            placed[self.cut] = self.table.ndim
        free = iter(range(depth, depth + len(index_shape) + len(spec.update_shape)))
        index_axes = {d: placed[d] if d in placed else next(free) for d in range(len(index_shape))}
        _, of_update = spec.windows()
        cuttable = [d for d in spec.cuttable() if d not in spec.indexed]
        whole = {u: d for d, u in enumerate(of_update) if u is not None and d in cuttable}
        lookups = iter(range(len(index_shape) - 1))
        update_axes: dict[int, int] = {}
        for u in range(len(spec.update_shape)):
            if u not in numbers.update_window_dims:
                update_axes[u] = index_axes[next(lookups)]
            else:
                update_axes[u] = whole[u] if u in whole else next(free)
        return index_axes, update_axes


@dataclass(frozen=True, slots=True)
class _After:
    """Charge of combining partial results on each candidate grid, and of a tile that lacks memory."""

    fields: tuple[tuple[tuple[Span, ...], int], ...]  # spans and bytes of an element; last: indices, updates, result
    rank: int  # of the table
    dtype: Any  # of the table
    away: tuple[bool, ...]  # of each field whether it lies elsewhere
    monoid: str | None  # by which parts combine; None where updates are whole
    steps: int
    table: Literal["neutral", "constant", "free", "elsewhere"]  # what parts are combined with last

    def __call__(self, grids: Grids, target: Target, byte_price: float) -> np.ndarray:
        # Code has a part of a tile's memory of its own.
        code_bytes = self.code_bytes(grids, target) * (target.bytes_per_tile / target.interleaved_offset_bytes)
        crowding = crowding_cycles(np.maximum(self.needed_bytes(grids), code_bytes), target)
        if self.monoid is None:
            return crowding
        slots, longest = grids.blocks[self.rank], grids.lengths[: self.rank]
        cycles, longest = combined(slots, longest, self.dtype, self.monoid, target, byte_price)
        if self.table == "neutral":
            return crowding + cycles
        constants = int(self.table == "constant")
        elements = np.prod(longest, axis=0)
        compute = elementwise_cycles(_COMBINE[self.monoid][0], self.dtype, 2 - constants, constants, elements, target)
        arriving = elements * element_bytes(self.dtype) if self.table == "elsewhere" else np.zeros_like(elements)
        receiving = receive_cycles(arriving, np.zeros_like(elements), (arriving > 0).astype(np.int64), target)
        exchange = exchange_cycles(receiving, np.zeros_like(elements), target)
        return crowding + cycles + target.internal_sync_cycles + exchange + compute

    def block_bytes(self, grids: Grids) -> np.ndarray:
        """Bytes of the longest block of each field, int64[fields, candidates]."""
        sizes = [total_elements([span.lengths(grids.lengths) for span in read]) * width for read, width in self.fields]
        return np.stack([np.broadcast_to(size, grids.blocks.shape[1:]) for size in sizes]).astype(np.int64)

    def code_bytes(self, grids: Grids, target: Target) -> np.ndarray:
        """Bytes of the instructions by which a tile receives what lies elsewhere, in as few fragments as can be."""
        away = [read for (read, _), is_away in zip(self.fields, self.away, strict=True) if is_away]
        fragments = sum((fewest_runs(read, grids.lengths) for read in away), np.zeros((), np.int64))
        return INSTRUCTION_BYTES * target.exchange_fragment_cycles * fragments

    def needed_bytes(self, grids: Grids) -> np.ndarray:
        """Bytes of all fields of a tile, or of a part of the result with what it is combined with."""
        blocks = self.block_bytes(grids)
        goes_on = self.steps > 1 and len(self.fields) == _WITHOUT_TABLE  # another step reads the result as its table
        working = blocks.sum(0) + (blocks[-1] if goes_on else 0)
        if self.monoid is None:
            return working
        return np.where(grids.blocks[self.rank] > 1, np.maximum(working, 2 * blocks[-1]), working)


def _between(tensor: Tensor, dim: int, start: int, end: int) -> Tensor:
    starts, ends = [0] * tensor.ndim, list(tensor.shape)
    starts[dim], ends[dim] = start, end
    return tensor.slice(starts, ends)
