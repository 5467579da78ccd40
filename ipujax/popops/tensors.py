"""Operations on whole tensors: casts, reductions, fills, sorting, slices at dynamic places, encodings.

Source: names and meanings from popops; numbers are those of the JAX operations of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.library import add, same_type
from ipujax.lowering.emit import placing
from ipujax.lowering.popops.dynamic import dynamic_update_slice_in_place
from ipujax.runtime.errors import GraphError, user_line
from ipujax.runtime.graph import Graph
from ipujax.runtime.program import Sequence as Program
from ipujax.runtime.target import nearest
from ipujax.runtime.tensor import Tensor

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": jnp.sum,
    "mul": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "logical_and": jnp.all,
    "logical_or": jnp.any,
    "square_add": lambda x, axis: jnp.sum(lax.square(x), axis),
    "log_add": jax.nn.logsumexp,
}


def cast(graph: Graph, x: Tensor, dtype: Any, prog: Program, name: str = "cast") -> Tensor:
    """A tensor converted to a type; the tensor itself if it has it."""
    result: Tensor = add(graph, lambda a: a.astype(dtype), [x], prog, name)
    return result


def reduce(
    graph: Graph,
    x: Tensor,
    dims: Sequence[int],
    operation: str,
    prog: Program,
    name: str = "reduce",
    *,
    scale: float | None = None,
    update: Tensor | None = None,
) -> Tensor:
    """Reduces a tensor over some dimensions.

    Args:
        graph: graph to add to.
        x: the tensor.
        dims: dimensions to reduce.
        operation: "add", "square_add", "log_add", "mul", "max", "min", "logical_and" or "logical_or".
        prog: program the steps are added to.
        name: debug name.
        scale: what the result is multiplied by.
        update: tensor of the result's shape that the result is added to, in place.

    Returns:
        A tensor of the shape without `dims`, of the type of `x`: new, or `update`.

    Raises:
        GraphError: an unknown operation.
    """
    if operation not in _REDUCTIONS:
        expected = f"one of {', '.join(_REDUCTIONS)}"
        hint = nearest(operation, _REDUCTIONS)
        raise GraphError(f"{name}: no reduction {operation!r}", where=user_line(), expected=expected, hint=hint)

    def reduced(a: jax.Array, *before: jax.Array) -> jax.Array:
        result = _REDUCTIONS[operation](a, axis=tuple(dims)).astype(a.dtype)
        result = result if scale is None else result * jnp.asarray(scale, result.dtype)
        return before[0] + result if before else result

    kept = [] if update is None else [update]
    result: Tensor = add(graph, reduced, [x, *kept], prog, name, kept)
    return result


def fill(graph: Graph, x: Tensor, prog: Program, value: Any, name: str = "fill") -> None:
    """Writes one value to all elements of a tensor."""
    add(graph, lambda: jnp.full(x.shape, value, x.dtype), [], prog, name, [x])


def zero(graph: Graph, x: Tensor, prog: Program, name: str = "zero") -> None:
    """Writes zeros to all elements of a tensor."""
    fill(graph, x, prog, 0, name)


def scaled_add_to(
    graph: Graph, a: Tensor, b: Tensor, scale: float | Tensor, prog: Program, name: str = "scaled_add_to"
) -> None:
    """Adds `scale · b` to `a`, in place; the scale is a number or a tensor of one element, `b` is cast to a's type."""
    _scaled(graph, a, b, scale, 1, prog, name)


def scaled_subtract_from(
    graph: Graph, a: Tensor, b: Tensor, scale: float | Tensor, prog: Program, name: str = "scaled_subtract_from"
) -> None:
    """Subtracts `scale · b` from `a`, in place; as `scaled_add_to`."""
    _scaled(graph, a, b, scale, -1, prog, name)


def _scaled(graph: Graph, a: Tensor, b: Tensor, scale: float | Tensor, sign: int, prog: Program, name: str) -> None:
    def scaled(x: jax.Array, y: jax.Array, *given: jax.Array) -> jax.Array:
        factor = given[0].reshape(()).astype(x.dtype) if given else jnp.asarray(scale, x.dtype)
        term = y.astype(x.dtype) * factor
        return x + term if sign > 0 else x - term

    if a.shape != b.shape:
        raise GraphError(f"{name}: tensors differ in shape", where=user_line(), expected=a.shape, got=b.shape)
    add(graph, scaled, [a, b, *([scale] if isinstance(scale, Tensor) else [])], prog, name, [a])


def sort(graph: Graph, x: Tensor, dim: int, prog: Program, name: str = "sort") -> Tensor:
    """A tensor sorted along one dimension, rising."""
    result: Tensor = add(graph, lambda a: lax.sort(a, dimension=dim), [x], prog, name)
    return result


def sort_in_place(graph: Graph, x: Tensor, dim: int, prog: Program, name: str = "sort") -> None:
    """Sorts a tensor along one dimension, rising."""
    add(graph, lambda a: lax.sort(a, dimension=dim), [x], prog, name, [x])


def sort_key_value(
    graph: Graph, keys: Tensor, values: Tensor, dim: int, prog: Program, name: str = "sort"
) -> tuple[Tensor, Tensor]:
    """Keys sorted along one dimension, rising, and the values that go with them, both new."""
    pair: tuple[Tensor, Tensor] = add(
        graph, lambda k, v: tuple(lax.sort((k, v), dimension=dim, num_keys=1)), [keys, values], prog, name
    )
    return pair


