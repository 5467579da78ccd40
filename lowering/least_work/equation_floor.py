"""Least cost of one equation: its multiply-adds and elements at rates that no vertex exceeds, its smallest vertex.

Input: an equation, a target. Output: an `EquationCost`. An equation without a figure here has none: moves, casts,
look-ups, sorts and random numbers count nothing, so that a bound holds where a plan makes views of them.

No plan takes less, because of
    products     a plan splits multiply-adds over vertices, steps and tiles, and does each at least once; padding of a
                 convolution, and zeros of a dilated input, may be left out
    elementwise  a plan fuses equations and splits elements, and computes each element at least once; operations on
                 floats issue beside loads, so only the larger of both sums counts
    reductions   every element is accumulated once; combining partial results comes on top
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import Atom, JaxprEqn, Literal as Constant, is_float0, shape_of
from ipujax.lowering.poplin.product_floors import ProductExtents, multiply_add_cycles, smallest_product_cycles
from ipujax.lowering.poplin.spec import Window
from ipujax.lowering.popops import MONOIDS
from ipujax.lowering.popops.vertices.kernel_cycles import (
    OpCount,
    least_element_cycles,
    smallest_kernel_cycles,
    smallest_vertex_cycles,
)
from ipujax.lowering.popops.vertices.reducers import least_reduced_cycles, smallest_reduction_cycles
from ipujax.lowering.primitives import record_of
from ipujax.lowering.rules.numerics.elementwise import op_of, unchanged_operand
from ipujax.runtime.target import Target

# Operations that a plan may leave out, as views, or do as part of a product's vertices.
_FREE = frozenset(("convert_element_type", "copy", "bitcast_convert_type", "real", "imag", "complex", "conj"))


@dataclass(frozen=True, slots=True)
class EquationFloor:
    """Least tile cycles of an equation, or of several.

    Args:
        serial: of products and reductions, which nothing issues beside.
        dual: of elementwise operations that issue beside loads and stores.
        single: of those that do not.
    """

    serial: float = 0.0
    dual: float = 0.0
    single: float = 0.0

    @property
    def cycles(self) -> float:
        """Cycles of all together."""
        return self.serial + max(self.dual, self.single)

    def __add__(self, other: EquationFloor) -> EquationFloor:
        return EquationFloor(self.serial + other.serial, self.dual + other.dual, self.single + other.single)

    def times(self, count: int) -> EquationFloor:
        """Return the cycles of so many runs."""
        return EquationFloor(self.serial * count, self.dual * count, self.single * count)


def least_of(floors: Sequence[EquationFloor]) -> EquationFloor:
    """Return cycles that are no more than those of any of several alternatives."""
    if not floors:
        return EquationFloor()
    return EquationFloor(*(min(getattr(x, name) for x in floors) for name in EquationFloor.__slots__))


Kind = Literal["product", "reduction", "map", "window", "view", "repeated", "joined", "written", "unknown"]


@dataclass(frozen=True, slots=True)
class EquationCost:
    """What an equation without jaxprs in it costs at least, and which elements its result reads.

    Args:
        kind: "product", "reduction" or "map" of single elements; "window" of a running sum or of windows, in vertices
            of its own; a "view" of an operand or of the parts of several; a "repeated" or looked-up one; operands that
            are "joined"; one that is "written" into another; "unknown" of anything else.
        floor: tile cycles.
        vertex_cycles: of the smallest vertex.
        element_cycles: tile cycles of one element of the result.
        read: elements of an operand that one element of the result reads, all of them others.
    """

    kind: Kind
    floor: EquationFloor = EquationFloor()
    vertex_cycles: float = 0.0
    element_cycles: float = 0.0
    read: int = 1


def equation_cost(eqn: JaxprEqn, target: Target, runs: int = 1) -> EquationCost:
    """Return the least cost of one run of an equation without jaxprs in it, and how its result depends on operands.

    A plan may do `runs` of them at once, as a product of more rows. Kinds of cost are described at `EquationCost`.
    """
    record = record_of(eqn)
    name = eqn.primitive.name
    if not eqn.invars or not all(prod(shape_of(var)) for var in eqn.outvars):
        return EquationCost("unknown")
    if record.cost == "product":
        return _product(eqn, target, runs)
    if record.is_reduction and len(eqn.invars) == 1 and _is_number(eqn.invars[0].aval):
        return _reduction(eqn, target)
    if _is_mapped(eqn):
        return _map(eqn, target)
    if name.startswith(("reduce_window_", "select_and_scatter_add")) and _covers(eqn):
        return _windows(eqn, target)
    if name.startswith("cum") and shape_of(eqn.invars[0])[eqn.params["axis"]] > 1:
        return EquationCost("window", vertex_cycles=smallest_kernel_cycles(target))
    if record.cost == "joined" or name == "pad":
        return EquationCost("joined")
    if record.rows == "written" or name == "dynamic_update_slice":
        return EquationCost("written")
    if record.view == "repeated" or record.cost == "look-up":
        return EquationCost("repeated")
    is_view = record.cost in ("view", "part", "none", "statement") or record.is_elementwise
    return EquationCost("view" if is_view else "unknown")


def _product(eqn: JaxprEqn, target: Target, runs: int) -> EquationCost:
    """Return the cost of a matrix product or convolution, of whose runs a plan may do `runs` at once."""
    lhs, rhs = map(_dtype, eqn.invars[:2])
    count = multiply_adds(eqn)
    read = _products_of_result(eqn)  # products that an element of the result is a sum of
    if not count or not read:  # of padding alone, or of nothing
        return EquationCost("unknown")
    largest = _extents(eqn)
    product = replace(largest, rows=largest.rows * runs, inner=largest.inner * runs)
    unit = multiply_add_cycles(lhs, rhs, product, smallest_kernel_cycles(target), target)
    floor = EquationFloor(serial=count * unit)
    vertex_cycles = smallest_product_cycles(lhs, rhs, target)
    return EquationCost("product", floor, vertex_cycles=vertex_cycles, element_cycles=read * unit, read=read)


def _extents(eqn: JaxprEqn) -> ProductExtents:
    """Return the largest extents of a vertex of a matrix product or convolution: rows, and products of a sum.

    Either operand may have the role of the activations, whose rows pass the AMP: the larger number counts.
    """
    lhs, rhs = (shape_of(atom) for atom in eqn.invars[:2])
    if eqn.primitive.name != "conv_general_dilated":
        (contracted, batch) = eqn.params["dimension_numbers"]  # dimensions of both operands each
        rows = [
            prod(n for d, n in enumerate(shape) if d not in (*dims, *batch_dims))
            for shape, dims, batch_dims in zip((lhs, rhs), contracted, batch, strict=True)
        ]
        return ProductExtents(max(rows), prod(lhs[d] for d in contracted[0]))
    numbers = eqn.params["dimension_numbers"]
    result = shape_of(eqn.outvars[0])
    # Specs of JAX: positions of (batch, channels, field…), of the weights (output channels, input channels, kernel…).
    out_channels = result[numbers.out_spec[1]]
    rows_of_channel = prod(result) // out_channels
    inner = prod(rhs) // rhs[numbers.rhs_spec[0]]
    # SLIC vertices need a field of two dimensions.
    return ProductExtents(max(rows_of_channel, out_channels), inner, is_slic=len(result) > 3)


def _reduction(eqn: JaxprEqn, target: Target) -> EquationCost:
    """Return the least cost of a reduction along dimensions; along dimensions of size 1 it is a view."""
    monoid, dtype = MONOIDS[eqn.primitive.name], _dtype(eqn.invars[0])
    elements = prod(shape_of(eqn.invars[0]))
    read = elements // prod(shape_of(eqn.outvars[0]))
    if read == 1:
        return EquationCost("view")
    unit = least_reduced_cycles(monoid, dtype, target)
    vertex_cycles = smallest_reduction_cycles(monoid, dtype, target)
    return EquationCost("reduction", EquationFloor(serial=elements * unit), vertex_cycles, read * unit, read)


def _map(eqn: JaxprEqn, target: Target) -> EquationCost:
    """Return the least cost of an elementwise operation, which may issue beside loads and stores (dual) or not."""
    op = op_of(eqn)
    # A comparison computes in the dtype of its operands.
    tensors = [atom for atom in eqn.invars if not isinstance(atom, Constant)]
    dtype = _dtype((tensors or eqn.invars)[-1]) if op.out_dtype == np.bool_ else op.out_dtype
    count = OpCount(op.name, dtype, len(tensors), len(eqn.invars) - len(tensors))
    unit, is_dual = least_element_cycles(count, target)
    cycles = prod(shape_of(eqn.outvars[0])) * unit
    floor = EquationFloor(dual=cycles) if is_dual else EquationFloor(single=cycles)
    return EquationCost("map", floor, smallest_vertex_cycles(count, target), unit)


def _windows(eqn: JaxprEqn, target: Target) -> EquationCost:
    """Return the cost of windows: each combines its elements, along one dimension at least."""
    dtype = _dtype(eqn.invars[0])
    monoid = {"reduce_window_sum": "add", "reduce_window_min": "min"}.get(eqn.primitive.name, "max")
    length = min(n for n in eqn.params["window_dimensions"] if n > 1)
    count = min(prod(shape_of(atom)) for atom in (*eqn.invars, *eqn.outvars))
    cycles = count * length * least_reduced_cycles(monoid, dtype, target)
    smallest = smallest_reduction_cycles(monoid, dtype, target)
    return EquationCost("window", EquationFloor(serial=cycles), smallest)


def _covers(eqn: JaxprEqn) -> bool:
    """Return whether each element of an operand is in a window, and none of the windows' is padding."""
    params = eqn.params
    window, strides = params["window_dimensions"], params["window_strides"]
    dilations = {*params.get("base_dilation", (1,)), *params.get("window_dilation", (1,))}
    sizes = shape_of(eqn.invars[-1])
    is_plain = dilations <= {1} and not any(map(any, params["padding"]))
    is_whole = all(n >= step and (size - n) % step == 0 for size, n, step in zip(sizes, window, strides, strict=True))
    return is_plain and is_whole and max(window) > 1


