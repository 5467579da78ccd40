"""Routines of LAPACK, which modules call, as the primitives of JAX that call them, with their numbers and costs.

Source: the lowerings of `jax.lax.linalg` for the CPU. A primitive puts NaN where its routine reports a failure, so the
operations of the module that do so are left out. The loop after `getrf` that makes a permutation of pivots is a result
of `lu`; `geqrf` and `orgqr` after it are one `qr`.
Limits: a call that JAX does not make so, or whose results are read in another way, stays a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.lax import linalg

from ipujax.lowering.jax_compat import mlir
from ipujax.lowering.stablehlo import regions
from ipujax.lowering.stablehlo.translation import (
    Operation,
    Rule,
    Scope,
    Success,
    Values,
    constant_value,
    dtype_of,
    flag,
    functions_of,
    integer,
    ints,
    shape_of,
    text,
    word,
)
from ipujax.runtime.names_at_import import jax_jit

ir = mlir.ir
Parameters = dict[str, Any]
Results = Sequence[Any] | None  # None for a result that has no counterpart
_ROUTINE = re.compile(r"lapack_[sdcz](\w+)_ffi")
_SUCCEEDED = ("EQ", "GE")  # comparisons of a report with 0
_FORWARDED = (
    *("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.convert"),
    *("stablehlo.dynamic_broadcast_in_dim", "stablehlo.dynamic_reshape"),
)
_SHAPE_OPERANDS = "indices_of_shape_operands"  # of polymorphic modules: last, one a result


def _is_letter(params: Parameters, name: str, letter: str) -> bool:
    return bool(params[name] == ord(letter))


def _cholesky(x: Any, params: Parameters) -> Results:
    return [linalg.cholesky_p.bind(x)] if _is_letter(params, "uplo", "L") else None


def _eigh(x: Any, params: Parameters) -> Results:
    if not _is_letter(params, "mode", "V"):
        return None
    lower = _is_letter(params, "uplo", "L")
    return list(linalg.eigh(x, lower=lower, symmetrize_input=False))


def _svd(algorithm: linalg.SvdAlgorithm, x: Any, params: Parameters) -> Results:
    """Results of LAPACK's `gesdd` or `gesvd` by JAX's primitive of singular values; None for modes that it lacks.

    None stands for a result that JAX has not: the overwritten operand, which is the first, and vectors if there are
    none.

    Args:
        algorithm: that of the routine.
        x: the matrices.
        params: parameters of the call, "mode" among them: the letter for the kind of vectors.
    """
    modes = {ord("A"): (True, True), ord("S"): (False, True), ord("N"): (False, False)}
    if params["mode"] not in modes:
        return None
    full_matrices, compute_uv = modes[params["mode"]]
    kind = None if algorithm is linalg.SvdAlgorithm.DEFAULT else algorithm
    results = linalg.svd_p.bind(
        x, full_matrices=full_matrices, compute_uv=compute_uv, subset_by_index=None, algorithm=kind
    )
    return [None, *results, *([None, None] if not compute_uv else [])]


def _schur(x: Any, params: Parameters) -> Results:
    """Results of `gees`: in the place of eigenvalues and their sorted number, which JAX's primitive lacks, None."""
    if not _is_letter(params, "sort", "N"):
        return None
    has_vectors = _is_letter(params, "mode", "V")
    results = linalg.schur(x, compute_schur_vectors=has_vectors)
    eigenvalues = [None] if np.issubdtype(x.dtype, np.complexfloating) else [None, None]
    return [*results, *([] if has_vectors else [None]), *eigenvalues, None]


def _eig(x: Any, params: Parameters) -> Results:
    """Results of `geev`: eigenvalues, of real matrices in two parts, then left and right vectors, or None."""
    sides = [_is_letter(params, name, "V") for name in ("compute_left", "compute_right")]
    values, *vectors = linalg.eig(x, compute_left_eigenvectors=sides[0], compute_right_eigenvectors=sides[1])
    remaining = iter(vectors)
    is_complex = np.issubdtype(x.dtype, np.complexfloating)
    parts = [values] if is_complex else [lax.real(values), lax.imag(values)]
    return [*parts, *(next(remaining) if side else None for side in sides)]


def _hessenberg(x: Any, params: Parameters) -> Results:
    is_whole = params["low"] == 1 and params["high"] == x.shape[-1]
    return list(linalg.hessenberg(x)) if is_whole else None


