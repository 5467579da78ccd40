"""Rows of the primitives without a tile-parallel rule, which run on one tile.

Each is a single problem: several, along batch dimensions or right-hand sides, are spread (`test_fallback.py`).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.lax import linalg

from tests.lowering.rules.op_case import OpCase, Spec, integers, normal


def _positive(rng: np.random.Generator) -> np.ndarray:
    """Symmetric matrix with positive eigenvalues, well apart from zero."""
    a = rng.normal(size=(5, 5))
    return (a @ a.T + 5 * np.eye(5)).astype(np.float32)


def fallback_rows() -> tuple[OpCase, ...]:
    """One row for each primitive."""
    square = normal(5, 5)
    vector = normal(5)
    column = normal(5, 1)
    positive = _positive
    pivots = integers(5, low=4, high=5)
    near = {"rtol": 1e-4, "atol": 1e-4}

    def row(primitive: str, fun: object, *specs: Spec) -> OpCase:
        return OpCase(primitive, "one tile", fun, specs, **near)  # type: ignore[arg-type]

    return (
        row("cholesky", linalg.cholesky, positive),
        row("cholesky_update", linalg.cholesky_update, positive, vector),
        row("eig", lambda a: linalg.eig(a)[0], square),
        row("eigh", lambda a: linalg.eigh(a)[1], positive),
        row("fft", jnp.fft.rfft2, square),
        row("hessenberg", linalg.hessenberg, square),
        row("householder_product", lambda a: linalg.householder_product(a, a[0]), square),
        row("lu", linalg.lu, square),
        row("lu_pivots_to_permutation", lambda p: linalg.lu_pivots_to_permutation(p, 5), pivots),
        row("ormqr", lambda a, b: linalg.ormqr(a, a[0], b), square, column),
        row("qr", linalg.qr, square),
        row("schur", linalg.schur, square),
        row("svd", lambda a: linalg.svd(a, compute_uv=False), square),
        row("symmetric_product", linalg.symmetric_product, square, positive),
        row("triangular_solve", lambda a, b: linalg.triangular_solve(a, b, left_side=True), positive, column),
        row("tridiagonal", linalg.tridiagonal, positive),
        row("tridiagonal_solve", lambda d, b: linalg.tridiagonal_solve(d * 0, 3 + d * d, d * 0, b), vector, column),
    )
