"""Costs of copies between many IPUs: counted by parts and IPUs, equal to a count of the whole copy."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given, settings, strategies as st

from ipujax.runtime.cost.copy_costs import CopyCosts, copy_counts
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Copy
from ipujax.runtime.tensor.mapping import Blocked, even_cuts, on_one_tile
from ipujax.runtime.tensor.tensor import concat
from tests.runtime.helpers import F32, TARGET

IPUS, TILES = 8, 4
POD = TARGET.replace(num_ipus=IPUS, tiles_per_ipu=TILES)


def ipu_variable(graph: Graph, ipu: int, size: int, tiles: list[int]):
    """A variable on some tiles of an IPU."""
    mapping = Blocked((even_cuts(size, len(tiles)),), np.array(tiles, np.int32) + TILES * ipu)
    return graph.add_variable((size,), F32, "x", mapping)


@settings(max_examples=40)
@given(st.data())
def test_costs_by_ipu_equal_those_of_the_whole_copy(data):
    graph = Graph(POD)
    tiles = st.lists(st.integers(0, TILES - 1), min_size=1, max_size=3, unique=True)
    ipus = st.integers(0, IPUS - 1)
    sizes = data.draw(st.lists(st.integers(3, 40), min_size=1, max_size=5))
    sources = [ipu_variable(graph, data.draw(ipus), size, data.draw(tiles)) for size in sizes]
    into = [ipu_variable(graph, data.draw(ipus), size, data.draw(tiles)) for size in sizes]
    # Copies of some of the parts, of which later ones find most of them counted.
    costs = CopyCosts(graph)
    for _ in range(3):
        chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1)))
        copy = Copy(concat([sources[n] for n in chosen], 0), concat([into[n] for n in chosen], 0))
        expected = copy_counts(graph, copy).cost(POD)
        cost = costs.cost(copy)
        assert (cost.first_ipu, len(cost.ipus), cost.slow_path) == (
            expected.first_ipu,
            len(expected.ipus),
            expected.slow_path,
        )
        np.testing.assert_array_equal(cost.copy_cycles, expected.copy_cycles)
        for item in fields(cost.exchange):
            values = getattr(cost.exchange, item.name)
            np.testing.assert_array_equal(values, getattr(expected.exchange, item.name), item.name)
        assert cost.is_global == expected.is_global
        if cost.is_global:
            np.testing.assert_array_equal(cost.flows.matrix(), expected.flows.matrix())
            np.testing.assert_array_equal(cost.link_cycles, expected.link_cycles)


def test_equal_stages_share_the_cost_of_an_ipu():
    """A pipeline in steady state: each IPU but the ends sends and receives alike, in one copy and in the next."""
    graph = Graph(POD)
    sent = [graph.add_variable((6,), F32, "x", on_one_tile(6, TILES * n)) for n in range(IPUS - 1)]
    received = [graph.add_variable((6,), F32, "y", on_one_tile(6, TILES * (n + 1) + 1)) for n in range(IPUS - 1)]
    costs = CopyCosts(graph)
    whole = costs.cost(Copy(concat(sent, 0), concat(received, 0)))
    part = costs.cost(Copy(concat(sent[2:], 0), concat(received[2:], 0)))
    assert len({id(ipu) for ipu in whole.ipus}) == 3
    assert {id(ipu) for ipu in part.ipus} == {id(ipu) for ipu in whole.ipus}
