"""Codelets called from JAX code, their primitive and its rule: one vertex a row, or one vertex for all.

The vertices are a group, on the tiles that the user names.

    results = codelet_call_p.bind(*operands, codelet=…, stacked=…, num_vertices=…, tiles=…, outs=…)

Operand n belongs to the n-th field that is read; `stacked[n]` tells whether it has a row for each vertex, as every
result has, or is common to all. In plain JAX the codelet's function is mapped over the rows. A vmap multiplies the
vertices, on the same tiles. Limits: no differentiation rule; whoever binds it defines a gradient around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import make_primitive
from ipujax.lowering.layout import map_linearly
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Access, Axis, Codelet, Copy, Execute, VertexGroup, block, element
from ipujax.runtime.tensor import Tensor, even_cuts, flat_mapping

Outs = tuple[tuple[tuple[int, ...], Any], ...]  # shape and dtype of the block of each field that is written


def _compute(
    *operands: jax.Array, codelet: Codelet, stacked: tuple[bool, ...], num_vertices: int, tiles: Any, outs: Outs
) -> list[jax.Array]:
    """Results of a call of a user's codelet in plain JAX: its function mapped over vertices, [vertices, …] each.

    Args:
        operands: arrays that the codelet's fields read.
        codelet: the codelet.
        stacked: for each operand whether it has a row for each vertex; else all of it is read by each.
        num_vertices: number of vertices.
        tiles: tile of each vertex, without meaning here.
        outs: shape and dtype of a row of each result.
    """

    def vertex(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        result = codelet.compute(*blocks)
        return result if isinstance(result, tuple) else (result,)

    if not any(stacked):
        assert num_vertices == 1, "several vertices have rows of their own"
        return [value[None] for value in vertex(*operands)]
    return list(jax.vmap(vertex, [0 if rows else None for rows in stacked])(*operands))


def _shapes(*operands: Any, num_vertices: int, outs: Outs, **params: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((num_vertices, *shape), dtype) for shape, dtype in outs]


def _batched(
    operands: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    codelet: Codelet,
    stacked: tuple[bool, ...],
    num_vertices: int,
    tiles: tuple[int, ...] | None,
    outs: Outs,
) -> tuple[list[jax.Array], list[int]]:
    """Batching rule of `jax.vmap`: the calls of a codelet for a batch as one call, with as many times the vertices.

    An operand that is common to the batch and to all vertices stays so; of others each vertex gets its own row.

    Args:
        operands: operands, some with a dimension for the batch.
        axes: that dimension of each operand; None for one that is common to the batch.
        codelet: the codelet.
        stacked: for each operand whether it has a row for each vertex.
        num_vertices: number of vertices for one index of the batch.
        tiles: tile of each of these vertices; None to spread vertices over the tiles of one IPU.
        outs: shape and dtype of a row of each result.

    Returns:
        The results, and the dimension of each for the batch.
    """
    batch = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    arrays: list[jax.Array] = []
    are_stacked: list[bool] = []
    for x, axis, is_stacked in zip(operands, axes, stacked, strict=True):
        is_shared = axis is None and not is_stacked
        are_stacked.append(not is_shared)
        if is_shared:
            arrays.append(x)
            continue
        x = jnp.broadcast_to(x, (batch, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        x = x if is_stacked else jnp.repeat(x[:, None], num_vertices, axis=1)
        arrays.append(x.reshape((batch * num_vertices, *x.shape[2:])))
    results = codelet_call_p.bind(
        *arrays,
        codelet=codelet,
        stacked=tuple(are_stacked),
        num_vertices=batch * num_vertices,
        tiles=None if tiles is None else tiles * batch,
        outs=outs,
    )
    return [y.reshape((batch, num_vertices, *y.shape[1:])) for y in results], [0] * len(results)


codelet_call_p = make_primitive("codelet_call", _compute, _shapes, _batched)


def codelet_call_rule(
    ctx: Context,
    *operands: Tensor,
    codelet: Codelet,
    stacked: tuple[bool, ...],
    num_vertices: int,
    tiles: tuple[int, ...] | None,
    outs: Outs,
) -> list[Tensor]:
    """Adds a compute set with a user's codelet; returns a new tensor, [vertices, …], for each field that is written.

    Operands are connected to the fields that are read, in order. A field that is both read and written is connected to
    a new tensor that begins as a copy of its operand.

    Args:
        ctx: the equation.
        operands: a tensor for each field that is read.
        codelet: the codelet.
        stacked: for each operand whether it has a row for each vertex; else all of it is read by each.
        num_vertices: number of vertices.
        tiles: tile of each vertex; None to spread vertices over the tiles of one IPU.
        outs: shape and dtype of a row of each result.
    """
    graph = ctx.graph
    tile = _tile_of_vertices(ctx, codelet, num_vertices, tiles)
    for tensor in operands:
        map_linearly(graph, tensor)
    remaining_operands = iter(zip(operands, stacked, strict=True))
    remaining_results = iter(outs)
    connected: list[tuple[Tensor, bool]] = []  # of each field the tensor, and whether it has a row for each vertex
    results: list[Tensor] = []
    for field in codelet.fields:
        operand = next(remaining_operands) if field.is_read else None
        if field.is_written:
            shape, dtype = next(remaining_results)
            results.append(rows_variable(ctx, (num_vertices, *shape), dtype, f"{ctx.name}/{field.name}", tile))
            if operand is not None:  # arrays of JAX never change, so a copy is updated in place
                ctx.prog.add(Copy(operand[0], results[-1], f"{ctx.name}/{field.name}", graph.origin))
            connected.append((results[-1], True))
        elif operand is not None:
            connected.append(operand)
    compute_set = graph.add_compute_set(ctx.name)
    graph.add_vertices(compute_set, rows_group(ctx, codelet, connected, tile))
    ctx.prog.add(Execute(compute_set))
    return results


def _tile_of_vertices(ctx: Context, codelet: Codelet, num_vertices: int, tiles: tuple[int, ...] | None) -> np.ndarray:
    """Tile of each vertex: the user's, else vertices spread over all tiles of one IPU."""
    num_tiles = ctx.graph.target.num_tiles
    if tiles is None:
        per_ipu = ctx.graph.target.tiles_per_ipu
        return np.arange(num_vertices, dtype=np.int32) * min(per_ipu, num_vertices) // num_vertices
    if max(tiles) >= num_tiles or min(tiles) < 0:
        message = f"codelet_call of {codelet.name} names a tile the target lacks"
        raise GraphError(message, where=ctx.graph.origin, expected=f"0 … {num_tiles - 1}", got=max(tiles))
    return np.array(tiles, np.int32)


