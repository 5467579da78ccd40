"""Combination of updates with rows of a table at computed indices, as the scatter family of `lax`.

Two forms, the cheaper one that fits on tiles. The table is cut, never the updates: every tile goes through all updates
and applies those of its block, so that results of one row are combined in the order of `lax` and there are no partial
results. Or the updates are cut as well: each block of them is combined with a neutral table, these tables with each
other by the monoid of the operation, and the result with the table. A scatter that fits in neither form goes in several
steps, each of which combines some of the updates with the result of the step before it, in the order of `lax`.

Batching dimensions and those that an update covers in full are cut first, since that divides the updates as well; then
the rows; of the updates the longest dimension of look-ups. A table that is one constant (the zeros of a gradient) is
filled by the vertices and not read.

Source: poplibs `popops/EmbeddingPlan.cpp` (multiUpdateAdd splits the dictionary so); cycles from `indexing_cycles`.
Limits: cut updates reassociate sums and products. Those of floats of less than 32 bits are not cut: they are rounded
after each update as `lax` does. Neither are updates that replace, nor those of a user's own function. Steps cut the
outermost dimension of look-ups alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from ipujax.lowering.layout import choose_cheapest, map_by_plan, map_like, map_linearly, weighted_cost
from ipujax.lowering.layout.choose import choose, cycles_in_place, estimated_cycles, grid_of, source_of
from ipujax.lowering.layout.grid_cost import FieldUse, Source, Span, Work, spans
from ipujax.lowering.layout.place import (
    along,
    mapped_variable,
    place_operand,
    placed_axes,
    unmoved_placement,
    whole_axis,
)
from ipujax.lowering.popops.indexing.gather import has_few_lookups
from ipujax.lowering.popops.indexing.scatter_cost import COMBINATIONS, INDICES_AND_UPDATES, MemoryAndCombinationCost
from ipujax.lowering.popops.indexing.scatter_vertex import ScatterSpec as ScatterSpec, scatter_codelet
from ipujax.lowering.popops.maps.constants import immediate_of
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.reductions.partials import reduce_partials_in_place
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.kernel import Op, freeze
from ipujax.lowering.popops.vertices.reducers import neutral
from ipujax.runtime.exchange import sync_cycles
from ipujax.runtime.graph import Access, Axis, Builder, Codelet, Copy, Graph, block, element
from ipujax.runtime.tensor import Blocked, Tensor, blocked_mapping, even_cuts

_MAX_STEPS = 1 << 11  # each is a superstep of the program, assumed: 3 ms to compile
# Assumed: updates of less than this fraction of the available memory are not the reason that a tile is full.
_FULL_TILE_UPDATES = 8


@dataclass(frozen=True, eq=False, slots=True)
class ScatterPlan:
    """Plan of a scatter on tiles."""

    add: Callable[[Builder], Tensor]  # adds the scatter, and returns the new table
    cycles: float  # lower bound of its cost
    is_exact: bool  # whether the bound is the cost itself
    needed_bytes: int  # bytes of all fields on the busiest tile
    update_bytes: int  # part of them that are indices and updates
    available_bytes: int  # bytes of a tile that planners may use

    @property
    def has_too_many_updates(self) -> bool:
        """True if tiles lack memory that fewer updates would free."""
        return (
            self.needed_bytes > self.available_bytes and self.update_bytes * _FULL_TILE_UPDATES > self.available_bytes
        )


def plan_scatter(
    graph: Graph,
    table: Tensor,
    indices: Tensor,
    updates: Tensor,
    spec: ScatterSpec,
    name: str,
    *,
    in_place: bool = False,
) -> ScatterPlan:
    """Plans a combination of updates with a table: the cheapest plan that fits, the smallest if none does.

    Plans differ in whether updates are cut, with partial tables that are combined, and in whether the vertices
    overwrite the table itself.

    Args:
        graph: the graph: its mappings, target and cost per byte.
        table: tensor of shape `spec.table_shape` with at least one element.
        indices: integer tensor, index vectors in its last dimension.
        updates: tensor of shape `spec.update_shape` with at least one element.
        spec: parameters of the scatter.
        name: debug name.
        in_place: whether the table, a writable tensor, is overwritten and returned.
    """
    uncut = _ScatterForm(table, indices, updates, spec, name, result="table" if in_place else "new")
    forms = [uncut]
    lookup_dims = [dim.of_indices for dim in spec.lookup_dims()]
    # Updates may be cut along the longest dimension of look-ups, if their results combine by a monoid.
    longest = max(lookup_dims, key=lambda i: indices.shape[i], default=None)
    if spec.monoid() is not None and longest is not None and indices.shape[longest] > 1:
        forms.append(replace(uncut, cut=longest))
    if in_place and graph.is_mapped(table):  # a partition of its own and a copy back may cost less
        forms.append(replace(uncut, result="back"))
    plans = [form.plan(graph) for form in forms]
    fitting = [plan for plan in plans if plan.needed_bytes <= plan.available_bytes]
    if not fitting:
        return min(plans, key=lambda plan: plan.needed_bytes)
    bounds = [plan.cycles for plan in fitting]
    is_exact = [plan.is_exact for plan in fitting]
    return choose_cheapest(fitting, bounds, lambda plan: weighted_cost(graph, plan.add), is_exact)


def plan_in_steps(
    graph: Graph,
    table: Tensor,
    indices: Tensor,
    updates: Tensor,
    spec: ScatterSpec,
    name: str,
    *,
    in_place: bool = False,
) -> ScatterPlan:
    """Plans a scatter with too many updates for the tiles' memory, in the fewest steps that fit.

    Each step scatters a part of the updates, along their outermost dimension of look-ups. The number of steps is a
    power of 2, or the most that there may be, which is the plan if none fits.

    Args:
        graph: the graph: its mappings, target and cost per byte.
        table: tensor of shape `spec.table_shape` with at least one element.
        indices: integer tensor, index vectors in its last dimension.
        updates: tensor of shape `spec.update_shape`, combined with the table at these indices.
        spec: parameters of the scatter.
        name: debug name.
        in_place: whether the table, a writable tensor, is overwritten and returned.
    """
    form = _ScatterForm(table, indices, updates, spec, name, result="back" if in_place else "new")
    steps = 1
    plan = form.plan(graph)
    lengths = (indices.shape[dim.of_indices] for dim in spec.lookup_dims())
    max_steps = min(_MAX_STEPS, next((length for length in lengths if length > 1), 1))
    while plan.has_too_many_updates and steps < max_steps:
        steps = min(2 * steps, max_steps)
        plan = replace(form, steps=steps).plan(graph)
    return plan


class _Read(NamedTuple):
    """Operand that vertices read, and what a block of the index space reads of each of its dimensions."""

    tensor: Tensor
    spans: tuple[Span, ...]


class _OperandAxes(NamedTuple):
    """Axis of each dimension of indices, and of updates."""

    indices: dict[int, int]
    updates: dict[int, int]


@dataclass(frozen=True, eq=False, slots=True)
class _ScatterForm:
    """Form of a scatter that a plan may have: the partition over tiles is still to be chosen.

    Args:
        table: as the following, an argument of `plan_scatter`.
        steps: number of steps, each with a part of the updates.
        cut: dimension of the indices along which updates may be cut; None for uncut ones, as those of steps.
        result: a "new" variable; the "table", which vertices overwrite; or a new one that is copied "back" to it.
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
        """Plan of this form of a scatter, on the partition of its index space that costs least.

        A table that is overwritten on the tiles that have it need not move: then those are the partition. The plan's
        cycles are a lower bound, but exact where a new table is computed, one block on each tile.
        """
        space = self._index_space()
        order = self.spec.cuttable()
        work = self._vertex_work(graph)
        if self.cut is not None:  # updates may be cut too, along the last dimension of the space
            order = [*order, self.table.ndim]
        cost = MemoryAndCombinationCost(
            work=work,
            rank=self.table.ndim,
            dtype=self.table.dtype,
            monoid=self.monoid,
            steps=self.steps,
            table=self._table_source(graph),
        )
        operands = [read.tensor for read in self._tensors_read()]
        placement = self._table_placement(graph, order)
        if placement is not None:
            overwritten = len(operands) - 1  # an overwritten table is the last operand, one that is only read the first
            cycles = cycles_in_place(placement, work, overwritten, cost, graph)
        else:
            only_reads_table = self._fill_constant() is None and not self._overwrites
            # With few look-ups the table is used where it is mapped.
            unmoved = [0] if only_reads_table and has_few_lookups(graph, self.indices) else []
            placement = choose(graph, space, order, work, operands, cost_after=cost, unmoved_fields=unmoved)
            cycles = estimated_cycles(placement, work, cost, graph)
        if self.result == "back":  # a new table, copied back to the old one: that costs a sync at least
            cycles += sync_cycles(1, graph.target)
        grid = grid_of(placement)
        blocks = int(np.bincount(placement.tile.ravel()).max())  # on the busiest tile
        index_and_update_bytes = cost.block_bytes(grid)[INDICES_AND_UPDATES]
        return ScatterPlan(
            add=lambda builder: self._add_scatter(builder, placement),
            cycles=cycles,
            # Inexact too if updates are then combined with a table that moves ("elsewhere"), or are written to it.
            is_exact=work.is_exact and blocks == 1 and cost.table != "elsewhere" and self.result == "new",
            needed_bytes=blocks * int(cost.needed_bytes(grid)[0]),
            update_bytes=blocks * int(index_and_update_bytes.sum()),
            available_bytes=int(graph.target.operation_bytes),
        )

    @property
    def _overwrites(self) -> bool:
        """True if the vertices themselves overwrite the table."""
        return self.result == "table" and self._fill_constant() is None

    def _table_placement(self, graph: Graph, order: Sequence[int]) -> Blocked | None:
        """Partition in which an overwritten table need not move; None if it has no such."""
        if not self._overwrites or not graph.is_mapped(self.table):
            return None
        return unmoved_placement(graph, self.table, self._table_spans(), self._index_space(), order)

    @property
    def monoid(self) -> str | None:
        """Monoid by which results of parts of the updates combine; None where updates are uncut."""
        monoid = None if self.cut is None else self.spec.monoid()
        constant = immediate_of(self.table)
        # An element of −0.0 that no update reaches must stay −0.0; a table of 0.0 alone has none.
        is_zero = constant is not None and freeze(constant) == freeze(np.zeros((), self.table.dtype))
        is_signed = monoid == "add" and jnp.issubdtype(self.table.dtype, jnp.inexact) and not is_zero
        return "signed_add" if is_signed else monoid

    def _step_forms(self) -> list[_ScatterForm]:
        """Each step as a scatter of its own, of a part along the outermost dimension of look-ups longer than 1."""
        if self.steps == 1:
            return [self]
        dims = self.spec.lookup_dims()
        index_dim, update_dim = next(dim for dim in dims if self.indices.shape[dim.of_indices] > 1)
        cuts = even_cuts(self.indices.shape[index_dim], self.steps).tolist()
        return [
            replace(
                self,
                indices=_between(self.indices, index_dim, start, end),
                updates=_between(self.updates, update_dim, start, end),
                steps=1,
            )
            for start, end in pairwise(cuts)
        ]

    def _index_space(self) -> tuple[int, ...]:
        """Dimensions of the table, then that of the updates that may be cut."""
        return self.table.shape if self.cut is None else (*self.table.shape, self.indices.shape[self.cut])

    def _fill_constant(self) -> np.ndarray | None:
        """Constant that a vertex fills its table with; None where it reads the table."""
        return immediate_of(self.table) if self.monoid is None else neutral(self.monoid, self.table.dtype)

    def _table_source(self, graph: Graph) -> Literal["neutral", "constant", "free", "elsewhere"]:
        """Kind of the table that combined updates are still to be combined with, after the scatter vertices.

        "neutral" for none: vertices begin with its elements. A "constant". "free" for an unmapped table, which will
        be mapped like the result; "elsewhere" for a mapped one, which has to be received.
        """
        # Without a monoid each update takes the place of an element of the table that the vertex holds.
        constant = immediate_of(self.table)
        fill = self._fill_constant()
        if self.monoid is None or (constant is not None and fill is not None and freeze(constant) == freeze(fill)):
            return "neutral"
        if constant is not None:
            return "constant"
        return "free" if source_of(graph, self.table) == "free" else "elsewhere"

    def _tensors_read(self) -> list[_Read]:
        """Tensors that scatter vertices read, in the order of the codelet's fields, and what a block reads of each."""
        depth = len(self._index_space())  # an axis from there on is not cut
        index_axes, update_axes = self._operand_axes()
        table = [_Read(self.table, self._table_spans())] if self._fill_constant() is None else []
        reads = [
            _Read(tensor, spans(tensor.shape, [axes[d] if axes[d] < depth else None for d in range(tensor.ndim)]))
            for tensor, axes in ((self.indices, index_axes), (self.updates, update_axes))
        ]
        # A table that is overwritten is the last field, see `scatter_codelet`.
        return reads + table if self._overwrites else table + reads

    def _table_spans(self) -> tuple[Span, ...]:
        return spans(self.table.shape, range(self.table.ndim))

    def _scatter_codelet(self) -> Codelet:
        """Codelet of the vertices, whose table begins as a copy of one, or as a constant, or is overwritten itself."""
        constant = self._fill_constant()
        return scatter_codelet(
            self.table.dtype,
            self.indices.dtype,
            self.spec,
            None if constant is None else freeze(constant),
            is_part=self.monoid is not None,
            in_place=self._overwrites,
        )

    def _vertex_work(self, graph: Graph) -> Work:
        """Codelet and fields of the scatter vertices, to compare partitions; of several steps those of the longest."""
        sources: list[Source] = [source_of(graph, read.tensor) for read in self._tensors_read()]
        if self.steps > 1:
            sources[-2:] = ["free", "free"]  # indices and updates: copied to the tiles of the steps first, if need be
        longest_step = max(self._step_forms(), key=lambda form: form.indices.size)
        pairs = zip(longest_step._tensors_read(), sources, strict=True)
        fields = [FieldUse(read.spans, source) for read, source in pairs]
        if not self._overwrites:
            fields.append(FieldUse(self._table_spans()))
        return Work(self._scatter_codelet(), tuple(fields))

    def _add_scatter(self, builder: Builder, placement: Blocked) -> Tensor:
        """Adds the scatter, and the copy back to the table if there is one."""
        result = self._add_result(builder, placement)
        if self.result == "new" or result is self.table:  # else it is "back", or a constant table was not written yet
            return result
        map_like(builder.graph, self.table, result)
        builder.prog.add(Copy(result, self.table, f"{self.name}/back", builder.graph.origin))
        return self.table

    def _add_result(self, builder: Builder, placement: Blocked) -> Tensor:
        """Adds the scatter vertices by a placement; returns the updated table.

        Where the vertices began from neutral elements, they have combined the updates alone: their result is then
        combined with the table, elementwise. An unmapped table gets the mapping of that result.
        """
        graph = builder.graph
        source = self._table_source(graph)
        combined = self._add_vertices(builder, placement)
        if source == "neutral":  # nothing is left of the table: vertices held its elements, or it is all neutral
            return combined
        assert self.monoid is not None
        mapping = graph.mappings[combined.variables()[0]]
        if source == "free" and isinstance(mapping, Blocked):
            map_by_plan(graph, self.table, mapping.cuts, mapping.tile)
        out = self.table
        if self.result != "table":
            out = graph.add_variable(combined.shape, combined.dtype, self.name, mapping)
        map_like(graph, out, combined)
        combination = COMBINATIONS[self.monoid]
        op = Op(combination.name, combination.fun, combined.dtype)
        return elementwise(Builder(graph, builder.prog, self.name), op, [self.table, combined], out)

    def _add_vertices(self, builder: Builder, placement: Blocked) -> Tensor:
        """Adds the vertices of all steps, each of which has the result of the one before as its table."""
        form = self if self.steps == 1 else self._with_copied_updates(builder, placement)
        for read in form._tensors_read():
            place_operand(builder.graph, read.tensor, read.spans, placement)
        table = self.table
        for step in form._step_forms():
            table = replace(step, table=table)._add_step(builder, placement)
        return table

    def _with_copied_updates(self, builder: Builder, placement: Blocked) -> _ScatterForm:
        """Copies indices and updates to the tiles whose vertices read them; returns the form that reads the copies.

        Else each step would receive its own part, in many fragments and by code of its own.
        """
        graph = builder.graph
        operands = []
        # The last two are indices and updates: steps write a new table, see `plan_in_steps`.
        for tensor, read in self._tensors_read()[-2:]:
            operand = tensor
            if source_of(graph, tensor) == "elsewhere" and immediate_of(tensor) is None:
                operand = graph.add_variable(tensor.shape, tensor.dtype, f"{self.name}/moved")
                place_operand(graph, operand, read, placement)
                map_linearly(graph, tensor)
                builder.prog.add(Copy(tensor, operand, f"{self.name}/move", graph.origin))
            operands.append(operand)
        return replace(self, indices=operands[0], updates=operands[1])

    def _add_step(self, builder: Builder, placement: Blocked) -> Tensor:
        """Adds the vertices of one step by a placement of the index space; returns the new table.

        Where the placement cuts updates, each part has a partial table, and these are combined.
        """
        graph = builder.graph
        rank = self.table.ndim
        index_axes, update_axes = self._operand_axes()
        axes = placed_axes(placement)
        parts = axes[rank].blocks if self.cut is not None else 1
        if parts > 1:
            axes[rank] = Axis("lookups", axes[rank].cuts, "reduce")
        depth = len(axes)  # axes from here on are not cut: of indices, of updates, some of both
        axes += [whole_axis(f"index{d}", self.indices.shape[d]) for d in index_axes if index_axes[d] >= depth]
        shared = {*range(depth), *index_axes.values()}
        axes += [whole_axis(f"update{d}", self.updates.shape[d]) for d in update_axes if update_axes[d] not in shared]
        out, written = self._add_result_variable(graph, placement, parts)
        accesses = (
            *([along(self.table, range(rank))] if self._fill_constant() is None and not self._overwrites else []),
            along(self.indices, [index_axes[d] for d in range(self.indices.ndim)]),
            along(self.updates, [update_axes[d] for d in range(self.updates.ndim)]),
            written,
        )
        tile = placement.tile.reshape([axis.blocks for axis in axes])
        origins = [f"d{d}" for d in self.spec.indexed]  # where its block of the table begins
        add_vertices(Builder(graph, builder.prog, self.name), self._scatter_codelet(), axes, accesses, tile, origins)
        return out if parts == 1 else reduce_partials_in_place(Builder(graph, builder.prog, self.name), out)

    def _add_result_variable(self, graph: Graph, placement: Blocked, parts: int) -> tuple[Tensor, Access]:
        """Adds the variable that vertices write: the new table, or partial tables if updates are cut.

        Args:
            graph: graph to add to.
            placement: blocks of the vertices: along the table's dimensions and, if updates may be cut, then along them.
            parts: number of blocks that the updates are cut into; partial tables have them as dimension 0.

        Returns:
            The variable, each block on the tile of its vertex, and the access that writes it. A table that vertices
            overwrite is the variable itself.
        """
        table = self.table
        rank = table.ndim
        if self._overwrites:
            return table, along(table, range(rank))
        if parts == 1:
            out = mapped_variable(graph, table.shape, table.dtype, self.name, range(rank), placement)
            return out, along(out, range(rank))
        tile_by_part = np.moveaxis(placement.tile, -1, 0)
        mapping = blocked_mapping((even_cuts(parts, parts), *placement.cuts[:rank]), tile_by_part)
        out = graph.add_variable((parts, *table.shape), table.dtype, f"{self.name}/partials", mapping, self.monoid)
        return out, Access(out, (block(rank), *map(element, range(rank))))

    def _operand_axes(self) -> _OperandAxes:
        """Numbers the axes of a scatter's vertices that dimensions of indices and updates run along.

        By these a block of the index space has its parts of both operands. The first axes are the index space, which
        placements cut: the table's dimensions, and one of updates if these are cut. A dimension of indices or updates
        runs along one of them if it is batched, covers a dimension of the table in full, or is `cut`. Others get new
        axes after those, which are never cut. Dimensions of look-ups have one axis in indices and updates.
        """
        spec = self.spec
        numbers = spec.numbers
        index_shape = self.indices.shape
        depth = len(self._index_space())
        # Of indices: those with an axis of the index space.
        space_axes = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
        if self.cut is not None:
            space_axes[self.cut] = self.table.ndim
        free = iter(range(depth, depth + len(index_shape) + len(spec.update_shape)))
        index_axes = {d: space_axes[d] if d in space_axes else next(free) for d in range(len(index_shape))}
        # Dimensions of a table that updates cover in full are cut together with theirs.
        cuttable = [d for d in spec.cuttable() if d not in spec.indexed]
        covered = {u: d for d, u in enumerate(spec.update_dims()) if u is not None and d in cuttable}
        lookups = iter(range(len(index_shape) - 1))
        update_axes: dict[int, int] = {}
        for u in range(len(spec.update_shape)):
            if u not in numbers.update_window_dims:
                update_axes[u] = index_axes[next(lookups)]
            else:
                update_axes[u] = covered[u] if u in covered else next(free)
        return _OperandAxes(index_axes, update_axes)


def _between(tensor: Tensor, dim: int, start: int, end: int) -> Tensor:
    starts = [0] * tensor.ndim
    limits = list(tensor.shape)
    starts[dim] = start
    limits[dim] = end
    return tensor.slice(starts, limits)