def _tridiagonal(x: Any, params: Parameters) -> Results:
    return list(linalg.tridiagonal_p.bind(x, lower=_is_letter(params, "uplo", "L")))


def _triangular_solve(a: Any, b: Any, params: Parameters) -> Results:
    """Solution of triangular systems, BLAS' `trsm`, by JAX's primitive, whose flags are letters in `params`.

    Args:
        a: the triangular matrices.
        b: the right-hand sides.
        params: parameters of the call.
    """
    return [
        linalg.triangular_solve_p.bind(
            a,
            b,
            left_side=_is_letter(params, "side", "L"),
            lower=_is_letter(params, "uplo", "L"),
            transpose_a=not _is_letter(params, "trans_x", "N"),
            conjugate_a=_is_letter(params, "trans_x", "C"),
            unit_diagonal=_is_letter(params, "diag", "U"),
        )
    ]


def _tridiagonal_solve(*operands_and_params: Any) -> Results:
    *operands, _ = operands_and_params
    return [None, None, None, linalg.tridiagonal_solve_p.bind(*operands, perturb_singular=False)]


@dataclass(frozen=True)
class _Routine:
    """A routine of LAPACK.

    Args:
        compute: its results by primitives of JAX, from its operands and the attributes of the call.
        reports: True if the last result of the call, not one of `compute`, is zero where it succeeded.
    """

    compute: Callable[..., Results]
    reports: bool = True


_ROUTINES: dict[str, _Routine] = {
    "potrf": _Routine(_cholesky),
    "trsm": _Routine(_triangular_solve, reports=False),
    **dict.fromkeys(("syevd", "heevd"), _Routine(_eigh)),
    "gesdd": _Routine(partial(_svd, linalg.SvdAlgorithm.DEFAULT)),
    "gesvd": _Routine(partial(_svd, linalg.SvdAlgorithm.QR)),
    "gees": _Routine(_schur),
    "geev": _Routine(_eig),
    "gehrd": _Routine(_hessenberg),
    **dict.fromkeys(("sytrd", "hetrd"), _Routine(_tridiagonal)),
    "gtsv": _Routine(_tridiagonal_solve),
    **dict.fromkeys(
        ("orgqr", "ungqr"), _Routine(lambda a, taus, params: [linalg.householder_product(a, taus)], reports=False)
    ),
    **dict.fromkeys(
        ("ormqr", "unmqr"),
        _Routine(lambda a, taus, c, params: [linalg.ormqr_p.bind(a, taus, c, **params)], reports=False),
    ),
}


def lapack_results(scope: Scope, op: Operation, operands: Values) -> Sequence[Any] | None:
    """Results of a custom call of LAPACK by primitives of JAX, which have costs and derivatives.

    A routine that reports failure has a counterpart only if its results are masked by the report, as primitives do it
    themselves.

    Returns:
        A value for each result, None for one that nothing reads; None for a call without a counterpart.
    """
    routine = _ROUTINE.fullmatch(text(op, "call_target_name"))
    if routine is None or not _is_as_jax_calls(op, operands):
        return None
    name = routine[1]
    operands = operands[: len(operands) - len(op.results)] if _SHAPE_OPERANDS in op.attributes else operands
    if name == "getrf":
        return _lu_results(scope, op, operands)
    if name == "geqrf":
        return _qr_results(scope, op, operands)
    # The `geqrf` before it is lowered as an entire `qr`, whose q is this result.
    if name in ("orgqr", "ungqr") and ("q", op.operands[1]) in scope.values:
        return [scope.values["q", op.operands[1]]]
    if name not in _ROUTINES:
        return None
    reports = _ROUTINES[name].reports
    if reports and not _is_masked(op):
        return None
    computed = _ROUTINES[name].compute(*operands, _parameters(op))
    if computed is None:
        return None
    results = [*computed, *([_success(op)] if reports else [])]
    is_read = [bool(list(result.uses)) for result in op.results]
    return None if any(x is None and read for x, read in zip(results, is_read, strict=True)) else results


