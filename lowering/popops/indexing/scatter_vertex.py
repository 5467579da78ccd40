"""Parameters of a scatter, and the codelet that combines updates with a block of a table.

Input: a `ScatterSpec`. Output: a codelet of a block of the table, or of one constant, index vectors and updates.
Source: cycles from `indexing_cycles`; filling a table with a constant is a vector a cycle (assumed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.layout import total_elements
from ipujax.lowering.popops.indexing.dynamic_slices import computed_before_writing
from ipujax.lowering.popops.indexing.gather import Mode, signed
from ipujax.lowering.popops.indexing.indexing_cycles import WORD_BYTES, scatter_cycles
from ipujax.lowering.popops.vertices.emulation import Kind
from ipujax.lowering.popops.vertices.kernel import Frozen, thawed
from ipujax.lowering.popops.vertices.reducers import comparison_of
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Codelet, Field, SlowPath, SlowReason
from ipujax.runtime.target import Target, store_cycles, whole_cycles
from ipujax.runtime.tensor import dtype_name, element_bytes

SCATTERS: dict[str, Callable[..., jax.Array]] = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}

# Monoids that combine neutral tables, each updated by a part of the updates.
SCATTER_MONOIDS = {
    "scatter-add": "add",
    "scatter-sub": "add",
    "scatter-mul": "mul",
    "scatter-min": "min",
    "scatter-max": "max",
}
_KINDS: dict[str, Kind] = {"scatter": "move", "scatter-mul": "multiply"}


class LookupDim(NamedTuple):
    """Dimension of look-ups: its number among the dimensions of the indices, and among those of the updates."""

    of_indices: int
    of_updates: int


@dataclass(frozen=True, slots=True)
class ScatterSpec:
    """Parameters of a scatter, those of `lax.scatter` among them.

    Args:
        kind: name of the primitive, a key of `SCATTERS`.
        numbers: dimension numbers.
        mode: what happens for an index beyond the table.
        indices_are_sorted: the user's promise.
        unique_indices: likewise.
        table_shape: shape of the whole table.
        update_shape: shape of all updates.
        dtype: dtype of the table and the updates.
        function: the user's jaxpr in the primitive, from an element of the table and one of the updates to the new
            element, in place of the function in `SCATTERS`; None without one.
        uncut: dimensions of the table that are never cut.
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
    uncut: tuple[int, ...] = ()

    @property
    def indexed(self) -> tuple[int, ...]:
        """Dimensions of the table that indices point into."""
        return tuple(self.numbers.scatter_dims_to_operand_dims)

    def update_dims(self) -> tuple[int | None, ...]:
        """For each dimension of the table that of the updates; None for one along which an update is one row."""
        numbers = self.numbers
        skipped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        dims = iter(numbers.update_window_dims)
        return tuple(None if d in skipped else next(dims) for d in range(len(self.table_shape)))

    def update_sizes(self) -> tuple[int, ...]:
        """Extent of one update along each dimension of the table."""
        return tuple(1 if u is None else self.update_shape[u] for u in self.update_dims())

    def lookups_per_batch(self) -> int:
        """Number of updates of each batch, any of which may be of one element of the table."""
        numbers = self.numbers
        lookups = prod(n for u, n in enumerate(self.update_shape) if u not in numbers.update_window_dims)
        return lookups // prod(self.table_shape[d] for d in numbers.operand_batching_dims)

    def cuttable(self) -> list[int]:
        """Dimensions of the table that partitions may cut, in the order in which they are tried.

        First those that divide the updates as well, which are batched or covered in full by an update; then those that
        are indexed, the longest first.
        """
        sizes = self.update_sizes()
        batched = list(self.numbers.operand_batching_dims)
        covered = [
            d
            for d, n in enumerate(self.table_shape)
            if self.update_dims()[d] is not None and d not in (*self.indexed, *self.uncut) and sizes[d] == n
        ]
        return batched + covered + sorted(self.indexed, key=lambda d: -self.table_shape[d])

    def lookup_dims(self) -> list[LookupDim]:
        """Dimensions of look-ups, outermost first; those of batches are none."""
        numbers = self.numbers
        of_updates = (u for u in range(len(self.update_shape)) if u not in numbers.update_window_dims)
        dims = (LookupDim(i, u) for i, u in enumerate(of_updates))
        return [dim for dim in dims if dim.of_indices not in numbers.scatter_indices_batching_dims]

    @property
    def is_narrow_sum(self) -> bool:
        """True if updates of one element are rounded one after the other to less than 32 bits."""
        is_narrow = jnp.issubdtype(self.dtype, jnp.floating) and self.dtype.itemsize < 4
        return bool(is_narrow and SCATTER_MONOIDS.get(self.kind) in ("add", "mul") and self.lookups_per_batch() > 1)

    def monoid(self) -> str | None:
        """Monoid by which results of parts of the updates combine; None where their order matters."""
        monoid = None if self.is_narrow_sum or self.dtype == np.bool_ else SCATTER_MONOIDS.get(self.kind)
        if monoid in ("min", "max") and jnp.issubdtype(self.dtype, jnp.complexfloating):
            return None
        return monoid


