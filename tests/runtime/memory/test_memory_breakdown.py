"""Bytes at the peak by variable, role, category and line: exact sums, and each item against a walk of one tile."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ipujax.runtime.errors import ArgumentValueError
from ipujax.runtime.graph.program import Call, Copy, Function, Repeat, Sequence, StreamIn
from ipujax.runtime.memory import LIVE, ROLES, MemoryReport
from ipujax.runtime.memory.memory_breakdown import COLUMNS
from ipujax.runtime.memory.packing import round_up
from tests.runtime.helpers import SIZE, graph_of_variables, stream
from tests.runtime.memory.test_memory import report_of
from tests.runtime.profile.profile_helpers import trained_program, two_ipus
from tests.runtime.profile.test_reports import everything


def items_of_tile(occupancy, tile, owner=None):
    """Names and bytes of the variables and buffers on a tile at its peak, found on this tile alone."""
    position = occupancy.fullest_step(owner, tile)
    if position is None:
        return Counter()
    frame = occupancy.frames.liveness[owner]
    step = frame.steps[position]
    items = Counter()
    for variable in frame.live_at(position):
        items[repr(variable)] += occupancy.bytes_on_tile(variable, tile)
    for name, size in occupancy.buffers_on_tile(step, tile):
        items[f"<{name}:{step.label}>"] += size
    for function in occupancy.frames.functions_during(owner, step):
        items += items_of_tile(occupancy, tile, function)
    return +items


def assert_exact(memory):
    """The rows of a breakdown are those of every tile, found one by one, and add up to the bytes of both tiles."""
    breakdown = memory.breakdown
    tiles = range(len(memory.tile_bytes))
    by_tile = [items_of_tile(memory.occupancy, tile) for tile in tiles]
    for tile in tiles:
        for variable in memory.constants:
            by_tile[tile][repr(variable)] += memory.occupancy.bytes_on_tile(variable, tile)
        for name, sizes in memory.fixed.items():
            by_tile[tile][name] += int(sizes[tile]) if name != "constant" else 0
        gap = memory.tile_bytes[tile] - sum(by_tile[tile].values())
        listed = {i.name: i.num_bytes for i in memory.at_peak(tile).items if i.category == "gap"}
        assert sum(listed.values()) == gap == memory.gap_bytes[tile]
        assert all(size > 0 for size in listed.values())
        by_tile[tile] += Counter(listed)
    fullest, everywhere = Counter(), Counter()
    for row in breakdown.rows:
        fullest[row.name] += row.fullest_bytes
        everywhere[row.name] += row.mean_bytes * len(tiles)
    assert +fullest == +by_tile[memory.worst_tile]
    assert everywhere == sum(by_tile, Counter())
    for columns in (COLUMNS, (), *((name,) for name in COLUMNS), ("role", "line")):
        rows = breakdown.by(*columns)
        assert sum(row.fullest_bytes for row in rows) == memory.max_tile_bytes
        assert sum(row.mean_bytes for row in rows) == memory.mean_tile_bytes == Fraction(memory.total_bytes, len(tiles))
        assert sum(row.num_items for row in rows) == len(breakdown.items)
        keys = [tuple(getattr(row, name) for name in columns) for row in rows]
        assert len(set(keys)) == len(keys)
    for kind, column in ((memory.by_role, "role"), (memory.by_category, "category")):
        rows = {getattr(row, column): row for row in breakdown.by(column)}
        for name, sizes in kind.items():
            here = (rows[name].fullest_bytes, rows[name].mean_bytes * len(tiles)) if name in rows else (0, 0)
            assert here == (sizes[memory.worst_tile], sizes.sum()), name
    saved = MemoryReport.from_data(memory.target, memory.figures_as_data())
    assert saved.breakdown.rows == breakdown.rows and str(saved.breakdown) == str(breakdown)


@pytest.mark.parametrize("program", [trained_program, two_ipus, everything])
def test_rows_of_programs_built_by_hand_add_up(program):
    assert_exact(program().memory)


@settings(max_examples=30)
@given(st.data(), st.integers(0, 10))
def test_rows_of_random_programs_add_up(data, length):
    graph, tensors = graph_of_variables()
    pairs = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda pair: pair[0] != pair[1])

    def copies():
        steps = []
        for _ in range(length):
            source, destination = data.draw(pairs)
            start, stop = data.draw(st.sampled_from([(0, SIZE), (0, 4), (4, SIZE)]))
            steps.append(Copy(tensors[source][start:stop], tensors[destination][start:stop]))
        return Sequence(*steps)

    function = Function(copies(), "function")
    inputs = (StreamIn(stream(), tensor) for tensor in tensors)
    assert_exact(report_of(graph, Sequence(*inputs, Call(function), Repeat(2, copies()), Call(function))))


def test_alignment_is_what_sizes_lack_to_the_unit_and_packing_is_the_rest():
    memory = trained_program().memory
    breakdown = memory.breakdown
    gaps = {row.name: row.fullest_bytes for row in breakdown.rows if row.category == "gap"}
    code = int(memory.code_bytes[memory.worst_tile])
    data = sum(int(sizes[memory.worst_tile]) for sizes in memory.fixed.values()) - code
    live = [item.num_bytes for item in breakdown.items if item.category in ("variable", "message")]
    expected = sum(int(round_up(np.int64(size))) - size for size in (code, data, *live))
    assert gaps == {"alignment": expected}


def test_buffers_have_the_lines_of_their_steps():
    for row in trained_program().memory.breakdown.rows:
        if row.category == "variable":
            assert row.name and row.role, row
        elif row.category in LIVE:
            assert row.line in ("model.py:3 (forward)", "model.py:9 (loss)"), row
        else:
            assert not row.line and row.role in ROLES, row


def test_text_lists_the_largest_and_adds_up():
    breakdown = two_ipus().memory.breakdown
    lines = list(breakdown.lines(3))
    numbers = [[float(word.replace(",", "")) for word in line.split(" B")[:2]] for line in lines[1:]]
    assert len(lines) == 6 and lines[0].split() == ["fullest", "mean"]
    assert sum(row[0] for row in numbers[:-1]) == numbers[-1][0] == breakdown.total.fullest_bytes
    assert f"{len(breakdown.rows) - 3} more" in lines[-2] and lines[-1].endswith("  all")
    assert len(list(breakdown.lines())) == len(breakdown.rows) + 2


def test_refuses_unknown_columns():
    with pytest.raises(ArgumentValueError, match="no such column"):
        trained_program().memory.breakdown.by("tile")
