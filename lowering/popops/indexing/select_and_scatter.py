"""Select-and-scatter by a user's own functions, on one block.

JAX has no batching rule for the primitive, which vertices of one shape and replicas need. So it is computed offset by
offset, for all windows at once: first the offset that each window selects, then the contributions to the elements under
each offset, the last offset first, since that is the order of the windows over an element in XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Jaxpr, closed, jaxpr_as_fun
from ipujax.runtime.cache import remembered

Function = Callable[[jax.Array, jax.Array], jax.Array]


class UserFunctions(NamedTuple):
    """Functions of arrays of one shape, element by element.

    Args:
        stays_selected: whether a selected element stays selected against another.
        combine: combination of two results.
    """

    stays_selected: Function
    combine: Function


@remembered
def functions_of(select: Jaxpr, scatter: Jaxpr) -> UserFunctions:
    """Converts the two jaxprs of scalars that the primitive has."""
    return UserFunctions(_elementwise(select), _elementwise(scatter))


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
    functions: UserFunctions,
) -> jax.Array:
    """Combines each element of a source with the element of `x` that its window selects; returns an array like `x`.

    This is XLA's SelectAndScatter, the gradient of a reduction of windows that selects. Two loops over the positions
    in a window: the first finds the position that each window selects, the second combines the sources there.

    Args:
        x: the elements under the windows.
        source: an element for each window.
        start: initial value of all results, a scalar.
        sizes: elements of a window in each dimension.
        strides: distance of neighbouring windows.
        padding: elements added around `x`, which no window selects.
        functions: the user's functions.
    """
    offsets = jnp.asarray(np.array(list(np.ndindex(*sizes)), np.int32))
    widths = [(low, high, 0) for low, high in padding]
    padded = lax.pad(x, jnp.zeros((), x.dtype), widths)
    is_element = lax.pad(jnp.ones(x.shape, bool), np.zeros((), bool), widths)
    # Elements from that of the first window to that of the last, at one position in all of them.
    reach = [(n - 1) * stride + 1 for n, stride in zip(source.shape, strides, strict=True)]
    stride_gaps = [(0, 0, stride - 1) for stride in strides]

    def window_elements(array: jax.Array, offset: jax.Array) -> jax.Array:
        """Elements of all windows at an offset."""
        return lax.slice(lax.dynamic_slice(array, offset, reach), [0] * x.ndim, reach, strides)

    def select(number: Any, selection: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        best, best_offset = selection  # the offset is −1 where a window has selected no element yet
        value = window_elements(padded, offsets[number])
        is_better = (best_offset < 0) | ~functions.stays_selected(best, value)
        is_selected = window_elements(is_element, offsets[number]) & is_better
        return jnp.where(is_selected, value, best), jnp.where(is_selected, number, best_offset)

    unselected = jnp.full(source.shape, -1, np.int32)
    _, best_offset = lax.fori_loop(0, len(offsets), select, (jnp.zeros(source.shape, x.dtype), unselected))

    def scatter(iteration: Any, out: jax.Array) -> jax.Array:
        # From the last offset to the first: the windows over an element are then combined in their own order.
        number = len(offsets) - 1 - iteration
        current = lax.dynamic_slice(out, offsets[number], reach)
        is_hit = lax.pad(best_offset == number, np.zeros((), bool), stride_gaps)
        combined = functions.combine(current, lax.pad(source, jnp.zeros((), source.dtype), stride_gaps))
        return lax.dynamic_update_slice(out, jnp.where(is_hit, combined, current), offsets[number])

    out = lax.fori_loop(0, len(offsets), scatter, lax.broadcast(start, padded.shape))
    return lax.pad(out, start, [(-low, -high, 0) for low, high in padding])
