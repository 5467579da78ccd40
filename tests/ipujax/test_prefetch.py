"""`ipu.prefetch`: the same batches in order, prepared ahead, and what goes wrong where it would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import ipujax as ipu


def test_batches_come_in_order_and_ahead() -> None:
    made, may_go_on = [], threading.Event()

    def batches() -> Iterator[int]:
        for number in range(5):
            made.append(number)
            if number == 2:
                may_go_on.set()
            yield number

    ahead = ipu.prefetch(batches(), depth=2)
    assert next(ahead) == 0
    assert may_go_on.wait(5)  # two more are made, while none is asked for
    assert list(ahead) == [1, 2, 3, 4] and made == [0, 1, 2, 3, 4]
    assert list(ahead) == []


def test_an_exception_comes_where_its_batch_would() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("no such file")

    ahead = ipu.prefetch(batches())
    assert next(ahead) == 1
    with pytest.raises(OSError, match="no such file"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_closing_drops_what_is_ready() -> None:
    ahead = ipu.prefetch(iter(range(10)), depth=3)
    assert next(ahead) == 0
    ahead.close()
    assert list(ahead) == []


@pytest.mark.parametrize("depth", [0, 1.5, True])
def test_a_depth_that_is_none(depth: Any) -> None:
    with pytest.raises(ipu.ArgumentError, match="a whole number of at least 1"):
        ipu.prefetch([1], depth=depth)
