"""Records of linear algebra and Fourier transforms: independent problems, and their operations.

Source of counts: textbooks (Golub and Van Loan, "Matrix Computations"); assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2
from typing import Any

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.primitives.factors import Factors, batched, shapes
from ipujax.lowering.primitives.record import PrimitiveRecord, Problem


def _record(
    rank: Callable[[Mapping[str, Any]], int],
    work: Callable[[int], float] | None = None,
    columns: Callable[[Mapping[str, Any]], int] | None = None,
) -> PrimitiveRecord:
    """The record of a primitive whose dimensions before those of a problem are a batch."""

    def factors(eqn: JaxprEqn) -> Factors:
        return batched(eqn, max(len(shapes(eqn.invars)[0]) - rank(eqn.params), 0))

    return PrimitiveRecord(factors, problem=Problem(rank, columns, work))


def _of_matrices(params: Mapping[str, Any]) -> int:
    return 2


def _of_vectors(params: Mapping[str, Any]) -> int:
    return 1


RECORDS: dict[str, PrimitiveRecord] = {
    "cholesky": _record(_of_matrices, lambda n: n / 3),
    "triangular_solve": _record(_of_matrices, lambda n: n, lambda params: -1 if params["left_side"] else -2),
    "lu": _record(_of_matrices, lambda n: 2 * n / 3),
    "qr": _record(_of_matrices, lambda n: 4 * n),
    "householder_product": _record(_of_matrices, lambda n: 2 * n),
    "ormqr": _record(_of_matrices, lambda n: 2 * n, lambda params: -1 if params["left"] else -2),
    "eigh": _record(_of_matrices, lambda n: 9 * n),
    "eig": _record(_of_matrices, lambda n: 25 * n),
    "svd": _record(_of_matrices, lambda n: 20 * n),
    "schur": _record(_of_matrices, lambda n: 25 * n),
    "hessenberg": _record(_of_matrices, lambda n: 10 * n / 3),
    "tridiagonal": _record(_of_matrices, lambda n: 4 * n / 3),
    "symmetric_product": _record(_of_matrices, lambda n: n),
    "tridiagonal_solve": _record(_of_vectors, lambda n: 8, lambda params: -1),
    "lu_pivots_to_permutation": _record(_of_vectors, lambda n: 1),
    "fft": _record(lambda params: len(params["fft_lengths"]), lambda n: 5 * log2(n + 1)),
    "cholesky_update": PrimitiveRecord(problem=Problem(work=lambda n: 4)),
}
