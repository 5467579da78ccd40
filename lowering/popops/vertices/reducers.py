"""Monoids of reductions, and the codelet that reduces dimensions of its block by one.

"only" combines values of which all but one have all bits zero, see `zero_bits`: an integer addition of their bits,
which unlike an addition of floats keeps signs of zeros, payloads of NaNs and numbers of a dtype without a zero.

"signed_add" starts from −0.0, the neutral element of a sum of floats: 0.0 would turn a sum of −0.0 into 0.0.

Source of the cost: `reduce_cycles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.layout import total_elements
from ipujax.lowering.popops.vertices.reduce_cycles import default_vertex_cycles, reduce_cycles, reduce_parts
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Codelet, Comparison, Field, Repetition, SlowPath, SlowReason
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import VECTOR_BYTES, dtype_name, element_bytes


def reduce_only(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Reduction by the monoid "only": of values of which at most one has bits other than zero, that one, bit for bit.

    Bits are added as integers: an addition of floats would lose the sign of −0.0.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(reduce_only(x.real, axes), reduce_only(x.imag, axes))
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(x, _bits_dtype(x.dtype))
        return lax.bitcast_convert_type(lax.reduce_sum(bits, axes), x.dtype)
    return lax.reduce_or(x, axes) if x.dtype == np.bool_ else lax.reduce_sum(x, axes)


def reduce_signed_add(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Sum along some dimensions of floats or complex numbers, from −0.0."""
    # Not `lax.add` itself: JAX replaces a reduction by it with a sum from 0.0.
    return lax.reduce(x, _negative_zero(x.dtype), lambda a, b: lax.add(a, b), tuple(axes))


def _negative_zero(dtype: Any) -> np.ndarray:
    zero = complex(-0.0, -0.0) if jnp.issubdtype(dtype, jnp.complexfloating) else -0.0
    return np.asarray(zero).astype(dtype)


def zero_bits(dtype: Any) -> jax.Array:
    """Scalar with all bits zero."""
    if jnp.issubdtype(dtype, jnp.floating):
        return lax.bitcast_convert_type(np.zeros((), _bits_dtype(dtype)), dtype)
    return jnp.zeros((), dtype)


def _bits_dtype(dtype: Any) -> Any:
    """Unsigned integer dtype as wide as a floating-point dtype."""
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


REDUCERS: dict[str, Callable[..., jax.Array]] = {
    "add": lax.reduce_sum,
    "mul": lax.reduce_prod,
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
    "xor": lax.reduce_xor,
    "only": reduce_only,
    "signed_add": reduce_signed_add,
}

SELECTING = ("max", "min")  # monoids whose result is one of the elements: it is a comparison


def comparison_of(monoid: str) -> Comparison:
    """What a codelet compares that combines elements by a monoid."""
    return "order" if monoid in SELECTING else "nothing"


MONOIDS = {  # by primitive
    "reduce_sum": "add",
    "reduce_prod": "mul",
    **{f"reduce_{name}": name for name in ("max", "min", "and", "or", "xor")},
}


_NEUTRAL_NUMBERS = {"add": 0, "mul": 1, "and": -1, "or": 0, "xor": 0}  # −1 has all bits set


def neutral(monoid: str, dtype: Any) -> np.ndarray:
    """Neutral element of a monoid, a scalar; by NumPy, as JAX would compile a program for each dtype."""
    if monoid in SELECTING:
        return _extreme(dtype, "min" if monoid == "max" else "max")
    if monoid == "only":
        return np.zeros((), dtype)  # all bits zero, also of a dtype without the number
    if monoid == "signed_add":
        return _negative_zero(dtype)
    return np.asarray(_NEUTRAL_NUMBERS[monoid]).astype(dtype)


def _extreme(dtype: Any, side: Literal["min", "max"]) -> np.ndarray:
    """Lowest ("min") or highest ("max") number of a dtype, an infinity where it has them."""
    if dtype == np.bool_:
        return np.asarray(side == "max")
    if not jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(getattr(jnp.iinfo(dtype), side), dtype)
    infinity = np.asarray(np.inf if side == "max" else -np.inf).astype(dtype)
    return infinity if np.isinf(infinity) else np.asarray(getattr(jnp.finfo(dtype), side), dtype)


@remembered
def reduce_codelet(monoid: str, dtype: Any, axes: tuple[int, ...]) -> Codelet:
    """Codelet whose vertices reduce a block of values or partial results.

    Args:
        monoid: how two values combine, a key of `REDUCERS`.
        dtype: dtype of the block and the results.
        axes: dimensions of the block that are reduced.
    """

    def outputs_and_reduced(shapes: BlockShapes) -> tuple[np.ndarray, np.ndarray]:
        """Number of results, and of elements reduced into each."""
        outputs = total_elements([n for d, n in enumerate(shapes[0]) if d not in axes])
        return outputs, total_elements([shapes[0][d] for d in axes])

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        return reduce_cycles(monoid, dtype, *outputs_and_reduced(shapes), target)

    def parts(shapes: BlockShapes, target: Target) -> np.ndarray:
        return reduce_parts(monoid, dtype, *outputs_and_reduced(shapes), target)

    def slow_paths(shapes: BlockShapes, repetitions: Sequence[Repetition | None], target: Target) -> Sequence[SlowPath]:
        """Slow path of rows of outputs that are no whole vectors: PopLibs takes its default vertex for them."""
        vector = max(1, VECTOR_BYTES // element_bytes(dtype))
        of_output = repetitions[-1]
        if of_output is None or of_output.repeats != "rows" or not of_output.row % vector:
            return []
        outputs, reduced = outputs_and_reduced(shapes)
        extra = default_vertex_cycles(dtype, outputs, reduced, target) - cycles(shapes, target)
        reason = SlowReason("partials fetched one by one", of_output.row, vector)
        return [SlowPath(reason, np.maximum(0, np.where(reduced > 1, extra, 0)))]

    title = f"popops::Reduce{monoid.title()}<{dtype_name(dtype)}>"
    fields = (Field("partials", "in", dtype), Field("out", "out", dtype))
    compute = partial(_reduce_block, REDUCERS[monoid], axes)
    return Codelet(
        title,
        fields,
        compute,
        cycles,
        state_bytes=24,
        code_bytes=600,
        compares=comparison_of(monoid),
        parts=parts,
        with_axes=partial(_codelet_with_axes, monoid, dtype, axes),
        slow_paths=slow_paths,
    )


def _reduce_block(reducer: Callable[..., jax.Array], axes: tuple[int, ...], x: jax.Array) -> jax.Array:
    # Partial results computed unsplit are one: without this an engine would trace a reduction for each stage.
    if all(x.shape[axis] == 1 for axis in axes):
        return lax.squeeze(x, axes)
    return reducer(x, axes=axes)


def _codelet_with_axes(
    monoid: str, dtype: Any, axes: tuple[int, ...], sources: Sequence[Sequence[int]]
) -> Codelet | None:
    reduced = axes_among(axes, sources)
    return None if reduced is None else reduce_codelet(monoid, dtype, reduced)


def axes_among(axes: Sequence[int], sources: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the numbers of the new axes that some axes become; None where one also has elements of other axes."""
    numbers = tuple(number for number, old in enumerate(sources) if any(axis in axes for axis in old))
    return numbers if all(axis in axes for number in numbers for axis in sources[number]) else None
