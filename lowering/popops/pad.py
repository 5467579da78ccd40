"""Padding: around a tensor, between its elements, or negative to crop it.

One copy: each block of the result reads the elements that fall in it, and its vertex fills in the rest.

The cost is that of an elementwise copy of the result (reference machine.md §1.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.popops.blocks import along, mapped_variable, place, placed_axes, scalar
from ipujax.lowering.popops.elementwise import immediate_of
from ipujax.lowering.popops.elementwise_cycles import elementwise_cycles, total_elements
from ipujax.lowering.poputil.mapping import map_linearly
from ipujax.runtime.codelet import BlockShapes, Codelet, Field
from ipujax.runtime.graph import Graph
from ipujax.runtime.program import Execute
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import dtype_name, element_bytes
from ipujax.runtime.vertices import Access, Dim, Term, VertexGroup

Config = Sequence[tuple[int, int, int]]


def pad(
    graph: Graph,
    x: Tensor,
    value: Tensor,
    config: Config,
    out_shape: Sequence[int],
    prog: ProgramSequence,
    name: str,
) -> Tensor:
    """Pads a tensor, as `lax.pad`.

    Args:
        graph: graph to add to.
        x: tensor with at least one element.
        value: scalar that fills.
        config: `(low, high, interior)` for each dimension.
        out_shape: shape of the result, with at least one element.
        prog: program the compute set is added to.
        name: debug name.

    Returns:
        A new tensor of shape `out_shape`.
    """
    map_linearly(graph, x)
    rank, constant = x.ndim, immediate_of(value)
    same = [d if c == (0, 0, 0) else None for d, c in enumerate(map(tuple, config))]
    placement = place(graph, out_shape, range(rank), element_bytes(x.dtype), [(x, same)])
    out = mapped_variable(graph, out_shape, x.dtype, name, range(rank), placement)
    dims = tuple(Dim((Term(d),), -low, interior + 1) for d, (low, _, interior) in enumerate(config))
    fill = np.zeros((), x.dtype) if constant is None else constant
    accesses = [Access(x, dims, fill), along(out, range(rank))]
    if constant is None:
        map_linearly(graph, value)
        accesses.append(scalar(value))
    frozen = None if constant is None else (constant.dtype.name, constant.tobytes())
    codelet = _codelet(x.dtype, tuple(interior for _, _, interior in config), frozen)
    group = VertexGroup(codelet, tuple(placed_axes(placement)), tuple(accesses), placement.tile, origin=graph.origin)
    compute_set = graph.add_compute_set(name)
    graph.add_vertices(compute_set, group)
    prog.add(Execute(compute_set))
    return out


@lru_cache(maxsize=512)
def _codelet(dtype: Any, interior: tuple[int, ...], constant: tuple[str, bytes] | None) -> Codelet:
    known = None if constant is None else np.frombuffer(constant[1], jax.numpy.dtype(constant[0])).reshape(())

    def compute(x: jax.Array, *given: jax.Array, pads: Sequence[Sequence[tuple[int, int]]]) -> jax.Array:
        value = given[0] if known is None else known
        return lax.pad(x, value, [(*pair, gap) for pair, gap in zip(pads[0], interior, strict=True)])

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        return elementwise_cycles("copy", dtype, 1, 0, total_elements(shapes[1]), target)

    fields = [Field("in", "in", dtype), Field("out", "out", dtype)]
    if constant is None:
        fields.append(Field("value", "in", dtype))
    return Codelet(f"popops::Pad<{dtype_name(dtype)}>", tuple(fields), compute, cycles, 32, 300, takes=("pads",))
