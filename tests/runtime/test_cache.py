"""Answers are remembered up to a number of bytes, and exchange of one geometry is counted once on any IPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.cache import Memory, cached_calls, find_arrays, remembered
from ipujax.runtime.exchange.traffic import copy_traffic
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.target.presets import preset
from ipujax.runtime.tensor.mapping import linear
from ipujax.runtime.tensor.tensor import Tensor, concat

BYTES = 1 << 16


def rows(key: str) -> np.ndarray:
    return np.full(BYTES // 8, len(key))


class Pair(NamedTuple):
    name: str
    array: np.ndarray


def test_the_least_recently_used_is_dropped_first() -> None:
    actual: list[str] = []

    def compute(key: str) -> np.ndarray:
        actual.append(key)
        return rows(key)

    memory = Memory(7 * BYTES // 2)
    for key in ("four", "three", "four", "five", "eleven", "four", "three"):
        found_now = memory.recall(key, lambda key=key: compute(key))  # type: ignore[misc]
        np.testing.assert_array_equal(found_now, rows(key))
    assert actual == ["four", "three", "five", "eleven", "four", "three"]  # the fourth leaves two of them
    assert memory.keys() == ["four", "three"]


def test_an_array_of_several_entries_counts_once() -> None:
    shared = np.zeros(BYTES, np.uint8)
    memory = Memory(2 * BYTES)
    for number in range(10):
        memory.recall(number, lambda: (shared, shared[:7]))
    assert len(memory.keys()) == 10 and BYTES < memory.used_bytes < 2 * BYTES
    max_bytes = memory.used_bytes - 1
    memory.shrink(max_bytes)
    assert len(memory.keys()) == 9 and BYTES < memory.used_bytes <= max_bytes
    memory.recall("too much", lambda: np.zeros(3 * BYTES, np.uint8))
    assert memory.keys() == [] and memory.used_bytes == 0


def test_values_of_the_last_period_stay() -> None:
    memory = Memory(100 * BYTES)
    for number in range(6):
        memory.recall(number, lambda number=number: rows(str(number)))  # type: ignore[misc]
    memory.end_period(2 * BYTES)
    assert memory.keys() == [0, 1, 2, 3, 4, 5]
    for number in (1, 4, 5):
        memory.recall(number, lambda: rows("not computed again"))
    memory.end_period(2 * BYTES)
    assert memory.keys() == [1, 4, 5]
    memory.end_period(2 * BYTES)
    assert memory.keys() == [5] and memory.used_bytes < 2 * BYTES


def test_arrays_of_keys_and_of_dataclasses_count() -> None:
    mapping = linear(BYTES, 4, 16)
    assert len(list(find_arrays((mapping, 3)))) == 2
    assert sum(array.nbytes for array in find_arrays({"x": mapping, "y": [rows("y")]}["y"])) == BYTES
    assert [array.nbytes for array in find_arrays(((rows("x")[2:5],),))] == [BYTES]  # a view keeps all of it
    assert [array.nbytes for array in find_arrays([Pair("x", rows("x"))])] == [BYTES]  # a record with names


def test_clear_caches_drops_all_values() -> None:
    actual: list[int] = []

    @remembered
    def double(number: int) -> int:
        actual.append(number)
        return 2 * number

    assert [double(3), double(3)] == [6, 6] and actual == [3]
    ipu.clear_caches()
    assert double(3) == 6 and actual == [3, 3]


def test_exceptions_are_not_cached() -> None:
    memory = Memory(BYTES)
    with pytest.raises(ZeroDivisionError):
        memory.recall("one", lambda: 1 // 0)
    assert memory.recall("one", lambda: 1) == 1


def test_the_same_copy_on_another_ipu_is_counted_once() -> None:
    """A transposed copy, and one to several variables at once: on each IPU the same figures, found on the first."""
    target = preset("mk2").replace(num_ipus=3, tiles_per_ipu=8)
    graph = Graph(target)

    def counted() -> int:
        return sum(key[0] in ("traffic", "element traffic") for key in cached_calls())

    def variable(number: int, *shape: int) -> Tensor:
        mapping = linear(int(np.prod(shape)), 4, target.tiles_per_ipu, number * target.tiles_per_ipu)
        return graph.add_variable(shape, np.float32, f"x{number}", mapping)

    def copies(number: int) -> list[np.ndarray]:
        source = variable(number, 40, 24)
        first = variable(number, 24, 20)
        second = variable(number, 24, 20)
        both = concat([first, second], 1)
        actual = [copy_traffic(source.transpose((1, 0)), both, graph)]
        actual += [copy_traffic(source, variable(number, 24, 40).transpose((1, 0)), graph)]
        here = slice(number * target.tiles_per_ipu, (number + 1) * target.tiles_per_ipu)
        return [rows[here] for one in actual for rows in (one.received_bytes, one.sent_bytes, one.receives)]

    ipu.clear_caches()
    expected = copies(0)
    known = counted()
    assert known == 2
    for number in (1, 2):
        for got, rows in zip(copies(number), expected, strict=True):
            np.testing.assert_array_equal(got, rows)
    assert counted() == known
