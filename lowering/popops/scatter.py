"""Combination of rows with rows of a table at computed indices, as the scatter family of `lax`.

The table is cut, never the updates: every tile goes through all updates and keeps what of them falls in its block, so
that results of one row are combined in the order of `lax` and no partial results arise. Batching dimensions and those
that an update covers whole are cut first, since that divides the updates as well; then the rows.

A table that is one constant (the zeros of a gradient) is made by the vertices and not read.

Source: poplibs `popops/EmbeddingPlan.cpp` (multiUpdateAdd splits the dictionary so); cycles from `indexing_cycles`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.popops.blocks import along, mapped_variable, place_operand, placed_axes, tile_grid, whole_axis
from ipujax.lowering.popops.choice import choose, source_of
from ipujax.lowering.popops.elementwise import Frozen, freeze, immediate_of, thawed
from ipujax.lowering.popops.elementwise_cycles import total_elements
from ipujax.lowering.popops.emulation import Kind
from ipujax.lowering.popops.gather import Mode, signed
from ipujax.lowering.popops.indexing_cycles import scatter_cycles
from ipujax.lowering.popops.work import Source, Work, spans
from ipujax.runtime.codelet import BlockShapes, Codelet, Field
from ipujax.runtime.graph import Graph
from ipujax.runtime.mapping import Blocked
from ipujax.runtime.program import Execute
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import dtype_name
from ipujax.runtime.vertices import VertexGroup

SCATTERS: dict[str, Callable[..., jax.Array]] = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


_KINDS: dict[str, Kind] = {"scatter": "move", "scatter-mul": "multiply"}


@dataclass(frozen=True, slots=True)
class ScatterSpec:
    """What to update: the row of `SCATTERS`, the parameters of that function, and the shapes.

    `function` is the user's own instead, as the primitive holds it: from a table's element and an update's to the new.
    """

    kind: str
    numbers: lax.ScatterDimensionNumbers
    mode: Mode
    indices_are_sorted: bool
    unique_indices: bool
    table_shape: tuple[int, ...]
    update_shape: tuple[int, ...]
    dtype: Any
    function: Any = None

    @property
    def indexed(self) -> tuple[int, ...]:
        """Dimensions of the table that indices point into."""
        return tuple(self.numbers.scatter_dims_to_operand_dims)

    def windows(self) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        """For each dimension of the table the extent of an update, and its dimension in the updates or None."""
        numbers = self.numbers
        skipped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        dims = iter(numbers.update_window_dims)
        of_update = [None if d in skipped else next(dims) for d in range(len(self.table_shape))]
        return tuple(1 if u is None else self.update_shape[u] for u in of_update), tuple(of_update)

    def repeats(self) -> int:
        """Look-ups of each batch."""
        numbers = self.numbers
        lookups = prod(n for u, n in enumerate(self.update_shape) if u not in numbers.update_window_dims)
        return lookups // prod(self.table_shape[d] for d in numbers.operand_batching_dims)

    def cuttable(self) -> list[int]:
        """Dimensions of the table that may be cut: batched, covered whole, or indexed."""
        sizes, of_update = self.windows()
        batched = list(self.numbers.operand_batching_dims)
        whole = [
            d
            for d, n in enumerate(self.table_shape)
            if of_update[d] is not None and d not in self.indexed and sizes[d] == n
        ]
        return batched + whole + sorted(self.indexed, key=lambda d: -self.table_shape[d])


def scatter(
    graph: Graph, table: Tensor, indices: Tensor, updates: Tensor, spec: ScatterSpec, prog: ProgramSequence, name: str
) -> Tensor:
    """Combines updates with a table.

    Args:
        graph: graph to add to.
        table: tensor of shape `spec.table_shape` with at least one element.
        indices: integer tensor, index vectors in its last dimension.
        updates: tensor of shape `spec.update_shape` with at least one element.
        spec: which indices point where, and how to combine.
        prog: program the compute set is added to.
        name: debug name.

    Returns:
        A new tensor like `table`.
    """
    constant, rank = immediate_of(table), table.ndim
    codelet = _codelet(table.dtype, indices.dtype, spec, None if constant is None else freeze(constant))
    index_axes, update_axes = _extra_axes(spec, indices.shape, rank)
    whole = spans(table.shape, range(rank))
    index_spans, update_spans = (
        spans(t.shape, [at[d] if at[d] < rank else None for d in range(t.ndim)])
        for t, at in ((indices, index_axes), (updates, update_axes))
    )
    reads = [*([(table, whole)] if constant is None else []), (indices, index_spans), (updates, update_spans)]
    sources: list[Source] = [source_of(graph, tensor) for tensor, _ in reads]
    work = Work(codelet, (*(read for _, read in reads), whole), (*sources, "here"))

    def add(graph: Graph, prog: ProgramSequence, placement: Blocked) -> Tensor:
        for tensor, read in reads:
            place_operand(graph, tensor, read, placement)
        out = mapped_variable(graph, table.shape, table.dtype, name, range(rank), placement)
        axes = placed_axes(placement)
        axes += [whole_axis(f"index{d}", indices.shape[d]) for d in index_axes if index_axes[d] >= rank]
        axes += [whole_axis(f"update{d}", updates.shape[d]) for d in _own(spec, update_axes, index_axes, rank)]
        accesses = (
            *([along(table, range(rank))] if constant is None else []),
            along(indices, [index_axes[d] for d in range(indices.ndim)]),
            along(updates, [update_axes[d] for d in range(updates.ndim)]),
            along(out, range(rank)),
        )
        tile, origins = tile_grid(placement, len(axes) - rank), tuple(f"d{d}" for d in spec.indexed)
        compute_set = graph.add_compute_set(name)
        graph.add_vertices(compute_set, VertexGroup(codelet, tuple(axes), accesses, tile, origins, graph.origin))
        prog.add(Execute(compute_set))
        return out

    operands = [tensor for tensor, _ in reads]
    return add(graph, prog, choose(graph, table.shape, spec.cuttable(), work, operands, add))


def _extra_axes(spec: ScatterSpec, index_shape: Sequence[int], rank: int) -> tuple[dict[int, int], dict[int, int]]:
    """The axis of each dimension of the indices and of the updates: one of the table's, or a new one behind them."""
    numbers = spec.numbers
    batched = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    free = iter(range(rank, rank + len(index_shape) + len(spec.update_shape)))
    index_axes = {d: batched[d] if d in batched else next(free) for d in range(len(index_shape))}
    _, of_update = spec.windows()
    whole = {u: d for d, u in enumerate(of_update) if u is not None and d in spec.cuttable() and d not in spec.indexed}
    lookups = iter(range(len(index_shape) - 1))
    update_axes: dict[int, int] = {}
    for u in range(len(spec.update_shape)):
        if u not in numbers.update_window_dims:
            update_axes[u] = index_axes[next(lookups)]
        else:
            update_axes[u] = whole[u] if u in whole else next(free)
    return index_axes, update_axes


