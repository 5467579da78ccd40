"""Kernels: elementwise operations over one index space as data, and reductions of them, computed by one vertex.

    kernel    ::= inputs, steps, results, reductions
    input     ::= dtype, the axes of the index space that it runs along (along the others it is repeated), and where it
                  begins in a block that several inputs are parts of
    step      ::= operation, operands: numbers of inputs and of earlier steps, or constants by their bits
    reduction ::= number of a value, monoid, the axes it is reduced over

Values are numbered, inputs first. What is no result is never stored. Every step rounds to its own dtype.

Input: operations and operands. Output: a codelet with one field for each input, result and reduction.
Source: PopLibs' `popops::map`, which makes one codelet of an expression (`popops/ExpressionGenerator.cpp`).
Limits: PopLibs' expressions have no reductions. What one costs here is what a vertex that only reduces costs, without
its launch: an accumulation is in one bundle with a load there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.layout import total_elements
from ipujax.lowering.popops.vertices.emulation import kind_of
from ipujax.lowering.popops.vertices.kernel_cycles import OpCount, kernel_cycles, kernel_parts
from ipujax.lowering.popops.vertices.reduce_cycles import LAUNCH_CYCLES, reduce_cycles, reduce_parts
from ipujax.lowering.popops.vertices.reducers import REDUCERS, SELECTING
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Codelet, Field
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import dtype_name, element_bytes

_CODE_BYTES = 400  # assumed: one assembly codelet with its dispatch, from the size of popops objects
_CODE_BYTES_PER_STEP = 16  # assumed: an instruction in the vector loop, and one for what is left over
_CODE_BYTES_PER_REDUCTION = 200  # assumed: a third of the codelet that only reduces
_STATE_BYTES = 16  # as `Codelet.state_bytes`, with up to
_USUAL_FIELDS = 3
_POINTER_BYTES = 4  # assumed: of each further field
_COMPARING = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "max", "min"))
_MOST_NAMES = 4  # operations that the name of a codelet shows

Frozen = tuple[str, bytes]


def freeze(value: np.ndarray) -> Frozen:
    """A scalar as a key by its bits: 0.0 equals -0.0, and True 1, but they are not the same constant."""
    return value.dtype.name, value.tobytes()


def thawed(value: Frozen) -> np.ndarray:
    """The scalar of a key."""
    return np.frombuffer(value[1], jax.numpy.dtype(value[0])).reshape(())


@dataclass(frozen=True, slots=True)
class Op:
    """An elementwise operation: its row in the cost table and its function of equally shaped arrays.

    Args:
        name: row of `OP_COSTS`, a JAX primitive name.
        fun: function of arrays of one shape.
        out_dtype: dtype of the result.
        key: tells operations of one name and dtype apart; the function itself when None.
        is_primitive: whether the function is the primitive of that name without parameters, not only charged as it.
    """

    name: str
    fun: Callable[..., jax.Array] = field(compare=False)
    out_dtype: Any
    key: Hashable = None
    is_primitive: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.key is None:
            object.__setattr__(self, "key", self.fun)


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that a kernel reads.

    Args:
        dtype: its dtype.
        axes: the axes of the index space that its dimensions are.
        field: number of the first input that has the same field; None of one with a field of its own alone.
        begins: in each dimension the first index of its part of that field's block.
        reach: by how much that block is longer than the index space's, in each dimension.
    """

    dtype: Any
    axes: tuple[int, ...]
    field: int | None = None
    begins: tuple[int, ...] = ()
    reach: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a kernel on values by number and on constants."""

    op: Op
    operands: tuple[int | Frozen, ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A value by number, reduced over some axes of the index space by a monoid of `REDUCERS`."""

    value: int
    monoid: str
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """Elementwise operations over an index space of `rank` dimensions, and reductions of what they compute.

    Args:
        rank: dimensions of the index space.
        inputs: what is read.
        steps: the operations, in order.
        results: the numbers of the values that are stored.
        reductions: what is reduced and stored.
    """

    rank: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    reductions: tuple[Reduction, ...] = ()

    @property
    def fields(self) -> dict[int, int]:
        """By the number of each input that has one, the number of its field."""
        own = [n for n, given in enumerate(self.inputs) if given.field in (None, n)]
        return {number: field for field, number in enumerate(own)}

    @property
    def result_dtypes(self) -> tuple[Any, ...]:
        """The dtype of each result."""
        return tuple(self.dtype_of(number) for number in self.results)

    @property
    def reduced_dtypes(self) -> tuple[Any, ...]:
        """The dtype of each reduction."""
        return tuple(self.dtype_of(reduction.value) for reduction in self.reductions)

    def dtype_of(self, value: int | Frozen) -> Any:
        """The dtype of a value or a constant."""
        if not isinstance(value, int):
            return jax.numpy.dtype(value[0])
        known = len(self.inputs)
        return self.inputs[value].dtype if value < known else self.steps[value - known].op.out_dtype

    def evaluate(self, arrays: Sequence[jax.Array], shape: tuple[int, ...]) -> list[jax.Array]:
        """The results and reductions on a block, step by step.

        Args:
            arrays: the block of each field.
            shape: of the block of the index space.
        """
        fields, values = self.fields, list[jax.Array]()
        for number, given in enumerate(self.inputs):
            x = arrays[fields[number if given.field is None else given.field]]
            if given.field is not None:
                x = lax.slice(x, given.begins, [first + n for first, n in zip(given.begins, shape, strict=True)])
            values.append(_filled_out(x, shape, given.axes) if len(given.axes) < self.rank else x)
        for step in self.steps:
            operands = (values[x] if isinstance(x, int) else lax.full(shape, thawed(x)) for x in step.operands)
            values.append(step.op.fun(*operands))
        reduced = [REDUCERS[r.monoid](values[r.value], axes=r.axes) for r in self.reductions]
        return [*(values[number] for number in self.results), *reduced]


