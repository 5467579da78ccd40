"""Triangular systems and the Cholesky factor.

Source: poplin `TriangularSolve.hpp`, `Cholesky.hpp`. Limits: the solver and the factor run on one tile, see
`profile.fallbacks`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ipujax.poplar.library import add
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor


def triangular_mask(
    graph: Graph,
    a: Tensor,
    prog: Program,
    name: str = "triangular_mask",
    *,
    lower: bool = True,
    unit_diagonal: bool = False,
) -> Tensor:
    """Return a matrix with zeros outside one triangle.

    Args:
        graph: graph to add to.
        a: [..., n, n].
        prog: program to add to.
        name: debug name.
        lower: set the upper triangle to zeros, else the lower.
        unit_diagonal: the diagonal becomes ones.

    Returns:
        A new tensor [..., n, n].

    Raises:
        GraphError: a matrix that is not square.

    Source: poplin::triangularMask.
    """
    _check_square(name, a)

    def mask(x: jax.Array) -> jax.Array:
        row, column = (jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - n) for n in (2, 1))
        is_in_triangle = column <= row if lower else column >= row
        x = jnp.where(is_in_triangle, x, jnp.zeros((), x.dtype))
        return jnp.where(row == column, jnp.ones((), x.dtype), x) if unit_diagonal else x

    return add(graph, mask, [a], prog, name)


def triangular_solve(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    prog: Program,
    name: str = "triangular_solve",
    *,
    left_side: bool = True,
    lower: bool = True,
    unit_diagonal: bool = False,
) -> Tensor:
    """Solve `a · x = b`, or `x · a = b` without `left_side`, for triangular matrices [..., n, n].

    The other triangle of `a` is not read, nor its diagonal with `unit_diagonal`.

    Raises:
        GraphError: shapes that do not match.

    Source: poplin::triangularSolve.
    """
    _check_square(name, a)

    def solve(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.linalg.triangular_solve(x, y, left_side=left_side, lower=lower, unit_diagonal=unit_diagonal)

    return add(graph, solve, [a, b], prog, name)


def cholesky(graph: Graph, a: Tensor, prog: Program, name: str = "cholesky", *, lower: bool = True) -> Tensor:
    """Return the Cholesky factor of symmetric positive definite matrices [..., n, n], a lower or an upper triangle.

    Raises:
        GraphError: a matrix that is not square.

    Source: poplin::cholesky.
    """
    _check_square(name, a)

    def factor(x: jax.Array) -> jax.Array:
        # In float: LAPACK has no half precision.
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return jnp.linalg.cholesky(wide, upper=not lower).astype(x.dtype)

    return add(graph, factor, [a], prog, name)


def _check_square(name: str, a: Tensor) -> None:
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise GraphError(f"{name}: must have a square matrix", expected="[..., n, n]", got=list(a.shape))