def _own(spec: ScatterSpec, update_axes: dict[int, int], index_axes: dict[int, int], rank: int) -> list[int]:
    """Dimensions of the updates with an axis of their own."""
    shared = {*range(rank), *index_axes.values()}
    return [u for u in range(len(spec.update_shape)) if update_axes[u] not in shared]


@lru_cache(maxsize=1024)
def _codelet(dtype: Any, index_dtype: Any, spec: ScatterSpec, constant: Frozen | None) -> Codelet:
    sizes, _ = spec.windows()

    def compute(*blocks: jax.Array, origins: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...]) -> jax.Array:
        *given, indices, updates = blocks
        table = given[0] if constant is None else lax.full(shapes[0], thawed(constant), dtype)
        mode, hints = spec.mode, {"unique_indices": spec.unique_indices, "indices_are_sorted": spec.indices_are_sorted}
        if all(table.shape[d] == spec.table_shape[d] for d in spec.indexed):
            return _scattered(table, indices, updates, mode, hints)
        # What updates of several indices have beside the block goes to places around it, and is left there.
        beside = [sizes[d] - 1 if d in spec.indexed else 0 for d in range(table.ndim)]
        around = lax.pad(table, jnp.zeros((), dtype), [(n, n, 0) for n in beside])
        around = _scattered(around, _local_indices(indices, origins), updates, Mode.FILL_OR_DROP, {})
        return lax.slice(around, beside, [n + m for n, m in zip(beside, table.shape, strict=True)])

    def _scattered(table: Any, indices: Any, updates: Any, mode: Mode, hints: Mapping[str, bool]) -> jax.Array:
        if spec.function is None:
            return SCATTERS[spec.kind](table, indices, updates, spec.numbers, mode=mode, **hints)
        return lax.scatter_p.bind(
            table,
            indices,
            updates,
            dimension_numbers=spec.numbers,
            update_jaxpr=spec.function,
            update_consts=(),
            mode=mode,
            **{"unique_indices": False, "indices_are_sorted": False, **hints},
        )

    def _local_indices(indices: jax.Array, origins: tuple[Any, ...]) -> jax.Array:
        """Indices into a block and what is around it; those that fall elsewhere are out of its range."""
        indices = signed(indices)
        last = np.array([spec.table_shape[d] - sizes[d] for d in spec.indexed], indices.dtype)
        inside = jnp.clip(indices, 0, last)
        if spec.mode is not Mode.CLIP:
            inside = jnp.where(inside == indices, indices, -max(spec.table_shape))
        beside = np.array([sizes[d] - 1 for d in spec.indexed], indices.dtype)
        return inside + beside - jnp.stack([jnp.asarray(origin, indices.dtype) for origin in origins])

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        table, indices, updates = shapes[-1], shapes[-3], shapes[-2]
        lookups, share = total_elements(indices[:-1]), np.ones(())
        row = -(-total_elements(updates) // np.maximum(lookups, 1))
        for d in spec.indexed:
            share = share * np.minimum(1.0, (table[d] + sizes[d] - 1) / spec.table_shape[d])
            row = np.ceil(row * np.minimum(1.0, table[d] / sizes[d])).astype(np.int64)
        return scatter_cycles(_KINDS.get(spec.kind, "add"), lookups, share, row, dtype, target)

    fields = [Field("indices", "in", index_dtype), Field("updates", "in", dtype), Field("out", "out", dtype)]
    if constant is None:
        fields.insert(0, Field("table", "in", dtype))
    moves = spec.kind == "scatter" and spec.function is None
    title = f"popops::{spec.kind.title().replace('-', '')}<{dtype_name(dtype)}>"
    return Codelet(title, tuple(fields), compute, cycles, 36, 600, takes=("origins", "shapes"), moves=moves)