def _is_as_jax_calls(op: Operation, operands: Values) -> bool:
    """True if a call of LAPACK passes matrices column by column, as JAX does, and operands have the module's dtypes.

    Dtypes differ where the module has 64 bits and JAX does not have them here.
    """
    if "operand_layouts" not in op.attributes or "mhlo.backend_config" not in op.attributes:
        return False
    layouts = [*op.attributes["operand_layouts"], *op.attributes["result_layouts"]]
    orders = [tuple(int(n) for n in layout) for layout in layouts]
    rank = max(map(len, orders), default=0)
    by_columns = (rank - 2, rank - 1, *range(rank - 3, -1, -1))
    is_same = all(x.dtype == dtype_of(operand.type) for x, operand in zip(operands, op.operands, strict=True))
    return is_same and rank >= 2 and all(order == by_columns for order in orders if len(order) == rank)


def _parameters(op: Operation) -> Parameters:
    """Attributes of a call by name."""
    attributes: Any = ir.DictAttr(op.attributes["mhlo.backend_config"])
    return {
        x.name: bool(x.attr) if isinstance(x.attr, ir.BoolAttr) else int(ir.IntegerAttr(x.attr).value)
        for x in attributes
    }


def _success(op: Operation) -> Success:
    report = op.results[len(op.results) - 1].type
    return Success(shape_of(report), dtype_of(report))


def _readers(value: Any) -> list[Any]:
    return [use.owner for use in value.uses]


def _is_masked(op: Operation) -> bool:
    """True if the report of a call, its last result, is only read to put NaN in place of its results, as JAX does.

    Follows the report from reader to reader: through comparisons with success and operations that forward it, to
    selections between results of the call and NaN.
    """
    remaining = list(_readers(op.results[len(op.results) - 1]))
    while remaining:
        reader = remaining.pop()
        if reader.name == "stablehlo.select":
            _, result, other = reader.operands
            is_complex = getattr(result.owner, "name", "") == "stablehlo.complex"  # eigenvalues by their two parts
            made_by = [x.owner for x in result.owner.operands] if is_complex else [result.owner]
            if any(owner != op for owner in made_by) or not _is_constant(other, np.isnan):
                return False
        elif reader.name == "stablehlo.compare":
            direction = word(reader, "comparison_direction")
            if direction not in _SUCCEEDED or not _is_constant(reader.operands[1], lambda x: x == 0):
                return False
            remaining += _readers(reader.results[0])
        elif reader.name in _FORWARDED:
            remaining += _readers(reader.results[0])
        else:
            return False
    return True


def _is_constant(value: Any, test: Callable[[Any], Any]) -> bool:
    """True if a value is a constant, broadcast or not, whose elements all pass a test."""
    op = value.owner
    while getattr(op, "name", "") in _FORWARDED:
        op = op.operands[0].owner
    return getattr(op, "name", "") == "stablehlo.constant" and bool(np.all(test(constant_value(op))))


def _lu_results(scope: Scope, op: Operation, operands: Values) -> Sequence[Any] | None:
    """Results of `getrf`; notes the permutation of `lu` for the loop that makes it of the pivots."""
    if not _is_masked(op):
        return None
    factors, pivots, permutation = linalg.lu(operands[0])
    scope.values["permutation", op.results[1]] = permutation
    return [factors, lax.add(pivots, np.int32(1)), _success(op)]


def permutation_results(scope: Scope, op: Operation, operands: Values) -> Sequence[Any] | None:
    """Results of a loop that makes the permutation of pivots of `getrf`; None for other loops.

    The permutation is a result of the primitive that `getrf` has become, noted in `scope.values` with its pivots.
    """
    # LAPACK counts pivots from 1: JAX subtracts 1 before its loop.
    pivots = op.operands[0]
    minus_one = pivots.owner
    if getattr(minus_one, "name", "") != "stablehlo.subtract":
        return None
    key = ("permutation", minus_one.operands[0])
    if key not in scope.values or not _is_constant(minus_one.operands[1], lambda x: x == 1):
        return None
    permutation = scope.values[key]
    expected = _loop_of_jax(tuple(operands[0].shape), permutation.shape[-1])
    if regions.loop_signature(op, scope.functions) != expected:
        return None
    steps = np.asarray(operands[0].shape[-1], np.int32)
    # The carries after the loop: pivots, counter, bound of the counter, permutation.
    return [operands[0], steps, steps, permutation]


