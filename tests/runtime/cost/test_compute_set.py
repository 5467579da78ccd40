"""Costs of leaves, against formulas worked out by hand, a brute-force worker schedule, and every element of copies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ipujax.runtime.analysis.effects import EffectsOf
from ipujax.runtime.compile import leaf_costs
from ipujax.runtime.cost import copy_costs
from ipujax.runtime.cost.compute_set import block_shapes, compute_set_cost, slowest_workers
from ipujax.runtime.cost.copy_costs import copy_cost
from ipujax.runtime.cost.links import Flows, link_cycles
from ipujax.runtime.cost.transfer import stream_cost
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph.codelet import Codelet, Field
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import (
    Copy,
    CrossReplicaCopy,
    Execute,
    HostStream,
    RemoteBuffer,
    RemoteIn,
    Repeat,
    Sequence,
    StreamIn,
)
from ipujax.runtime.graph.vertex_group import Access, Axis, Dim, Term, VertexGroup, block, element
from ipujax.runtime.target import Target, preset
from ipujax.runtime.tensor.mapping import Blocked, Flat, even_cuts, grid, on_one_tile, owners
from ipujax.runtime.tensor.tensor import concat
from ipujax.runtime.timeline.clock_steps import clock_steps
from ipujax.runtime.timeline.clock_walk import Walk
from ipujax.runtime.timeline.clocks import COMPUTE, EXCHANGE, GLOBAL_EXCHANGE, HOST_EXCHANGE, SYNC
from ipujax.runtime.timeline.timeline import timeline
from tests.runtime.helpers import F32, TARGET

OVERHEAD = TARGET.supervisor_overhead_cycles
WORKERS = TARGET.worker_contexts


def unary(cycles, *, supervisor=True, takes=(), name="unary"):
    """A codelet of one input and one output that costs `cycles(lengths of the output)`."""
    fields = (Field("x", "in", F32), Field("y", "out", F32))
    return Codelet(name, fields, lambda x: x, lambda shapes, _: cycles(*shapes[1]), supervisor=supervisor, takes=takes)


def elementwise(graph, codelet, mapping, cuts, tile, size):
    """A compute set of one elementwise group over `cuts`, between two variables of one mapping."""
    x, y = (graph.add_variable((size,), F32, name, mapping) for name in "xy")
    compute_set = graph.add_compute_set("elementwise")
    axis = Axis("i", np.asarray(cuts, np.int64))
    dims = (element(0),)
    graph.add_vertices(
        compute_set, VertexGroup(codelet, (axis,), (Access(x, dims), Access(y, dims)), np.array(tile, np.int32))
    )
    return compute_set


# --- vertices ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=40), st.integers(1, 6))
def test_workers_take_the_longest_vertex_first(vertices, workers):
    tile, cycles = (np.array([v[i] for v in vertices], np.int64) for i in (0, 1))
    expected = []
    for t in range(5):
        load = [0] * workers
        for length in sorted((int(c) for where, c in vertices if where == t), reverse=True):
            load[load.index(min(load))] += length
        expected.append(max(load))
    assert slowest_workers(tile, cycles, 5, workers).tolist() == expected


def test_supervisor_vertices_of_a_tile_run_one_after_the_other():
    graph = Graph(TARGET)
    cuts = [0, 8, 12, 20, 40]
    tile = [0, 0, 1, 3]
    compute_set = elementwise(
        graph, unary(lambda n: 5 + 2 * n), Flat(40, np.array([0, 12, 20]), np.array([0, 1, 3])), cuts, tile, 40
    )
    cost = compute_set_cost(graph, compute_set)
    assert cost.vertices.tolist() == [2, 1, 0, 1]
    vertex = np.array([5 + 16 + 5 + 8, 5 + 16, 0, 5 + 40])
    np.testing.assert_array_equal(cost.compute_cycles - cost.rearrangement_cycles, vertex)
    np.testing.assert_array_equal(cost.active_cycles, vertex)
    assert cost.active_by_codelet == (("unary", int(vertex.sum())),)
    assert not cost.before.cycles.any() and not cost.after.cycles.any()


def test_worker_vertices_share_six_workers():
    graph = Graph(TARGET)
    # Tile 0 has eight vertices of 10, so two workers get two of them; tile 2 has one of 30.
    cuts = [*range(0, 90, 10), 110]
    compute_set = elementwise(
        graph,
        unary(lambda n: n, supervisor=False),
        Flat(110, np.array([0, 80]), np.array([0, 2])),
        cuts,
        [0] * 8 + [2],
        110,
    )
    cost = compute_set_cost(graph, compute_set)
    busy = np.array([OVERHEAD + WORKERS * 20, 0, OVERHEAD + WORKERS * 30, 0])
    np.testing.assert_array_equal(cost.compute_cycles - cost.rearrangement_cycles, busy)
    assert cost.active_cycles.tolist() == [80, 0, 30, 0]


@pytest.mark.parametrize(("workers", "cycles"), [(1, 6 * 60), (2, 6 * 30), (5, 6 * 20), (6, 6 * 10), (8, 8 * 10)])
def test_fewer_workers_than_issue_slots_leave_slots_idle(workers, cycles):
    """Six equal vertices on one tile: a worker issues once in six cycles, or once in as many as there are workers."""
    target = TARGET.replace(worker_contexts=workers)
    codelet = unary(lambda n: n, supervisor=False)
    graph = Graph(target)
    cost = compute_set_cost(graph, elementwise(graph, codelet, on_one_tile(60, 0), range(0, 70, 10), [0] * 6, 60))
    assert (cost.compute_cycles - cost.rearrangement_cycles)[0] == OVERHEAD + cycles
    assert cost.active_cycles[0] == 60


def test_two_groups_on_a_tile():
    graph = Graph(TARGET)
    mapping = on_one_tile(12, 1)
    compute_set = elementwise(graph, unary(lambda n: n, supervisor=False), mapping, [0, 4, 12], [1, 1], 12)
    x, y = (graph.add_variable((12,), F32, name, mapping) for name in "xy")
    full = Axis("i", np.array([0, 12]))
    for codelet in (unary(lambda n: 7 * n, name="slow"), unary(lambda n: n, supervisor=False)):
        accesses = (Access(x, (element(0),)), Access(y, (element(0),)))
        graph.add_vertices(compute_set, VertexGroup(codelet, (full,), accesses, np.array([1], np.int32)))
    cost = compute_set_cost(graph, compute_set)
    # Three worker vertices on three workers, the longest of 12; then the supervisor vertex.
    vertex = cost.compute_cycles - cost.rearrangement_cycles
    assert vertex.tolist() == [0, OVERHEAD + WORKERS * 12 + 84, 0, 0]
    assert cost.active_by_codelet == (("unary", 24), ("slow", 84))
    assert cost.limiting_by_group == (12, 84, 12)


@pytest.mark.parametrize(("parts", "busy"), [(1, 1 / 6), (6, 1), (7, 7 / 12), (600, 1), (0, 0)])
def test_workers_without_a_part_of_a_vertex_are_idle(parts, busy):
    """Seven parts: one worker does two, and the others wait for it."""
    graph = Graph(TARGET)
    codelet = replace(unary(lambda n: 1_200 + n), parts=lambda shapes, target: np.full_like(shapes[0][0], parts))
    cost = compute_set_cost(graph, elementwise(graph, codelet, on_one_tile(8, 2), [0, 8], [2], 8))
    vertex = cost.compute_cycles - cost.rearrangement_cycles
    assert vertex.tolist() == [0, 0, 1_208, 0] and cost.limiting_by_group == (1_208,)  # time does not depend on it
    assert cost.active_cycles[2] == pytest.approx(1_208 * busy, abs=1)
    assert cost.active_by_codelet == (("unary", int(cost.active_cycles.sum())),)


def test_blocks_without_a_vertex_cost_nothing():
    graph = Graph(TARGET)
    compute_set = elementwise(graph, unary(lambda n: n + 1), on_one_tile(8, 2), [0, 4, 8], [-1, 2], 8)
    cost = compute_set_cost(graph, compute_set)
    assert cost.vertices.tolist() == [0, 0, 1, 0]
    assert (cost.compute_cycles - cost.rearrangement_cycles).tolist() == [0, 0, 5, 0]


def test_equal_vertices_are_costed_once_and_others_are_not():
    """Groups that differ in cuts, tiles, mapping or codelet have costs of their own."""
    asked = []

    def cycles(n):
        asked.append(n)
        return 5 + 2 * n

    graph = Graph(TARGET)
    codelet = unary(cycles)
    mapping, other = (Flat(40, np.array([0, 12]), np.array([0, tile])) for tile in (1, 3))
    given = codelet, mapping, [0, 12, 40], [0, 1], 40
    first, repeated = (compute_set_cost(graph, elementwise(graph, *given)) for _ in range(2))
    assert len(asked) == 1 and first.compute_set is not repeated.compute_set
    np.testing.assert_array_equal(first.compute_cycles, repeated.compute_cycles)
    for changed in ({1: other}, {2: [0, 8, 40]}, {3: [0, 3]}, {0: unary(cycles, supervisor=False)}):
        before = len(asked)
        compute_set_cost(graph, elementwise(graph, *(changed.get(n, value) for n, value in enumerate(given))))
        assert len(asked) == before + 1, changed


def test_fractions_of_cycles_round_up():
    graph = Graph(TARGET)
    compute_set = elementwise(graph, unary(lambda n: n / 8), on_one_tile(9, 0), [0, 9], [0], 9)
    assert compute_set_cost(graph, compute_set).active_cycles[0] == 2


def test_empty_compute_set_costs_nothing():
    graph = Graph(TARGET)
    cost = compute_set_cost(graph, graph.add_compute_set("empty"))
    assert not any(a.any() for a in (cost.compute_cycles, cost.before.cycles, cost.after.cycles, cost.vertices))


@pytest.mark.parametrize("takes", [(), ("pads",)])
def test_block_shapes_are_those_of_the_codelet_arguments(takes):
    graph = Graph(TARGET)
    x = graph.add_variable((10, 3), F32, "x", grid((10, 3), (2, 1)))
    y = graph.add_variable((10, 2), F32, "y", grid((10, 2), (2, 1)))
    axes = (Axis("i", np.array([0, 4, 10])), Axis("k", np.array([0, 3])), Axis("j", np.array([0, 3]), "reduce"))
    halo = Dim((Term(0), Term(1)), offset=-1)  # three rows around each, one of fill at each end
    group = VertexGroup(
        unary(lambda n: n, takes=takes),
        axes,
        (Access(x, (halo, element(2)), 0.0), Access(y, (element(0), block(2)))),
        np.array([[[0]], [[1]]], np.int32),
    )
    (rows, columns), (lengths,) = block_shapes(group)
    assert rows.ravel().tolist() == ([5, 7] if takes else [6, 8])
    assert columns.ravel().tolist() == [3]
    assert lengths.ravel().tolist() == [4, 6]
    assert np.broadcast_shapes(rows.shape, columns.shape, lengths.shape) == (2, 1, 1)


def test_block_shapes_of_dilated_reads():
    graph = Graph(TARGET)
    x = graph.add_variable((5,), F32, "x", on_one_tile(5, 0))
    y = graph.add_variable((12,), F32, "y", on_one_tile(12, 0))
    axes = (Axis("i", np.array([0, 1, 6, 12])),)
    dilated = Dim((Term(0),), offset=-1, divisor=2)  # index 1, 3, 5, 7, 9 is an element, all else fill
    group = VertexGroup(
        unary(lambda n: n), axes, (Access(x, (dilated,), 0.0), Access(y, (element(0),))), np.zeros(3, np.int32)
    )
    assert [a.tolist() for a in block_shapes(group)[0]] == [[1, 5, 6]]


# --- exchange ---------------------------------------------------------------------------------------------------------


def test_operands_and_results_elsewhere_are_exchanged():
    graph = Graph(TARGET)
    x = graph.add_variable((16,), F32, "x", grid((16,), (4,)))
    y = graph.add_variable((16,), F32, "y", on_one_tile(16, 3))
    compute_set = graph.add_compute_set("gather")
    dims = (element(0),)
    full = Axis("i", np.array([0, 16]))
    graph.add_vertices(
        compute_set,
        VertexGroup(unary(lambda n: n), (full,), (Access(x, dims), Access(y, dims)), np.array([1], np.int32)),
    )
    cost = compute_set_cost(graph, compute_set)
    assert cost.before.received_bytes.tolist() == [0, 48, 0, 0]
    assert cost.before.sent_bytes.tolist() == [16, 0, 16, 16]
    assert cost.after.received_bytes.tolist() == [0, 0, 0, 64]
    assert cost.after.sent_bytes.tolist() == [0, 64, 0, 0]
    startup = TARGET.exchange_startup_cycles
    assert cost.before.cycles.tolist() == [4 + startup, max(12, 3 * 3) + startup, 4 + startup, 4 + startup]
    # The 16 bytes that are on the tile already are copied to make the operand contiguous.
    assert cost.rearrangement_bytes.tolist() == [0, 16, 0, 0]
    copying = TARGET.copy_startup_cycles + -(-16 // TARGET.memcpy_bytes_per_cycle) + TARGET.copy_fragment_cycles
    assert cost.rearrangement_cycles.tolist() == [0, copying, 0, 0]
    assert cost.compute_cycles.tolist() == [0, 16 + copying, 0, 0]
    work = steps_of(graph, Execute(compute_set)).work[0]
    assert work[SYNC] == 2 * TARGET.internal_sync_cycles  # one before each exchange
    assert work[EXCHANGE] == cost.before.cycles.max() + 16 + startup
    assert work[COMPUTE] == 16 + copying


def steps_of(graph, leaf):
    """The clock step of one leaf."""
    steps, _ = clock_steps(leaf, leaf_costs(graph, leaf), EffectsOf(graph), graph.target)
    return steps[leaf]


# --- several IPUs -----------------------------------------------------------------------------------------------------

POD = TARGET.replace(num_ipus=4)
LATENCY = round(POD.global_exchange_latency_seconds * POD.clock_hz)


def test_costs_cover_the_ipus_that_take_part():
    graph = Graph(POD)
    compute_set = elementwise(graph, unary(lambda n: n), on_one_tile(8, 9), [0, 8], [9], 8)
    cost = compute_set_cost(graph, compute_set)
    assert cost.first_ipu == 2 and cost.vertices.tolist() == [0, 1, 0, 0]
    step = steps_of(graph, Execute(compute_set))
    assert step.ipus == (2,) and step.work[2, COMPUTE] == 8 and not step.work[[0, 1, 3]].any()


def test_ipus_of_one_compute_set_work_for_themselves():
    graph = Graph(POD)
    mapping = Flat(32, np.array([0, 8]), np.array([1, 13]))
    compute_set = elementwise(graph, unary(lambda n: n), mapping, [0, 8, 32], [1, 13], 32)
    step = steps_of(graph, Execute(compute_set))
    assert step.ipus == (0, 3) and step.barriers == ()
    assert step.work[:, COMPUTE].tolist() == [8, 0, 0, 24]
    assert step.work[:, SYNC].tolist() == [POD.internal_sync_cycles, 0, 0, POD.internal_sync_cycles]


@given(st.data())
def test_flows_between_ipus_equal_counting_every_element(data):
    graph = Graph(POD)
    size = 24
    mappings = []
    for _ in range(2):
        parts = data.draw(st.integers(1, 6))
        tiles = data.draw(st.lists(st.integers(0, 15), min_size=parts, max_size=parts))
        mappings.append(Blocked((even_cuts(size, parts),), np.array(tiles, np.int32)))
    x, y = (graph.add_variable((size,), F32, name, m) for name, m in zip("xy", mappings, strict=True))
    source = concat([x[8:], x[:8]], 0) if data.draw(st.booleans()) else x
    cost = copy_cost(graph, Copy(source, y))
    expected = np.zeros((4, 4), np.int64)
    ipu_of = [owners(mapping) // 4 for mapping in mappings]
    np.add.at(expected, (ipu_of[0][source.flat_indices()[1]], ipu_of[1]), 4)
    np.fill_diagonal(expected, 0)
    np.testing.assert_array_equal(np.zeros((4, 4)) if cost.flows is None else cost.flows.matrix(), expected)
    assert cost.is_global == bool(expected.any())


def test_parts_between_two_ipus_each_are_counted_once_at_most(monkeypatch: pytest.MonkeyPatch):
    """Handing on the results of n stages takes at most n questions, not one for each pair of IPUs and part."""
    asked: list[int] = []
    ask = copy_costs._ipu_traffic
    monkeypatch.setattr(copy_costs, "_ipu_traffic", lambda *args: asked.append(1) or ask(*args))
    stages = 12
    graph = Graph(TARGET.replace(num_ipus=stages + 1, tiles_per_ipu=4))
    parts = [graph.add_variable((6,), F32, "x", on_one_tile(6, 4 * n)) for n in range(stages)]
    into = [graph.add_variable((6,), F32, "y", on_one_tile(6, 4 * n + 5)) for n in range(stages)]
    cost = copy_cost(graph, Copy(concat(parts, 0), concat(into, 0)))
    np.testing.assert_array_equal(cost.flows.matrix(), np.diag([24] * stages, 1))
    assert len(asked) <= stages


def test_ring_copy_between_all_ipus():
    graph = Graph(POD)
    size = 16
    x = graph.add_variable((size,), F32, "x", grid((size,), (4,)))
    ring = Blocked((even_cuts(size, 4),), np.array([4, 8, 12, 0], np.int32))
    source = graph.add_variable((size,), F32, "s", Blocked(ring.cuts, np.array([0, 4, 8, 12], np.int32)))
    cost = copy_cost(graph, Copy(source, graph.add_variable((size,), F32, "y", ring)))
    expected = np.zeros((4, 4), np.int64)
    expected[[0, 1, 2, 3], [1, 2, 3, 0]] = 16
    np.testing.assert_array_equal(cost.flows.matrix(), expected)
    assert not copy_cost(graph, Copy(x, graph.add_variable((size,), F32, "z", grid((size,), (2,))))).is_global


def test_refuses_to_shuffle_a_variable_over_ipus_in_place():
    graph = Graph(POD)
    x = graph.add_variable((8,), F32, "x", Blocked((even_cuts(8, 4),), np.array([0, 4, 8, 12], np.int32)))
    with pytest.raises(GraphError, match="moves a variable onto itself"):
        copy_cost(graph, Copy(x[::-1], x))


def route(source: int, destination: int, target: Target) -> list[tuple[int, int]]:
    """Links from one IPU to another by a walk, one link at a time: (IPU it leaves or first of its machine, kind)."""
    pair, cross, up, down, leaves, enters = range(6)
    pod, machine = target.ipus_per_pod, target.ipus_per_gateway
    if source // pod != destination // pod:
        return [(source // machine * machine, leaves), (destination // machine * machine, enters)]
    links = []
    here = source
    if here // 2 == destination // 2:
        return [(here, pair)] if here != destination else []
    if here % 2 != destination % 2:
        links.append((here, cross))
        here ^= 1
    while here != destination:
        links.append((here, up if destination > here else down))
        here += 2 if destination > here else -2
    return links


def cycles_by_walks(flows: np.ndarray, target: Target) -> list[int]:
    """Cycles of each IPU, from the routes of all pairs; rates by hand."""
    per_link = target.ipu_link_bytes_per_second * target.ipu_link_efficiency * target.ipu_links_per_ipu / 10
    rates = [4 * per_link, 2 * per_link, 2 * per_link, 2 * per_link, *[target.gateway_bytes_per_second] * 2]
    routes = {(s, d): route(s, d, target) for s, d in zip(*np.nonzero(flows), strict=True) if s != d}
    load: Counter[tuple[int, int]] = Counter()
    for pair, links in routes.items():
        load.update(dict.fromkeys(links, int(flows[pair])))
    cycles = [0] * len(flows)
    latency = round(target.global_exchange_latency_seconds * target.clock_hz)
    for pair, links in routes.items():
        busy = latency + max(int(np.ceil(load[link] / (rates[link[1]] / target.clock_hz))) for link in links)
        for ipu in pair:
            cycles[ipu] = max(cycles[ipu], busy)
    return cycles


def flows_of(matrix: np.ndarray) -> Flows:
    """Flows of a square matrix."""
    senders, receivers = np.nonzero(matrix)
    return Flows.of(len(matrix), senders, receivers, matrix[senders, receivers])


def test_routes_on_the_ladder():
    assert route(0, 1, POD) == [(0, 0)] and route(3, 2, POD) == [(3, 0)]
    assert route(0, 4, POD) == [(0, 2), (2, 2)] and route(5, 1, POD) == [(5, 3), (3, 3)]
    assert route(1, 4, POD) == [(1, 1), (0, 2), (2, 2)]
    assert route(2, 2, POD) == []


@given(st.data())
def test_cycles_of_links_are_those_of_walks_over_them(data):
    num_ipus = data.draw(st.integers(1, 13))
    target = POD.replace(num_ipus=num_ipus, ipus_per_pod=data.draw(st.sampled_from([4, 8, 64])), ipus_per_gateway=4)
    ipu = st.integers(0, num_ipus - 1)
    pairs = data.draw(st.lists(st.tuples(ipu, ipu, st.integers(0, 3_000_000)), max_size=12))
    matrix = np.zeros((num_ipus, num_ipus), np.int64)
    for sender, receiver, num_bytes in pairs:
        matrix[sender, receiver] += num_bytes
    flows = Flows.of(num_ipus, *(np.array(pairs, np.int64).reshape(-1, 3).T))
    np.testing.assert_array_equal(flows.matrix(), np.where(np.eye(num_ipus, dtype=bool), 0, matrix))
    assert link_cycles(flows, target).tolist() == cycles_by_walks(matrix, target)


def test_flows_of_many_replicas_take_little_memory():
    """A ring over 4,096 replicas: three numbers a pair, not a row and a column of 4,096."""
    pair = Flows.of(4, [0, 1], [2, 3], 10)
    ring = [(n, (n + 1) % 4096) for n in range(4096)]
    flows = pair.between_replicas(ring, 4096)
    assert flows.num_ipus == 8192 and len(flows.senders) == 8192
    assert sum(values.nbytes for values in (flows.senders, flows.receivers, flows.num_bytes)) < 200_000
    assert flows.crossing().all() and pair.folded().receivers.tolist() == [0, 1]
    assert link_cycles(flows, preset("bow", 8192)).shape == (8192,)


def test_other_pods_are_reached_over_gateways():
    pods = POD.replace(ipus_per_pod=8, ipus_per_gateway=4, num_ipus=16)
    assert route(9, 12, pods) == [(9, 1), (8, 2), (10, 2)]  # as 1 and 4 of the first pod
    assert route(6, 9, pods) == [(4, 4), (8, 5)]
    per_cycle = pods.gateway_bytes_per_second / pods.clock_hz
    flows = np.zeros((16, 16), np.int64)
    flows[6, 9] = 1_000_000
    assert link_cycles(flows_of(flows), pods)[[6, 9]].tolist() == [LATENCY + int(np.ceil(1_000_000 / per_cycle))] * 2
    flows[4, 13] = 500_000  # leaves by the same gateway and comes in by another
    flows[8, 9] = 1_000_000  # stays on its rung
    cycles = link_cycles(flows_of(flows), pods)
    both = LATENCY + int(np.ceil(1_500_000 / per_cycle))
    assert cycles[[4, 6, 9, 13]].tolist() == [both] * 4
    assert cycles[8] == LATENCY + int(np.ceil(1_000_000 / (4 * POD.ipu_link_bytes_per_second * 0.85 / POD.clock_hz)))


def test_links_are_shared_by_flows_that_cross_them():
    per_link = POD.ipu_link_bytes_per_second * POD.ipu_link_efficiency / POD.clock_hz * POD.ipu_links_per_ipu / 10
    flows = np.zeros((6, 6), np.int64)
    flows[0, 1] = 4_000_000
    assert link_cycles(flows_of(flows), POD).tolist() == [LATENCY - (-4_000_000 // (4 * per_link))] * 2 + [0] * 4
    flows[:] = 0
    flows[0, 4] = flows[2, 4] = 1_000_000  # both go up from IPU 2
    both = LATENCY + int(np.ceil(2_000_000 / (2 * per_link)))
    alone = LATENCY + int(np.ceil(1_000_000 / (2 * per_link)))
    assert link_cycles(flows_of(flows), POD).tolist() == [both, 0, both, 0, both, 0]
    flows[:] = 0
    flows[0, 4] = flows[4, 0] = 1_000_000  # each direction has its own links
    assert link_cycles(flows_of(flows), POD).tolist() == [alone, 0, 0, 0, alone, 0]


def test_a_blur_of_16_ipus_takes_the_published_cycles_of_its_exchange():
    """Each IPU sends a row of 2,200 pixels of 8 or 16 bytes to both neighbours (lbm-graphcore, reference B5)."""
    mk1 = preset("mk1", 16)
    for pixel_bytes, published in ((8, 3043), (16, 4017), (16, 4048)):
        flows = (np.eye(16, k=1, dtype=np.int64) + np.eye(16, k=-1, dtype=np.int64)) * 2200 * pixel_bytes
        assert abs(link_cycles(flows_of(flows), mk1).max() / published - 1) < 0.02


def pipe(target):
    """A copy from IPU 0 to IPU 1 of 4096 floats, evenly over their tiles."""
    graph = Graph(target)
    x = graph.add_variable((4096,), F32, "x", grid((4096,), (4,)))
    y = graph.add_variable((4096,), F32, "y", grid((4096,), (4,), 4))
    return graph, Copy(x, y)


def test_lockstep_copy_between_ipus_syncs_all():
    graph, copy = pipe(POD)
    cost = copy_cost(graph, copy)
    step = steps_of(graph, copy)
    assert cost.exchange.cycles[0] == 1024 + POD.exchange_startup_cycles  # 4,096 bytes a tile at 4 B/cycle
    assert step.barriers == (step.ipus,) == ((0, 1, 2, 3),)
    assert step.work[:, SYNC].tolist() == [POD.global_sync_cycles] * 4
    slowest = max(int(cost.exchange.cycles.max()), int(cost.link_cycles.max()))
    assert step.work[:, GLOBAL_EXCHANGE].tolist() == [slowest, slowest, 0, 0]
    assert not step.work[:, EXCHANGE].any()


def test_buffered_copy_between_ipus_costs_the_sender():
    graph, copy = pipe(POD.replace(global_exchange="buffered"))
    program = Sequence(copy, Repeat(2, Copy(copy.destination, copy.destination)))
    steps, slots = clock_steps(program, leaf_costs(graph, program), EffectsOf(graph), graph.target)
    step = steps[copy]
    assert slots == 2 and step.fills == (4,) and step.barriers == ()
    assert (step.senders, step.delivers) == ((0,), ((5, (0,)),))
    assert step.work[0, GLOBAL_EXCHANGE] > 0 and not step.work[1:].any() and not step.work[:, SYNC].any()
    reader = next(s for node, s in steps.items() if node is not copy)
    assert (reader.frees, reader.awaits) == ((4,), ((1, 5),))


@pytest.mark.parametrize("exchange", ["lockstep", "buffered"])
@pytest.mark.parametrize("ipus", [(2,), (1, 3)])
def test_a_copy_between_replicas_syncs_the_ipus_that_take_part(exchange, ipus):
    """Worked out by hand: IPU 0 computes while the others exchange, once and in a loop; whoever takes part waits."""
    graph = Graph(POD.replace(global_exchange=exchange), replication_factor=2)
    parts = [[graph.add_variable((8,), F32, name, on_one_tile(8, 4 * ipu)) for ipu in ipus] for name in "xy"]
    x, y = (concat(tensors) for tensors in parts)
    copy = CrossReplicaCopy(x, y, ((0, 1), (1, 0)))
    step = steps_of(graph, copy)
    assert step.barriers == (step.ipus,) == (ipus,)
    assert step.work[:, SYNC].tolist() == [POD.global_sync_cycles * (ipu in ipus) for ipu in range(4)]
    busy = {
        ipu: elementwise(graph, unary(lambda n: n), on_one_tile(800, 4 * ipu), [0, 800], [4 * ipu], 800)
        for ipu in (0, 3)
    }
    program = Sequence(*map(Execute, busy.values()), Repeat(5, copy))
    steps, slots = clock_steps(program, leaf_costs(graph, program), EffectsOf(graph), graph.target)
    run = timeline(Walk.of(program, steps, POD.num_ipus, slots))
    computing = int(steps_of(graph, Execute(busy[0])).work[0].sum())
    exchanging = 5 * int(step.work[ipus[0]].sum())
    assert exchanging > 5 * POD.global_sync_cycles
    both = computing + exchanging
    assert run.clocks.tolist() == (
        [computing, 0, exchanging, computing] if ipus == (2,) else [computing, both, 0, both]
    )


# --- host -------------------------------------------------------------------------------------------------------------


def test_stream_costs_latency_and_bytes_of_each_ipu():
    graph = Graph(POD.replace(ipus_per_gateway=1))
    x = graph.add_variable((3000,), F32, "x", Flat(3000, np.array([0, 1000]), np.array([0, 5])))
    cost = stream_cost(graph, HostStream("x", (3000,), F32), x)
    seconds = [POD.host_latency_seconds + size / POD.host_bytes_per_second for size in (4000, 8000)]
    assert cost.cycles.tolist() == [int(np.ceil(s * POD.clock_hz)) for s in seconds] + [0, 0]
    assert cost.first_ipu == 0 and cost.tile_bytes.tolist() == [4000, 0, 0, 0, 0, 8000, 0, 0]
    step = steps_of(graph, StreamIn(HostStream("x", (3000,), F32), x))
    assert step.ipus == (0, 1) and step.work.sum() == cost.cycles.sum()


def test_ipus_of_a_machine_share_its_host_link():
    """Machines of 2 IPUs: IPUs 0 and 1 share one, IPU 2 has another for itself; streaming memory is not shared."""
    graph = Graph(POD.replace(ipus_per_gateway=2))
    x = graph.add_variable((4000,), F32, "x", Flat(4000, np.array([0, 1000, 3000]), np.array([0, 5, 9])))

    def cycles(*sizes):
        seconds = [POD.host_latency_seconds + size / POD.host_bytes_per_second for size in sizes]
        return [int(np.ceil(s * POD.clock_hz)) for s in seconds] + [0]

    host = replace(RemoteBuffer.of("h", F32, 4000), on_host=True)
    for stream in (HostStream("x", (4000,), F32), host):
        assert stream_cost(graph, stream, x).cycles.tolist() == cycles(12_000, 12_000, 4_000)
    own = RemoteBuffer.of("r", F32, 4000)
    assert POD.streaming_bytes_per_second == POD.host_bytes_per_second
    assert stream_cost(graph, own, x).cycles.tolist() == cycles(4_000, 8_000, 4_000)


@pytest.mark.parametrize(("ipus_per_machine", "sharing"), [(1, 1), (4, 4), (8, 8), (3, 3)])
def test_replicas_of_a_machine_share_its_host_link(ipus_per_machine, sharing):
    """Eight replicas of an IPU each; with 3 IPUs a machine the last has two, and all wait for the slowest."""
    target = preset("mk2").replace(tiles_per_ipu=4, ipus_per_gateway=ipus_per_machine)
    graph = Graph(target, 8)
    x = graph.add_variable((1000,), F32, "x", Flat(1000, np.array([0]), np.array([0])))
    seconds = target.host_latency_seconds + sharing * 4000 / target.host_bytes_per_second
    assert stream_cost(graph, HostStream("x", (1000,), F32), x).cycles.tolist() == [
        int(np.ceil(seconds * target.clock_hz))
    ]


ZONES = {"single_pipeline": (), "ping_pong": ((0, 2),), "full": ((0, 1, 2, 3),)}


@pytest.mark.parametrize("pattern", ZONES)
def test_ipus_of_a_sync_zone_sync_before_a_host_exchange(pattern):
    """Data for IPU 2 alone, while IPU 0 is busy: who shares its zone waits, and waits for it."""
    target = POD.replace(sync_pattern=pattern)
    graph = Graph(target)
    x = graph.add_variable((1000,), F32, "x", Flat(1000, np.array([0]), np.array([8])))
    stream = StreamIn(HostStream("x", (1000,), F32), x)
    busy = elementwise(graph, unary(lambda n: n), on_one_tile(800, 0), [0, 800], [0], 800)
    step = steps_of(graph, stream)
    zones = ZONES[pattern]
    members = sorted({2, *(ipu for zone in zones for ipu in zone)})
    assert step.barriers == zones and list(step.ipus) == members
    synced = {ipu for zone in zones for ipu in zone}
    assert step.work[:, SYNC].tolist() == [POD.global_sync_cycles * (ipu in synced) for ipu in range(4)]
    program = Sequence(Execute(busy), stream)
    steps, slots = clock_steps(program, leaf_costs(graph, program), EffectsOf(graph), target)
    clocks = timeline(Walk.of(program, steps, target.num_ipus, slots)).clocks
    before = int(steps_of(graph, Execute(busy)).work[0].sum())
    host = int(step.work[2, HOST_EXCHANGE])
    waits = before + POD.global_sync_cycles
    assert (
        clocks.tolist()
        == {
            "single_pipeline": [before, 0, host, 0],
            "ping_pong": [waits, 0, waits + host, 0],
            "full": [waits, waits, waits + host, waits],
        }[pattern]
    )


def test_transfers_that_are_one_host_exchange_sync_once():
    graph = Graph(POD.replace(sync_pattern="full"))
    tensors = [graph.add_variable((8,), F32, name, Flat(8, np.array([0]), np.array([0]))) for name in "xy"]
    program = Sequence(*(StreamIn(HostStream("s", (8,), F32), tensor) for tensor in tensors))
    steps, _ = clock_steps(program, leaf_costs(graph, program), EffectsOf(graph), graph.target)
    assert [step.work[0, SYNC] for step in steps.values()] == [POD.global_sync_cycles, 0]
    alone = Graph(TARGET.replace(sync_pattern="full"))
    x = alone.add_variable((8,), F32, "x", Flat(8, np.array([0]), np.array([0])))
    assert steps_of(alone, StreamIn(HostStream("s", (8,), F32), x)).barriers == ()


@pytest.mark.parametrize("pattern", ZONES)
def test_each_ipu_pays_the_latency_of_a_host_exchange_once(pattern):
    """Four transfers that are one exchange, of IPU 0, 2, 0 and 1: all but the third are the first of an IPU."""
    graph = Graph(POD.replace(sync_pattern=pattern))
    tiles = [ipu * POD.tiles_per_ipu for ipu in (0, 2, 0, 1)]
    tensors = [graph.add_variable((8,), F32, f"x{n}", Flat(8, np.array([0]), np.array([n]))) for n in tiles]
    program = Sequence(*(RemoteIn(RemoteBuffer.of("x", F32, 8), tensor) for tensor in tensors))
    costs = leaf_costs(graph, program)
    short = 32 / POD.streaming_bytes_per_second
    latency = POD.host_latency_seconds
    first, later = (int(np.ceil(seconds * POD.clock_hz)) for seconds in (latency + short, short))
    cycles = [cost.cycles.tolist() for cost in costs.values()]
    assert cycles == [[first, 0, 0, 0], [0, 0, first, 0], [later, 0, 0, 0], [0, first, 0, 0]]
    steps, _ = clock_steps(program, costs, EffectsOf(graph), graph.target)
    of_0_and_1 = {"single_pipeline": ((), ()), "ping_pong": (((0, 2),), ((1, 3),)), "full": (((0, 1, 2, 3),), ())}
    barriers = [step.barriers for step in steps.values()]
    assert barriers[1:3] == [(), ()] and (barriers[0], barriers[3]) == of_0_and_1[pattern]


@pytest.mark.parametrize("stream", [HostStream("x", (3000,), F32), RemoteBuffer.of("x", F32, 3000)])
def test_bytes_beyond_one_transfer_are_several(stream):
    limits = {"stream_buffer_limit_bytes": 4096, "max_remote_transfer_bytes": 4096, "ipus_per_gateway": 1}
    graph = Graph(POD.replace(**limits))
    x = graph.add_variable((3000,), F32, "x", Flat(3000, np.array([0, 1000]), np.array([0, 5])))
    seconds = [n * POD.host_latency_seconds + size / POD.host_bytes_per_second for n, size in ((1, 4000), (2, 8000))]
    expected = [int(np.ceil(s * POD.clock_hz)) for s in seconds] + [0, 0]
    assert stream_cost(graph, stream, x).cycles.tolist() == expected
    joined = [int(np.ceil((s - POD.host_latency_seconds) * POD.clock_hz)) for s in seconds] + [0, 0]
    assert stream_cost(graph, stream, x, after=stream_cost(graph, stream, x)).cycles.tolist() == joined


def test_part_of_a_variable_streams_its_own_bytes():
    graph = Graph(TARGET)
    x = graph.add_variable((16,), F32, "x", grid((16,), (4,)))
    cost = stream_cost(graph, HostStream("x", (6,), F32), x[2:8])
    assert cost.tile_bytes.tolist() == [8, 16, 0, 0]


def test_resident_stream_costs_no_time():
    graph = Graph(TARGET)
    x = graph.add_variable((16,), F32, "x", grid((16,), (4,)))
    assert not stream_cost(graph, HostStream("x", (16,), F32, resident=True), x).cycles.any()
