"""Plan and encoding of a dynamic pattern: buckets of one size for all patterns of at most so many blocks.

The matrix is cut into cells of equal sizes. Each cell has a bucket with room for the blocks of an even pattern, and
for some more (`oversize`). A block whose bucket is full goes to the next bucket with room. A product passes each bucket
on to the cell before, as many times as the plan has propagation steps; in each step a cell multiplies its own blocks,
after the first step at most as many as the fullest cell of a random pattern has beyond its own bucket. Cells are so few
that a random pattern needs no more steps than the plan has.

Input: a `DynamicPlan`, and on the host a pattern and its blocks. Output: `SparseBlocks`, the arguments of a function.
Source: Li et al. 2023, "PopSparse", section 3.3; PopLibs `popsparse/MatMul.hpp` (30 % more room).
Limits: the cost of a product is that of the most blocks in each step, whatever the pattern; a pattern is encoded on the
host; one far less even than a random one needs more propagation steps, or larger buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf, log, prod, sqrt
from numbers import Real
from typing import Any

import jax
import numpy as np

from ipujax.arguments import whole_number
from ipujax.popsparse.block_pattern import BlockPattern
from ipujax.popsparse.cell_grids import (
    MOST_CELLS,
    CellRows,
    CellSizes,
    Grid,
    estimated_cost,
    even_spans,
    number_type,
    possible_column_parts,
    some_counts,
    whole_bucket,
)
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError

# Room of a bucket for more blocks than an even pattern has; PopLibs' `metaInfoBucketOversizeProportion`.
_OVERSIZE = 0.3
_REFUSED_SHARE = 0.01  # assumed: upper bound of the share of random patterns that a plan has no room for


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseBlocks:
    """A block-sparse matrix in the buckets of a plan: a pytree of arrays, the result of `DynamicPlan.encode`.

    Args:
        values: [cells · size, block, block]; zeros where a bucket has room.
        row: [cells, size], the row of blocks of the dense operand that each block is multiplied by, as its place among
            the rows of the cell.
        slot: [steps + 1, cells, size], for each propagation step the row of blocks of the result that each block is
            added to, as its place among the rows of the cell that has the bucket in that step; past the last row for
            blocks of other cells.
        column_slot: `slot` of the transposed product.
        plan: the plan, which is part of the tree's structure.
    """

    values: jax.Array
    row: jax.Array
    slot: jax.Array
    column_slot: jax.Array
    plan: DynamicPlan = field(metadata={"static": True})


@dataclass(frozen=True, slots=True)
class DynamicPlan:
    """Buckets for any pattern of a matrix with at most so many blocks.

    Args:
        shape: rows and columns of the matrix.
        block: rows and columns of a block, one of `BLOCK_SIZES`.
        max_blocks: most blocks with values.
        columns: columns of the dense operand that the plan is best for; others work too, if its parts divide them.
        dtype: float32 or float16.
        propagation_steps: times that buckets are passed on to other cells: more for patterns that are less even.
        oversize: room of a bucket beside that for an even pattern, as a share of it.
        buckets: most cells that the matrix and the columns are cut into, one a tile.

    Raises:
        ArgumentValueError: a block that does not divide the shape, or numbers out of range.
    """

    shape: tuple[int, int]
    block: int
    max_blocks: int
    columns: int
    dtype: Any = np.float32
    propagation_steps: int = 1
    oversize: float = _OVERSIZE
    buckets: int = MOST_CELLS

    def __post_init__(self) -> None:
        pattern = BlockPattern(self.shape, self.block, (), ())
        all_blocks = self.shape[0] // self.block * (self.shape[1] // self.block)
        for name, value, minimum, limit in (
            ("max_blocks", self.max_blocks, 1, all_blocks),
            ("columns", self.columns, 1, inf),
            ("propagation_steps", self.propagation_steps, 0, inf),
            ("buckets", self.buckets, 1, inf),
        ):
            expected = f"a whole number, at least {minimum}" if limit == inf else f"a whole number, {minimum} … {limit}"
            number = whole_number(f"DynamicPlan: {name}", value, minimum, expected)
            if number > limit:
                raise ArgumentValueError(f"DynamicPlan: {name}", expected=expected, got=value)
            object.__setattr__(self, name, number)
        if not (isinstance(self.oversize, Real) and 0 <= self.oversize < inf):
            raise ArgumentValueError("DynamicPlan: oversize", expected="a number, at least 0", got=self.oversize)
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            dtype = None
        if dtype not in (np.float32, np.float16):
            raise ArgumentTypeError("DynamicPlan: dtype", expected="float32 or float16", got=self.dtype)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", pattern.shape)

    @property
    def grid(self) -> Grid:
        """Grid of cells of equal sizes."""
        return _grid(self)

    @property
    def size(self) -> int:
        """Blocks that a bucket has room for."""
        return self._buckets.size

    @property
    def number(self) -> np.dtype[Any]:
        """Dtype of the meta-information."""
        return number_type(self.grid)

    @property
    def steps(self) -> int:
        """Propagation steps: at most one fewer than cells, after which each bucket has passed all cells."""
        return min(self.propagation_steps, self.grid.cells - 1)

    def most_blocks(self, step: int) -> int:
        """Return the most blocks that a cell multiplies in a propagation step; step 0 is that of its own bucket."""
        return self._buckets.most_blocks(step)

    @property
    def _buckets(self) -> _Cells:
        return _cells(self, self.grid.cells, self.grid.reads.width, self.grid.writes.width)

    def encode(self, pattern: BlockPattern, values: Any) -> SparseBlocks:
        """Put the blocks of a pattern into the buckets of this plan, on the host.

        Args:
            pattern: of the plan's shape and block.
            values: the blocks, [blocks, block, block].

        Raises:
            ArgumentTypeError: `pattern` is not a BlockPattern, or `values` are traced.
            ArgumentValueError: another shape or block size, more blocks than the plan has room for, or a pattern so
                uneven that its buckets need more propagation steps.
        """
        if not isinstance(pattern, BlockPattern) or isinstance(values, jax.core.Tracer):
            raise ArgumentTypeError(
                "DynamicPlan.encode needs a pattern and values that are not traced",
                expected="a BlockPattern, and an array",
                got=f"{type(pattern).__name__}, {type(values).__name__}",
                hint="encode outside of the function, and pass it the SparseBlocks",
            )
        blocks = np.asarray(values)
        self._check(pattern, blocks)
        grid = self.grid
        size = self.size
        rows = np.array(pattern.rows, int)
        columns = np.array(pattern.columns, int)
        cell = _cells_of(grid, rows, columns)
        place = self._places(cell)
        bucket = place // size
        number = self.number
        row = np.zeros(grid.cells * size, number)
        row[place] = grid.reads.place(cell, columns)
        shape = self.steps + 1, grid.cells * size
        slot = np.full(shape, grid.writes.width, number)
        column_slot = np.full(shape, grid.reads.width, number)
        step = (bucket - cell) % grid.cells
        # In step s a cell has the bucket of the s-th cell behind it.
        place_in_step = (place - step * size) % shape[1]
        slot[step, place_in_step] = grid.writes.place(cell, rows)
        column_slot[step, place_in_step] = row[place]
        values_by_place = np.zeros((shape[1], self.block, self.block), self.dtype)
        values_by_place[place] = blocks
        by_cell = (grid.cells, size)
        return SparseBlocks(
            jax.numpy.asarray(values_by_place),
            jax.numpy.asarray(row.reshape(by_cell)),
            jax.numpy.asarray(slot.reshape(-1, *by_cell)),
            jax.numpy.asarray(column_slot.reshape(-1, *by_cell)),
            self,
        )

    def _places(self, cell: np.ndarray) -> np.ndarray:
        """Return the place of each block in the buckets, int[blocks]: in its own bucket, or the next one with room."""
        count = self.grid.cells
        size = self.size
        order = np.argsort(cell, kind="stable")
        load = np.bincount(cell, minlength=count)
        rank = np.empty(len(cell), int)
        rank[order] = np.arange(len(cell)) - (np.cumsum(load) - load)[cell[order]]
        place = cell * size + rank
        used = np.minimum(load, size)
        steps = 0
        for step in range(1, count):
            homeless = np.flatnonzero(rank >= size)
            if not len(homeless):
                break
            steps = step
            target = (cell[homeless] + step) % count
            # In one step, blocks of one cell go to one bucket, and each bucket receives blocks of one cell.
            first = np.searchsorted(np.sort(target), target)
            inverse = np.argsort(np.argsort(target, kind="stable"), kind="stable")
            position = used[target] + inverse - first
            fits = (position < size) & (inverse - first < self.most_blocks(step))
            placed = homeless[fits]
            place[placed] = target[fits] * size + position[fits]
            rank[placed] = 0
            used += np.bincount(target[fits], minlength=count)
        if steps > self.steps:
            raise ArgumentValueError(
                "DynamicPlan.encode: the pattern is too uneven",
                expected=f"at most {self.steps} propagation steps",
                got=steps,
                hint=f"propagation_steps={steps}, or a larger oversize",
            )
        return place

    def _check(self, pattern: BlockPattern, blocks: np.ndarray) -> None:
        """Refuse a pattern or blocks that the plan was not made for."""
        if (pattern.shape, pattern.block) != (tuple(self.shape), self.block):
            expected = f"{self.shape}, block {self.block}"
            got = f"{pattern.shape}, block {pattern.block}"
            raise ArgumentValueError("DynamicPlan.encode: pattern", expected=expected, got=got)
        if pattern.num_blocks > self.max_blocks:
            raise ArgumentValueError(
                "DynamicPlan.encode: blocks with values", expected=f"at most {self.max_blocks}", got=pattern.num_blocks
            )
        expected_shape = pattern.num_blocks, self.block, self.block
        if blocks.shape != expected_shape:
            raise ArgumentValueError("DynamicPlan.encode: values", expected=expected_shape, got=blocks.shape)


def _cells_of(grid: Grid, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the cell of each block, int[blocks], in a grid whose bands have the same parts of rows."""
    parts = grid.cells // grid.bands
    band = np.searchsorted(grid.reads.last[::parts], columns)
    return band * parts + np.searchsorted(grid.writes.last[:parts], rows)


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of a grid as buckets see them: `count` buckets of `size` blocks for cells of `capacity` blocks."""

    count: int
    size: int
    capacity: int
    mean: float  # blocks of the largest cell of an even pattern

    def most_blocks(self, step: int) -> int:
        """Return the most blocks that a cell multiplies in a step of propagation."""
        return self.size if step == 0 else max(1, min(self.quantile(1) - self.size, self.size))

    def quantile(self, cells: int) -> int:
        """Return the blocks that hardly any `cells` neighbouring cells of a random pattern exceed."""
        # The sum over some cells is nearly Poisson: blocks are many, and each is in these cells with a small chance.
        blocks = poisson_quantile(cells * self.mean, _REFUSED_SHARE / self.count)
        return min(blocks, cells * self.capacity)

    def has_room(self, steps: int) -> bool:
        """Return True if random patterns need at most that many propagation steps."""
        cells = min(steps + 1, self.count)
        return cells == self.count or self.quantile(cells) <= cells * self.size


def poisson_quantile(mean: float, tail: float) -> int:
    """Return the smallest number that a Poisson variable exceeds with at most the probability `tail`."""
    numbers = np.arange(int(mean + 10 * sqrt(mean) + 40))  # ten standard deviations; 40 where the mean is small
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(numbers[1:]))])
    probability = np.exp(numbers * log(mean) - mean - log_factorial)
    exceeding = np.cumsum(probability[::-1])[::-1] - probability
    return int(np.argmax(exceeding <= tail))


def _cells(plan: DynamicPlan, count: int, reads: int, writes: int) -> _Cells:
    capacity = reads * writes
    size = whole_bucket(max(1, round(ceil(plan.max_blocks / count) * (1 + plan.oversize))))
    return _Cells(count, size, capacity, plan.max_blocks * capacity * plan.block**2 / prod(plan.shape))


@remembered
def _grid(plan: DynamicPlan) -> Grid:
    """Return the grid of fewest estimated cycles, or of fewest bytes if no grid fits the memory of a tile."""
    num_rows, num_reads = (n // plan.block for n in plan.shape)
    share = plan.shape[0] * plan.columns / plan.buckets
    sums = np.dtype(np.float32)

    def cost(choice: tuple[int, int, int]) -> tuple[bool, bool, float]:
        bands, row_parts, parts = choice
        reads = -(-num_reads // bands)
        writes = -(-num_rows // row_parts)
        cells = _cells(plan, bands * row_parts, reads, writes)
        sizes = CellSizes(plan.block, cells.size, reads, writes, plan.columns // parts, bands, share)
        steps = min(plan.propagation_steps, cells.count - 1)
        most_blocks = [cells.most_blocks(step) for step in range(steps + 1)]
        return not cells.has_room(steps), *estimated_cost(sizes, plan.dtype, sums, most_blocks)

    bands, row_parts, parts = min(
        (
            (bands, row_parts, parts)
            for bands in some_counts(min(num_reads, plan.buckets))
            for parts in possible_column_parts(plan.columns, plan.buckets // bands)
            for row_parts in some_counts(min(plan.buckets // (bands * parts), num_rows))
        ),
        key=cost,
    )
    reads = [span for span in even_spans(num_reads, bands) for _ in range(row_parts)]
    writes = even_spans(num_rows, row_parts) * bands
    return Grid((num_rows, num_reads), CellRows.of_spans(reads), CellRows.of_spans(writes), bands, parts)