def _is_mapped(eqn: JaxprEqn) -> bool:
    """Return whether an equation computes each element by itself, in a vertex of elementwise operations."""
    if record_of(eqn).cost != "elementwise" or eqn.primitive.name in _FREE or len(eqn.outvars) != 1:
        return False
    is_plain = all(_is_number(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
    return is_plain and unchanged_operand(eqn) is None


def _dtype(atom: Atom) -> Any:
    aval: Any = atom.aval
    return aval.dtype


def _is_number(aval: Any) -> bool:
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and not is_float0(aval)


def multiply_adds(eqn: JaxprEqn) -> int:
    """Return the multiply-adds of a product whose operands are no padding."""
    if eqn.primitive.name != "conv_general_dilated":
        return record_of(eqn).macs(eqn)
    numbers = eqn.params["dimension_numbers"]
    result, kernel = shape_of(eqn.outvars[0]), shape_of(eqn.invars[1])
    outside = prod(result[d] for d in numbers.out_spec[:2])
    return outside * kernel[numbers.rhs_spec[1]] * prod(_pairs(window).total for window in _fields(eqn))


def _products_of_result(eqn: JaxprEqn) -> int:
    """Return the fewest multiply-adds of one element of a product's result, each of another element of an operand."""
    if eqn.primitive.name != "conv_general_dilated":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return prod(shape_of(eqn.invars[0])[d] for d in contracted)
    channels = shape_of(eqn.invars[1])[eqn.params["dimension_numbers"].rhs_spec[1]]
    return int(channels) * prod(_pairs(window).least for window in _fields(eqn))


def _fields(eqn: JaxprEqn) -> list[Window]:
    """Return the window of a convolution along each dimension of its field."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    field, kernel = (shape_of(atom) for atom in eqn.invars[:2])
    sizes = (
        [field[d] for d in numbers.lhs_spec[2:]],  # behind batch and channels
        [kernel[d] for d in numbers.rhs_spec[2:]],
        *(params["padding"], params["window_strides"], params["lhs_dilation"], params["rhs_dilation"]),
    )
    # Of each field dimension its values, in the order of the members of `Window`.
    return [Window(*row) for row in zip(*sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of an output and a kernel element that meet an element: all along a dimension, fewest of one output."""

    total: int
    least: int


def _pairs(window: Window) -> _Pairs:
    """Return how many pairs of an output and a kernel element meet an element of the input, no padding or zero."""
    outputs = np.arange(window.outputs)[:, None]
    elements = np.arange(window.kernel)
    # Position in the input with its dilation, which has zeros between elements: bool[outputs, kernel elements] below.
    position = outputs * window.stride + elements * window.rhs_dilation - window.padding[0]
    is_element = position % window.lhs_dilation == 0
    meets = (position >= 0) & is_element & (position < window.size * window.lhs_dilation)
    total = int(meets.sum())
    # A vertex counts as many rows, or kernel elements, as a dilation leaves; all outputs may meet the same.
    pairs_kept = window.outputs * window.kernel // window.lhs_dilation
    return _Pairs(min(total, pairs_kept), int(meets.sum(1).min()) if window.outputs else 0)
