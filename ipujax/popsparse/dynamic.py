"""Products of a graph with matrices whose pattern the host writes, by PopLibs' names: `popsparse::dynamic`.

    sparsity = dynamic.SparsityParams("Block", "Unstructured", (16, 16))
    params = dynamic.MatMulParams.create_with_nz_ratio(sparsity, 0.1, 1, m, k, n)
    lhs = dynamic.create_sparse_dense_mat_mul_lhs(graph, poplar.HALF, params)
    out = dynamic.sparse_dense_mat_mul(graph, lhs, rhs, prog)
    data = dynamic.Partitioner(params, poplar.HALF, graph.target).create_sparsity_data_impl(matrix)

Source: popsparse `MatMul.hpp`, `MatMulParams.hpp`, `SparsityParams.hpp`. Limits: one group; square blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import jax
import numpy as np

from ipujax.poplar.library import add, check_arguments
from ipujax.popsparse.block_pattern import COOMatrix, CSRMatrix, SparseTensor, SparsityDataImpl, linear_variable
from ipujax.popsparse.dynamic_plan import DynamicPlan, SparseBlocks
from ipujax.popsparse.dynamic_product import dynamic_matmul, dynamic_transposed_matmul
from ipujax.runtime.errors import ArgumentValueError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True)
class SparsityParams:
    """Elements or blocks of a size, anywhere."""

    type: Literal["Element", "Block"] = "Element"
    structure: Literal["Unstructured"] = "Unstructured"
    block_dimensions: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class MatMulParams:
    """Sizes of a product [groups, m, k] · [groups, k, n], and the most values of the sparse operand."""

    sparsity_params: SparsityParams
    num_non_zero_values: int
    groups: int
    m: int
    k: int
    n: int

    @classmethod
    def create_with_nz_ratio(
        cls, sparsity_params: SparsityParams, nz_ratio: float, groups: int, m: int, k: int, n: int
    ) -> MatMulParams:
        """Sizes, with the most values as a share of the matrix."""
        return cls.create_with_num_non_zero_values(sparsity_params, ceil(nz_ratio * m * k), groups, m, k, n)

    @classmethod
    def create_with_num_non_zero_values(
        cls, sparsity_params: SparsityParams, num_non_zero_elems: int, groups: int, m: int, k: int, n: int
    ) -> MatMulParams:
        """Return the parameters of a product of a pattern with at most `num_non_zero_elems` values."""
        high, wide = sparsity_params.block_dimensions
        if groups != 1 or high != wide:
            got = f"{groups} groups, blocks of {high} x {wide}"
            raise ArgumentValueError("MatMulParams", expected="one group, square blocks", got=got)
        return cls(sparsity_params, num_non_zero_elems, groups, m, k, n)

    def plan(self, dtype: Any, tiles: int) -> DynamicPlan:
        """Return the buckets of such a product on `tiles` tiles."""
        block = self.sparsity_params.block_dimensions[0]
        return DynamicPlan(
            (self.m, self.k), block, ceil(self.num_non_zero_values / block**2), self.n, dtype, buckets=tiles
        )


class Partitioner:
    """Puts matrices into the buckets of the device."""

    def __init__(self, params: MatMulParams, dtype: Any, target: Any) -> None:
        self.plan = params.plan(dtype, target.tiles_per_ipu)

    def create_sparsity_data_impl(self, matrix: COOMatrix | CSRMatrix) -> SparsityDataImpl:
        """Return the values and the meta-information of a matrix."""
        blocks = self.plan.encode(matrix.pattern(), matrix.blocks())
        meta = [np.asarray(array).ravel() for array in (blocks.row, blocks.slot, blocks.column_slot)]
        return SparsityDataImpl(np.asarray(blocks.values), np.concatenate(meta))


def create_sparse_dense_mat_mul_lhs(graph: Graph, dtype: Any, params: MatMulParams, name: str = "lhs") -> SparseTensor:
    """Create the sparse operand; the host writes the values and meta-information that `Partitioner` returns."""
    plan = params.plan(dtype, graph.target.tiles_per_ipu)
    cells = plan.grid.cells
    values = linear_variable(graph, (cells * plan.size, plan.block, plan.block), plan.dtype, f"{name}/nzValues")
    numbers = cells * plan.size * (1 + 2 * (plan.steps + 1))
    return SparseTensor(values, linear_variable(graph, (numbers,), plan.number, f"{name}/metaInfo"), (params, plan))


def create_sparse_dense_mat_mul_rhs(graph: Graph, dtype: Any, params: MatMulParams, name: str = "rhs") -> Tensor:
    """Create the dense operand, [groups, k, n]."""
    return linear_variable(graph, (params.groups, params.k, params.n), dtype, name)


def sparse_dense_mat_mul(
    graph: Graph,
    lhs: SparseTensor,
    rhs: Tensor,
    prog: Program,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    name: str = "matMul",
) -> Tensor:
    """Multiply the sparse operand, or its transpose, by the dense one: [groups, m, n], or [groups, k, n]."""
    params, plan = lhs.plan
    rhs = rhs.transpose((0, 2, 1)) if transpose_rhs else rhs
    expected = params.groups, params.m if transpose_lhs else params.k, params.n
    if rhs.shape != expected:
        raise ArgumentValueError(f"{name}: rhs", expected=expected, got=rhs.shape)
    cells = plan.grid.cells
    steps = plan.steps + 1
    meta_info = lhs.meta_info_tensor
    assert meta_info is not None

    def product(values: jax.Array, meta: jax.Array, x: jax.Array) -> jax.Array:
        row = meta[: cells * plan.size]
        slots = meta[cells * plan.size :].reshape(2, steps, cells, plan.size)
        sparse = SparseBlocks(values, row.reshape(cells, plan.size), slots[0], slots[1], plan)
        multiply = dynamic_transposed_matmul if transpose_lhs else dynamic_matmul
        return multiply(plan, sparse, x[0])[None]

    result: Tensor = add(graph, product, [lhs.nz_values_tensor, meta_info, rhs], prog, name)
    return result


check_arguments(globals())
