"""Equations on the blocks of a device: the primitive with the parameters of its record, but for some.

A device that has some rows of a table reads or writes those alone; one that has some numbers of an iota counts from
the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.partition.resharding import index_along
from ipujax.lowering.partition.specs import Axes, MeshAxes
from ipujax.lowering.primitives import INDEX, record_of, shapes

# Parameters with shardings in the types of an equation; a block has none.
_SHARDING_PARAMS = ("out_sharding", "sharding")
_CLIPS = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


@dataclass(frozen=True, slots=True)
class Blocks:
    """One equation on the blocks of a device.

    Args:
        eqn: the equation.
        operands: block of each operand.
        result_shapes: shape of the block of each result.
        axes: axes of each factor that is split.
        mesh: the mesh.
    """

    eqn: JaxprEqn
    operands: Sequence[jax.Array]
    result_shapes: Sequence[tuple[int, ...]]
    axes: Mapping[int, Axes]
    mesh: MeshAxes

    def bind(self, *operands: jax.Array, **changes: Any) -> list[jax.Array]:
        """The primitive on blocks, those of the equation without `operands`, with changed parameters."""
        params = {key: None if key in _SHARDING_PARAMS else value for key, value in self.eqn.params.items()}
        shapes_of_blocks = [jnp.shape(x) for x in self.operands]
        params |= record_of(self.eqn).block_params(self.eqn, shapes_of_blocks, self.result_shapes)
        primitive = self.eqn.primitive
        results = primitive.bind(*(operands or self.operands), **primitive.get_bind_params({**params, **changes}))
        return list(results) if primitive.multiple_results else [results]


def results_of(blocks: Blocks) -> list[Any]:
    """Block of each result of an equation."""
    rows = record_of(blocks.eqn).rows
    if rows is not None:
        return (_rows_read if rows == "read" else _rows_written)(blocks)
    compute = _COMPUTES.get(blocks.eqn.primitive.name, Blocks.bind)
    return compute(blocks)


def _rows_read(blocks: Blocks) -> list[Any]:
    """Each device reads its own rows, 0 for others, and devices add up."""
    operand, indices = blocks.operands
    eqn = blocks.eqn
    numbers = eqn.params["dimension_numbers"]
    rows = [d for d in numbers.start_index_map if blocks.axes.get(d)]
    if not rows:
        return blocks.bind()
    local, here, outside = _local_rows(blocks, indices, numbers.start_index_map, rows, eqn.params["mode"])
    changes = {"mode": lax.GatherScatterMode.CLIP, "indices_are_sorted": False, "unique_indices": False}
    (found,) = blocks.bind(operand, local, **changes)
    axes = tuple(axis for d in rows for axis in blocks.axes[d])
    lookups = [d for d in range(found.ndim) if d not in numbers.offset_dims]

    def spread(flags: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(flags, found.shape, lookups)

    zero = jnp.zeros((), found.dtype)
    missing = jnp.full(found.shape, _fill_value(eqn, found.dtype))
    # One device has the value of rows outside of the table, so that the sum has it once.
    first = spread(outside & (index_along(axes, blocks.mesh) == 0))
    return [jnp.where(spread(here), found, jnp.where(first, missing, zero))]


def _fill_value(eqn: JaxprEqn, dtype: Any) -> Any:
    """Value of rows outside of the table: the default of `lax.gather`."""
    value = eqn.params["fill_value"]
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(True)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max, dtype)


def _local_rows(
    blocks: Blocks, indices: jax.Array, places: Sequence[int], rows: Sequence[int], mode: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Indices into the device's rows; flags of lookups of its own rows, and of rows outside of the table."""
    whole_operand = shapes(blocks.eqn.invars)[0]
    columns = [indices[..., n] for n in range(len(places))]
    shape = indices.shape[:-1]
    here = jnp.ones(shape, bool)
    outside = jnp.zeros(shape, bool)
    for dim in rows:
        column = places.index(dim)
        row = columns[column]
        size = whole_operand[dim]
        if mode in _CLIPS:
            row = jnp.clip(row, 0, size - 1)
        outside |= (row < 0) | (row >= size)
        local_size = size // blocks.mesh.size(blocks.axes[dim])
        row = row - (index_along(blocks.axes[dim], blocks.mesh) * local_size).astype(row.dtype)
        here &= (row >= 0) & (row < local_size)
        columns[column] = row
    return jnp.stack(columns, -1), here & ~outside, outside


def _rows_written(blocks: Blocks) -> list[Any]:
    """Each device writes its own rows, and drops others; of terms of a sum the first has the table."""
    operand, indices, updates = blocks.operands
    eqn = blocks.eqn
    places = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    rows = [d for d in places if blocks.axes.get(d)]
    changes: dict[str, Any] = {}
    if rows:
        local, here, _ = _local_rows(blocks, indices, places, rows, eqn.params["mode"])
        # Negative indices are dropped, as those past the end.
        indices = jnp.where(here[..., None], local, -1)
        changes = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    terms = tuple(axis for f, axes in blocks.axes.items() if f >= INDEX for axis in axes)
    if terms:
        operand = jnp.where(index_along(terms, blocks.mesh) == 0, operand, jnp.zeros((), operand.dtype))
    return blocks.bind(operand, indices, updates, **changes)


def _iota(blocks: Blocks) -> list[Any]:
    (shape,) = blocks.result_shapes
    dim = blocks.eqn.params["dimension"]
    (numbers,) = blocks.bind()
    axes = blocks.axes.get(dim, ())
    if not axes:
        return [numbers]
    first = (index_along(axes, blocks.mesh) * shape[dim]).astype(numbers.dtype)
    return [numbers + lax.broadcast(first, shape)]


_COMPUTES: Mapping[str, Callable[[Blocks], list[Any]]] = {
    "iota": _iota,
    **dict.fromkeys(("shard_alike", "layout_constraint", "xla_metadata_value"), lambda blocks: list(blocks.operands)),
}
