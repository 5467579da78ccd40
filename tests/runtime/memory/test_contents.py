"""What many tiles hold is what each of them holds."""

from __future__ import annotations

import pytest

from ipujax.runtime.memory.contents import TileContents, tile_contents
from tests.runtime.profile.profile_helpers import trained_program, two_ipus
from tests.runtime.profile.test_reports import everything


def contents(memory, **limits):
    return tile_contents(memory.occupancy, memory.constants, memory._unnamed, memory.tile_bytes, **limits)


@pytest.mark.parametrize("program", [trained_program, two_ipus, everything])
def test_contents_of_all_tiles_equal_those_of_each(program):
    memory = program().memory
    found = contents(memory, max_items=1000)
    assert found.tiles.tolist() == list(range(len(memory.tile_bytes)))
    for tile in found.tiles.tolist():
        expected = [(i.num_bytes, i.name, i.category, str(i.origin)) for i in memory.at_peak(tile)[2]]
        mine = found.tile == tile
        rows = zip(found.num_bytes[mine].tolist(), found.item[mine].tolist(), strict=True)
        assert sorted((size, *found.items[item]) for size, item in rows) == sorted(expected)
        assert found.num_bytes[mine].sum() == memory.tile_bytes[tile]


def test_the_fullest_tiles_and_the_largest_things_are_kept_and_all_of_the_fullest():
    memory = two_ipus().memory
    found = contents(memory, max_tiles=3, max_items=2)
    assert memory.worst_tile in found.tiles and len(found.tiles) == 3
    for tile in found.tiles.tolist():
        largest = sorted((i.num_bytes for i in memory.at_peak(tile)[2]), reverse=True)
        expected = largest if tile == memory.worst_tile else largest[:2]
        assert found.num_bytes[found.tile == tile].tolist() == expected


def test_contents_are_data_and_again_contents():
    found = two_ipus().memory.contents
    assert TileContents.of_data(found.data()).data() == found.data()
    with pytest.raises(ValueError, match="differ in length"):
        TileContents.of_data(found.data() | {"item": [0]})
