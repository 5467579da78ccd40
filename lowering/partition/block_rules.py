"""Equations on the blocks of a device: the primitive with the parameters of its record, but for some.

A device that has some rows of a table reads or writes those alone; one that has some numbers of an iota counts from
the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.partition.assignments import Assignment, needed_specs
from ipujax.lowering.partition.resharding import index_along
from ipujax.lowering.partition.specs import Axes, MeshAxes, Spec
from ipujax.lowering.popops import fill_of, frozen_fill
from ipujax.lowering.primitives import INDEX, Factors, record_of, shapes

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
        """Blocks of the results of the primitive.

        Args:
            operands: a block for each operand; those of the equation when empty.
            changes: parameters in place of the equation's.
        """
        params = {key: None if key in _SHARDING_PARAMS else value for key, value in self.eqn.params.items()}
        shapes_of_blocks = [jnp.shape(x) for x in self.operands]
        params |= record_of(self.eqn).block_params(self.eqn, shapes_of_blocks, self.result_shapes)
        primitive = self.eqn.primitive
        results = primitive.bind(*(operands or self.operands), **primitive.get_bind_params({**params, **changes}))
        return list(results) if primitive.multiple_results else [results]


def needed_operand_specs(
    eqn: JaxprEqn, factors: Factors, assignment: Assignment, operand_specs: Sequence[Spec]
) -> list[Spec]:
    """How each operand must be split for devices to compute their blocks, as an assignment of mesh axes has them.

    A table to which devices add the updates of their lookups is needed as partial sums, which have their sum later.

    Args:
        eqn: the equation.
        factors: its index space.
        assignment: mesh axes of each factor, an index of the equation.
        operand_specs: how operands are split so far.
    """
    needed = needed_specs(factors, assignment, operand_specs)
    if record_of(eqn).rows == "written":
        # Factors from `INDEX` on are those of lookups.
        lookup_axes = {axis for factor, axes in assignment.items() if factor >= INDEX for axis in axes}
        needed[0] = replace(needed[0], unreduced=needed[0].unreduced | lookup_axes)
    return needed


def results_of(blocks: Blocks) -> list[Any]:
    """Block of each result of an equation."""
    rows = record_of(blocks.eqn).rows
    if rows is not None:
        return (_rows_read if rows == "read" else _rows_written)(blocks)
    compute = _COMPUTES.get(blocks.eqn.primitive.name, Blocks.bind)
    return compute(blocks)


def _rows_read(blocks: Blocks) -> list[Any]:
    """Results of a gather from a table whose rows are split over devices, as partial sums.

    Each device looks up its own rows, and has 0 for those of others; the caller adds the results up over devices.
    """
    operand, indices = blocks.operands
    eqn = blocks.eqn
    numbers = eqn.params["dimension_numbers"]
    # The factor of a dimension of the table is the number of the dimension.
    split_dims = [d for d in numbers.start_index_map if blocks.axes.get(d)]
    if not split_dims:
        return blocks.bind()
    local = _local_rows(blocks, indices, numbers.start_index_map, eqn.params["slice_sizes"])
    # Local indices are clipped, not in the order of the whole ones, and those of other devices' rows may coincide.
    changes = {"mode": lax.GatherScatterMode.CLIP, "indices_are_sorted": False, "unique_indices": False}
    (rows,) = blocks.bind(operand, local.indices, **changes)
    axes = tuple(axis for d in split_dims for axis in blocks.axes[d])
    lookup_dims = [d for d in range(rows.ndim) if d not in numbers.offset_dims]

    def for_windows(flags: jax.Array) -> jax.Array:
        """Flags of lookups, broadcast along the dimensions of the windows that these read."""
        return lax.broadcast_in_dim(flags, rows.shape, lookup_dims)

    zero = jnp.zeros((), rows.dtype)
    fill = jnp.full(rows.shape, fill_of(frozen_fill(eqn.params["fill_value"], rows.dtype), rows.dtype))
    # One device has the value of rows outside of the table, so that the sum has it once.
    is_fill = for_windows(local.are_outside & (index_along(axes, blocks.mesh) == 0))
    return [jnp.where(for_windows(local.are_own), rows, jnp.where(is_fill, fill, zero))]


class _LocalRows(NamedTuple):
    """Lookups of a table, of which a device has some rows."""

    indices: jax.Array  # into the device's rows; beyond them for other devices' rows
    are_own: jax.Array  # flag of each lookup whose row the device has
    are_outside: jax.Array  # flag of each lookup of a row outside of the table


def _local_rows(
    blocks: Blocks, indices: jax.Array, indexed_dims: Sequence[int], window_shape: Sequence[int]
) -> _LocalRows:
    """Lookups by the device's own rows.

    The mode of the equation, what becomes of lookups outside of the table, is applied here, to all indexed dimensions.

    Args:
        blocks: a gather or a scatter, whose first operand is the table.
        indices: int[*lookups, dims], indices into the whole table.
        indexed_dims: dimension of the table that each column of `indices` indexes.
        window_shape: extents of the window of a lookup in the table; 1 along dimensions that are split over devices.
    """
    table_shape = shapes(blocks.eqn.invars)[0]
    columns: list[jax.Array] = []
    lookups_shape = indices.shape[:-1]
    are_own = jnp.ones(lookups_shape, bool)
    are_outside = jnp.zeros(lookups_shape, bool)
    # A narrower dtype may not have the size of the table, nor the first row of each device.
    wide = jnp.uint32 if jnp.issubdtype(indices.dtype, jnp.unsignedinteger) else jnp.int32
    indices = indices.astype(jnp.promote_types(indices.dtype, wide))
    for column, dim in enumerate(indexed_dims):
        row = indices[..., column]
        last = table_shape[dim] - window_shape[dim]
        if blocks.eqn.params["mode"] in _CLIPS:
            row = jnp.clip(row, 0, last)
        are_outside |= (row < 0) | (row > last)
        if axes := blocks.axes.get(dim):
            local_size = table_shape[dim] // blocks.mesh.size(axes)  # rows of each device
            row = row - (index_along(axes, blocks.mesh) * local_size).astype(row.dtype)
            are_own &= (row >= 0) & (row < local_size)
        columns.append(row)
    return _LocalRows(jnp.stack(columns, -1), are_own & ~are_outside, are_outside)


def _rows_written(blocks: Blocks) -> list[Any]:
    """Results of a scatter to a table whose rows are split over devices: each device writes its own, and drops others.

    If lookups are split, each device adds its own updates to its partial sum of the table, see `needed_operand_specs`.
    """
    operand, indices, updates = blocks.operands
    eqn = blocks.eqn
    indexed_dims = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    # The factor of a dimension of the table is the number of the dimension.
    split_dims = [d for d in indexed_dims if blocks.axes.get(d)]
    changes: dict[str, Any] = {}
    if split_dims:
        local = _local_rows(blocks, indices, indexed_dims, _window_shape(eqn))
        # Negative indices are dropped, as those past the end.
        indices = jnp.where(local.are_own[..., None], local.indices, -1)
        changes = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    return blocks.bind(operand, indices, updates, **changes)


def _window_shape(scatter: JaxprEqn) -> list[int]:
    """Extents, along each dimension of the table, of the window that one update of a scatter is written to."""
    numbers = scatter.params["dimension_numbers"]
    table, _, updates = shapes(scatter.invars)
    extents = iter(updates[d] for d in numbers.update_window_dims)
    single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    return [1 if d in single else next(extents) for d in range(len(table))]


def _iota_of_block(blocks: Blocks) -> list[Any]:
    """Each device counts from the first number of its block."""
    (shape,) = blocks.result_shapes
    dim = blocks.eqn.params["dimension"]
    axes = blocks.axes.get(dim, ())  # the factor of a dimension of an iota is its number
    if not axes:
        return blocks.bind()
    # Integers, as a sum of rounded numbers would be rounded twice.
    numbers = lax.broadcasted_iota(np.int32, shape, dim) + index_along(axes, blocks.mesh) * shape[dim]
    return [lax.convert_element_type(numbers, blocks.eqn.params["dtype"])]


_COMPUTES: Mapping[str, Callable[[Blocks], list[Any]]] = {
    "iota": _iota_of_block,
    **dict.fromkeys(("shard_alike", "layout_constraint", "xla_metadata_value"), lambda blocks: list(blocks.operands)),
}
