"""Equations without inner jaxprs on the blocks of one device, by their factors.

The primitive of an equation has the parameters of its record, but for some: a device that has some rows of a table
reads or writes those alone; one that has some numbers of an iota counts from the first of them.
Operands that are needed in another split are resharded before, results whose spec is another one after. Equations
without factors get whole operands, and are noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import DropVar, JaxprEqn, eval_equation, shape_of
from ipujax.lowering.jaxpr import equations_inside
from ipujax.lowering.partition.assignments import Assignment, Values, axes_of, decide, needed_specs
from ipujax.lowering.partition.block_values import Block, GatheredEquation, Scope
from ipujax.lowering.partition.resharding import ADDITIONS, Step, index_along, of_numbers
from ipujax.lowering.partition.specs import SPEC_STATEMENTS, Axes, MeshAxes, Spec, in_words, local_shape, whole
from ipujax.lowering.popops import fill_of, frozen_fill
from ipujax.lowering.primitives import INDEX, Factors, record_of, shapes
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import GraphError

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


def equation_on_blocks(scope: Scope, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """Blocks of the results of an equation on one device of a mesh, from blocks of its operands.

    By its factors, the indices along which its parts are computed alone; one without is computed on gathered operands.
    """
    name = eqn.primitive.name
    if name in _ON_DEVICES_OWN_VALUES:
        # Inside of a user's `shard_map` a value is a device's own, whole to it: so are operand and result.
        return [replace(operands[0], array=_ON_DEVICES_OWN_VALUES[name](operands[0].array, eqn.params))]
    if name in SPEC_STATEMENTS:  # such as `with_sharding_constraint`
        return [_under_stated_spec(scope, eqn, operands[0])]
    required = [scope.required_spec(var) for var in eqn.outvars]  # None for any spec
    if all(block.spec.is_whole for block in operands) and all(spec is None or spec.is_whole for spec in required):
        return _on_whole_operands(scope, eqn, operands)
    factors_of = record_of(eqn).factors
    if factors_of is None:
        return _on_gathered_operands(scope, eqn, operands, required)
    return _on_blocks_by_factors(scope, factors_of(eqn), eqn, operands, required)


def _under_stated_spec(scope: Scope, eqn: JaxprEqn, block: Block) -> Block:
    """The array of each device under the spec that an equation states for its result, as `with_sharding_constraint`.

    A result of which nothing needs the sum yet stays a partial result along the axes that the spec does not use.
    """
    (result,) = eqn.outvars
    if isinstance(result, DropVar):
        return block
    spec = scope.required_spec(result)
    spec = block.spec if spec is None else spec
    # Of any other result a spec that does not name unreduced axes asks for the sum.
    if result in scope.may_stay_unreduced:
        spec = replace(spec, unreduced=block.spec.unreduced - set(spec.axes))
    return scope.to_spec(block, spec, eqn)


def _on_whole_operands(scope: Scope, eqn: JaxprEqn, operands: Sequence[Block]) -> list[Block]:
    """Results of an equation on operands that no axis splits, which every device computes alike."""
    arrays = [block.array for block in operands]
    if record_of(eqn).factors is None:
        results = eval_equation(eqn, *arrays)
    else:
        # Without the shardings in its parameters, which blocks do not have.
        results = Blocks(eqn, arrays, [shape_of(var) for var in eqn.outvars], {}, scope.mesh).bind()
    return [Block(x, whole(len(shape_of(v))), v.aval) for x, v in zip(results, eqn.outvars, strict=True)]


def _on_gathered_operands(
    scope: Scope, eqn: JaxprEqn, operands: Sequence[Block], required: Sequence[Spec | None]
) -> list[Block]:
    """Blocks of the results of an equation that every device computes on whole operands, as it has no factors."""
    _check_no_statements_inside(eqn)
    if any(not block.spec.is_whole for block in operands):
        scope.notes.gathered.append(GatheredEquation(eqn.primitive.name, source_line(eqn)))
    gathered = [scope.to_spec(block, whole(len(block.spec.dims)), eqn) for block in operands]
    results = _on_whole_operands(scope, eqn, gathered)
    return [_to_required(scope, block, spec, eqn) for block, spec in zip(results, required, strict=True)]


def _check_no_statements_inside(eqn: JaxprEqn) -> None:
    """Refuse shardings inside of an equation that is computed whole, such as a pipeline with stages.

    Raises:
        GraphError: with the line of the sharding.
    """
    for inner in equations_inside(eqn):
        if inner.primitive.name in SPEC_STATEMENTS:
            problem = f"a sharding inside of {eqn.primitive.name}, which is not partitioned"
            hint = "state shardings outside of pipelines with stages, or use jax.shard_map"
            raise GraphError(problem, where=source_line(inner) or None, hint=hint)


def _to_required(scope: Scope, block: Block, spec: Spec | None, eqn: JaxprEqn) -> Block:
    """Block of a result under its required spec; partial sums are added up if any spec will do."""
    return scope.to_spec(block, block.spec.reduced() if spec is None else spec, eqn)


def _on_blocks_by_factors(
    scope: Scope, factors: Factors, eqn: JaxprEqn, operands: Sequence[Block], required: Sequence[Spec | None]
) -> list[Block]:
    """Blocks of the results, computed from blocks of the operands, and moved to the required specs.

    Which factors are split over which axes is decided by cycles, those of moving operands and results included.

    Args:
        scope: specs of the values around.
        factors: indices of the equation along which its parts can be computed alone.
        eqn: the equation.
        operands: block of each operand.
        required: spec that each result must have, None for any.
    """
    operands = _with_sums_taken(scope, eqn, operands, required)
    unreduced = frozenset(axis for block in operands for axis in block.spec.unreduced)
    operand_specs = [block.spec for block in operands]
    sums_of = [scope.may_stay_unreduced.get(var, 1) for var in eqn.outvars]
    result_avals = [var.aval for var in eqn.outvars]
    values = Values([block.aval for block in operands], operand_specs, result_avals, required, sums_of)
    decision = decide(factors, values, scope.mesh, scope.target)
    needed = needed_operand_specs(eqn, factors, decision.assignment, operand_specs)
    arrays = scope.arrays_under(needed, operands, eqn)
    specs = [Spec(axes_of(labels, decision.assignment)) for labels in factors.results]
    shapes = [local_shape(shape_of(var), spec, scope.mesh) for var, spec in zip(eqn.outvars, specs, strict=True)]
    results = results_of(Blocks(eqn, arrays, shapes, decision.assignment, scope.mesh))
    monoids = decision.reduced_axes(factors)
    # Sums stay unreduced at first: the required spec may have them scattered.
    unreduced |= {axis for axis, monoid in monoids.items() if monoid == "add"}
    blocks: list[Block] = []
    for x, spec, var, required_spec in zip(results, specs, eqn.outvars, required, strict=True):
        reduced = _reduced_over_devices(scope, monoids, Block(x, spec, var.aval), eqn)
        block = Block(reduced, replace(spec, unreduced=unreduced), var.aval)
        has_required_dims = required_spec is None or block.spec.dims == required_spec.dims
        stays_unreduced = var in scope.may_stay_unreduced and has_required_dims
        blocks.append(block if stays_unreduced else _to_required(scope, block, required_spec, eqn))
    return blocks


def _with_sums_taken(
    scope: Scope, eqn: JaxprEqn, operands: Sequence[Block], required: Sequence[Spec | None]
) -> list[Block]:
    """Operands with their partial sums added up, but over axes over which all results may be partial sums as well.

    Over these, readers of the results add up. Only linear equations have such results, see `may_stay_unreduced`.
    """
    # For each result the axes over which it may be partial sums: none that must split it.
    axes_of_results = [
        frozenset(scope.mesh.names).difference(() if spec is None else spec.axes)
        if var in scope.may_stay_unreduced
        else (frozenset[str]() if spec is None else spec.unreduced)
        for var, spec in zip(eqn.outvars, required, strict=True)
    ]
    may_stay = frozenset.intersection(*axes_of_results)
    unreduced_axes = [block.spec.unreduced & may_stay for block in operands]
    if eqn.primitive.name in ADDITIONS:
        # Both operands are partial sums over the same axes: a whole one would be added on every device.
        unreduced_axes = [frozenset[str]().union(*unreduced_axes)] * len(operands)
    pairs = zip(operands, unreduced_axes, strict=True)
    return [scope.to_spec(block, _unreduced_over(axes, block.spec), eqn) for block, axes in pairs]


def _unreduced_over(axes: frozenset[str], spec: Spec) -> Spec:
    """A spec with partial sums over axes: these split no dimension, as a device has a partial sum of all of it."""
    dims = tuple(tuple(axis for axis in dim if axis not in axes) for dim in spec.dims)
    return replace(spec, dims=dims, unreduced=axes)


def _reduced_over_devices(scope: Scope, monoids: Mapping[str, str], block: Block, eqn: JaxprEqn) -> Any:
    """Array of a result after all reductions over devices but sums.

    Args:
        scope: receives notes of the collectives.
        monoids: monoid by which devices' partial results over each axis combine; empty if each device has the result.
        block: a device's partial result.
        eqn: equation of the result.
    """
    x = block.array
    for monoid in sorted(set(monoids.values()) - {"add"}):
        axes = tuple(axis for axis, axis_monoid in monoids.items() if axis_monoid == monoid)
        # Monoid "own" is the equation's own reduction, which no collective computes: see `_reduced_after_gather`.
        step = Step("all_gather" if monoid == "own" else "all_reduce", axes)
        why = f"terms of {eqn.primitive.name} over {', '.join(axes)} to {in_words(block.spec)}"
        scope.note_collective(eqn.primitive.name, source_line(eqn), step, block.aval, block.spec, why)
        x = _REDUCED_OVER_DEVICES[monoid](x, axes, eqn)
    return x


def _reduced_after_gather(x: Any, axes: Axes, eqn: JaxprEqn) -> Any:
    """The equation's own reduction of the partial results of all devices, for one without a collective."""
    params = eqn.primitive.get_bind_params({**eqn.params, "axes": (0,)})
    return eqn.primitive.bind(lax.all_gather(x, axes), **params)


