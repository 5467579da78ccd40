"""Patterns of block-sparse matrices: on the host, and as sparse tensors of a graph by PopLibs' names.

Indices are those of the first element of a block, in elements. Source: popsparse `SparseStorageFormats.hpp`,
`SparseTensor.hpp`.
A pattern has the blocks of a matrix that have values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.emit import placing
from ipujax.lowering.layout import map_linearly
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Tensor

BLOCK_SIZES = (1, 4, 8, 16)  # rows and columns of a block: those of PopLibs' codelets


@dataclass(frozen=True, slots=True)
class BlockPattern:
    """Numbers of the blocks of a matrix that have values, in the order of the values.

    Args:
        shape: rows and columns of the matrix.
        block: rows and columns of a block, one of `BLOCK_SIZES`.
        rows: for each block with values, the number of its row of blocks.
        columns: for each of them, the number of its column of blocks.

    Raises:
        ArgumentValueError: a block size that does not divide the shape; a block outside of the matrix or given
            twice.
        ArgumentTypeError: numbers that are traced, or not whole.
    """

    shape: tuple[int, int]
    block: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = _numbers(self.shape, "shape of a pattern")
        if len(sizes) != 2:
            raise ArgumentValueError("shape of a pattern", expected="rows and columns", got=sizes)
        m, k = sizes
        if self.block not in BLOCK_SIZES:
            raise ArgumentValueError("block of a pattern", expected=f"one of {BLOCK_SIZES}", got=self.block)
        if m % self.block or k % self.block or min(m, k) < 1:
            expected = f"multiples of the block, {self.block}"
            raise ArgumentValueError("shape of a pattern", expected=expected, got=f"{m}, {k}")
        rows = _numbers(self.rows, "rows of a pattern")
        columns = _numbers(self.columns, "columns of a pattern")
        if len(rows) != len(columns):
            raise ArgumentValueError(
                "rows and columns of a pattern", expected="equally many", got=(len(rows), len(columns))
            )
        for name, numbers, count in (("rows", rows, m // self.block), ("columns", columns, k // self.block)):
            if numbers and not 0 <= min(numbers) <= max(numbers) < count:
                got = f"{min(numbers)} … {max(numbers)}"
                raise ArgumentValueError(f"{name} of a pattern", expected=f"0 … {count - 1}", got=got)
        if len(set(zip(rows, columns, strict=True))) < len(rows):
            raise ArgumentValueError("rows and columns of a pattern have a block twice", expected="each block once")
        for name, value in (("shape", (m, k)), ("rows", rows), ("columns", columns)):
            object.__setattr__(self, name, value)

    @classmethod
    def of_mask(cls, mask: Any, block: int) -> BlockPattern:
        """The blocks that have a nonzero element of a mask [m, k], in row-major order."""
        _refuse_traced(mask, "mask of a pattern")
        elements = np.asarray(mask)
        if elements.ndim != 2 or block not in BLOCK_SIZES or any(n % block for n in elements.shape):
            expected = f"two dimensions, multiples of a block of {BLOCK_SIZES}"
            raise ArgumentValueError("mask of a pattern", expected=expected, got=f"{elements.shape}, block {block}")
        m, k = elements.shape
        used = elements.astype(bool).reshape(m // block, block, k // block, block).any((1, 3))
        rows, columns = np.nonzero(used)
        return cls((m, k), block, tuple(rows.tolist()), tuple(columns.tolist()))

    @property
    def num_blocks(self) -> int:
        """Blocks with values."""
        return len(self.rows)

    @property
    def density(self) -> float:
        """Share of the matrix that has values."""
        return self.num_blocks * self.block**2 / (self.shape[0] * self.shape[1])

    def transposed(self) -> BlockPattern:
        """The pattern of the transposed matrix, its blocks in the same order."""
        return BlockPattern(self.shape[::-1], self.block, self.columns, self.rows)

    def blocks_of(self, dense: jax.Array) -> jax.Array:
        """The values of a dense matrix [m, k] in the blocks of the pattern, [blocks, block, block]."""
        m, k = self.shape
        b = self.block
        _check_shape("a dense matrix of a pattern", dense, self.shape)
        tiles = dense.reshape(m // b, b, k // b, b).swapaxes(1, 2)
        return tiles[np.array(self.rows, int), np.array(self.columns, int)]

    def dense(self, blocks: jax.Array) -> jax.Array:
        """The matrix [m, k] of blocks [blocks, block, block]; zero elsewhere."""
        m, k = self.shape
        b = self.block
        _check_shape("blocks of a pattern", blocks, (self.num_blocks, b, b))
        tiles = jnp.zeros((m // b, k // b, b, b), blocks.dtype)
        tiles = tiles.at[np.array(self.rows, int), np.array(self.columns, int)].set(blocks)
        return tiles.swapaxes(1, 2).reshape(m, k)


def _check_shape(label: str, array: Any, expected: tuple[int, ...]) -> None:
    if (shape := getattr(array, "shape", type(array).__name__)) != expected:
        raise ArgumentValueError(label, expected=f"an array {expected}", got=shape)


def _numbers(values: Sequence[Any], label: str) -> tuple[int, ...]:
    _refuse_traced(values, label)
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ArgumentTypeError(label, expected="whole numbers", got=repr(values))
    return tuple(int(n) for n in array.tolist())


def _refuse_traced(values: Any, label: str) -> None:
    several = values if isinstance(values, tuple | list) else [values]
    if any(isinstance(x, jax.core.Tracer) for x in several):
        raise ArgumentTypeError(
            f"{label} cannot be traced", expected="numbers that are known when the function is traced"
        )


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
        values = np.asarray(self.nz_values)
        count = len(self.column_indices)
        if values.size != count * prod(self.block_dimensions):
            expected = f"{count} blocks of {self.block_dimensions}"
            raise ArgumentValueError("nz_values", expected=expected, got=values.shape)
        return values.reshape(-1, *self.block_dimensions)

    def _pattern_at(self, rows: np.ndarray) -> BlockPattern:
        """Return the pattern of blocks that begin in `rows`, int[blocks], and the columns of the matrix."""
        block, width = self.block_dimensions
        if block != width:
            raise ArgumentValueError("block_dimensions", expected="square blocks", got=self.block_dimensions)
        columns = np.array(_numbers(self.column_indices, "column_indices"), int)
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
        return self._pattern_at(np.array(_numbers(self.row_indices, "row_indices"), int))


@dataclass(frozen=True, eq=False)
class CSRMatrix(_BlockMatrix):
    """A matrix by rows: blocks of values, the column of each, and for each row of blocks its first value."""

    def pattern(self) -> BlockPattern:
        """Return the positions of the blocks."""
        block = self.block_dimensions[0]
        starts, cut_off = np.divmod(
            np.array(_numbers(self.row_indices, "row_indices"), int), block * self.block_dimensions[1]
        )
        lengths = np.diff(starts)
        ends = (*starts[:1], *starts[-1:])
        if len(lengths) * block != self.num_rows or ends != (0, len(self.column_indices)) or (lengths < 0).any():
            expected = f"{self.num_rows // block + 1} starts of rows from 0, for {len(self.column_indices)} blocks"
            raise ArgumentValueError("CSRMatrix: row_indices", expected=expected, got=list(self.row_indices)[:8])
        if cut_off.any():
            expected = f"multiples of the elements of a block, {block * self.block_dimensions[1]}"
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
