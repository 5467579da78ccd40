"""Contents of many tiles are those of each of them."""

from __future__ import annotations

import pytest

from ipujax.runtime.files.figure_records import data_of, field_type
from ipujax.runtime.files.kinds import FieldError, Lengths
from ipujax.runtime.memory.contents import TileContents, tile_contents
from tests.runtime.profile.profile_helpers import trained_program, two_ipus
from tests.runtime.profile.test_reports import everything


def contents(memory, **limits):
    return tile_contents(memory.occupancy, memory.constants, memory._unnamed, memory.tile_bytes, **limits)


@pytest.mark.parametrize("program", [trained_program, two_ipus, everything])
def test_contents_of_all_tiles_equal_those_of_each(program):
    memory = program().memory
    actual = contents(memory, max_items=1000)
    assert actual.tiles.tolist() == list(range(len(memory.tile_bytes)))
    for tile in actual.tiles.tolist():
        expected = [(i.num_bytes, i.name, i.category, str(i.origin)) for i in memory.at_peak(tile)[2]]
        mine = actual.tile == tile
        rows = zip(actual.num_bytes[mine].tolist(), actual.item[mine].tolist(), strict=True)
        assert sorted((size, *actual.items[item]) for size, item in rows) == sorted(expected)
        assert actual.num_bytes[mine].sum() == memory.tile_bytes[tile]


def test_the_fullest_tiles_and_the_largest_things_are_kept_and_all_of_the_fullest():
    memory = two_ipus().memory
    actual = contents(memory, max_tiles=3, max_items=2)
    assert memory.worst_tile in actual.tiles and len(actual.tiles) == 3
    for tile in actual.tiles.tolist():
        largest = sorted((i.num_bytes for i in memory.at_peak(tile)[2]), reverse=True)
        expected = largest if tile == memory.worst_tile else largest[:2]
        assert actual.num_bytes[actual.tile == tile].tolist() == expected


def test_contents_are_data_and_again_contents():
    actual = two_ipus().memory.contents
    of_files = field_type(TileContents)
    assert data_of(of_files.from_data(data_of(actual))) == data_of(actual)
    with pytest.raises(FieldError, match="elements, as"):
        of_files.kind.check(data_of(actual) | {"item": [0]}, "", Lengths())
