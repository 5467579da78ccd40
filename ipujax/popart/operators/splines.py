"""B-splines of ai.graphcore for graph networks.

Source: Fey et al. 2018, "SplineCNN".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from ipujax.popart.operators.domain import graphcore

# Degree → values of the basis functions that overlap a place v between two knots.
_BASES: Mapping[int, Callable[[jax.Array], list[jax.Array]]] = MappingProxyType(
    {
        1: lambda v: [1 - v, v],
        2: lambda v: [0.5 * v * v - v + 0.5, -v * v + v + 0.5, 0.5 * v * v],
        3: lambda v: [
            (1 - v) ** 3 / 6,
            (3 * v**3 - 6 * v**2 + 4) / 6,
            (-3 * v**3 + 3 * v**2 + 3 * v + 1) / 6,
            v**3 / 6,
        ],
    }
)


@graphcore("SplineBasis")
def spline_basis(
    pseudo: jax.Array, kernel_size: jax.Array, is_open: jax.Array, *, degree: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Return products of basis functions and the indices of their weights.

    Args:
        pseudo: coordinates from 0 to 1, [edges, dimensions].
        kernel_size: knots of each dimension.
        is_open: 1 for open splines, of each dimension.
        degree: 1, 2 or 3.

    Returns:
        Values and indices, [edges, (degree + 1)^dimensions].
    """
    wide = pseudo.astype(jnp.float32)
    sizes = kernel_size.astype(jnp.int32)
    opened = is_open.astype(jnp.int32)
    # An open spline has `degree` fewer intervals than knots; a closed one wraps around.
    place = wide * (sizes - degree * opened)
    knot = jnp.floor(place).astype(jnp.int32)
    bases = [jnp.stack(_BASES[degree](place[:, d] - knot[:, d]), 1) for d in range(pseudo.shape[1])]
    values = jnp.ones((pseudo.shape[0], 1))
    index = jnp.zeros((pseudo.shape[0], 1), jnp.int32)
    stride = jnp.int32(1)
    steps = jnp.arange(degree + 1)
    # The first dimension varies fastest.
    for d, basis in enumerate(bases):
        knots = (knot[:, d, None] + steps) % sizes[d]
        values = (basis[:, :, None] * values[:, None, :]).reshape(pseudo.shape[0], -1)
        index = (knots[:, :, None] * stride + index[:, None, :]).reshape(pseudo.shape[0], -1)
        stride = stride * sizes[d]
    return values.astype(pseudo.dtype), index


@graphcore("SplineWeighting")
def spline_weighting(x: jax.Array, weights: jax.Array, basis: jax.Array, indices: jax.Array) -> jax.Array:
    """Return features weighted by a spline.

    Args:
        x: [edges, channels in].
        weights: [kernel, channels in, channels out].
        basis: [edges, splines].
        indices: [edges, splines].
    """
    chosen = weights[indices.astype(jnp.int32)]
    return jnp.einsum("ei,es,esio->eo", x, basis, chosen).astype(x.dtype)
