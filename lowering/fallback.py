"""What has no tile-parallel rule: one vertex on one tile that calls the JAX primitive itself.

Input: an equation's context and operands. Output: its results, mapped linearly. The vertex reads its operands whole,
so that XLA computes exactly what plain JAX would; the profile names it under `fallbacks`. Successive fallbacks take
different tiles, so that their operands do not pile up on one.

Limits: the cost is an estimate from element counts, `assumed` throughout. A vertex that exceeds its tile is for the
memory plan to judge.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import log2, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.context import Context
from ipujax.lowering.poputil.mapping import linear_mapping, map_linearly
from ipujax.runtime.codelet import BlockShapes, Codelet, Field
from ipujax.runtime.errors import GraphError
from ipujax.runtime.mapping import even_cuts, frozen
from ipujax.runtime.program import Execute
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.vertices import Access, Axis, Dim, VertexGroup, element

_LOG = logging.getLogger("ipujax")
_TILE_STRIDE = 617  # prime, so that successive fallbacks walk over all tiles
_INSTRUCTIONS_PER_ELEMENT = 4  # assumed: load, compute, store, count; a C++ codelet issues one instruction a cycle
_CODE_BYTES = 4096  # assumed

# Operations for each element of the larger of operands and results, from the size n of its last dimension (assumed:
# textbook operation counts; what is not listed is one operation an element).
_WORK: dict[str, Callable[[int], float]] = {
    "cholesky": lambda n: n / 3,
    "triangular_solve": lambda n: n,
    "lu": lambda n: 2 * n / 3,
    "geqrf": lambda n: 2 * n,
    "qr": lambda n: 4 * n,
    "householder_product": lambda n: 2 * n,
    "eigh": lambda n: 9 * n,
    "eig": lambda n: 25 * n,
    "svd": lambda n: 20 * n,
    "schur": lambda n: 25 * n,
    "tridiagonal_solve": lambda n: 8,
    "fft": lambda n: 5 * log2(n + 1),
    "sort": lambda n: 2 * log2(n + 1),
    "top_k": lambda n: 2 * log2(n + 1),
}


def fallback(ctx: Context, *operands: Tensor) -> list[Tensor]:
    """Runs an equation's primitive on one tile.

    Args:
        ctx: the equation's surroundings; primitive and parameters are taken from it.
        operands: tensors of any shape and dtype.

    Returns:
        One new tensor for each result, mapped linearly.

    Raises:
        GraphError: for a result that is no array, as `jax.new_ref` has.
    """
    graph, name = ctx.graph, ctx.primitive.name
    for aval in ctx.out_avals:
        check_is_array(aval, f"what {name} makes", graph.origin)
    for tensor in operands:
        map_linearly(graph, tensor)
    outs = [
        graph.add_variable(aval.shape, aval.dtype, ctx.name, linear_mapping(graph, prod(aval.shape), aval.dtype))
        for aval in ctx.out_avals
    ]
    read = [x for x in operands if x.size]
    written = [x for x in outs if x.size]
    if outs and not written:
        return outs
    if name not in graph.fallbacks.values():
        _LOG.info("%s has no tile-parallel rule: it runs on one tile (%s)", name, graph.origin)
    compute_set = graph.add_compute_set(ctx.name)
    graph.fallbacks[compute_set] = name
    tile = len(graph.groups) * _TILE_STRIDE % graph.target.tiles_per_ipu
    graph.add_vertices(compute_set, _whole_group(_codelet(ctx, operands), [*read, *written], tile, ctx))
    ctx.prog.add(Execute(compute_set))
    return outs


def check_is_array(aval: Any, what: str, where: object = None) -> None:
    """Refuses what changes while a program runs: the references of `jax.new_ref`.

    Args:
        aval: its abstract value.
        what: what it is, for the message.
        where: the user's line; the one that is running when None.

    Raises:
        GraphError: for anything but an array.
    """
    if not isinstance(aval, jax.core.ShapedArray):
        raise GraphError(
            f"{what} is no array",
            where=where,
            expected="arrays: no value of a program ever changes",
            got=aval,
            hint="make what changes a carry of the loop, or an argument and a result of the function",
        )


def _whole_group(codelet: Codelet, tensors: Sequence[Tensor], tile: int, ctx: Context) -> VertexGroup:
    """One vertex connected to all of each tensor: dimensions of one size share an axis."""
    extents = sorted({n for tensor in tensors for n in tensor.shape if n > 1})
    axes = tuple(Axis(f"n{n}", even_cuts(n, 1)) for n in extents)
    accesses = tuple(
        Access(tensor, tuple(element(extents.index(n)) if n > 1 else Dim() for n in tensor.shape)) for tensor in tensors
    )
    tiles = frozen(np.full((1,) * len(axes), tile), np.int32)
    return VertexGroup(codelet, axes, accesses, tiles, origin=ctx.graph.origin)


def _codelet(ctx: Context, operands: Sequence[Tensor]) -> Codelet:
    primitive, params, avals = ctx.primitive, dict(ctx.params), ctx.out_avals
    given = [(tensor.shape, tensor.dtype) for tensor in operands]

    def compute(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        left = iter(blocks)
        # A block comes without dimensions of size 1, and what has no elements is not connected at all.
        arrays = [next(left).reshape(shape) if prod(shape) else jnp.zeros(shape, dtype) for shape, dtype in given]
        result = primitive.bind(*arrays, **primitive.get_bind_params(params))
        results = result if primitive.multiple_results else [result]
        return tuple(
            value.reshape([n for n in aval.shape if n > 1])
            for value, aval in zip(results, avals, strict=True)
            if prod(aval.shape)
        )

    elements = _work(primitive.name, [shape for shape, _ in given] + [aval.shape for aval in avals])

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        del shapes
        return np.asarray(target.supervisor_overhead_cycles + _INSTRUCTIONS_PER_ELEMENT * elements, np.int64)

    fields = [Field(f"in{n}", "in", dtype) for n, (shape, dtype) in enumerate(given) if prod(shape)]
    fields += [Field(f"out{n}", "out", aval.dtype) for n, aval in enumerate(avals) if prod(aval.shape)]
    return Codelet(f"ipujax::Fallback<{primitive.name}>", tuple(fields), compute, cycles, 64, _CODE_BYTES)


def _work(name: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """Estimated operations of one call."""
    largest = max(shapes, key=prod, default=())
    each = _WORK.get(name, lambda n: 1.0)(largest[-1] if largest else 1)
    return round(prod(largest) * max(1.0, each))
