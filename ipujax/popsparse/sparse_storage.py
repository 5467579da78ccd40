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
class _BlockMatrix:
    """Fields that both storage formats have, in PopLibs' order."""

    num_rows: int
    num_columns: int
    nz_values: Any
    column_indices: Any
    row_indices: Any
    block_dimensions: tuple[int, int] = (1, 1)

    def blocks(self) -> np.ndarray:
        """Return the values, [blocks, block, block]."""
        return np.asarray(self.nz_values).reshape(-1, *self.block_dimensions)

    def _pattern_at(self, rows: np.ndarray) -> BlockPattern:
        """Return the pattern of blocks that begin in `rows`, int[blocks], and the columns of the matrix."""
        block, width = self.block_dimensions
        if block != width:
            raise ArgumentValueError("block_dimensions", expected="square blocks", got=self.block_dimensions)
        columns = np.asarray(self.column_indices, int)
        outside_grid = [*rows[rows % block != 0], *columns[columns % block != 0]]
        if outside_grid:
            got = ", ".join(map(str, outside_grid[:8]))
            raise ArgumentValueError("indices of blocks", expected=f"multiples of the block size {block}", got=got)
        shape = self.num_rows, self.num_columns
        return BlockPattern(shape, block, tuple((rows // block).tolist()), tuple((columns // block).tolist()))


@dataclass(frozen=True, eq=False)
class COOMatrix(_BlockMatrix):
    """A matrix by coordinates: blocks of values, and the column and row of each."""

    def pattern(self) -> BlockPattern:
        """Return the positions of the blocks."""
        return self._pattern_at(np.asarray(self.row_indices, int))


@dataclass(frozen=True, eq=False)
class CSRMatrix(_BlockMatrix):
    """A matrix by rows: blocks of values, the column of each, and for each row of blocks its first value."""

    def pattern(self) -> BlockPattern:
        """Return the positions of the blocks."""
        block = self.block_dimensions[0]
        lengths = np.diff(np.asarray(self.row_indices, int)) // (block * self.block_dimensions[1])
        if len(lengths) * block != self.num_rows or lengths.sum() != len(self.column_indices):
            expected = f"{self.num_rows // block + 1} starts of rows, for {len(self.column_indices)} blocks"
            raise ArgumentValueError("CSRMatrix: row_indices", expected=expected, got=list(self.row_indices)[:8])
        rows = np.repeat(np.arange(len(lengths)) * block, lengths)
        return self._pattern_at(rows)


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """The sparse operand of a product: its values, the meta-information of a dynamic pattern, and its plan."""

    nz_values_tensor: Tensor
    meta_info_tensor: Tensor | None
    plan: Any

    def get_nz_values_tensor(self) -> Tensor:
        """Return the values."""
        return self.nz_values_tensor

    def get_meta_info_tensor(self) -> Tensor | None:
        """Return the meta-information; None for a static pattern."""
        return self.meta_info_tensor


@dataclass(frozen=True, eq=False)
class SparsityDataImpl:
    """Values and meta-information that the host writes to a sparse tensor."""

    nz_values: np.ndarray
    meta_info: np.ndarray | None = None


def linear_variable(graph: Graph, shape: tuple[int, ...], dtype: Any, name: str) -> Tensor:
    """Add an operand that is spread evenly over the tiles."""
    # Called on the base class: `add_variable` of Poplar's graphs has the dtype first.
    tensor = Graph.add_variable(graph, shape, np.dtype(dtype), name)
    with placing(graph):
        map_linearly(graph, tensor)
    return tensor
