"""Gathers and scatters all of whose look-ups go to one place that is known: slices, which need no look-up.

So are those with index vectors of no components (`x.at[:].add(u)`), and those of slices (`x.at[1:-1].set(u)`), whose
index vectors are constants. A gather is a view then; a scatter combines a slice of the table with the updates, and its
result is a view of that and of what is around it.

Input: a table, index tensors and the parameters of the primitives, as the rules of `indexing` have them.
Limits: several updates of one place are combined with each other first, which reassociates sums and products. Those of
floats of less than 32 bits, which would round otherwise, and those of functions of the user's own are combined with the
table one after the other, each part of the window by a vertex.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Primitive
from ipujax.lowering.popops import GatherSpec, Mode, ScatterSpec, fill_of
from ipujax.runtime.tensor import Tensor, elements

Place = Sequence[int]  # a component for each indexed dimension
_MOST_COMPARED = 4096  # indices that are compared with each other, assumed: more are hardly all the same

# How updates of one place are combined with each other, and then with the table.
_COMBINE: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "scatter-add": (lax.reduce_sum, lax.add),
    "scatter-sub": (lax.reduce_sum, lax.sub),
    "scatter-mul": (lax.reduce_prod, lax.mul),
    "scatter-min": (lax.reduce_min, lax.min),
    "scatter-max": (lax.reduce_max, lax.max),
}


def known_place(indices: Tensor) -> Place | None:
    """The index vector of all look-ups, where that is known; None where it is not, or where they differ."""
    if not indices.shape[-1]:
        return ()
    variables = indices.variables()
    constant = all(v.is_constant and not v.by_replica for v in variables)
    if not constant or not 0 < indices.size <= _MOST_COMPARED:
        return None
    which, index = elements(indices.node, variables)
    found = np.zeros(indices.shape, object)
    for number, variable in enumerate(variables):
        found[which == number] = np.ravel(np.asarray(variable.value))[index[which == number]]
    vectors = found.reshape(-1, indices.shape[-1])
    return tuple(int(n) for n in vectors[0]) if (vectors == vectors[0]).all() else None


def gather_from(table: jax.Array, place: Place, spec: GatherSpec, out_shape: Sequence[int]) -> jax.Array:
    """The window of a table at one place, for every look-up.

    Args:
        table: array of shape `spec.table_shape`.
        place: the index vector of all look-ups.
        spec: what it points to.
        out_shape: shape of the result.
    """
    batched, dims = spec.numbers.operand_batching_dims, spec.kept_dims()
    sizes = [n if d in batched else spec.slice_sizes[d] for d, n in enumerate(table.shape)]
    starts, is_inside = _starts(table.shape, sizes, spec.indexed, place)
    if spec.mode is Mode.FILL_OR_DROP and not is_inside:
        return lax.broadcast(fill_of(spec.fill, table.dtype), out_shape)
    window = lax.slice(table, starts, [start + n for start, n in zip(starts, sizes, strict=True)])
    window = lax.squeeze(window, [d for d, out in enumerate(dims) if out is None])
    kept = [out for out in dims if out is not None]
    window = lax.transpose(window, np.argsort(kept).tolist())
    return lax.broadcast_in_dim(window, out_shape, sorted(kept))


def combines_in_order(spec: ScatterSpec) -> bool:
    """Whether updates of one place are combined with the table one after the other."""
    if spec.kind == "scatter":
        return spec.function is not None
    return spec.is_narrow_sum


def scatter_to(
    table: jax.Array, updates: jax.Array, place: Place, spec: ScatterSpec, primitive: Primitive, params: dict[str, Any]
) -> jax.Array:
    """A table combined with updates, all of them at one place.

    Args:
        table: array of shape `spec.table_shape`.
        updates: array of shape `spec.update_shape`, with at least one element.
        place: the index vector of all updates.
        spec: what it points to, and how to combine.
        primitive: that of the scatter, for what is combined one after the other.
        params: its parameters.
    """
    numbers, (extents, of_update) = spec.numbers, spec.windows()
    sizes = [n if d in numbers.operand_batching_dims else extents[d] for d, n in enumerate(table.shape)]
    starts, is_inside = _starts(table.shape, sizes, spec.indexed, place)
    if spec.mode is not Mode.CLIP and not is_inside:
        return table
    window = lax.dynamic_slice(table, starts, sizes)
    lookups = [u for u in range(updates.ndim) if u not in numbers.update_window_dims]
    batched = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    own = {d: lookups[i] for d, i in batched}
    dims = [own.get(d, u) for d, u in enumerate(of_update)]
    repeats = [u for u in lookups if u not in own.values()]
    if combines_in_order(spec):
        window = _one_after_the_other(window, updates, spec, primitive, params)
    elif spec.kind in _COMBINE:
        reduce, combine = _COMBINE[spec.kind]
        once = reduce(updates, repeats) if repeats else updates
        window = combine(window, _like_window(once, dims, repeats, sizes))
    else:
        last = lax.slice(updates, [n - 1 if u in repeats else 0 for u, n in enumerate(updates.shape)], updates.shape)
        window = _like_window(lax.squeeze(last, repeats), dims, repeats, sizes)
    return lax.dynamic_update_slice(table, window, starts)


def _starts(shape: Sequence[int], sizes: Sequence[int], indexed: Sequence[int], place: Place) -> tuple[list[int], bool]:
    """Start of the window, clamped so that it fits, and whether it fitted before."""
    at = dict(zip(indexed, place, strict=True))
    wanted = [at.get(d, 0) for d in range(len(shape))]
    starts = [min(max(start, 0), n - size) for start, n, size in zip(wanted, shape, sizes, strict=True)]
    return starts, starts == wanted


def _like_window(updates: jax.Array, dims: Sequence[int | None], gone: Sequence[int], shape: Sequence[int]) -> Any:
    """Updates without the dimensions `gone`, in the order of the table's dimensions."""
    kept = [u for u in range(updates.ndim + len(gone)) if u not in gone]
    return lax.transpose(updates, [kept.index(u) for u in dims if u is not None]).reshape(shape)


def _one_after_the_other(
    window: jax.Array, updates: jax.Array, spec: ScatterSpec, primitive: Primitive, params: dict[str, Any]
) -> jax.Array:
    """The scatter itself on the window, by indices 0 into a further dimension of size 1."""
    old, rank = spec.numbers, window.ndim
    lookups = [n for u, n in enumerate(updates.shape) if u not in old.update_window_dims]
    numbers = lax.ScatterDimensionNumbers(
        old.update_window_dims,
        (*old.inserted_window_dims, rank),
        (rank,),
        old.operand_batching_dims,
        old.scatter_indices_batching_dims,
    )
    indices = lax.full((*lookups, 1), 0, np.int32)
    given = {**params, "dimension_numbers": numbers, "unique_indices": False}
    return primitive.bind(lax.expand_dims(window, (rank,)), indices, updates, **given)[..., 0]
