"""Slices of ai.graphcore whose offsets are operands, and sequences that are copied by lengths and offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.popart.operators.domain import graphcore


def _starts(x: jax.Array, offsets: jax.Array, axes: Sequence[int]) -> list[Any]:
    # Offsets are UINT32 in PopART, signed in JAX, which clamps a slice that would leave x.
    flat = jnp.reshape(offsets, -1).astype(jnp.int32)
    starts: list[Any] = [jnp.int32(0)] * x.ndim
    for i, axis in enumerate(axes):
        starts[axis] = flat[i]
    return starts


def _sizes(x: jax.Array, axes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    by_axis = dict(zip(axes, sizes, strict=True))
    return [by_axis.get(axis, n) for axis, n in enumerate(x.shape)]


@graphcore("DynamicSlice")
def dynamic_slice(
    x: jax.Array,
    offsets: jax.Array,
    place: Any = None,
    *,
    axes: Sequence[int],
    sizes: Sequence[int],
    noOverlap: int = 0,
) -> jax.Array:
    """Return the part of x at offsets along some axes; in the shape of `place`, which may lack axes of length 1."""
    part = jax.lax.dynamic_slice(x, _starts(x, offsets, axes), _sizes(x, axes, sizes))
    return part if place is None else part.reshape(place.shape)


@graphcore("DynamicUpdate")
def dynamic_update(
    x: jax.Array, offsets: jax.Array, part: jax.Array, *, axes: Sequence[int], sizes: Sequence[int], noOverlap: int = 0
) -> jax.Array:
    """Return x with another part at offsets; the part may lack axes of length 1."""
    update = part.astype(x.dtype).reshape(_sizes(x, axes, sizes))
    return jax.lax.dynamic_update_slice(x, update, _starts(x, offsets, axes))


@graphcore("DynamicAdd")
def dynamic_add(
    x: jax.Array, offsets: jax.Array, part: jax.Array, *, axes: Sequence[int], sizes: Sequence[int]
) -> jax.Array:
    """Return x with a part added at offsets."""
    starts = _starts(x, offsets, axes)
    all_sizes = _sizes(x, axes, sizes)
    before = jax.lax.dynamic_slice(x, starts, all_sizes)
    return jax.lax.dynamic_update_slice(x, before + part.reshape(all_sizes), starts)


@graphcore("DynamicZero")
def dynamic_zero(x: jax.Array, offsets: jax.Array, *, axes: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    """Return x with zeros at offsets."""
    zeros = jnp.zeros(_sizes(x, axes, sizes), x.dtype)
    return jax.lax.dynamic_update_slice(x, zeros, _starts(x, offsets, axes))


@graphcore("SequenceSlice")
def sequence_slice(
    source: jax.Array,
    target: jax.Array,
    lengths: jax.Array,
    source_offsets: jax.Array,
    target_offsets: jax.Array,
    *,
    zeroUnused: int = 0,
) -> jax.Array:
    """Return rows of the source at the places of the target that lengths and offsets name; later ones count."""
    rows = jnp.arange(target.shape[0])
    result = jnp.zeros_like(target) if zeroUnused else target
    for i in range(lengths.shape[0]):
        shift = rows - target_offsets[i].astype(jnp.int32)
        is_inside = (shift >= 0) & (shift < lengths[i].astype(jnp.int32))
        chosen = source[jnp.clip(source_offsets[i].astype(jnp.int32) + shift, 0, source.shape[0] - 1)]
        result = jnp.where(is_inside.reshape(-1, *[1] * (target.ndim - 1)), chosen, result)
    return result
