"""popsparse.static_ and popsparse.dynamic: products of Poplar programs, by engine and tile interpreter."""

from __future__ import annotations

import numpy as np
import pytest

import ipujax as ipu
from ipujax import poplar, popsparse
from ipujax.poplar.program import Sequence
from ipujax.popsparse import COOMatrix, CSRMatrix
from tests.ipujax.poplar.engine_helpers import both, new_graph

RANDOM = np.random.default_rng(0)
BLOCKS = RANDOM.normal(size=(3, 4, 4)).astype(np.float32)
X = RANDOM.normal(size=(1, 12, 2)).astype(np.float32)
COO = COOMatrix(8, 12, BLOCKS, (4, 0, 8), (0, 4, 4), (4, 4))
CSR = CSRMatrix(8, 12, BLOCKS, (4, 0, 8), (0, 16, 48), (4, 4))
DENSE = np.zeros((8, 12), np.float32)
DENSE[:4, 4:8], DENSE[4:, :4], DENSE[4:, 8:] = BLOCKS
EXPECTED = DENSE @ X[0]


def test_storage_formats_have_one_pattern():
    assert COO.pattern() == CSR.pattern()
    for wrong in (
        COOMatrix(8, 12, BLOCKS, (3, 0, 8), (0, 4, 4), (4, 4)),
        CSRMatrix(8, 12, BLOCKS, (4, 0), (0, 16), (4, 4)),
        CSRMatrix(8, 12, BLOCKS, (4, 0, 8), (16, 32, 64), (4, 4)),  # the first row does not begin at 0
        CSRMatrix(8, 12, BLOCKS, (4, 0, 8), (0, 17, 48), (4, 4)),
        CSRMatrix(4, 4, BLOCKS, (0, 1, 2), (0, 2, 1, 3, 3)),
        CSRMatrix(0, 4, BLOCKS, (), (0,)),
        CSRMatrix(4, 4, BLOCKS, (), ()),
        COOMatrix(8, 12, BLOCKS, (4.5, 0, 8), (0, 4, 4), (4, 4)),
        COOMatrix(8, 12, BLOCKS, (4, 0, 8), (0.5, 4, 4), (4, 4)),
    ):
        with pytest.raises(ipu.ArgumentError):
            wrong.pattern()
    with pytest.raises(ipu.ArgumentError, match="nz_values"):
        COOMatrix(8, 12, BLOCKS[:2], (4, 0, 8), (0, 4, 4), (4, 4)).blocks()


def test_static_product():
    graph = new_graph()
    prog = Sequence()
    popsparse.add_codelets(graph)
    params = popsparse.static_.MatMulParams.create_for_sparse_dense(1, 8, 12, 2)
    lhs = popsparse.static_.create_sparse_dense_mat_mul_lhs(graph, poplar.FLOAT, params, CSR)
    rhs = popsparse.static_.create_sparse_dense_mat_mul_rhs(graph, poplar.FLOAT, params, CSR)
    data = popsparse.static_.Partitioner(params, poplar.FLOAT).create_sparsity_data_impl(CSR)
    graph.set_initial_value(lhs.get_nz_values_tensor(), data.nz_values)
    graph.set_initial_value(rhs, X)
    out = popsparse.static_.sparse_dense_mat_mul(graph, lhs, rhs, prog)
    np.testing.assert_allclose(both(graph, prog, {"out": out})["out"], EXPECTED[None], rtol=1e-5, atol=1e-5)


def test_dynamic_product_and_its_transpose():
    graph = new_graph()
    prog = Sequence()
    dynamic = popsparse.dynamic
    sparsity = dynamic.SparsityParams("Block", "Unstructured", (4, 4))
    params = dynamic.MatMulParams.create_with_nz_ratio(sparsity, 0.5, 1, 8, 12, 2)
    lhs = dynamic.create_sparse_dense_mat_mul_lhs(graph, poplar.FLOAT, params)
    rhs = dynamic.create_sparse_dense_mat_mul_rhs(graph, poplar.FLOAT, params)
    data = dynamic.Partitioner(params, poplar.FLOAT, graph.target).create_sparsity_data_impl(COO)
    graph.set_initial_value(lhs.get_nz_values_tensor(), data.nz_values)
    graph.set_initial_value(lhs.get_meta_info_tensor(), data.meta_info)
    graph.set_initial_value(rhs, X)
    out = dynamic.sparse_dense_mat_mul(graph, lhs, rhs, prog)
    back = dynamic.sparse_dense_mat_mul(graph, lhs, out, prog, transpose_lhs=True)
    actual = both(graph, prog, {"out": out, "back": back})
    np.testing.assert_allclose(actual["out"], EXPECTED[None], rtol=1e-5, atol=1e-5)
    right = np.asarray(COO.pattern().dense(BLOCKS)).T @ EXPECTED
    np.testing.assert_allclose(actual["back"], right[None], rtol=1e-4, atol=1e-4)
    with pytest.raises(ipu.ArgumentError, match="rhs"):
        dynamic.sparse_dense_mat_mul(graph, lhs, out, prog)
