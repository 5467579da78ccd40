"""Rising numbers, computed by the tiles that they are mapped to.

Source of the cost: poplibs `popopsCycleEstimators.cpp`, iota (reference machine.md §1.3).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.layout.choose import choose
from ipujax.lowering.layout.grid_cost import Work, spans
from ipujax.lowering.layout.place import along, mapped_variable, placed_axes
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Builder, Codelet, Field
from ipujax.runtime.target import Target, issue_round_cycles, store_cycles, whole_cycles
from ipujax.runtime.tensor import Blocked, Tensor, dtype_name, element_bytes

_BASE_CYCLES = 14
_VECTOR_CYCLES = 2  # of the 3 of a vector, one stores it


def iota(builder: Builder, dtype: Any, size: int) -> Tensor:
    """Adds the numbers 0 … size − 1, at least one, in a tensor of shape (size,) that is spread over tiles."""
    codelet = _codelet(dtype)
    field = spans((size,), (0,))

    def add(builder: Builder, placement: Blocked) -> Tensor:
        out = mapped_variable(builder.graph, (size,), dtype, builder.name, (0,), placement)
        accesses = [along(out, (0,))]
        add_vertices(builder, codelet, placed_axes(placement), accesses, placement.tile, ["d0"])
        return out

    return add(builder, choose(builder.graph, (size,), (0,), Work(codelet, (field,), ("here",)), (), add))


@remembered
def _codelet(dtype: Any) -> Codelet:
    def compute(origins: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...]) -> jax.Array:
        numbers = lax.iota(np.dtype(np.int32), shapes[0][0]) + jnp.asarray(origins[0], np.int32)
        return numbers.astype(dtype)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        vector_cycles = _VECTOR_CYCLES + store_cycles(target.vector_width_bytes, target)
        loop = whole_cycles(vector_cycles * -(-parts(shapes, target) // target.worker_contexts))
        return target.supervisor_overhead_cycles + issue_round_cycles(target) * (_BASE_CYCLES + loop)

    def parts(shapes: BlockShapes, target: Target) -> np.ndarray:
        return -(-shapes[0][0] * element_bytes(dtype) // target.vector_width_bytes)

    fields = (Field("out", "out", dtype),)
    title = f"popops::Iota<{dtype_name(dtype)}>"
    return Codelet(title, fields, compute, cycles, 12, 120, takes=("origins", "shapes"), parts=parts, language="C++")
