"""Routines of LAPACK in exported functions: the numbers and the primitives of plain JAX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.lax import linalg

import ipujax as ipu
from ipujax.lowering.jax_compat import jaxpr_as_fun
from ipujax.lowering.jaxpr import primitive_names
from ipujax.lowering.passes.inline import inline

_RANDOM = np.random.default_rng(0)
ONE = _RANDOM.normal(size=(9, 9)).astype(np.float32) + 3 * np.eye(9, dtype=np.float32)
BATCH = _RANDOM.normal(size=(2, 3, 5, 5)).astype(np.float32)
MANY = _RANDOM.normal(size=(70, 4, 4)).astype(np.float32)
COMPLEX = (BATCH + 1j * BATCH[::-1]).astype(np.complex64)
TALL = _RANDOM.normal(size=(3, 12, 5)).astype(np.float32)
WIDE = TALL.mT.copy()


def positive(x: Any) -> Any:
    return x @ jnp.conj(x.mT) + 5 * jnp.eye(x.shape[-1], dtype=x.dtype)


def solved(x: Any, side: str, part: str, transpose: str, diagonal: str) -> Any:
    return linalg.triangular_solve(
        x,
        x + 1,
        left_side=side == "left",
        lower=part == "lower",
        transpose_a=transpose != "plain",
        conjugate_a=transpose == "adjoint",
        unit_diagonal=diagonal == "ones",
    )


def tridiagonal_solution(x: Any) -> Any:
    row = x[..., 0, :]
    lower = row.at[..., 0].set(0)
    upper = row.at[..., -1].set(0)
    return linalg.tridiagonal_solve(lower, row + 9, upper, x)


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    **{
        " ".join(words): (partial(solved, side=words[0], part=words[1], transpose=words[2], diagonal=words[3]), x)
        for x, transposes in ((ONE, ("plain", "transposed")), (COMPLEX, ("adjoint",)))
        for words in product(("left", "right"), ("lower", "upper"), transposes, ("any", "ones"))
    },
    "solve": (lambda x: jnp.linalg.solve(x, x + 1), ONE),
    "solve vector": (lambda x: jnp.linalg.solve(x, x[0]), ONE),
    "solve batch": (lambda x: jnp.linalg.solve(x, x + 1), BATCH),
    "solve many": (lambda x: jnp.linalg.solve(x, x + 1), MANY),
    "inverse": (jnp.linalg.inv, BATCH),
    "inverse of complex numbers": (jnp.linalg.inv, COMPLEX),
    "determinant": (jnp.linalg.det, BATCH),
    "lu": (linalg.lu, TALL),
    "lu wide": (linalg.lu, WIDE),
    "lu twice": (lambda x: (linalg.lu(x)[2], linalg.lu(x.mT)[2]), BATCH),
    "cholesky": (lambda x: jnp.linalg.cholesky(positive(x)), BATCH),
    "cholesky many": (lambda x: jnp.linalg.cholesky(positive(x)), MANY),
    "cholesky upper": (lambda x: jnp.linalg.cholesky(positive(x), upper=True), COMPLEX),
    "cholesky of no square": (jnp.linalg.cholesky, BATCH),
    "cholesky solve": (lambda x: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(positive(x)), x), ONE),
    "eigh": (lambda x: jnp.linalg.eigh(positive(x)), BATCH),
    "eigh upper": (lambda x: linalg.eigh(positive(x), lower=False, symmetrize_input=False), COMPLEX),
    "eigenvalues": (lambda x: jnp.linalg.eigvalsh(positive(x)), ONE),
    "eig": (jnp.linalg.eig, BATCH),
    "eigvals": (jnp.linalg.eigvals, COMPLEX),
    "svd": (jnp.linalg.svd, TALL),
    "svd thin": (lambda x: jnp.linalg.svd(x, full_matrices=False), WIDE),
    "singular values": (lambda x: jnp.linalg.svd(x, compute_uv=False), COMPLEX),
    "svd qr": (lambda x: linalg.svd(x, algorithm=linalg.SvdAlgorithm.QR), TALL),
    "pinv": (jnp.linalg.pinv, TALL),
    "qr": (jnp.linalg.qr, BATCH),
    "qr tall": (jnp.linalg.qr, TALL),
    "qr wide": (jnp.linalg.qr, WIDE),
    "qr complete": (lambda x: jnp.linalg.qr(x, mode="complete"), TALL),
    "qr of complex numbers": (jnp.linalg.qr, COMPLEX),
    "schur": (linalg.schur, BATCH),
    "schur form": (lambda x: linalg.schur(x, compute_schur_vectors=False), COMPLEX),
    "hessenberg": (linalg.hessenberg, BATCH),
    "tridiagonal": (lambda x: linalg.tridiagonal(positive(x)), BATCH),
    "tridiagonal solve": (tridiagonal_solution, BATCH),
    "householder product": (lambda x: linalg.householder_product(x, x[..., 0, :]), TALL),
    "gradient": (jax.grad(lambda x: (jnp.linalg.solve(x, x + 1) ** 2).sum()), ONE),
}
UNCHECKED = [export.DisabledSafetyCheck.custom_call(f"lapack_{name}_ffi") for name in ("sgesvd", "spotrf")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_and_primitives_are_those_of_jax(name: str) -> None:
    fun, x = FUNCTIONS[name]
    plain = inline(jax.make_jaxpr(fun)(x))
    exported = inline(jax.make_jaxpr(export.export(jax.jit(fun), disabled_checks=UNCHECKED)(x).call)(x))
    routines = {value for value in vars(linalg) if f"{value}_p" in vars(linalg)}
    counts = [Counter(n for n in primitive_names(p.jaxpr) if n in routines) for p in (exported, plain)]
    assert counts[0] == counts[1] != Counter()
    assert not {"module_operation", "while", "scan"} & set(primitive_names(exported.jaxpr))
    for actual, expected in zip(jax.jit(jaxpr_as_fun(exported))(x), jax.tree.leaves(jax.jit(fun)(x)), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ("solve", "solve batch", "inverse", "qr", "cholesky", "svd"))
def test_prices_are_those_of_jax(name: str) -> None:
    fun, x = FUNCTIONS[name]
    device = ipu.IPUModel(tiles_per_ipu=16)
    plain = ipu.jit(fun, device=device).profile(x).cycles
    exported = ipu.jit(export.export(jax.jit(fun))(x).call, device=device).profile(x).cycles
    assert exported <= 1.1 * plain


def test_polymorphic_batch() -> None:
    (batch,) = export.symbolic_shape("batch")
    fun = jax.jit(lambda x: jnp.linalg.solve(x, x + 1))
    call = export.export(fun)(jax.ShapeDtypeStruct((batch, 4, 4), np.float32)).call
    jaxpr = inline(jax.make_jaxpr(call)(MANY))
    assert {"lu", "triangular_solve"} <= set(primitive_names(jaxpr.jaxpr))
    np.testing.assert_allclose(jaxpr_as_fun(jaxpr)(MANY)[0], fun(MANY), rtol=1e-4, atol=1e-5)


def test_calls_that_jax_does_not_make_stay_calls() -> None:
    def by_rows(x: Any) -> Any:
        shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), np.int32))
        return jax.ffi.ffi_call("lapack_spotrf_ffi", shapes)(positive(x), uplo=np.uint8(ord("L")))

    call = export.export(jax.jit(by_rows), disabled_checks=UNCHECKED)
    jaxpr = inline(jax.make_jaxpr(call(ONE).call)(ONE))
    assert "cholesky" not in set(primitive_names(jaxpr.jaxpr))
    for actual, expected in zip(jaxpr_as_fun(jaxpr)(ONE), jax.jit(by_rows)(ONE), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_failures_are_nan() -> None:
    def fun(x: Any) -> Any:
        return jnp.linalg.cholesky(x), lax.linalg.eigh(x)[1]

    x = np.stack([-np.eye(3), np.eye(3)]).astype(np.float32)
    jaxpr = inline(jax.make_jaxpr(export.export(jax.jit(fun))(x).call)(x))
    for actual, expected in zip(jaxpr_as_fun(jaxpr)(x), fun(x), strict=True):
        np.testing.assert_array_equal(actual, expected)