def _filled_out(x: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, axes)


def _without(lengths: Sequence[Any], reach: Sequence[int]) -> Sequence[Any]:
    return [n - more for n, more in zip(lengths, reach, strict=True)] if reach else lengths


@remembered
def kernel_codelet(kernel: Kernel) -> Codelet:
    """The codelet of a kernel: `Kernel.fields`, then one for each result, then one for each reduction.

    The elements of a block are those of an input that is as large, or of a result: there must be one of them.
    """
    holders = kernel.fields
    # The fields that are as large as a block of the index space, or larger by a reach.
    whole = [
        (field, kernel.inputs[n].reach) for n, field in holders.items() if len(kernel.inputs[n].axes) == kernel.rank
    ]

    def compute(*arrays: jax.Array, shapes: Sequence[tuple[int, ...]] = ()) -> Any:
        shape = tuple(_without(arrays[whole[0][0]].shape, whole[0][1]) if whole else shapes[0])
        results = kernel.evaluate(arrays, shape)
        return results[0] if len(results) == 1 else tuple(results)

    counts = tuple(_count(kernel, step) for step in kernel.steps)
    dtypes, stored = tuple(given.dtype for given in kernel.inputs), kernel.result_dtypes
    read = tuple(given.dtype for given in kernel.inputs if given.axes)
    scalars, is_mapped = len(dtypes) - len(read), bool(kernel.steps or stored)
    (sized, reach), first_reduced = (whole or [(len(holders), ())])[0], len(holders) + len(stored)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        elements, total = total_elements(_without(shapes[sized], reach)), np.asarray(0)
        if is_mapped:
            loaded = (*read, *_unaligned(kernel, target))
            total = total + kernel_cycles(counts, loaded, stored, elements, target, scalars)
        for reduction, dtype, shape in zip(
            kernel.reductions, kernel.reduced_dtypes, shapes[first_reduced:], strict=True
        ):
            outputs = total_elements(shape)
            reduced = elements // np.maximum(1, outputs)
            total = total + reduce_cycles(reduction.monoid, dtype, outputs, reduced, target)
        launches = is_mapped + len(kernel.reductions)
        return total - (launches - 1) * LAUNCH_CYCLES

    def parts(shapes: BlockShapes, target: Target) -> np.ndarray:
        elements, most = total_elements(_without(shapes[sized], reach)), np.asarray(0)
        if is_mapped:
            loaded = (*read, *_unaligned(kernel, target))
            most = kernel_parts(counts, loaded, stored, elements, target)
        for reduction, dtype, shape in zip(
            kernel.reductions, kernel.reduced_dtypes, shapes[first_reduced:], strict=True
        ):
            outputs = total_elements(shape)
            dealt = reduce_parts(reduction.monoid, dtype, outputs, elements // np.maximum(1, outputs), target)
            most = np.maximum(most, dealt)
        return most

    written = (*stored, *kernel.reduced_dtypes)
    fields = [Field(f"in{field}", "in", dtypes[number]) for number, field in holders.items()]
    outs = ["out"] if len(written) == 1 else [f"out{n}" for n in range(len(written))]
    fields += [Field(name, "out", dtype) for name, dtype in zip(outs, written, strict=True)]
    computing = [step for step in kernel.steps if kind_of(step.op.name) != "move"]
    code = _CODE_BYTES + _CODE_BYTES_PER_STEP * max(0, len(kernel.steps) - 1)
    return Codelet(
        _title(kernel, counts),
        tuple(fields),
        compute,
        cycles,
        state_bytes=_STATE_BYTES + _POINTER_BYTES * max(0, len(fields) - _USUAL_FIELDS),
        code_bytes=code + _CODE_BYTES_PER_REDUCTION * len(kernel.reductions),
        takes=() if whole else ("shapes",),
        moves=not kernel.reductions and not computing,
        compares=_compares(kernel),
        flops=len(computing) + len(kernel.reductions),
        parts=parts,
    )


def _compares(kernel: Kernel) -> bool:
    """Whether any step compares two values with each other, or any reduction takes the largest or the smallest."""
    steps = (step for step in kernel.steps if step.op.name in _COMPARING)
    selects = any(reduction.monoid in SELECTING for reduction in kernel.reductions)
    return selects or any(all(isinstance(x, int) for x in step.operands) for step in steps)


def _unaligned(kernel: Kernel, target: Target) -> list[Any]:
    """The dtypes of the inputs that begin inside a vector: they take a second load for each (assumed)."""
    vector_bytes = target.vector_width_bytes
    parts = [given for given in kernel.inputs if given.begins]
    return [given.dtype for given in parts if given.begins[-1] * element_bytes(given.dtype) % vector_bytes]


def _count(kernel: Kernel, step: Step) -> OpCount:
    """What the cycles of a step depend on."""
    op, tensors = step.op, [x for x in step.operands if isinstance(x, int)]
    # Comparisons work in what they compare, casts of integers in integers.
    last = kernel.dtype_of(tensors[-1] if tensors else step.operands[-1])
    from_integer = op.name == "convert_element_type" and not jax.numpy.issubdtype(last, np.inexact)
    dtype = last if op.out_dtype == np.bool_ or from_integer else op.out_dtype
    return OpCount(op.name, dtype, len(tensors), len(step.operands) - len(tensors))


def _title(kernel: Kernel, counts: Sequence[OpCount]) -> str:
    names = [step.op.name.title().replace("_", "") for step in kernel.steps]
    names += [f"Reduce{reduction.monoid.title()}" for reduction in kernel.reductions]
    dtype = dtype_name(counts[-1].dtype if counts else kernel.inputs[-1].dtype)
    if len(names) == 1 and not kernel.reductions:
        return f"popops::{names[0]}<{dtype}>"
    shown = [*names[:_MOST_NAMES], f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES + 1 else names
    return f"popops::Map<{dtype}>({', '.join(shown)})"
