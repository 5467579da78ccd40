"""Rules of operations of StableHLO that make, move, select and update elements, by name.

Shapes and positions that polymorphic modules compute are known when they are read: their operations, `dynamic_…`, are
those of fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import stablehlo
from ipujax.lowering.stablehlo.elementwise import ELEMENTWISE
from ipujax.lowering.stablehlo.regions import only_operation
from ipujax.lowering.stablehlo.translation import (
    Operation,
    Rule,
    Scope,
    UntranslatedError,
    Values,
    constant_value,
    dtype_of,
    flag,
    integer,
    ints,
    static_shape,
)

_SCATTERS: dict[str, Callable[..., Any]] = {
    "": lax.scatter,
    "stablehlo.add": lax.scatter_add,
    "stablehlo.subtract": lax.scatter_sub,
    "stablehlo.multiply": lax.scatter_mul,
    "stablehlo.minimum": lax.scatter_min,
    "stablehlo.maximum": lax.scatter_max,
}


def known_integers(value: Any) -> tuple[int, ...]:
    """Integers of an operand that must be known while a module is read."""
    if not isinstance(value, np.ndarray):
        raise UntranslatedError("a shape that only a run knows")
    return tuple(int(n) for n in value.reshape(-1))


def constant_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """The array of a constant; a number of a formula, which only elementwise operations read, is no stored array."""
    readers = [use.owner.name.partition(".")[2] for use in op.results[0].uses]
    return [constant_value(op, is_broadcast=all(name in ELEMENTWISE for name in readers))]


def iota_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Numbers along a dimension."""
    kind = op.results[0].type
    shape = known_integers(operands[0]) if operands else static_shape(kind)
    return [lax.broadcasted_iota(dtype_of(kind), shape, integer(op, "iota_dimension"))]


def broadcast_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Broadcast to the shape of the result."""
    shape = known_integers(operands[1]) if len(operands) > 1 else static_shape(op.results[0].type)
    dims = ints(op, "broadcast_dimensions")
    is_same = operands[0].shape == shape and dims == tuple(range(len(shape)))
    return [operands[0] if is_same else lax.broadcast_in_dim(operands[0], shape, dims)]


def reshape_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Other shape of the same elements."""
    shape = known_integers(operands[1]) if len(operands) > 1 else static_shape(op.results[0].type)
    return [operands[0] if operands[0].shape == shape else lax.reshape(operands[0], shape)]


def transpose_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Other order of the dimensions."""
    return [lax.transpose(operands[0], ints(op, "permutation"))]


def slice_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Part at a fixed position."""
    return [lax.slice(operands[0], *(ints(op, name) for name in ("start_indices", "limit_indices", "strides")))]


def real_dynamic_slice_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Part at a position that is known when the module is read."""
    return [lax.slice(operands[0], *map(known_integers, operands[1:]))]


def dynamic_slice_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.dynamic_slice`: a part at a position that is known when it runs, clamped to the array."""
    x, *starts = operands
    sizes = ints(op, "slice_sizes")
    if all(isinstance(start, np.ndarray) for start in starts):
        first = [min(max(int(n), 0), extent - size) for n, extent, size in zip(starts, x.shape, sizes, strict=True)]
        return [lax.slice(x, first, [n + size for n, size in zip(first, sizes, strict=True)])]
    return [lax.dynamic_slice_p.bind(x, *starts, slice_sizes=sizes)]  # the function of JAX counts from the end below 0


def dynamic_update_slice_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Array with a part replaced, at a position of the run."""
    x, update, *starts = operands
    return [lax.dynamic_update_slice_p.bind(x, update, *starts)]


def pad_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Array with a border, or without its rim where it is negative."""
    x, value, *amounts = operands
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    sizes = [known_integers(n) for n in amounts] if amounts else [ints(op, name) for name in names]
    config = list(zip(*sizes, strict=True))
    return [lax.pad(x, value, config) if any(map(any, config)) else x]


