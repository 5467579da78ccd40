"""Kernels: elementwise operations over one index space as data, and reductions of their values, computed by one vertex.

    kernel    ::= inputs, steps, results, reductions
    input     ::= dtype, the axes of the index space that it runs along (along the others it is repeated), and its
                  first index in a block that several inputs are parts of
    step      ::= operation, operands: numbers of inputs and of earlier steps, or constants by their bits
    reduction ::= number of a value, monoid, the axes it is reduced over

Values are numbered, inputs first. A value that is not a result is never stored. Every step rounds to its own dtype.

Input: operations and operands. Output: a codelet with one field for each input, result and reduction.
Source: PopLibs' `popops::map`, which makes one codelet of an expression (`popops/ExpressionGenerator.cpp`).
Limits: PopLibs' expressions have no reductions. The cost of one is that of a vertex that only reduces, without its
launch: an accumulation is in one bundle with a load there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.layout import total_elements
from ipujax.lowering.popops.vertices.emulation import kind_of
from ipujax.lowering.popops.vertices.kernel_cycles import (
    OpCount,
    kernel_cycles,
    kernel_iteration,
    kernel_language,
    kernel_parts,
)
from ipujax.lowering.popops.vertices.kernel_rows import row_slow_paths
from ipujax.lowering.popops.vertices.reduce_cycles import LAUNCH_CYCLES, reduce_cycles, reduce_parts
from ipujax.lowering.popops.vertices.reducers import REDUCERS, SELECTING, axes_among
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Codelet, Comparison, Field, Repetition, SlowPath
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import dtype_name, element_bytes

_CODE_BYTES = 400  # assumed: one assembly codelet with its dispatch, from the size of popops objects
_CODE_BYTES_PER_STEP = 16  # assumed: an instruction in the vector loop, and one for the remainder
_CODE_BYTES_PER_REDUCTION = 200  # assumed: a third of the codelet that only reduces
_STATE_BYTES = 16  # default of `Codelet.state_bytes`, which pays for three fields
_FREE_FIELDS = 3
_POINTER_BYTES = 4  # assumed: of each further field
_TESTING_EQUALITY = frozenset(("eq", "ne"))
_ORDERING = frozenset(("lt", "le", "gt", "ge", "max", "min"))
_MAX_TITLE_NAMES = 4  # operations that the name of a codelet lists

Frozen = tuple[str, bytes]


def freeze(value: np.ndarray) -> Frozen:
    """Hashable bits of a scalar: 0.0 equals -0.0, and True 1, but they are not the same constant."""
    return value.dtype.name, value.tobytes()


def thawed(value: Frozen) -> np.ndarray:
    """Scalar of the bits that `freeze` returned."""
    return np.frombuffer(value[1], jax.numpy.dtype(value[0])).reshape(())


@dataclass(frozen=True, slots=True)
class Op:
    """Elementwise operation: a row of the cost table and a function of equally shaped arrays."""

    name: str  # row of `OP_COSTS`, a JAX primitive name
    fun: Callable[..., jax.Array] = field(compare=False)
    out_dtype: Any
    key: Hashable = None  # distinguishes operations of one name and dtype; the function itself when None
    # Whether the function is the primitive `name` without parameters, and does not only cost the same
    is_primitive: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.key is None:
            object.__setattr__(self, "key", self.fun)


@dataclass(frozen=True, slots=True)
class Input:
    """Operand of a kernel."""

    dtype: Any
    axes: tuple[int, ...]  # axes of the index space that its dimensions run along
    # Number of the first input of the same field; None of an input that shares its field with no other
    field: int | None = None
    begins: tuple[int, ...] = ()  # in each dimension the first index of this input in that field's block
    # In each dimension the elements by which that block is longer than the index space's
    reach: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Operation of a kernel on values by number and on constants."""

    op: Op
    operands: tuple[int | Frozen, ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Value by number, reduced over some axes of the index space by a monoid of `REDUCERS`."""

    value: int
    monoid: str
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """Elementwise operations over an index space of `rank` dimensions, and reductions of their values."""

    rank: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]  # numbers of the values that are stored
    reductions: tuple[Reduction, ...] = ()

    @property
    def fields(self) -> dict[int, int]:
        """Number of the field of each input that owns one, by number of the input."""
        owners = [n for n, x in enumerate(self.inputs) if x.field in (None, n)]
        return {number: field for field, number in enumerate(owners)}

    @property
    def result_dtypes(self) -> tuple[Any, ...]:
        """Dtype of each result."""
        return tuple(self.dtype_of(number) for number in self.results)

    @property
    def reduced_dtypes(self) -> tuple[Any, ...]:
        """Dtype of each reduction."""
        return tuple(self.dtype_of(reduction.value) for reduction in self.reductions)

    @property
    def sources(self) -> tuple[frozenset[int], ...]:
        """Numbers of the fields that each result and reduction is computed from."""
        fields = self.fields
        owners = [number if operand.field is None else operand.field for number, operand in enumerate(self.inputs)]
        sources = [frozenset((fields[owner],)) for owner in owners]
        for step in self.steps:
            sources.append(frozenset().union(*(sources[x] for x in step.operands if isinstance(x, int))))
        return tuple(sources[number] for number in (*self.results, *(r.value for r in self.reductions)))

    def dtype_of(self, value: int | Frozen) -> Any:
        """Dtype of a value or a constant."""
        if not isinstance(value, int):
            return jax.numpy.dtype(value[0])
        inputs = len(self.inputs)
        return self.inputs[value].dtype if value < inputs else self.steps[value - inputs].op.out_dtype

    def with_axes(self, sources: Sequence[Sequence[int]]) -> Kernel | None:
        """Return the kernel on other axes, as `Codelet.with_axes`; dimensions of blocks follow the axes."""
        inputs = [_on_axes(operand, sources) for operand in self.inputs]
        reduced = [axes_among(reduction.axes, sources) for reduction in self.reductions]
        if None in inputs or None in reduced:
            return None
        reductions = (
            replace(r, axes=axes) for r, axes in zip(self.reductions, reduced, strict=True) if axes is not None
        )
        found = tuple(operand for operand in inputs if operand is not None)
        return replace(self, rank=len(sources), inputs=found, reductions=tuple(reductions))

    def evaluate(self, arrays: Sequence[jax.Array], shape: tuple[int, ...]) -> list[jax.Array]:
        """Results and reductions on a block of `shape` of the index space, of the block of each field."""
        fields = self.fields
        values: list[jax.Array] = []
        for number, operand in enumerate(self.inputs):
            x = arrays[fields[number if operand.field is None else operand.field]]
            if operand.field is not None:
                ends = [first + n for first, n in zip(operand.begins, shape, strict=True)]
                x = lax.slice(x, operand.begins, ends)
            values.append(lax.broadcast_in_dim(x, shape, operand.axes) if len(operand.axes) < self.rank else x)
        for step in self.steps:
            operands = (values[x] if isinstance(x, int) else lax.full(shape, thawed(x)) for x in step.operands)
            values.append(step.op.fun(*operands))
        reduced = [REDUCERS[r.monoid](values[r.value], axes=r.axes) for r in self.reductions]
        return [*(values[number] for number in self.results), *reduced]


def _on_axes(operand: Input, sources: Sequence[Sequence[int]]) -> Input | None:
    """An input on new axes, each of which joins the old ones of `sources`; None where it has no such view."""
    axes = axes_among(operand.axes, sources)
    if axes is None or not (operand.begins or operand.reach):
        return None if axes is None else replace(operand, axes=axes)
    # An input that is a part of a longer block keeps its dimensions.
    if len(axes) != len(operand.axes) or any(len(sources[axis]) > 1 for axis in axes):
        return None
    dims = [operand.axes.index(sources[axis][0]) for axis in axes]
    begins = tuple(operand.begins[dim] for dim in dims) if operand.begins else ()
    reach = tuple(operand.reach[dim] for dim in dims) if operand.reach else ()
    return replace(operand, axes=axes, begins=begins, reach=reach)


def _without_reach(lengths: Sequence[Any], reach: Sequence[int]) -> Sequence[Any]:
    return [n - extra for n, extra in zip(lengths, reach, strict=True)] if reach else lengths


@remembered
def kernel_codelet(kernel: Kernel) -> Codelet:
    """Codelet of a kernel, with `Kernel.fields`, then a field for each result, then one for each reduction.

    An input of the kernel's rank or a result must exist: from its block follow the elements of the index space's.
    """
    input_fields = kernel.fields
    # Fields whose blocks are as large as those of the index space, or larger by a reach.
    full = [
        (field, kernel.inputs[n].reach)
        for n, field in input_fields.items()
        if len(kernel.inputs[n].axes) == kernel.rank
    ]
    # The field whose block tells the extents of the index space's: the first of these, else the first result.
    sized, reach = full[0] if full else (len(input_fields), ())

    def compute(*arrays: jax.Array, shapes: Sequence[tuple[int, ...]] = ()) -> Any:
        shape = tuple(_without_reach(arrays[sized].shape, reach) if full else shapes[0])
        results = kernel.evaluate(arrays, shape)
        return results[0] if len(results) == 1 else tuple(results)

    counts = tuple(_count(kernel, step) for step in kernel.steps)
    dtypes = tuple(x.dtype for x in kernel.inputs)
    stored = kernel.result_dtypes
    read = tuple(x.dtype for x in kernel.inputs if x.axes)
    scalars = len(dtypes) - len(read)
    is_map = bool(kernel.steps or stored)
    first_reduced = len(input_fields) + len(stored)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        """Elementwise steps, then each reduction, in one launch."""
        elements = total_elements(_without_reach(shapes[sized], reach))
        total = np.asarray(0)
        if is_map:
            loaded = (*read, *_unaligned(kernel, target))
            total = total + kernel_cycles(counts, loaded, stored, elements, target, scalars)
        for reduction, dtype, shape in zip(
            kernel.reductions, kernel.reduced_dtypes, shapes[first_reduced:], strict=True
        ):
            outputs = total_elements(shape)
            reduced = elements // np.maximum(1, outputs)
            total = total + reduce_cycles(reduction.monoid, dtype, outputs, reduced, target)
        launches = is_map + len(kernel.reductions)
        return total - (launches - 1) * LAUNCH_CYCLES

    def parts(shapes: BlockShapes, target: Target) -> np.ndarray:
        """Parts of the loop that keeps most workers busy; the others have fewer."""
        elements = total_elements(_without_reach(shapes[sized], reach))
        largest = np.asarray(0)
        if is_map:
            loaded = (*read, *_unaligned(kernel, target))
            largest = kernel_parts(counts, loaded, stored, elements, target)
        for reduction, dtype, shape in zip(
            kernel.reductions, kernel.reduced_dtypes, shapes[first_reduced:], strict=True
        ):
            outputs = total_elements(shape)
            shared = reduce_parts(reduction.monoid, dtype, outputs, elements // np.maximum(1, outputs), target)
            largest = np.maximum(largest, shared)
        return largest

    def slow_paths(shapes: BlockShapes, repetitions: Sequence[Repetition | None], target: Target) -> Sequence[SlowPath]:
        """Those of rows by which operands are repeated."""
        if not is_map:
            return []
        rows = list(zip(repetitions, (kernel.inputs[n].dtype for n in input_fields), strict=False))
        block = _without_reach(shapes[sized], reach)
        return row_slow_paths(rows, block, kernel_iteration(counts, read, stored, target), target)

    written = (*stored, *kernel.reduced_dtypes)
    fields = [Field(f"in{field}", "in", dtypes[number]) for number, field in input_fields.items()]
    outs = ["out"] if len(written) == 1 else [f"out{n}" for n in range(len(written))]
    fields += [Field(name, "out", dtype) for name, dtype in zip(outs, written, strict=True)]
    computing = [step for step in kernel.steps if kind_of(step.op.name) != "move"]
    code = _CODE_BYTES + _CODE_BYTES_PER_STEP * max(0, len(kernel.steps) - 1)
    return Codelet(
        _title(kernel, counts),
        tuple(fields),
        compute,
        cycles,
        state_bytes=_STATE_BYTES + _POINTER_BYTES * max(0, len(fields) - _FREE_FIELDS),
        code_bytes=code + _CODE_BYTES_PER_REDUCTION * len(kernel.reductions),
        takes=() if full else ("shapes",),
        moves=not kernel.reductions and not computing,
        compares=_comparison(kernel),
        flops=len(computing) + len(kernel.reductions),
        parts=parts,
        language=kernel_language(counts),
        with_axes=partial(_codelet_with_axes, kernel),
        sources=kernel.sources,
        slow_paths=slow_paths,
        in_place=True,
    )


def _codelet_with_axes(kernel: Kernel, sources: Sequence[Sequence[int]]) -> Codelet | None:
    other = kernel.with_axes(sources)
    return None if other is None else kernel_codelet(other)


def _comparison(kernel: Kernel) -> Comparison:
    """What steps and reductions compare of different values."""
    steps = [step for step in kernel.steps if len({x for x in step.operands if isinstance(x, int)}) > 1]
    names = {step.op.name for step in steps}
    if not names.isdisjoint(_TESTING_EQUALITY):
        return "equality"
    selects = any(reduction.monoid in SELECTING for reduction in kernel.reductions)
    return "order" if selects or not names.isdisjoint(_ORDERING) else "nothing"


def _unaligned(kernel: Kernel, target: Target) -> list[Any]:
    """Dtypes of the inputs that begin inside a vector: each takes a second load (assumed)."""
    parts = [x for x in kernel.inputs if x.begins]
    return [x.dtype for x in parts if x.begins[-1] * element_bytes(x.dtype) % target.vector_width_bytes]


def _count(kernel: Kernel, step: Step) -> OpCount:
    op = step.op
    tensors = [x for x in step.operands if isinstance(x, int)]
    # A comparison computes in the dtype of its operands, a cast of an integer in that of the integer.
    operand_dtype = kernel.dtype_of(tensors[-1] if tensors else step.operands[-1])
    from_integer = op.name == "convert_element_type" and not jax.numpy.issubdtype(operand_dtype, np.inexact)
    dtype = operand_dtype if op.out_dtype == np.bool_ or from_integer else op.out_dtype
    return OpCount(op.name, dtype, len(tensors), len(step.operands) - len(tensors))


def _title(kernel: Kernel, counts: Sequence[OpCount]) -> str:
    names = [step.op.name.title().replace("_", "") for step in kernel.steps]
    names += [f"Reduce{reduction.monoid.title()}" for reduction in kernel.reductions]
    dtype = dtype_name(counts[-1].dtype if counts else kernel.inputs[-1].dtype)
    if len(names) == 1 and not kernel.reductions:
        return f"popops::{names[0]}<{dtype}>"
    omitted = len(names) - _MAX_TITLE_NAMES
    listed = [*names[:_MAX_TITLE_NAMES], f"{omitted} more"] if omitted > 1 else names
    return f"popops::Map<{dtype}>({', '.join(listed)})"
