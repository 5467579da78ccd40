"""Codelets whose code, or what it reads, is replaced in a process: functions made afterwards have its costs."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax import poplar
from ipujax.poplar import FLOAT, Input, Output, Vector, Vertex
from tests.ipujax.poplar.helpers import compiled, placed, small_graph

COSTS = {"cycles": 1000}


class Sum(Vertex):
    x: Input[Vector[FLOAT]]
    out: Output[FLOAT]

    def compute(x):
        return jnp.sum(x)

    def cycles(x):
        return COSTS["cycles"]


class SumByEnvironment(Sum):  # has no digest
    def cycles(x):
        return int(os.environ.get("IPUJAX_TEST_CYCLES", 1000))


def call_profile(codelet: type[Vertex]) -> ipu.Profile:
    x = jax.ShapeDtypeStruct((4, 8), np.float32)
    return ipu.jit(lambda x: ipu.codelet_call(codelet, x), device=ipu.IPUModel(tiles_per_ipu=8)).profile(x)


def graph_profile(codelet: type[Vertex]) -> ipu.Profile:
    graph = small_graph()
    graph.add_codelets([codelet])
    x = placed(graph, FLOAT, [8], "x")
    out = placed(graph, FLOAT, [], "out")
    compute_set = graph.add_compute_set("sum")
    vertex = graph.add_vertex(compute_set, codelet.__name__)
    graph.connect(vertex["x"], x)
    graph.connect(vertex["out"], out)
    graph.set_tile_mapping(vertex, 0)
    return ipu.Profile(compiled(graph, poplar.program.Execute(compute_set), {x: np.ones(8)}, [out]))


@pytest.mark.parametrize("profile", [call_profile, graph_profile])
@pytest.mark.parametrize(
    ("codelet", "replace"),
    [
        (Sum, lambda patch: patch.setitem(COSTS, "cycles", 3000)),
        (Sum, lambda patch: patch.setattr(Sum, "cycles", lambda x: 3000)),
        (SumByEnvironment, lambda patch: patch.setenv("IPUJAX_TEST_CYCLES", "3000")),
    ],
)
def test_cycles_are_those_of_the_code_as_it_is(monkeypatch, profile, codelet, replace):
    before = profile(codelet).phase_cycles["compute"]
    replace(monkeypatch)
    assert profile(codelet).phase_cycles["compute"] == before + 6 * 2000  # a tile issues one instruction a cycle
    monkeypatch.undo()
    assert profile(codelet).phase_cycles["compute"] == before


def test_memory_is_that_of_the_code_as_it_is(monkeypatch):
    before = call_profile(Sum).memory.max_tile_bytes
    monkeypatch.setattr(Sum, "code_bytes", Sum.code_bytes + 4096, raising=False)
    assert call_profile(Sum).memory.max_tile_bytes == before + 4096


def test_calls_of_equal_code_share_it():
    x = jax.ShapeDtypeStruct((4, 8), np.float32)
    twice = ipu.jit(lambda x: (ipu.codelet_call(Sum, x), ipu.codelet_call(Sum, x + 1)))
    groups = [group for groups in twice.lower(x).graph.groups.values() for group in groups]
    codelets = [group.codelet for group in groups if group.codelet.name == "Sum"]
    assert len(codelets) == 2 and codelets[0] is codelets[1]