@lru_cache(maxsize=64)
def _loop_of_jax(shape: tuple[int, ...], size: int) -> regions.Signature:
    """Signature of the loop by which JAX makes a permutation of pivots, as it lowers it, to recognise that loop.

    Args:
        shape: shape of the pivots.
        size: length of the permutation.
    """
    function = jax_jit(lambda pivots: linalg.lu_pivots_to_permutation(pivots, size))
    module: Any = function.lower(jax.ShapeDtypeStruct(shape, np.int32)).compiler_ir("stablehlo")
    functions = functions_of(module)
    signatures: list[regions.Signature] = []

    def note_loop(op: Operation) -> Any:
        if op.name == "stablehlo.while":
            signatures.append(regions.loop_signature(op, functions))
        return ir.WalkResult.ADVANCE

    module.operation.walk(note_loop)
    return signatures[0]


def _qr_results(scope: Scope, op: Operation, operands: Values) -> Sequence[Any] | None:
    """Results of LAPACK's `geqrf` by JAX's `qr`, whose triangle is the first; `q` is noted for the `orgqr` after it.

    LAPACK computes a QR decomposition in two calls: packed factors, then `orgqr` makes the orthogonal one of them. None
    where another operation reads what `qr` does not have: the packed reflectors.
    """
    (x,) = operands
    rows, columns = x.shape[-2:]
    products = [reader for reader in _readers(op.results[1]) if text(reader, "call_target_name").endswith("gqr_ffi")]
    if len(products) != 1 or len(list(op.results[1].uses)) != 1 or not _is_triangle_read(op.results[0], products[0]):
        return None
    product_columns = shape_of(products[0].results[0].type)[-1]
    if product_columns not in (rows, columns):
        return None
    factors: Any = linalg.qr(x, full_matrices=product_columns == rows)
    q, r = factors
    scope.values["q", op.results[1]] = q
    missing = rows - r.shape[-2]
    padding = [(0, 0, 0)] * (x.ndim - 2) + [(0, missing, 0), (0, 0, 0)]
    unread = np.zeros((*x.shape[:-2], min(rows, columns)), x.dtype)  # by the product, whose result is q
    return [lax.pad(r, np.zeros((), x.dtype), padding) if missing else r, unread]


def _is_triangle_read(value: Any, product: Any) -> bool:
    """True if, of the packed factors of a QR, only a product of reflectors reads more than the upper triangle.

    Args:
        value: the packed factors, or a slice of them from the first element on.
        product: the operation that multiplies the reflectors, below the diagonal.
    """
    for reader in _readers(value):
        if reader == product:
            continue
        if reader.name == "stablehlo.slice" and not any(ints(reader, "start_indices")):
            if not _is_triangle_read(reader.results[0], product):
                return False
        elif reader.name == "stablehlo.pad":
            if [x for x in _readers(reader.results[0]) if x != product]:
                return False
        elif reader.name != "stablehlo.select" or reader.operands[2] != value or not _is_below(reader.operands[0]):
            return False
    return True


def _is_below(mask: Any) -> bool:
    """True for a value that is the mask of the elements below the diagonal, as JAX computes it: row − 1 ≥ column."""
    op = mask.owner
    while getattr(op, "name", "") == "stablehlo.broadcast_in_dim":
        op = op.operands[0].owner
    if getattr(op, "name", "") != "stablehlo.compare" or word(op, "comparison_direction") != "GE":
        return False
    shifted, column = (x.owner for x in op.operands)
    if getattr(shifted, "name", "") != "stablehlo.add" or not _is_constant(shifted.operands[1], lambda x: x == -1):
        return False
    row = shifted.operands[0].owner
    return _counted_dim(row) == 0 and _counted_dim(column) == 1


def _counted_dim(op: Operation) -> int | None:
    """Dimension whose numbers an iota has; None for another operation."""
    return integer(op, "iota_dimension") if getattr(op, "name", "") == "stablehlo.iota" else None


def triangular_solve_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.triangular_solve`: solutions of triangular systems, by JAX's primitive with the same flags."""
    transpose = word(op, "transpose_a")
    solution = linalg.triangular_solve_p.bind(
        *operands,
        left_side=flag(op, "left_side"),
        lower=flag(op, "lower"),
        transpose_a=transpose != "NO_TRANSPOSE",
        conjugate_a=transpose == "ADJOINT",
        unit_diagonal=flag(op, "unit_diagonal"),
    )
    return [solution]


def while_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Permutation of pivots, or another loop."""
    return permutation_results(scope, op, operands) or regions.while_rule(scope, op, operands)


RULES: dict[str, Rule] = {
    "stablehlo.triangular_solve": triangular_solve_rule,
    "stablehlo.while": while_rule,
}
