"""Values that are complete before a slice of another is overwritten by them.

XLA for CPU (jaxlib 0.10.2) fuses an update with the operation that writes it in place. It refuses to where the update
reads the array that is written, but misses that array behind a reshape: then elements are read that have already been
overwritten, as in `expand_dims(dynamic_update_slice_in_dim(p, p[:, :8] * 2, i, 1), 1)`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def computed_before_writing(update: jax.Array) -> jax.Array:
    """Return an update that XLA computes before the operation that writes it; takes 0.1 µs, and a copy of it."""
    # XLA fuses nothing into a branch, and does not know which one is taken until it has simplified everything.
    is_taken = jax.lax.optimization_barrier(jnp.asarray(True))
    return jax.lax.cond(is_taken, lambda value: value, jnp.zeros_like, update)
