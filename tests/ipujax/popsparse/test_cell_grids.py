"""popsparse.cell_grids and plans: cells have rows of blocks once, rows without blocks have no sums."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax import popsparse
from ipujax.popsparse import BlockPattern, DynamicPlan
from ipujax.popsparse.cell_grids import CellRows, Grid, add_terms, term_places
from ipujax.popsparse.static_product import plan_of_cut, possible_cuts, static_plan
from tests.ipujax.popsparse.test_static_matmul import random_pattern

HALF = np.dtype(np.float16)


def test_rows_of_spans_are_consecutive_and_used_once():
    rows = CellRows.of_spans([(0, 2), (2, 5), (5, 7)])
    np.testing.assert_array_equal(rows.rows, [[0, 1, 2], [2, 3, 4], [4, 5, 6]])
    np.testing.assert_array_equal(rows.rows[rows.is_used], np.arange(7))
    np.testing.assert_array_equal(rows.last, [1, 4, 6])
    np.testing.assert_array_equal(rows.place(np.array([2, 0, 1]), np.array([6, 1, 2])), [2, 1, 0])


def test_rows_of_blocks_leave_out_rows_without_blocks():
    rows = CellRows.of_blocks(np.array([0, 0, 2, 0, 2]), np.array([7, 3, 3, 7, 0]), 3)
    assert rows.width == 2
    np.testing.assert_array_equal(rows.is_used, [[True, True], [False, False], [True, True]])
    np.testing.assert_array_equal(rows.rows[[0, 2]], [[3, 7], [0, 3]])
    np.testing.assert_array_equal(rows.place(np.array([0, 2, 2]), np.array([7, 3, 0])), [1, 1, 0])
    np.testing.assert_array_equal(term_places(rows, 9)[:, [3, 7, 0, 8]], [[0, 1, 4, 6], [5, 6, 6, 6]])


def test_terms_of_a_row_are_added_and_rows_without_terms_are_zeros():
    rows = CellRows.of_blocks(np.array([0, 0, 1]), np.array([1, 3, 3]), 2)
    grid = Grid((5, 2), CellRows.of_spans([(0, 1), (1, 2)]), rows, bands=2, column_parts=2)
    sums = jnp.arange(1.0, 1 + 2 * 2 * 2 * 1 * 3).reshape(4, 2, 1, 3)  # the second row of cell 1 is unused
    expected = np.zeros((5, 6))
    expected[1] = np.concatenate([sums[0, 0, 0], sums[2, 0, 0]])
    expected[3] = np.concatenate([sums[0, 1, 0] + sums[1, 0, 0], sums[2, 1, 0] + sums[3, 0, 0]])
    np.testing.assert_array_equal(add_terms(grid, sums), expected)


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("most_cells", [1, 3, 16, 200])
def test_a_static_plan_has_each_block_once(block, most_cells):
    pattern = random_pattern(32 * block, 24 * block, block, 0.2)
    plan = static_plan(pattern, most_cells, 8, HALF)
    assert plan.grid.cells * plan.grid.column_parts <= most_cells
    np.testing.assert_array_equal(plan.order.ravel()[plan.place], np.arange(pattern.num_blocks))
    is_block = plan.slot < plan.grid.writes.width
    assert is_block.sum() == pattern.num_blocks
    cell, _ = np.nonzero(is_block)
    for numbers, places, rows in (
        (pattern.rows, plan.slot, plan.grid.writes),
        (pattern.columns, plan.row, plan.grid.reads),
    ):
        assert rows.is_used[cell, places[is_block]].all()
        np.testing.assert_array_equal(rows.rows[cell, places[is_block]], np.array(numbers)[plan.order[is_block]])


@pytest.mark.parametrize("density", [0.02, 0.3])
def test_sizes_of_a_cut_are_those_of_its_plan(density):
    pattern = random_pattern(96, 128, 4, density)
    cuts = list(possible_cuts(pattern, 24, 8))
    assert {cut.has_whole_rows for cut, _ in cuts} == {False, True}
    for cut, sizes in cuts:
        plan = plan_of_cut(pattern, cut)
        terms = term_places(plan.grid.writes, 24)
        assert (sizes.blocks, sizes.writes, sizes.reads, sizes.terms) == (
            plan.order.shape[1],
            plan.grid.writes.width,
            plan.grid.reads.width,
            len(terms),
        )


def test_cells_share_a_long_row():
    pattern = BlockPattern((64, 1024), 16, (0,) * 64, tuple(range(64)))
    plan = static_plan(pattern, 16, 1, HALF)
    assert plan.order.shape[1] == 64 // 16


def phases(pattern, columns, tiles):
    shapes = ((pattern.num_blocks, pattern.block, pattern.block), (pattern.shape[1], columns))
    product = ipu.jit(
        partial(popsparse.static_matmul, pattern, buckets=tiles), device=ipu.IPUModel(tiles_per_ipu=tiles)
    )
    operands = (jax.ShapeDtypeStruct(shape, np.float16) for shape in shapes)
    return product.lower(*operands).compile().profile.phase_cycles


def test_a_cell_has_sums_of_rows_with_blocks_alone():
    plan = static_plan(random_pattern(4096, 4096, 16, 1 / 256), 1472, 4, HALF)
    assert plan.grid.writes.width <= plan.order.shape[1] <= 4


def test_uneven_columns_cost_more():
    size, count = 1024, 256
    rows = np.repeat(np.arange(64), 4)
    patterns = {
        "even": BlockPattern(
            (size, size), 16, tuple(rows.tolist()), tuple(((rows + np.arange(count) % 4) % 64).tolist())
        ),
        "uneven": BlockPattern((size, size), 16, tuple(rows.tolist()), tuple((np.arange(count) % 4).tolist())),
    }
    cycles = {
        name: found["compute"] + found["exchange"]
        for name, pattern in patterns.items()
        for found in [phases(pattern, 64, 256)]
    }
    assert cycles["uneven"] > 1.2 * cycles["even"]


@pytest.mark.parametrize("plan", [static_plan, None], ids=["static", "dynamic"])
def test_offsets_of_single_elements_have_16_bits(plan):
    """The operand of a tile is within 64 KiB, though the memory of a tile has room for more (PopLibs' codelets)."""
    columns = 1024
    if plan is static_plan:
        grid = static_plan(random_pattern(1024, 1024, 1, 1 / 16), 64, columns, HALF).grid
    else:
        grid = DynamicPlan((1024, 1024), 1, 1 << 16, columns, HALF, buckets=64).grid
    assert grid.reads.width * columns // grid.column_parts * HALF.itemsize <= 1 << 16
