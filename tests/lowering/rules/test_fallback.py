"""Primitives without a rule: numbers of JAX; a single problem on one tile, named; batches spread over tiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import linalg

import ipujax as ipu
from ipujax.lowering.popops import OP_COSTS
from ipujax.lowering.rules import RULES
from ipujax.runtime.graph.vertex_group import NO_TILE
from tests.lowering.helpers import check, lowered, small_target
from tests.lowering.rules.op_case import OpCase
from tests.lowering.rules.op_rows_fallback import fallback_rows

A = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)


@pytest.mark.parametrize("case", fallback_rows(), ids=lambda case: case.primitive)
def test_runs_on_one_tile(case: OpCase) -> None:
    arguments = case.arguments()
    assert case.primitive in set(lowered(case.fun, arguments, small_target(7)).graph.notes.fallbacks.values())
    check(case.fun, *arguments, tiles=(7,), rtol=case.rtol, atol=case.atol)


BATCH = np.random.default_rng(1).normal(size=(3, 2, 4, 4)).astype(np.float32)
SYMMETRIC = BATCH @ np.swapaxes(BATCH, -1, -2) + 4 * np.eye(4, dtype=np.float32)
VECTORS = BATCH[..., 0]
PIVOTS = np.full((3, 2, 4), 3, np.int32)
# Functions of six problems, along two batch dimensions.
BATCHED: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "cholesky": (lambda a: linalg.cholesky(a, symmetrize_input=False), (SYMMETRIC,)),
    "eig": (lambda a: linalg.eig(a)[0], (BATCH,)),
    "eigh": (lambda a: linalg.eigh(a)[1], (SYMMETRIC,)),
    "hessenberg": (linalg.hessenberg, (BATCH,)),
    "householder_product": (linalg.householder_product, (BATCH, VECTORS)),
    "lu": (linalg.lu, (BATCH,)),
    "lu_pivots_to_permutation": (lambda p: linalg.lu_pivots_to_permutation(p, 4), (PIVOTS,)),
    "ormqr": (linalg.ormqr, (BATCH, VECTORS, BATCH[..., :1])),
    "qr": (linalg.qr, (BATCH[..., :3],)),
    "schur": (linalg.schur, (BATCH,)),
    "svd": (lambda a: linalg.svd(a, compute_uv=False), (BATCH,)),
    "symmetric_product": (linalg.symmetric_product, (BATCH, SYMMETRIC)),
    "triangular_solve": (lambda a, b: linalg.triangular_solve(a, b, left_side=True), (SYMMETRIC, BATCH[..., :1])),
    "tridiagonal": (linalg.tridiagonal, (SYMMETRIC,)),
    "tridiagonal_solve": (lambda d, b: linalg.tridiagonal_solve(0 * d, 3 + d * d, 0 * d, b), (VECTORS, BATCH[..., :1])),
    "fft": (jnp.fft.ifft2, (BATCH,)),
}


def tiles_of(fun: Callable[..., Any], arguments: Sequence[Any]) -> int:
    """Number of tiles with a vertex of the primitive, which is no fallback."""
    graph = lowered(fun, arguments, small_target(16)).graph
    assert not graph.notes.fallbacks
    (group,) = [g for groups in graph.groups.values() for g in groups if "Fallback" in g.codelet.name]
    assert {axis.kind for axis in group.axes} == {"map"}
    return len(np.unique(group.tile))


@pytest.mark.parametrize("primitive", BATCHED)
def test_spreads_a_batch(primitive: str) -> None:
    fun, arguments = BATCHED[primitive]
    assert tiles_of(fun, arguments) == 6
    check(fun, *arguments, tiles=(7,), rtol=1e-4, atol=1e-4)


def test_spreads_every_primitive_with_batches() -> None:
    """JAX has no batches of `cholesky_update`."""
    assert {case.primitive for case in fallback_rows()} - set(BATCHED) == {"cholesky_update"}


@pytest.mark.parametrize("left_side", [True, False])
def test_spreads_right_hand_sides(left_side: bool) -> None:
    a = SYMMETRIC[0, 0]
    b = BATCH.reshape(24, 4)
    columns = b.T if left_side else b
    tau = VECTORS[0, 0]
    for fun, arguments in (
        (lambda a, b: linalg.triangular_solve(a, b, left_side=left_side), (a, columns)),
        (lambda a, b: linalg.ormqr(a, tau, b, left=left_side), (a, columns)),
        (lambda d, b: linalg.tridiagonal_solve(0 * d, 3 + d * d, 0 * d, b), (tau, b.T)),
    ):
        assert tiles_of(fun, arguments) > 8
        check(fun, *arguments, tiles=(7,), rtol=1e-4, atol=1e-4)


def test_shapes_of_batches() -> None:
    """Sizes of 1 and 0, more problems than tiles, and dimensions of the problems that equal those of the batch."""
    for shape in [(1, 1, 4, 4), (0, 4, 4), (23, 1, 1), (4, 4, 4, 4), (5, 0, 0)]:
        check(lambda a: linalg.qr(a), np.ones(shape, np.float32), tiles=(7,), rtol=1e-4, atol=1e-4)
    check(lambda a: linalg.qr(a, full_matrices=True)[0], np.zeros((3, 4, 0), np.float32), tiles=(7,))


@pytest.mark.parametrize(
    ("fun", "shape", "max_cycles"),
    [
        (jnp.fft.fft, (256, 128), 20_000),  # 4.6 million on one tile
        (lambda b: linalg.triangular_solve(jnp.eye(64), b, left_side=True), (64, 200), 20_000),  # 10 million
        (jnp.linalg.cholesky, (32, 16, 16), 10_000),  # 175,000
    ],
)
def test_costs_one_problem_a_tile(fun: Callable[..., Any], shape: tuple[int, ...], max_cycles: int) -> None:
    profile = ipu.jit(fun).lower(jax.ShapeDtypeStruct(shape, np.float32)).compile().profile
    assert profile.phase_cycles["compute"] < max_cycles


def test_large_problems_borrow_memory() -> None:
    device = ipu.IPUModel(tiles_per_ipu=16)
    compiled = (
        ipu.jit(jnp.linalg.cholesky, device=device).lower(jax.ShapeDtypeStruct((2, 220, 220), np.float32)).compile()
    )
    (fallback,) = compiled.profile.fallbacks
    assert fallback.operation == "cholesky" and fallback.borrowed_tiles > 1


def test_several_results_of_several_dtypes() -> None:
    check(lambda a: lax.linalg.lu(a), A, rtol=1e-5, tiles=(1, 7))


def test_complex_numbers() -> None:
    check(lambda a: jnp.fft.fft(a.reshape(-1)[:24]), A, rtol=1e-5, atol=1e-5)


def test_parameters_with_a_jaxpr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "reduce")

    def fun(a: jax.Array) -> jax.Array:
        return lax.reduce(a, np.float32(0), lambda x, y: x * 0.5 + y, (1,))

    check(fun, A, rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 5, 1)])
def test_sizes(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "erf_inv")
    monkeypatch.delitem(OP_COSTS, "erf_inv")
    check(lambda a: lax.erf_inv(a), np.full(shape, 0.3, np.float32), tiles=(1, 4), rtol=1e-6)


def test_operand_without_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "reduce_sum", raising=False)
    check(lambda a: a.sum(0), np.zeros((0, 3), np.float32), tiles=(1, 4))


def test_names_logs_once_and_spreads_fallbacks(caplog: pytest.LogCaptureFixture) -> None:
    def fun(a: jax.Array) -> list[jax.Array]:
        return [jnp.fft.fft(a[n]) for n in range(4)]

    with caplog.at_level(logging.INFO, "ipujax"):
        program = lowered(fun, (A,), small_target(16))
    assert sorted(program.graph.notes.fallbacks.values()) == ["fft"] * 4
    assert [record.getMessage().split()[0] for record in caplog.records if "fft" in record.getMessage()] == ["fft"]
    groups = [program.graph.groups[compute_set] for compute_set in program.graph.notes.fallbacks]
    tiles = {int(group.tile.max()) for (group,) in groups}
    assert len(tiles) == 4 and NO_TILE not in tiles


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random_split", "random_bits", "random_fold_in"):
        monkeypatch.delitem(RULES, name, raising=False)
    check(
        lambda k: jax.random.bits(jax.random.fold_in(jax.random.split(k)[1], 3), (3, 2)), jax.random.key(4), tiles=(4,)
    )
