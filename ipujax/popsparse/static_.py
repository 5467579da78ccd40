"""Products of a graph with matrices of a static pattern, by PopLibs' names: `popsparse::static_`.

    params = static_.MatMulParams.create_for_sparse_dense(1, m, k, n)
    lhs = static_.create_sparse_dense_mat_mul_lhs(graph, poplar.HALF, params, matrix)
    out = static_.sparse_dense_mat_mul(graph, lhs, rhs, prog)  # [1, m, k] · [1, k, n]

Source: popsparse `MatMul.hpp`, `MatMulParams.hpp`, `SparsePartitioner.hpp`. Limits: one group, the sparse operand on
the left, which is not transposed; as in PopLibs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipujax.poplar.library import add, check_arguments
from ipujax.popsparse.block_pattern import (
    BlockPattern,
    COOMatrix,
    CSRMatrix,
    SparseTensor,
    SparsityDataImpl,
    linear_variable,
)
from ipujax.popsparse.static_product import static_matmul
from ipujax.runtime.errors import ArgumentValueError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True)
class MatMulParams:
    """Sizes of a product [groups, m, k] · [groups, k, n]."""

    groups: int
    m: int
    k: int
    n: int

    @classmethod
    def create_for_sparse_dense(cls, groups: int, m: int, k: int, n: int) -> MatMulParams:
        """Sizes with the sparse operand on the left."""
        if groups != 1 or min(m, k, n) < 1:
            raise ArgumentValueError("MatMulParams", expected="one group, sizes of at least 1", got=(groups, m, k, n))
        return cls(groups, m, k, n)


class Partitioner:
    """Puts values of matrices of one pattern in the order of the device."""

    def __init__(self, params: MatMulParams, dtype: Any, target: Any = None) -> None:
        self.params = params
        self.dtype = np.dtype(dtype)

    def create_sparsity_data_impl(self, matrix: COOMatrix | CSRMatrix) -> SparsityDataImpl:
        """The values of a matrix."""
        _pattern_for(self.params, matrix)
        return SparsityDataImpl(matrix.blocks().astype(self.dtype))


def create_sparse_dense_mat_mul_lhs(
    graph: Graph, dtype: Any, params: MatMulParams, csr_lhs: COOMatrix | CSRMatrix, name: str = "lhs"
) -> SparseTensor:
    """Create the sparse operand of a pattern; write its values with those of `Partitioner`."""
    pattern = _pattern_for(params, csr_lhs)
    shape = pattern.num_blocks, pattern.block, pattern.block
    return SparseTensor(linear_variable(graph, shape, dtype, name), None, (params, pattern))


def create_sparse_dense_mat_mul_rhs(
    graph: Graph, dtype: Any, params: MatMulParams, csr_lhs: COOMatrix | CSRMatrix, name: str = "rhs"
) -> Tensor:
    """Create the dense operand, [groups, k, n]."""
    _pattern_for(params, csr_lhs)
    return linear_variable(graph, (params.groups, params.k, params.n), dtype, name)


def sparse_dense_mat_mul(
    graph: Graph, lhs: SparseTensor, rhs: Tensor, prog: Program, transpose_rhs: bool = False, name: str = "matMul"
) -> Tensor:
    """Multiply the sparse operand by the dense one: [groups, m, n]."""
    params, pattern = lhs.plan
    rhs = rhs.transpose((0, 2, 1)) if transpose_rhs else rhs
    if rhs.shape != (params.groups, params.k, params.n):
        raise ArgumentValueError(f"{name}: rhs", expected=(params.groups, params.k, params.n), got=rhs.shape)
    tiles = graph.target.tiles_per_ipu

    def product(values: jax.Array, x: jax.Array) -> jax.Array:
        return static_matmul(pattern, values, x[0], buckets=tiles)[None]

    result: Tensor = add(graph, product, [lhs.nz_values_tensor, rhs], prog, name)
    return result


def _pattern_for(params: MatMulParams, matrix: COOMatrix | CSRMatrix) -> BlockPattern:
    pattern = matrix.pattern()
    if pattern.shape != (params.m, params.k):
        raise ArgumentValueError("sparse matrix", expected=(params.m, params.k), got=pattern.shape)
    return pattern


check_arguments(globals())
