"""Select-and-scatter by functions of the user's own, on one block.

JAX has no batching rule for the primitive, which vertices of one shape and replicas need. So it is done offset by
offset here, for all windows at once: which offset each window selects, then what reaches the elements under each
offset, the last offset first, as the windows over an element follow each other in XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Jaxpr, closed, jaxpr_as_fun
from ipujax.runtime.cache import remembered

Function = Callable[[jax.Array, jax.Array], jax.Array]


@remembered
def functions_of(select: Jaxpr, scatter: Jaxpr) -> tuple[Function, Function]:
    """Jaxprs of two scalars as functions of arrays of one shape."""
    return _elementwise(select), _elementwise(scatter)


def _elementwise(jaxpr: Jaxpr) -> Function:
    def fun(a: jax.Array, b: jax.Array) -> jax.Array:
        (result,) = jax.vmap(jaxpr_as_fun(closed(jaxpr)))(a.ravel(), b.ravel())
        return result.reshape(a.shape)

    return fun


def select_and_scatter_block(
    x: jax.Array,
    source: jax.Array,
    start: jax.Array,
    sizes: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    functions: tuple[Function, Function],
) -> jax.Array:
    """Combines each element of a source with the place of `x` that its window selects.

    Args:
        x: what windows are of.
        source: an element for each window.
        start: scalar that all elements start as.
        sizes: of a window.
        strides: of windows.
        padding: elements around `x` that no window selects.
        functions: whether a selected element stays when it meets another; what an element and one of the source make.

    Returns:
        An array like `x`.
    """
    (stays, combined), offsets = functions, np.array(list(np.ndindex(*sizes)), np.int32)
    widths = [(low, high, 0) for low, high in padding]
    padded, real = lax.pad(x, jnp.zeros((), x.dtype), widths), lax.pad(jnp.ones(x.shape, bool), False, widths)
    reach = [(n - 1) * stride + 1 for n, stride in zip(source.shape, strides, strict=True)]
    apart = [(0, 0, stride - 1) for stride in strides]
    where = jnp.asarray(offsets)

    def under(array: jax.Array, offset: jax.Array) -> jax.Array:
        """The elements of all windows at an offset."""
        return lax.slice(lax.dynamic_slice(array, offset, reach), [0] * x.ndim, reach, strides)

    def select(number: Any, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        best, place = found
        value = under(padded, where[number])
        is_new = under(real, where[number]) & ((place < 0) | ~stays(best, value))
        return jnp.where(is_new, value, best), jnp.where(is_new, number, place)

    nowhere = jnp.full(source.shape, -1, np.int32)
    _, place = lax.fori_loop(0, len(offsets), select, (jnp.zeros(source.shape, x.dtype), nowhere))

    def scatter(iteration: Any, out: jax.Array) -> jax.Array:
        number = len(offsets) - 1 - iteration
        old = lax.dynamic_slice(out, where[number], reach)
        hits = lax.pad(place == number, False, apart)
        new = jnp.where(hits, combined(old, lax.pad(source, jnp.zeros((), source.dtype), apart)), old)
        return lax.dynamic_update_slice(out, new, where[number])

    out = lax.fori_loop(0, len(offsets), scatter, lax.broadcast(start, padded.shape))
    return lax.pad(out, start, [(-low, -high, 0) for low, high in padding])