@remembered
def scatter_codelet(
    dtype: Any,
    index_dtype: Any,
    spec: ScatterSpec,
    constant: Frozen | None,
    *,
    is_part: bool = False,
    in_place: bool = False,
) -> Codelet:
    """Codelet whose vertices combine those updates with their block of a table whose indices fall into it.

    Args:
        dtype: dtype of table and updates.
        index_dtype: dtype of the indices.
        spec: parameters of the scatter.
        constant: value of every element of the table, which is not read; None for a table that is read.
        is_part: whether the updates are a part of all, combined with a neutral table of their own, which costs filling.
        in_place: whether the table is the last field, which is overwritten.
    """
    result = Field("table", "inout", dtype) if in_place else Field("out", "out", dtype)
    fields = [Field("indices", "in", index_dtype), Field("updates", "in", dtype), result]
    if constant is None and not in_place:
        fields.insert(0, Field("table", "in", dtype))
    return Codelet(
        f"popops::{spec.kind.title().replace('-', '')}<{dtype_name(dtype)}>",
        tuple(fields),
        partial(_update_table, spec, dtype, constant, in_place),
        partial(_update_cycles, spec, dtype, is_part),
        state_bytes=36,
        code_bytes=600,
        takes=("origins", "shapes"),
        moves=spec.kind == "scatter" and spec.function is None,
        is_lookup=True,
        compares=comparison_of(SCATTER_MONOIDS.get(spec.kind, "")),
        flops=partial(_update_flops, spec),
        parts=partial(_rows_in_block, spec),
        slow_paths=partial(_slow_paths, spec, dtype),
    )


def _update_table(
    spec: ScatterSpec,
    dtype: Any,
    constant: Frozen | None,
    in_place: bool,
    *blocks: jax.Array,
    origins: tuple[Any, ...],
    shapes: tuple[tuple[int, ...], ...],
) -> jax.Array:
    """Combines updates with a block of a table: those whose indices fall into the block, which begins at `origins`.

    Args:
        spec: parameters of the scatter.
        dtype: dtype of the table.
        constant: number that fills the block first, which then is no operand; None without.
        in_place: whether the block is overwritten: then it is the last operand, as its field is written.
        blocks: blocks of the table, unless it is a constant, of the indices and of the updates.
        origins: first index of the block along each indexed dimension.
        shapes: shape of each block that is written: of the table's alone.
    """
    indices, updates, *tables = blocks if in_place else (*blocks[-2:], *blocks[:-2])
    table = tables[0] if constant is None else lax.full(shapes[0], thawed(constant), dtype)
    if all(table.shape[d] == spec.table_shape[d] for d in spec.indexed):  # uncut: indices are those of the block
        hints = {"unique_indices": spec.unique_indices, "indices_are_sorted": spec.indices_are_sorted}
        return _scatter_block(spec, table, indices, updates, spec.mode, hints)
    # An update of several rows may overlap the block in part: a margin around the block takes its other rows, and is
    # cropped.
    sizes = spec.update_sizes()
    margin = [sizes[d] - 1 if d in spec.indexed else 0 for d in range(table.ndim)]
    padded = lax.pad(table, jnp.zeros((), dtype), [(n, n, 0) for n in margin])
    local_indices = _local_indices(spec, indices, origins)
    padded = _scatter_block(spec, padded, local_indices, updates, Mode.FILL_OR_DROP, hints={})
    return lax.slice(padded, margin, [n + m for n, m in zip(margin, table.shape, strict=True)])


def _scatter_block(
    spec: ScatterSpec, table: Any, indices: Any, updates: Any, mode: Mode, hints: Mapping[str, bool]
) -> jax.Array:
    """JAX's scatter of updates into a block of the table, by the operation of `spec.kind` or the user's own function.

    `mode` is for indices beyond the block, `hints` has JAX's flags of indices that are unique or sorted.
    """
    # XLA writes a single update as a slice, whose fused computation would read elements already overwritten.
    if prod(indices.shape[:-1]) == 1:
        updates = computed_before_writing(updates)
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


