"""Answers are remembered up to a number of bytes, and questions of one geometry are one question on any IPU."""

from __future__ import annotations

import numpy as np

from ipujax.runtime import exchange
from ipujax.runtime.exchange import copy_traffic
from ipujax.runtime.graph import Graph
from ipujax.runtime.mapping import linear
from ipujax.runtime.presets import preset
from ipujax.runtime.remembered import Remembered
from ipujax.runtime.tensor import Tensor, concat


def test_the_least_recently_asked_for_is_forgotten_first() -> None:
    found: list[str] = []

    def answer(question: str) -> str:
        found.append(question)
        return question

    memory = Remembered[str](10, len)
    for question in ("four", "three", "four", "five", "four", "three"):
        assert memory(question, lambda question=question: answer(question)) == question  # type: ignore[misc]
    assert found == ["four", "three", "five", "three"]
    assert len(memory) == 2
    assert memory("far too long to keep", lambda: answer("far too long to keep")) == "far too long to keep"
    assert len(memory) == 0
    memory("four", lambda: answer("four"))
    memory.clear()
    memory("four", lambda: answer("four"))
    assert found[-2:] == ["four", "four"]


def test_the_same_copy_on_another_ipu_is_counted_once() -> None:
    """A transposed copy, and one to several variables at once: on each IPU the same figures, found on the first."""
    target = preset("mk2").replace(num_ipus=3, tiles_per_ipu=8)
    graph, ipus = Graph(target), range(3)

    def variable(ipu: int, *shape: int) -> Tensor:
        mapping = linear(int(np.prod(shape)), 4, target.tiles_per_ipu, ipu * target.tiles_per_ipu)
        return graph.add_variable(shape, np.float32, f"x{ipu}", mapping)

    def copies(ipu: int) -> list[np.ndarray]:
        source, first, second = variable(ipu, 40, 24), variable(ipu, 24, 20), variable(ipu, 24, 20)
        both = concat([first, second], 1)
        found = [copy_traffic(source.transpose((1, 0)), both, graph)]
        found += [copy_traffic(source, variable(ipu, 24, 40).transpose((1, 0)), graph)]
        here = slice(ipu * target.tiles_per_ipu, (ipu + 1) * target.tiles_per_ipu)
        return [rows[here] for one in found for rows in (one.received_bytes, one.sent_bytes, one.fragments)]

    exchange._remembered.clear()
    expected = copies(0)
    known = len(exchange._remembered)
    assert known == 2
    for ipu in ipus[1:]:
        for got, rows in zip(copies(ipu), expected, strict=True):
            np.testing.assert_array_equal(got, rows)
    assert len(exchange._remembered) == known