def rows_variable(ctx: Context, shape: tuple[int, ...], dtype: Any, name: str, tile: np.ndarray) -> Tensor:
    """Adds a variable with each row on a tile."""
    size = int(np.prod(shape))
    # Consecutive rows on one tile are one region.
    first_rows = np.flatnonzero(np.diff(tile, prepend=-1))
    mapping = flat_mapping(size, first_rows * (size // shape[0]), tile[first_rows])
    return ctx.graph.add_variable(shape, dtype, name, mapping)


def rows_group(
    ctx: Context, codelet: Codelet, connected: Sequence[tuple[Tensor, bool]], tile: np.ndarray
) -> VertexGroup:
    """Vertex group of a codelet: one vertex for each row of its tensors.

    Args:
        ctx: context of the call.
        codelet: the codelet.
        connected: for each field its tensor, and whether it has a row for each vertex or is common to all.
        tile: tile of each vertex, int32[rows].
    """
    shapes = [tensor.shape[1:] if has_rows else tensor.shape for tensor, has_rows in connected]
    # An unsplit axis for each pair of dimension and length: fields share it, and no access has one twice.
    block_dims = sorted({dim for shape in shapes for dim in enumerate(shape)})
    axes = (Axis("vertex", even_cuts(len(tile), len(tile))), *(Axis(f"n{n}", even_cuts(n, 1)) for _, n in block_dims))
    accesses = []
    for (tensor, has_rows), shape in zip(connected, shapes, strict=True):
        # A vertex sees the elements along the axes of its shape; of axis "vertex" its own row, a number, which is no
        # dimension of what it sees.
        dims = tuple(element(1 + block_dims.index(dim)) for dim in enumerate(shape))
        accesses.append(Access(tensor, (block(0), *dims) if has_rows else dims))
    grid = tile.reshape(-1, *(1 for _ in block_dims))
    return VertexGroup(codelet, axes, tuple(accesses), grid, origin=ctx.graph.origin)


RULES: dict[str, Rule] = {"codelet_call": codelet_call_rule}