# By monoid of the partial results: (block, axes, equation) → the reduced block.
_REDUCED_OVER_DEVICES = {
    "max": lambda x, axes, _: of_numbers(lambda x: lax.pmax(x, axes), x),
    "min": lambda x, axes, _: of_numbers(lambda x: lax.pmin(x, axes), x),
    "own": _reduced_after_gather,
}


def _sum_of_axes(x: Any, params: Mapping[str, Any]) -> Any:
    return lax.psum(x, params["axes"], axis_index_groups=params.get("axis_index_groups"))


def _gather_of_axes(x: Any, params: Mapping[str, Any]) -> Any:
    """Gathers a device's own value over mesh axes, for an equation of `all_gather` in a user's `shard_map`."""
    return lax.all_gather(
        x,
        params["axis_name"],
        axis=params["all_gather_dimension"],
        tiled=params["tiled"],
        axis_index_groups=params.get("axis_index_groups"),
    )


def _scatter_of_axes(x: Any, params: Mapping[str, Any]) -> Any:
    dim = params["scatter_dimension"]
    return lax.psum_scatter(x, params["axis_name"], scatter_dimension=dim, tiled=params["tiled"])


# Equations of the body of a user's `shard_map`, where JAX's types tell over which axes a value varies from device to
# device: casts between these types, and collectives whose results have another one. Blocks have no such types: a cast
# does nothing, and a collective is its untyped form. By primitive: (array, params) → array.
_ON_DEVICES_OWN_VALUES = {
    "pvary": lambda x, params: x,
    "pcast": lambda x, params: x,
    "psum_invariant": _sum_of_axes,
    "all_gather_invariant": _gather_of_axes,
    "all_gather_reduced": _gather_of_axes,
    "unreduced_psum": _sum_of_axes,
    "unreduced_reduce_scatter": _scatter_of_axes,
    **{name: lambda x, params: x for name in ("preduced", "vary_unreduced_cast_p", "reduced_vary_cast_p")},
}
