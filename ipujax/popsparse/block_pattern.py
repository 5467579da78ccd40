"""Patterns of block-sparse matrices: the blocks of a matrix that have values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError

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
        m, k = _numbers(self.shape, "shape of a pattern")
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
        if dense.shape != self.shape:
            raise ArgumentValueError("a dense matrix of a pattern", expected=self.shape, got=dense.shape)
        tiles = dense.reshape(m // b, b, k // b, b).swapaxes(1, 2)
        return tiles[np.array(self.rows, int), np.array(self.columns, int)]

    def dense(self, blocks: jax.Array) -> jax.Array:
        """The matrix [m, k] of blocks [blocks, block, block]; zero elsewhere."""
        m, k = self.shape
        b = self.block
        tiles = jnp.zeros((m // b, k // b, b, b), blocks.dtype)
        tiles = tiles.at[np.array(self.rows, int), np.array(self.columns, int)].set(blocks)
        return tiles.swapaxes(1, 2).reshape(m, k)


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