def top_k(graph: Graph, x: Tensor, k: int, prog: Program, name: str = "top_k") -> tuple[Tensor, Tensor]:
    """The k largest elements along the last dimension, falling, and their UNSIGNED_INT indices."""

    def largest(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, indices = lax.top_k(a, k)
        return values, indices.astype(jnp.uint32)

    pair: tuple[Tensor, Tensor] = add(graph, largest, [x], prog, name)
    return pair


def dynamic_slice(
    graph: Graph,
    x: Tensor,
    offset: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "dynamic_slice",
) -> Tensor:
    """A box at a place known when it runs.

    Args:
        graph: graph to add to.
        x: the tensor.
        offset: integers, the first index in each of `dims`; moved so that the box fits.
        dims: the dimensions that are sliced.
        sizes: size of the box in each of `dims`.
        prog: program the steps are added to.
        name: debug name.

    Returns:
        A new tensor.
    """
    box = list(x.shape)
    for dim, size in zip(dims, sizes, strict=True):
        box[dim] = size

    def sliced(a: jax.Array, starts: jax.Array) -> jax.Array:
        at = dict(zip(dims, starts.reshape(-1), strict=True))
        return lax.dynamic_slice(a, [at.get(d, jnp.zeros((), starts.dtype)) for d in range(a.ndim)], box)

    result: Tensor = add(graph, sliced, [x, offset], prog, name)
    return result


def dynamic_update(
    graph: Graph,
    x: Tensor,
    update: Tensor,
    offset: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "dynamic_update",
) -> None:
    """Overwrites a box at a place known when it runs, in place; arguments as of `dynamic_slice`."""
    expected = tuple(dict(zip(dims, sizes, strict=True)).get(d, n) for d, n in enumerate(x.shape))
    if update.shape != expected or offset.size != len(dims):
        raise GraphError(
            f"{name}: the update has another shape", where=user_line(), expected=expected, got=update.shape
        )
    same_type(name, [x, update])
    with placing(graph, [x, update, offset]):
        starts = [offset.flatten()[n].reshape(()) for n in range(len(dims))]
        dynamic_update_slice_in_place(graph, x, update, starts, prog, name, tuple(dims))


def multi_slice(
    graph: Graph,
    table: Tensor,
    indices: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "multi_slice",
) -> Tensor:
    """Rows of a matrix by index.

    Args:
        graph: graph to add to.
        table: [rows, columns].
        indices: [n] or [n, 1], integers; the result for an index beyond the table is undefined.
        dims: (0,).
        sizes: (1,).
        prog: program the steps are added to.
        name: debug name.

    Returns:
        A new tensor [n, 1, columns].

    Raises:
        GraphError: slices of another kind.
    """
    _check_rows(name, table, dims, sizes)
    result: Tensor = add(
        graph, lambda t, i: jnp.take(t, i.reshape(-1, 1), axis=0, mode="clip"), [table, indices], prog, name
    )
    return result


def multi_update(
    graph: Graph,
    table: Tensor,
    slices: Tensor,
    indices: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "multi_update",
) -> None:
    """Overwrites rows of a matrix, in place; `slices` is [n, 1, columns], what is beyond the table is dropped."""
    _check_rows(name, table, dims, sizes)

    def updated(t: jax.Array, s: jax.Array, i: jax.Array) -> jax.Array:
        return t.at[i.reshape(-1)].set(s.reshape(-1, t.shape[1]), mode="drop")

    add(graph, updated, [table, slices, indices], prog, name, [table])


def multi_update_add(
    graph: Graph,
    table: Tensor,
    slices: Tensor,
    indices: Tensor,
    scale: float | Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    prog: Program,
    name: str = "multi_update_add",
) -> None:
    """Adds `scale · slices` to rows of a matrix, in place; as `multi_update`."""
    _check_rows(name, table, dims, sizes)

    def updated(t: jax.Array, s: jax.Array, i: jax.Array, *given: jax.Array) -> jax.Array:
        factor = given[0].reshape(()) if given else jnp.asarray(scale, t.dtype)
        return t.at[i.reshape(-1)].add(s.reshape(-1, t.shape[1]) * factor.astype(t.dtype), mode="drop")

    scales = [scale] if isinstance(scale, Tensor) else []
    add(graph, updated, [table, slices, indices, *scales], prog, name, [table])


def _check_rows(name: str, table: Tensor, dims: Sequence[int], sizes: Sequence[int]) -> None:
    if tuple(dims) != (0,) or tuple(sizes) != (1,) or table.ndim != 2:
        got = f"dims {list(dims)}, sizes {list(sizes)}, a table {list(table.shape)}"
        expected = "dims [0], sizes [1], a table [rows, columns]"
        raise GraphError(f"{name} takes single rows of a matrix", where=user_line(), expected=expected, got=got)


def iota(graph: Graph, x: Tensor, start: int, prog: Program, name: str = "iota") -> None:
    """Writes start, start + 1, … to a vector."""
    add(graph, lambda: jnp.arange(start, start + x.size, dtype=x.dtype), [], prog, name, [x])


def encode_one_hot(
    graph: Graph, indices: Tensor, encoded: Tensor, prog: Program, on: float = 1, off: float = 0, name: str = "one_hot"
) -> None:
    """Writes `on` where the column is the row's index, and `off` elsewhere.

    Args:
        graph: graph to add to.
        indices: [n], integers.
        encoded: [n, classes], written.
        prog: program the steps are added to.
        on: value at the index.
        off: value elsewhere.
        name: debug name.
    """

    def one_hot(i: jax.Array) -> jax.Array:
        classes = lax.broadcasted_iota(i.dtype, encoded.shape, 1)
        hit = classes == i[:, None]
        return jnp.where(hit, np.asarray(on, encoded.dtype), np.asarray(off, encoded.dtype))

    add(graph, one_hot, [indices], prog, name, [encoded])
