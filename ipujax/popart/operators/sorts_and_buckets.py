"""Sorts, medians and buckets of ai.graphcore."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

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
