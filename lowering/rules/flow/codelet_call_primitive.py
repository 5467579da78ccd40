"""Primitive of codelets called from JAX code: one vertex a row, or one vertex for all.

    results = codelet_call_p.bind(*operands, codelet=…, stacked=…, num_vertices=…, tiles=…, outs=…)

Operand n belongs to the n-th field that is read; `stacked[n]` tells whether it has a row for each vertex, as every
result has, or is common to all. In plain JAX the codelet's function is mapped over the rows. A vmap multiplies the
vertices, on the same tiles. Limits: no differentiation rule; whoever binds it defines a gradient around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.lowering.jax_compat import make_primitive
from ipujax.runtime.graph import Codelet

Outs = tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype of the block of each field that is written


def _compute(
    *operands: jax.Array, codelet: Codelet, stacked: tuple[bool, ...], num_vertices: int, tiles: Any, outs: Outs
) -> list[jax.Array]:
    """Results in plain JAX: the codelet's function mapped over rows."""

    def vertex(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        result = codelet.compute(*blocks)
        return result if isinstance(result, tuple) else (result,)

    if not any(stacked):
        return [value[None] for value in vertex(*operands)]
    return list(jax.vmap(vertex, [0 if rows else None for rows in stacked])(*operands))


def _shapes(*operands: Any, num_vertices: int, outs: Outs, **params: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((num_vertices, *shape), dtype) for shape, dtype in outs]


def _batched(
    operands: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    codelet: Codelet,
    stacked: tuple[bool, ...],
    num_vertices: int,
    tiles: tuple[int, ...] | None,
    outs: Outs,
) -> tuple[list[jax.Array], list[int]]:
    """The calls for all indices of a batch as one call with as many times the vertices."""
    batch = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    arrays: list[jax.Array] = []
    rows: list[bool] = []
    for x, axis, is_stacked in zip(operands, axes, stacked, strict=True):
        is_shared = axis is None and not is_stacked
        rows.append(not is_shared)
        if is_shared:
            arrays.append(x)
            continue
        x = jnp.broadcast_to(x, (batch, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        x = x if is_stacked else jnp.repeat(x[:, None], num_vertices, axis=1)
        arrays.append(x.reshape((batch * num_vertices, *x.shape[2:])))
    results = codelet_call_p.bind(
        *arrays,
        codelet=codelet,
        stacked=tuple(rows),
        num_vertices=batch * num_vertices,
        tiles=None if tiles is None else tiles * batch,
        outs=outs,
    )
    return [y.reshape((batch, num_vertices, *y.shape[1:])) for y in results], [0] * len(results)


codelet_call_p = make_primitive("codelet_call", _compute, _shapes, _batched)
