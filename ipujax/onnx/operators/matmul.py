"""Products of matrices and tensors, and determinants."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.registry import operator


@operator("MatMul")
def matmul(a: Value, b: Value) -> Array:
    return jnp.matmul(a, b)


@operator("Gemm")
def gemm(
    a: Value,
    b: Value,
    c: Optional = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    """α A B + β C, either matrix transposed or not; scales of one are no operations."""
    for matrix, name in ((a, "A"), (b, "B")):
        if np.ndim(matrix) != 2:
            raise OutsideError(f"{name} is no matrix", expected="2 dimensions", got=list(np.shape(matrix)))
    product = jnp.matmul(jnp.transpose(a) if transA else a, jnp.transpose(b) if transB else b)
    scaled = _scaled(product, alpha)
    if c is None:
        return scaled
    addend = jnp.broadcast_to(c, product.shape) if np.ndim(c) > 2 else jnp.asarray(c)
    return scaled + _scaled(addend, beta)


def _scaled(x: Array, factor: float) -> Array:
    return x if factor == 1 else (factor * x).astype(x.dtype)


@operator("Einsum")
def einstein_sum(*inputs: Value, equation: str) -> Array:
    return jnp.einsum(equation.replace(" ", ""), *map(jnp.asarray, inputs))


@operator("Det")
def determinant(x: Value) -> Array:
    return jnp.linalg.det(x)
