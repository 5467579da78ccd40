"""Sparse matrices on the host, and sparse tensors of a graph, by PopLibs' names.

Indices are those of the first element of a block, in elements. Source: popsparse `SparseStorageFormats.hpp`,
`SparseTensor.hpp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.lowering.emit import placing
from ipujax.lowering.layout import map_linearly
from ipujax.popsparse.block_pattern import BlockPattern
from ipujax.runtime.errors import ArgumentValueError
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True, eq=False)
class COOMatrix:
    """A matrix by coordinates: blocks of values, and the column and row of each."""

    num_rows: int
    num_columns: int
    nz_values: Any
    column_indices: Any
    row_indices: Any
    block_dimensions: tuple[int, int] = (1, 1)

    def pattern(self) -> BlockPattern:
        """Which blocks have values."""
        return _pattern(self, np.asarray(self.row_indices, int), np.asarray(self.column_indices, int))

    def blocks(self) -> np.ndarray:
        """The values, [blocks, block, block]."""
        return np.asarray(self.nz_values).reshape(-1, *self.block_dimensions)


@dataclass(frozen=True, eq=False)
class CSRMatrix:
    """A matrix by rows: blocks of values, the column of each, and for each row of blocks its first value."""

    num_rows: int
    num_columns: int
    nz_values: Any
    column_indices: Any
    row_indices: Any
    block_dimensions: tuple[int, int] = (1, 1)

    def pattern(self) -> BlockPattern:
        """Which blocks have values."""
        block = self.block_dimensions[0]
        lengths = np.diff(np.asarray(self.row_indices, int)) // (block * self.block_dimensions[1])
        if len(lengths) * block != self.num_rows or lengths.sum() != len(self.column_indices):
            expected = f"{self.num_rows // block + 1} starts of rows, for {len(self.column_indices)} blocks"
            raise ArgumentValueError("CSRMatrix: row_indices", expected=expected, got=list(self.row_indices)[:8])
        rows = np.repeat(np.arange(len(lengths)) * block, lengths)
        return _pattern(self, rows, np.asarray(self.column_indices, int))

    def blocks(self) -> np.ndarray:
        """The values, [blocks, block, block]."""
        return np.asarray(self.nz_values).reshape(-1, *self.block_dimensions)


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """The sparse operand of a product: values, meta-information of a dynamic pattern, and what it was created for."""

    nz_values_tensor: Tensor
    meta_info_tensor: Tensor | None
    plan: Any

    def get_nz_values_tensor(self) -> Tensor:
        """The values."""
        return self.nz_values_tensor

    def get_meta_info_tensor(self) -> Tensor | None:
        """The meta-information; None for a static pattern."""
        return self.meta_info_tensor


@dataclass(frozen=True, eq=False)
class SparsityDataImpl:
    """What the host writes to a sparse tensor."""

    nz_values: np.ndarray
    meta_info: np.ndarray | None = None


def linear_variable(graph: Graph, shape: tuple[int, ...], dtype: Any, name: str) -> Tensor:
    """Add an operand that is spread evenly over the tiles."""
    # That of Poplar's graphs has the dtype first.
    tensor = Graph.add_variable(graph, shape, np.dtype(dtype), name)
    with placing(graph):
        map_linearly(graph, tensor)
    return tensor


def _pattern(matrix: COOMatrix | CSRMatrix, rows: np.ndarray, columns: np.ndarray) -> BlockPattern:
    high, wide = matrix.block_dimensions
    if high != wide:
        raise ArgumentValueError("block_dimensions", expected="square blocks", got=matrix.block_dimensions)
    if (rows % high).any() or (columns % high).any():
        raise ArgumentValueError("indices of blocks", expected=f"multiples of the block, {high}", got="others")
    shape = matrix.num_rows, matrix.num_columns
    return BlockPattern(shape, high, tuple((rows // high).tolist()), tuple((columns // high).tolist()))