def _local_indices(spec: ScatterSpec, indices: jax.Array, origins: tuple[Any, ...]) -> jax.Array:
    """Index vectors into a block of the table with its margin, from those into the whole table.

    The margin, one row less than an update has on each side, takes updates that begin before the block or end behind
    it. An index that falls elsewhere is out of range. `origins` is the first index of the block in each indexed
    dimension.
    """
    sizes = spec.update_sizes()
    indices = signed(indices)
    limits = np.array([spec.table_shape[d] - sizes[d] for d in spec.indexed], indices.dtype)
    clipped = jnp.clip(indices, 0, limits)
    if spec.mode is not Mode.CLIP:  # an update beyond the table is dropped: its index is negative for every block
        clipped = jnp.where(clipped == indices, indices, -max(spec.table_shape))
    margin = np.array([sizes[d] - 1 for d in spec.indexed], indices.dtype)
    return clipped + margin - jnp.stack([jnp.asarray(origin, indices.dtype) for origin in origins])


def _update_cycles(spec: ScatterSpec, dtype: Any, is_part: bool, shapes: BlockShapes, target: Target) -> np.ndarray:
    """Tile cycles of a scatter vertex, with as many updates in its block as are expected of uniform indices.

    Args:
        spec: parameters of the scatter.
        dtype: dtype of table and updates.
        is_part: whether the vertex fills its block with neutral elements first.
        shapes: lengths of the block of each field; the last three are indices, updates and the table's block.
        target: the machine.
    """
    cycles = scatter_cycles(_KINDS.get(spec.kind, "add"), *_work(spec, shapes), dtype, target)
    filled_bytes = total_elements(shapes[-1]) * element_bytes(dtype)
    return cycles + whole_cycles(store_cycles(filled_bytes, target)) if is_part else cycles


class _Work(NamedTuple):
    """Arguments of `scatter_cycles` of a vertex: look-ups, the share in its block, and rows and their elements."""

    lookups: np.ndarray
    share: np.ndarray
    rows: np.ndarray
    row_elements: np.ndarray


def _work(spec: ScatterSpec, shapes: BlockShapes) -> _Work:
    """Work of a scatter vertex: look-ups that it tells apart, and those whose updates are expected in its block."""
    indices, updates, table = shapes[-3:]
    sizes = spec.update_sizes()
    lookups = total_elements(indices[:-1])
    share = np.ones(())  # expected part of the look-ups that fall in the block
    rows = np.ones((), np.int64)  # of the block, an update's worth each
    row_elements = -(-total_elements(updates) // np.maximum(lookups, 1))
    for d in spec.indexed:
        # An update that begins before the block may reach into it.
        share = share * np.minimum(1.0, (table[d] + sizes[d] - 1) / spec.table_shape[d])
        rows = rows * -(-table[d] // sizes[d])
        row_elements = np.ceil(row_elements * np.minimum(1.0, table[d] / sizes[d])).astype(np.int64)
    return _Work(lookups, share, rows, row_elements)


def _slow_paths(
    spec: ScatterSpec, dtype: Any, shapes: BlockShapes, _repetitions: object, target: Target
) -> Sequence[SlowPath]:
    """Slow path of updates whose rows are no whole words: PopLibs combines these in C++, see `Codelet.slow_paths`."""
    kind = _KINDS.get(spec.kind, "add")
    work = _work(spec, shapes)
    odd_rows = work.row_elements[work.row_elements * element_bytes(dtype) % WORD_BYTES > 0]
    if kind == "move" or not odd_rows.size:
        return []
    by_word, by_element = (scatter_cycles(kind, *work, dtype, target, in_words=words) for words in (True, False))
    reason = SlowReason("C++", int(odd_rows.min()), WORD_BYTES // element_bytes(dtype))
    is_odd = work.row_elements * element_bytes(dtype) % WORD_BYTES > 0
    return [SlowPath(reason, np.where(is_odd, np.maximum(0, by_element - by_word), 0))]


def _update_flops(spec: ScatterSpec, shapes: BlockShapes) -> np.ndarray:
    """Operations on the updates whose rows are expected in the block of the table."""
    updates, table = shapes[-2:]
    in_block = np.asarray(prod((table[d] for d in spec.indexed), start=np.ones((), np.int64)))
    return total_elements(updates) * in_block // prod(spec.table_shape[d] for d in spec.indexed)


def _rows_in_block(spec: ScatterSpec, shapes: BlockShapes, _target: Target) -> np.ndarray:
    """Rows of the table, which the workers of a vertex share."""
    return _work(spec, shapes).rows
