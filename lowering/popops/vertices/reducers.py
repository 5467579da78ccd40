"""Reductions of a block on one tile: their monoids, the codelet, and its cycle cost.

"only" combines values of which all but one have all bits zero, see `zero_bits`: an integer addition of their bits,
which unlike an addition of floats keeps signs of zeros, payloads of NaNs and numbers of a dtype without a zero.

"signed_add" starts from −0.0, the neutral element of a sum of floats: 0.0 would turn a sum of −0.0 into 0.0.

The cost is that of the cheaper of two forms: accumulating rows of outputs ("strided", poplibs `ReduceAdd` single input)
and running along contiguous partials of one output ("continuous"). Source: poplibs `getReduceCycleEstimate` and
`popops/reduction/CycleEstimationFunctions.cpp` (reference machine.md §1.2, §1.3). Rows of outputs that are no whole
vectors are not accumulated in strides (`popops/reduction/ReductionConnection.cpp`,
`getReductionVertexSpecialisation`): the default vertex fetches each partial by itself, and its remainder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.layout import ceil_div, total_elements
from ipujax.lowering.popops.vertices.emulation import Kind, emulation
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Codelet, Comparison, Field, Repetition, SlowPath, SlowReason
from ipujax.runtime.target import Target, issue_round_cycles, larger, load_cycles, whole_cycles
from ipujax.runtime.tensor import VECTOR_BYTES, dtype_name, element_bytes

LAUNCH_CYCLES = 33  # of the supervisor, once a vertex
_WORKER_CYCLES = 20
_OUTER_LOOP_CYCLES = 8  # 7 to 10 in the source
_CONTINUOUS_OUTPUT_CYCLES = 12
_CONTINUOUS_CYCLES = 17
_LEAST_VECTOR_CYCLES = 0.5  # poplibs' accumulators take 128 bits, two vectors, in one instruction (f32v4acc, f16v8acc)
# Cycles a vector beyond the instruction that loads and combines it, of sums, and of largest and smallest numbers
# (`popops/codelets/asm/ReductionSpecial3.S`, `ContinuousReductionNoAcc.S`): products are assumed to need one.
# Poplibs combines look-ups of blocks of rows ("only") by adding them up.
_EXTRA_CYCLES = {"mul": 1}
_LOGIC = frozenset(("and", "or", "xor"))
_LOGIC_CYCLES = 25  # an element: a codelet in C++ (`getCyclesEstimateForReduce`); poplibs has it for booleans only
_KINDS: dict[str, Kind] = {"mul": "multiply"}


def reduce_cycles(monoid: str, dtype: Any, outputs: np.ndarray, reduced: np.ndarray, target: Target) -> np.ndarray:
    """Tile cycles to reduce `reduced` elements into each of `outputs` results.

    Args:
        monoid: "add", "max", …
        dtype: dtype of operand and results.
        outputs: results of the vertex, int64 array.
        reduced: elements reduced into each result, int64 array.
    """
    # PopLibs takes the cheapest form.
    strided, by_output, by_part = _cycles_by_form(monoid, dtype, outputs, reduced, target)
    return np.minimum(strided, np.minimum(by_output, by_part))


def least_reduced_cycles(monoid: str, dtype: Any, target: Target) -> float:
    """Tile cycles to reduce one element, in whichever form and however it is split: its share of a vector."""
    vector = max(1, target.vector_width_bytes // element_bytes(dtype))
    round_share = float(issue_round_cycles(target)) / target.worker_contexts
    return round_share * float(_vector_cycles(monoid, dtype, vector, target)) / vector


def smallest_reduction_cycles(monoid: str, dtype: Any, target: Target) -> float:
    """Tile cycles of the smallest vertex that reduces."""
    return float(reduce_cycles(monoid, dtype, np.asarray(1), np.asarray(1), target))


def reduce_parts(monoid: str, dtype: Any, outputs: np.ndarray, reduced: np.ndarray, target: Target) -> np.ndarray:
    """Parts that workers share in the cheapest form: rows of outputs, outputs, or the vectors reduced into each.

    `outputs` are the results of the vertex, `reduced` the elements reduced into each, int64 arrays.
    """
    strided, by_output, by_part = _cycles_by_form(monoid, dtype, outputs, reduced, target)
    vector = max(1, target.vector_width_bytes // element_bytes(dtype))
    continuous = np.where(by_part < by_output, ceil_div(reduced, vector), outputs)
    return np.where(strided <= np.minimum(by_output, by_part), ceil_div(outputs, 2 * vector), continuous)


def default_vertex_cycles(dtype: Any, outputs: np.ndarray, reduced: np.ndarray, target: Target) -> np.ndarray:
    """Tile cycles to sum rows by PopLibs' default vertex, which takes rows of any length and alignment.

    Each of `reduced` rows, of `outputs` elements of a dtype, is added to the results; workers share them evenly.
    Source: `getCyclesEstimateForReduce` of the estimation functions, for sums.
    """
    vector = max(1, target.vector_width_bytes // element_bytes(dtype))  # elements
    wide = 2 * vector  # elements of an accumulator
    levels = wide.bit_length() - 1  # powers of 2 below its width
    # The source's numbers. For each accumulator: zeroing, 2 cycles for each element of a vector that is stored, and its
    # loop; in the loop, for each row, a pointer, a load with its call, and an accumulation.
    start = 33 + 24 + 2 * levels
    worker = outputs // wide * (5 + (2 * vector + 1) + 1 + reduced * (10 + 6 + 3))
    # Outputs beyond whole accumulators: at most one remainder of each power of 2.
    for level in range(levels):
        has_remainder = outputs // 2**level % 2
        worker = worker + has_remainder * (5 + 2 * 2**level + reduced * (10 + 6))
    return np.asanyarray(
        LAUNCH_CYCLES + issue_round_cycles(target) * (start + ceil_div(worker, target.worker_contexts))
    )


def _vector_cycles(monoid: str, dtype: Any, vector: int, target: Target) -> Any:
    """Cycles of a worker to accumulate a vector of elements."""
    if monoid in _LOGIC:
        return _LOGIC_CYCLES * vector
    emulated = emulation(dtype, _KINDS.get(monoid, "add"), target)
    extra = _EXTRA_CYCLES.get(monoid, 0) + (1 if emulated.width in ("int", "byte", "double") else 0)
    loading = larger(_LEAST_VECTOR_CYCLES, load_cycles(target.vector_width_bytes, target))
    return emulated.factor * (loading + extra) + emulated.cast_cycles * vector


def _cycles_by_form(
    monoid: str, dtype: Any, outputs: np.ndarray, reduced: np.ndarray, target: Target
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tile cycles of a reduction in each of PopLibs' forms: of `reduced` elements into each of `outputs` results.

    First strided: the elements of one result are a row apart, and whole vectors of neighbouring results accumulate.
    Then continuous, where the elements of a result are neighbours: workers share the results; or those of each result.
    """
    workers = target.worker_contexts
    round_cycles = issue_round_cycles(target)
    vector = max(1, target.vector_width_bytes // element_bytes(dtype))
    vector_cycles = _vector_cycles(monoid, dtype, vector, target)
    accumulators = 2 * vector
    loads = accumulators // vector
    rows = ceil_div(ceil_div(outputs, accumulators), workers)
    row_cycles = whole_cycles(loads * vector_cycles * reduced) + _OUTER_LOOP_CYCLES
    strided = LAUNCH_CYCLES + round_cycles * (_WORKER_CYCLES + rows * row_cycles)
    output_cycles = whole_cycles(-(-reduced // vector) * vector_cycles)
    by_output = -(-outputs // workers) * (_CONTINUOUS_OUTPUT_CYCLES + output_cycles)
    # Then the parts are combined, one for each slot of a round: six workers are not slower than five.
    by_part = outputs * (_CONTINUOUS_OUTPUT_CYCLES + whole_cycles(output_cycles / workers)) + round_cycles
    start = LAUNCH_CYCLES + round_cycles * _CONTINUOUS_CYCLES
    return strided, start + round_cycles * by_output, start + round_cycles * by_part


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
