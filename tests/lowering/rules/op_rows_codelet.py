"""Rows of the op table for codelets called from JAX code."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import ipujax as ipu
from ipujax.poplar import FLOAT, INT, InOut, Input, Output, Vector, Vertex
from tests.lowering.rules.op_case import MAIN, OpCase, normal


class AxpyVertex(Vertex):
    a: Input[FLOAT]
    x: Input[Vector[FLOAT]]
    out: Output[Vector[FLOAT]]

    def compute(a, x):
        return a * x + 1


class ShiftVertex(Vertex):
    data: InOut[Vector[FLOAT]]
    top: Output[FLOAT]
    by: INT = 2

    def compute(data, by):
        return {"top": jnp.max(data), "data": data + by}


def _axpy_gradient(arrays: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    (a, x) = arrays
    (ct,) = cotangents
    d_a = jnp.sum(ct * x, -1)
    return d_a if a.ndim else jnp.sum(d_a), jnp.broadcast_to(a[..., None], x.shape) * ct


def _axpy(a: Any, x: Any, **options: Any) -> Any:
    return ipu.codelet_call(AxpyVertex, a, x, gradient=_axpy_gradient, **options)


def codelet() -> list[OpCase]:
    """Rows shared and stacked, state, in-place fields, chosen tiles, and batches of calls."""
    name = "codelet_call"
    rows, _ = MAIN
    fused = {"rtol": 1e-6, "atol": 1e-6}  # a product and a sum round once or twice, as XLA likes
    return [
        OpCase(name, "stacked", _axpy, (normal(rows), normal(*MAIN)), grad=True, **fused),
        OpCase(name, "shared scalar", _axpy, (normal(), normal(*MAIN)), grad=True, **fused),
        OpCase(name, "one vertex", _axpy, (normal(), normal(5)), **fused),
        OpCase(name, "on one tile", lambda a, x: _axpy(a, x, tiles=0), (normal(rows), normal(*MAIN)), **fused),
        OpCase(name, "batch", jax.vmap(_axpy, (None, 0)), (normal(3), normal(5, 3, 7)), **fused),
        OpCase(name, "batch of shared", jax.vmap(_axpy, (0, None)), (normal(5), normal(3, 7)), **fused),
        OpCase(name, "in place", lambda x: ipu.codelet_call(ShiftVertex, x, by=3), (normal(*MAIN),)),
    ]