def concatenate_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Arrays one after the other."""
    return [lax.concatenate(operands, integer(op, "dimension"))]


def reverse_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Array backwards along dimensions."""
    return [lax.rev(operands[0], ints(op, "dimensions"))]


def dimension_size_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Size of a dimension, which is known."""
    return [np.asarray(operands[0].shape[integer(op, "dimension")], np.int32)]


def gather_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.gather` and `dynamic_gather`: slices of an array at index vectors, which are clamped to the array."""
    x, indices, *sizes = operands
    attribute = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(attribute.offset_dims),
        collapsed_slice_dims=tuple(attribute.collapsed_slice_dims),
        start_index_map=tuple(attribute.start_index_map),
        operand_batching_dims=tuple(attribute.operand_batching_dims),
        start_indices_batching_dims=tuple(attribute.start_indices_batching_dims),
    )
    slice_sizes = known_integers(sizes[0]) if sizes else ints(op, "slice_sizes")
    vectors = _with_vectors_last(indices, attribute.index_vector_dim)
    is_sorted = flag(op, "indices_are_sorted")
    mode = lax.GatherScatterMode.CLIP
    return [lax.gather(x, vectors, numbers, slice_sizes, indices_are_sorted=is_sorted, mode=mode)]


def scatter_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.scatter`: an array combined with updates at index vectors; those outside of the array are left out."""
    scatter = _SCATTERS.get(only_operation(op.regions[0]))
    if len(operands) != 3 or scatter is None:
        raise UntranslatedError("a scatter by another function, or of several arrays")
    x, indices, updates = operands
    attribute = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(attribute.update_window_dims),
        inserted_window_dims=tuple(attribute.inserted_window_dims),
        scatter_dims_to_operand_dims=tuple(attribute.scattered_dims_to_operand_dims),
        operand_batching_dims=tuple(attribute.input_batching_dims),
        scatter_indices_batching_dims=tuple(attribute.scatter_indices_batching_dims),
    )
    vectors = _with_vectors_last(indices, attribute.index_vector_dim)
    hints = {name: flag(op, name) for name in ("indices_are_sorted", "unique_indices")}
    return [scatter(x, vectors, updates, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP, **hints)]


def _with_vectors_last(indices: Any, dim: int) -> Any:
    """Indices with the dimension of index vectors last, as JAX has them; a further one of size 1 if they have none."""
    if dim == indices.ndim:
        return lax.expand_dims(indices, (dim,))
    order = [*(n for n in range(indices.ndim) if n != dim), dim]
    return indices if dim == indices.ndim - 1 else lax.transpose(indices, order)


RULES: dict[str, Rule] = {
    "stablehlo.constant": constant_rule,
    "stablehlo.iota": iota_rule,
    "stablehlo.dynamic_iota": iota_rule,
    "stablehlo.broadcast_in_dim": broadcast_rule,
    "stablehlo.dynamic_broadcast_in_dim": broadcast_rule,
    "stablehlo.reshape": reshape_rule,
    "stablehlo.dynamic_reshape": reshape_rule,
    "stablehlo.transpose": transpose_rule,
    "stablehlo.slice": slice_rule,
    "stablehlo.real_dynamic_slice": real_dynamic_slice_rule,
    "stablehlo.dynamic_slice": dynamic_slice_rule,
    "stablehlo.dynamic_update_slice": dynamic_update_slice_rule,
    "stablehlo.pad": pad_rule,
    "stablehlo.dynamic_pad": pad_rule,
    "stablehlo.concatenate": concatenate_rule,
    "stablehlo.reverse": reverse_rule,
    "stablehlo.get_dimension_size": dimension_size_rule,
    "stablehlo.gather": gather_rule,
    "stablehlo.dynamic_gather": gather_rule,
    "stablehlo.scatter": scatter_rule,
}
