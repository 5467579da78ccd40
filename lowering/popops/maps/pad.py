"""Padding: around a tensor, between its elements, or negative to crop it.

One copy: each block of the result reads the elements that fall in it, and its vertex fills in the padding.

The cost is that of an elementwise copy of the result (reference machine.md §1.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ipujax.lowering.layout import map_linearly, total_elements
from ipujax.lowering.layout.choose import choose, source_of
from ipujax.lowering.layout.grid_cost import FieldUse, Span, Work, spans
from ipujax.lowering.layout.place import along, mapped_variable, place_operand, placed_axes, scalar
from ipujax.lowering.popops.maps.constants import immediate_of
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.elementwise_cycles import elementwise_cycles, elementwise_parts
from ipujax.lowering.popops.vertices.kernel import Frozen, freeze, thawed
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Access, BlockShapes, Builder, Codelet, Dim, Field, Term
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, dtype_name

Config = Sequence[tuple[int, int, int]]  # low, high, interior


def pad(builder: Builder, x: Tensor, value: Tensor, config: Config, out_shape: Sequence[int]) -> Tensor:
    """Pads a tensor, as `lax.pad`; returns a new one.

    Args:
        x: tensor with at least one element.
        value: scalar of its dtype, which fills the padding.
        config: `(low, high, interior)` of each dimension: elements before, after, and between neighbours.
        out_shape: shape of the result, which has elements.
    """
    rank = x.ndim
    constant = immediate_of(value)
    immediate = None if constant is None else freeze(constant)
    codelet = _pad_codelet(x.dtype, tuple(interior for _, _, interior in config), immediate)
    # Index i of the result is element (i − low) / (interior + 1) of `x`, where that is a whole number in its range.
    read = tuple(
        Span(axis=d, extent=n, offset=-low, divisor=interior + 1)
        for d, (n, (low, _, interior)) in enumerate(zip(x.shape, config, strict=True))
    )
    fields = [FieldUse(read, source_of(builder.graph, x)), FieldUse(spans(out_shape, range(rank)))]
    fields += [FieldUse((), "elsewhere")] * (constant is None)  # a padding value that is no constant is an operand
    work = Work(codelet, tuple(fields))

    operands = [x, value] if constant is None else [x]
    # Each vertex reads the elements that fall in its block of the result.
    placement = choose(builder.graph, out_shape, range(rank), work, operands)
    graph = builder.graph
    place_operand(graph, x, read, placement)
    out = mapped_variable(graph, out_shape, x.dtype, builder.name, range(rank), placement)
    dims = tuple(Dim((Term(d),), -low, interior + 1) for d, (low, _, interior) in enumerate(config))
    # What the vertices read of `x` outside of it is the fill; `pads` tell the codelet where that is.
    accesses = [Access(x, dims, np.zeros((), x.dtype) if constant is None else constant), along(out, range(rank))]
    if constant is None:
        map_linearly(graph, value)
        accesses.append(scalar(value))
    add_vertices(builder, codelet, placed_axes(placement), accesses, placement.tile)
    return out


@remembered
def _pad_codelet(dtype: Any, interior: tuple[int, ...], constant: Frozen | None) -> Codelet:
    """Codelet that copies elements apart and fills the gaps, with an immediate or, without one, a scalar operand.

    `interior` is the number of elements between neighbours, along each dimension.
    """
    immediate = None if constant is None else thawed(constant)

    def compute(x: jax.Array, *values: jax.Array, pads: Sequence[Sequence[tuple[int, int]]]) -> jax.Array:
        value = values[0] if immediate is None else immediate
        # `pads` of the first field: elements before and after the block along each dimension.
        return jax.lax.pad(x, value, [(*pair, gap) for pair, gap in zip(pads[0], interior, strict=True)])

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        return elementwise_cycles(
            "copy", dtype, operands=1, immediates=0, elements=total_elements(shapes[1]), target=target
        )

    def parts(shapes: BlockShapes, target: Target) -> np.ndarray:
        return elementwise_parts("copy", dtype, total_elements(shapes[1]), target)

    fields = [Field("in", "in", dtype), Field("out", "out", dtype)]
    if constant is None:
        fields.append(Field("value", "in", dtype))
    title = f"popops::Pad<{dtype_name(dtype)}>"
    return Codelet(  # sizes: assumed
        title, tuple(fields), compute, cycles, state_bytes=32, code_bytes=300, takes=("pads",), moves=True, parts=parts
    )
