"""Gathers and scatters of ai.graphcore, in groups or alone, and its sorts, medians and buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.popart.enumerations import ScatterReduction
from ipujax.popart.operators.domain import graphcore


@graphcore("Sort")
def sort(x: jax.Array, *, axis: int = -1, descending: int = 0, stable: int = 0) -> tuple[jax.Array, jax.Array]:
    """Return elements in order along an axis, and their indices."""
    indices = jnp.argsort(x, axis=axis, descending=bool(descending), stable=True)
    return jnp.take_along_axis(x, indices, axis=axis), indices.astype(jnp.int32)


@graphcore("ReduceMedian")
def reduce_median(x: jax.Array, *, axes: Sequence[int] | None = None, keepdims: int = 1) -> tuple[jax.Array, jax.Array]:
    """Return the lower median over some axes, all when None, and its index among the elements reduced."""
    reduced = sorted(axis % x.ndim for axis in (range(x.ndim) if axes is None else axes))
    rest = [axis for axis in range(x.ndim) if axis not in reduced]
    flat = jnp.transpose(x, [*rest, *reduced]).reshape(*(x.shape[i] for i in rest), -1)
    middle = (flat.shape[-1] - 1) // 2
    index = jnp.argsort(flat, axis=-1, stable=True)[..., middle]
    value = jnp.take_along_axis(flat, index[..., None], axis=-1)[..., 0]
    shape = [1 if i in reduced else n for i, n in enumerate(x.shape)] if keepdims else list(value.shape)
    return value.reshape(shape), index.astype(jnp.int32).reshape(shape)


@graphcore("Bucketize")
def bucketize(x: jax.Array, boundaries: jax.Array, *, right: int = 0) -> jax.Array:
    """Return the number of the bucket of each element; boundaries ascend."""
    side = "right" if right else "left"
    return jnp.searchsorted(boundaries, x, side=side).astype(jnp.int32)


@graphcore("GroupedGather")
def grouped_gather(data: jax.Array, indices: jax.Array, *, axis: int = 0, group_size: int = 1) -> jax.Array:
    """Return rows of each group of data by the indices of the group; `axis` counts the axis of groups."""
    inner = axis % data.ndim - 1
    return jax.vmap(lambda x, index: jnp.take(x, index.astype(jnp.int32), axis=inner, mode="clip"))(data, indices)


# Reduction → (value of an element that nothing is scattered to, how elements are combined).
_SCATTERS: Mapping[ScatterReduction, tuple[float, str]] = MappingProxyType(
    {
        ScatterReduction.Sum: (0, "add"),
        ScatterReduction.Max: (0, "max"),
        ScatterReduction.Min: (0, "min"),
        ScatterReduction.Mul: (1, "multiply"),
        ScatterReduction.NoReduction: (0, "set"),
    }
)


@graphcore("ScatterReduce")
def scatter_reduce(
    source: jax.Array,
    indices: jax.Array,
    initial: Any = None,
    *,
    axis_size: int,
    axis: int = -1,
    reduction: int = 0,
    enable_index_broadcast: int = 1,
) -> jax.Array:
    """Return elements of the source reduced at indices along an axis.

    Args:
        source: values.
        indices: place of each along the axis; of the source's shape, or broadcast to it. A vector is along the axis,
            other indices may lack the last dimensions.
        initial: values to begin with.
        axis_size: size of the axis in the result.
        axis: axis of the indices.
        reduction: sum, largest, smallest, product, or the value alone.
        enable_index_broadcast: 1 if indices are broadcast; 0 if elements of the source without an index are left out.
    """
    kind = ScatterReduction(reduction)
    along = axis % source.ndim
    index = _with_rank(indices, source.ndim, along)
    if enable_index_broadcast and all(n in (1, m) for n, m in zip(index.shape, source.shape, strict=True)):
        index = jnp.broadcast_to(index, source.shape)
    # An element's place differs from its index in the source along one axis alone.
    places = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij"))
    places[along] = index.astype(jnp.int32)
    whole = source.shape if enable_index_broadcast else index.shape
    shape = [axis_size if i == along else n for i, n in enumerate(whole)]
    values = source if index.shape == source.shape else source[tuple(slice(0, n) for n in index.shape)]
    empty, method = _SCATTERS[kind]
    if initial is not None:
        return _scatter(jnp.asarray(initial), places, values, method)
    if kind not in (ScatterReduction.Max, ScatterReduction.Min):
        return _scatter(jnp.full(shape, empty, source.dtype), places, values, method)
    # The largest of nothing is zero; that of something is not compared with zero.
    lowest = _limit(source.dtype, kind is ScatterReduction.Max)
    extreme = _scatter(jnp.full(shape, lowest, source.dtype), places, values, method)
    is_hit = jnp.zeros(shape, bool).at[tuple(places)].set(True)
    return jnp.where(is_hit, extreme, 0).astype(source.dtype)


@graphcore("GroupedScatterReduce")
def grouped_scatter_reduce(
    source: jax.Array,
    indices: jax.Array,
    initial: Any = None,
    *,
    axis_size: int,
    axis: int = -1,
    reduction: int = 0,
    group_size: int = 1,
    enable_index_broadcast: int = 1,
) -> jax.Array:
    """Return `scatter_reduce` of each group; `axis` counts the axis of groups."""
    inner = axis % source.ndim - 1

    def of_group(*operands: jax.Array) -> jax.Array:
        keywords = {"axis_size": axis_size, "axis": inner, "reduction": reduction}
        return scatter_reduce(*operands, **keywords, enable_index_broadcast=enable_index_broadcast)

    operands = (source, indices) if initial is None else (source, indices, initial)
    grouped: Callable[..., jax.Array] = jax.vmap(of_group)
    return grouped(*operands)


def _scatter(start: jax.Array, places: list[jax.Array], values: jax.Array, method: str) -> jax.Array:
    result: jax.Array = getattr(start.at[tuple(places)], method)(values.astype(start.dtype))
    return result


def _limit(dtype: Any, is_lowest: bool) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if is_lowest else jnp.inf
    return jnp.iinfo(dtype).min if is_lowest else jnp.iinfo(dtype).max


def _with_rank(indices: jax.Array, rank: int, axis: int) -> jax.Array:
    """Return indices with dimensions of 1 up to a rank: before those of a vector, else behind them."""
    leading = axis if indices.ndim == 1 else 0
    return indices.reshape(*[1] * leading, *indices.shape, *[1] * (rank - leading - indices.ndim))
