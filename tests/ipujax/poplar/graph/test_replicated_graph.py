"""Replicas made from a graph: additions are in all of them, the parent stays usable, and programs run in each."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax import poplar, popops
from ipujax.poplar import BOOL, FLOAT, INT, UNSIGNED_INT, ReplicatedStreamMode
from ipujax.poplar.engine.engine_programs import expanded
from ipujax.poplar.program import (
    AbortOn,
    Call,
    Copy,
    CrossReplicaCopy,
    If,
    PrintTensor,
    Repeat,
    RepeatWhileTrue,
    Sequence,
    Switch,
    WriteUndef,
)
from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ArgumentError, EngineError, GraphError, VerifyError
from ipujax.runtime.graph import program as nodes
from ipujax.runtime.graph.walks import distinct
from ipujax.runtime.options import Options
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.tensor.mapping import owners
from tests.ipujax.poplar.replica_helpers import AddVertex, LessVertex, both, constant, device, placed, run, vertex

REPLICAS = 4


def graphs(num_ipus: int = 4, tiles: int = 4, replicas: int = REPLICAS) -> tuple:
    """A device, a graph of it and a replicated graph of that."""
    on = device(num_ipus, tiles)
    graph = poplar.Graph(on)
    return on, graph, graph.create_replicated_graph(replicas)


def tiles_of(graph, tensor):
    return [owners(graph.mappings[v]).tolist() for v in tensor.variables()]


def streams(graph, size, inputs, outputs):
    """Streams of a graph by name."""
    inputs_by_name = {name: graph.add_host_to_device_fifo(name, FLOAT, size) for name in inputs}
    return inputs_by_name | {name: graph.add_device_to_host_fifo(name, FLOAT, size) for name in outputs}


# --- tiles, variables, vertices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ipus", "tiles", "replicas"), [(8, 4, 4), (4, 4, 4), (1, 8, 4), (2, 4, 1)])
def test_each_replica_has_its_share_of_tiles(num_ipus, tiles, replicas):
    _, graph, replicated = graphs(num_ipus, tiles, replicas)
    share = num_ipus * tiles // replicas
    assert replicated.get_target().get_num_tiles() == share
    assert replicated.get_replication_factor() == replicas and graph.get_replication_factor() == 1
    assert replicated.get_top_level_graph() is graph
    v = replicated.add_variable(FLOAT, [share], "v")
    for i in range(share):
        replicated.set_tile_mapping(v[i], share - 1 - i)
    assert replicated.get_tile_mapping(v)[0] == [(share - 1, share)]
    everything = graph.get_non_replicated_tensor(v)
    assert everything.shape == (replicas, share)
    assert tiles_of(graph, everything) == [list(range((r + 1) * share - 1, r * share - 1, -1)) for r in range(replicas)]
    assert tiles_of(graph, graph.get_non_replicated_tensor(v[1:2]))[0] == tiles_of(graph, everything)[0]


@pytest.mark.parametrize("replicas", ["2", 2.0, None])
def test_refuses_a_non_integer_number_of_replicas(replicas):
    with pytest.raises(GraphError, match=r"a graph cannot have .* replicas[\s\S]*a divisor of 4"):
        graphs(4, 4, replicas)
    with pytest.raises(GraphError, match=r"a graph cannot have .* replicas[\s\S]*a divisor of 4"):
        poplar.Graph(device(4), replication_factor=replicas)


@pytest.mark.parametrize(
    ("num_ipus", "replicas", "match"),
    [
        (4, 3, "a divisor of 4 IPUs"),
        (1, 3, "a divisor of 8 tiles"),
        (2, 4, "a divisor of 2 IPUs"),
        (4, 0, "0 replicas"),
    ],
)
def test_replicas_divide_the_machine(num_ipus, replicas, match):
    with pytest.raises(GraphError, match=match):
        graphs(num_ipus, 8, replicas)


def test_refuses_replicas_inside_replicas():
    on, _, replicated = graphs()
    for graph in (replicated, replicated.create_virtual_graph(2), poplar.Graph(on, replication_factor=2)):
        with pytest.raises(GraphError, match="cannot be replicated again"):
            graph.create_replicated_graph(2)


def test_refuses_tensors_outside_of_the_replicas():
    _, graph, replicated = graphs()
    with pytest.raises(GraphError, match="does not belong to a replicated graph"):
        graph.get_non_replicated_tensor(placed(graph, [2], "own"))
    with pytest.raises(GraphError, match=r"own.*is not of this replicated graph"):
        replicated.set_tile_mapping(graph.add_variable(FLOAT, [2], "own"), 0)
    other = graph.create_replicated_graph(2)
    with pytest.raises(GraphError, match="different replicated graphs"):
        graph.get_non_replicated_tensor(poplar.concat([placed(replicated, [1], "a"), placed(other, [1], "b")]))


@pytest.mark.parametrize(("num_ipus", "tiles"), [(4, 4), (1, 16)])
def test_every_replica_computes_by_itself(num_ipus, tiles):
    on, graph, rg = graphs(num_ipus, tiles)
    x = placed(rg, [3], "x", tile=1)
    y = placed(rg, [3], "y", tile=3)
    io = streams(rg, 3, ["in"], ["out"])
    program = Sequence(Copy(io["in"], x), vertex(rg, AddVertex, x, x, y, tile=2), Copy(y, io["out"]))
    values = np.arange(12.0, dtype=np.float32).reshape(REPLICAS, 1, 3)
    outputs = both(graph, on, program, {"in": values}, {"out": REPLICAS})
    np.testing.assert_array_equal(outputs["out"], 2 * values)


def test_parent_and_replicas_share_compute_sets_and_copies():
    on, graph, rg = graphs()
    x = placed(rg, [2], "x")
    y = placed(rg, [2], "y")
    parent_tensor = placed(graph, [2], "own", tile=5)
    total = placed(graph, [2], "total", tile=5)
    rg.set_initial_value(x, [1, 2])
    graph.set_initial_value(parent_tensor, [10, 20])
    step = vertex(rg, AddVertex, x, x, y)
    parent_vertex = graph.add_vertex(
        step.compute_set, AddVertex, {"a": parent_tensor, "b": parent_tensor, "out": total}
    )
    graph.set_tile_mapping(parent_vertex, 5)
    assert len(graph.groups[step.compute_set]) == REPLICAS + 1 and len(rg.groups[step.compute_set]) == 1
    # From replica 2 to the parent, and from the parent to replica 3 and to all.
    everything = graph.get_non_replicated_tensor(y)
    ones = placed(rg, [2], "ones")
    copies = [Copy(everything[2], parent_tensor), Copy(total, everything[3]), Copy(parent_tensor, ones)]
    out = rg.add_device_to_host_fifo("y", FLOAT, 2)
    out_ones = rg.add_device_to_host_fifo("ones", FLOAT, 2)
    program = Sequence(step, *copies, Copy(y, out), Copy(ones, out_ones))
    outputs = both(graph, on, program, {}, {"y": REPLICAS, "ones": REPLICAS})
    assert outputs["y"][:, 0].tolist() == [[2, 4], [2, 4], [2, 4], [20, 40]]
    assert outputs["ones"][:, 0].tolist() == [[2, 4]] * REPLICAS


def test_virtual_graphs_of_replicas_and_replicas_of_virtual_graphs():
    on = device(1, 16)
    graph = poplar.Graph(on)
    middle = graph.create_virtual_graph(4, 12)
    rg = middle.create_replicated_graph(2)
    inner = rg.create_virtual_graph([3, 1])
    assert inner.get_target().get_num_tiles() == 2 and inner.get_replication_factor() == 2
    x = placed(inner, [2], "x", tile=0)
    y = placed(inner, [2], "y", tile=1)
    assert tiles_of(rg, x) == [[3, 3]] and tiles_of(inner, y) == [[1, 1]]
    assert tiles_of(graph, graph.get_non_replicated_tensor(x)) == [[7, 7], [11, 11]]
    io = streams(inner, 2, ["in"], ["out"])
    step = vertex(inner, AddVertex, x, x, y, tile=1)
    assert [int(g.tile.reshape(-1)[0]) for g in graph.groups[step.compute_set]] == [5, 9]
    program = Sequence(Copy(io["in"], x), step, Copy(y, io["out"]))
    values = np.float32([[[1, 2]], [[3, 4]]])
    np.testing.assert_array_equal(both(graph, on, program, {"in": values}, {"out": 2})["out"], 2 * values)


def test_libraries_work_in_a_replica():
    on, graph, rg = graphs(2, 8, 2)
    popops.add_codelets(rg)
    x = rg.add_variable(FLOAT, [8], "x")
    for i in range(8):
        rg.set_tile_mapping(x[i], i)
    io = streams(rg, 8, ["in"], ["out"])
    program = Sequence(Copy(io["in"], x))
    y = popops.mul(rg, popops.add(rg, x, x, program, "sum"), x, program, "product")
    program.add(Copy(y, io["out"]))
    values = np.random.default_rng(0).normal(size=(2, 1, 8)).astype(np.float32)
    outputs = both(graph, on, program, {"in": values}, {"out": 2})
    np.testing.assert_array_equal(outputs["out"], (values + values) * values)
    assert "popops" in graph.notes.libraries


def test_the_index_and_constants_of_each_replica():
    on, graph, rg = graphs()
    index = rg.add_replication_index_constant()
    c = constant(rg, [7.0])
    rg.set_tile_mapping(index, 2)
    assert index.dtype == UNSIGNED_INT and index.shape == () and index.contains_constant
    y = placed(rg, [1], "y", UNSIGNED_INT)
    z = placed(rg, [1], "z")
    for name, tensor in (("y", y), ("z", z)):
        rg.create_host_read(name, tensor)
    engine = run(graph, on, Sequence(Copy(index, y), Copy(c, z)), {})
    assert engine.read_tensor("y").tolist() == [[0], [1], [2], [3]]
    assert engine.read_tensor("z").tolist() == [[7]] * REPLICAS
    assert engine.read_tensor(z).tolist() == [[7]] * REPLICAS


# --- steps that are one on the machine --------------------------------------------------------------------------------


def test_a_copy_in_all_replicas_costs_as_much_as_in_one():
    def profile(replicas):
        on = device(replicas)
        graph = poplar.Graph(on)
        part = graph.create_replicated_graph(replicas) if replicas > 1 else graph
        x = placed(part, [64], "x")
        y = placed(part, [64], "y", tile=3)
        part.set_initial_value(x, 1)
        _, (program,) = expanded(graph, [Sequence(vertex(part, AddVertex, x, x, y), Copy(y, x))])
        assert sum(isinstance(node, nodes.Copy) for node in distinct(program)) == 1
        return poplar.Engine(graph, Sequence(vertex(part, AddVertex, x, x, y), Copy(y, x))).profile

    profile_of_one = profile(1)
    profile_of_eight = profile(8)
    assert (
        profile_of_one.phase_cycles == profile_of_eight.phase_cycles
        and profile_of_one.phase_cycles["global_exchange"] == 0
    )
    np.testing.assert_array_equal(np.tile(profile_of_one.memory.tile_bytes, 8), profile_of_eight.memory.tile_bytes)
    assert isinstance(profile_of_one, Profile)


def test_writing_part_of_each_replicas_variable_keeps_the_rest():
    on, graph, rg = graphs()
    x = placed(rg, [4], "x")
    source = placed(graph, [2], "source")
    rg.create_host_write("x", x)
    rg.create_host_read("x", x)
    graph.create_host_write("source", source)
    engine = poplar.Engine(graph, Sequence(Copy(source, x[1:3])))
    engine.load(on)
    before = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    engine.write_tensor("x", before)
    engine.write_tensor("source", np.float32([-1, -2]))
    engine.run(0)
    before[:, 1:3] = [-1, -2]
    np.testing.assert_array_equal(engine.read_tensor("x"), before)
    with pytest.raises(ArgumentError, match=r"float32\[4, 4\][\s\S]*\[4\]"):
        engine.write_tensor("x", np.zeros(4, np.float32))


@pytest.mark.parametrize("broadcast", [False, True])
def test_streams_deliver_separate_or_broadcast_data(broadcast):
    on, graph, rg = graphs()
    mode = ReplicatedStreamMode.BROADCAST if broadcast else ReplicatedStreamMode.REPLICATE
    stream = rg.add_host_to_device_fifo("in", FLOAT, 2, mode)
    assert stream.replicas == REPLICAS and stream.replication_mode is mode
    out = rg.add_device_to_host_fifo("out", FLOAT, 2)
    x = placed(rg, [2], "x")
    program = Repeat(3, Sequence(Copy(stream, x), Copy(x, out)))
    rows = np.arange(24.0, dtype=np.float32).reshape(REPLICAS, 3, 2)
    feed = rows[:1] if broadcast else rows
    outputs = both(graph, on, program, {"in": feed}, {"out": REPLICAS})
    np.testing.assert_array_equal(outputs["out"], np.broadcast_to(feed, rows.shape))
    # The same through buffers, and large copies split.
    engine = poplar.Engine(graph, program)
    engine.load(on)
    result = np.zeros((REPLICAS, 6), np.float32)
    engine.connect_stream("in", feed.reshape(6).copy() if broadcast else feed.reshape(REPLICAS, 6).copy())
    engine.connect_stream("out", result)
    engine.run(0)
    np.testing.assert_array_equal(result.reshape(rows.shape), np.broadcast_to(feed, rows.shape))


def test_printing_and_aborting_name_the_replica(capsys):
    on, graph, rg = graphs(2, 4, 2)
    x = placed(rg, [2], "x")
    flag = placed(rg, [], "flag", BOOL)
    io = streams(rg, 2, ["in"], [])
    index = rg.add_replication_index_constant()
    number_one = constant(rg, np.uint32(1), UNSIGNED_INT)
    rg.set_tile_mapping(index, 0)
    program = Sequence(Copy(io["in"], x), PrintTensor("x", x))
    is_one = popops.eq(rg, index, number_one, program, "is one")
    program.add(Copy(is_one.reshape(()), flag))
    engine = poplar.Engine(graph, Sequence(program, AbortOn(flag, "too far")))
    engine.load(on)
    engine.connect_stream("in", np.float32([[1, 2], [3, 4]]))
    with pytest.raises(EngineError, match=r"the program ended itself \(replica 1\): too far"):
        engine.run(0)
    assert capsys.readouterr().err == "x (replica 0): {1,2}\nx (replica 1): {3,4}\n"


def test_remote_buffers_are_of_each_replica():
    on, graph, rg = graphs()
    buffer = rg.add_remote_buffer("far", FLOAT, 2, repeats=3)
    x = placed(rg, [2], "x")
    y = placed(rg, [2], "y")
    row = constant(rg, np.int32([1]), INT)
    io = streams(rg, 2, ["in"], ["out"])
    program = Sequence(Copy(io["in"], x), Copy(x, buffer, row), Copy(buffer, y, row), Copy(y, io["out"]))
    values = np.arange(8.0, dtype=np.float32).reshape(REPLICAS, 1, 2)
    np.testing.assert_array_equal(both(graph, on, program, {"in": values}, {"out": REPLICAS})["out"], values)


def test_each_of_two_replicas_uses_its_remote_buffer_under_control_flow():
    on, graph, rg = graphs(num_ipus=2, replicas=2)
    buffer = rg.add_remote_buffer("far", FLOAT, 2)
    x = placed(rg, [2], "x")
    y = placed(rg, [2], "y")
    flag = constant(rg, [True], BOOL)
    io = streams(rg, 2, ["in"], ["out"])
    # All replicas write before one of them reads.
    round_trip = [If(flag, Copy(x, buffer), Sequence()), If(flag, Copy(buffer, y), Sequence())]
    values = np.arange(4.0, dtype=np.float32).reshape(2, 1, 2)
    program = Sequence(Copy(io["in"], x), *round_trip, Copy(y, io["out"]))
    np.testing.assert_array_equal(both(graph, on, program, {"in": values}, {"out": 2})["out"], values)


@pytest.mark.parametrize("pairs", [{0: 1, 1: 2, 2: 3, 3: 0}, {3: 0}, [(1, 0), (1, 2), (1, 3)], {}])
def test_copies_between_replicas(pairs):
    on, graph, rg = graphs()
    x = placed(rg, [2], "x")
    y = placed(rg, [2], "y", tile=1)
    io = streams(rg, 2, ["x", "y"], ["out"])
    copy = CrossReplicaCopy(x, y, pairs)
    program = Sequence(Copy(io["x"], x), Copy(io["y"], y), copy, Copy(y, io["out"]))
    _, (flat,) = expanded(graph, [Sequence(copy)])
    assert sum(isinstance(node, nodes.Copy) for node in distinct(flat)) == bool(pairs)
    xs, ys = np.random.default_rng(0).normal(size=(2, REPLICAS, 1, 2)).astype(np.float32)
    outputs = both(graph, on, program, {"x": xs, "y": ys}, {"out": REPLICAS})
    expected = ys.copy()
    for sender, receiver in pairs.items() if isinstance(pairs, dict) else pairs:
        expected[receiver] = xs[sender]
    np.testing.assert_array_equal(outputs["out"], expected)


def test_copies_between_replicas_stop_the_ipus_that_exchange():
    """Replicas of two IPUs, the first computes while the second exchanges: as in a graph of replicas without parent."""
    on = device(4)
    parent = poplar.Graph(on)
    alone = poplar.Graph(on, replication_factor=2)
    clocks = []
    for graph, top in ((parent.create_replicated_graph(2), parent), (alone, alone)):
        x, y = (placed(graph, [64], name, tile=4) for name in "xy")
        z = placed(graph, [640], "z")
        compute = Repeat(9, vertex(graph, AddVertex, z, z, placed(graph, [640], "sum")))
        program = Sequence(compute, Repeat(3, CrossReplicaCopy(x, y, {0: 1, 1: 0})))
        all_replicas, (flat,) = expanded(top, [program])
        executable = compile(all_replicas, flat, options=Options(verify_undefined=False))
        clocks.append(executable.timeline_of(None).clocks.tolist())
    of_all, of_one = clocks
    assert of_all == of_one * 2
    assert 0 < of_one[1] < of_one[0]


# --- control ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["if", "while", "switch", "call"])
def test_each_replica_decides_for_itself(kind):
    on, graph, rg = graphs()
    x = placed(rg, [1], "x")
    y = placed(rg, [1], "y")
    flag = placed(rg, [1], "flag", BOOL)
    limit = constant(rg, [5.0])
    increment = constant(rg, [1.0])
    io = streams(rg, 1, ["in"], ["out"])
    test = vertex(rg, LessVertex, x[0], limit[0], flag[0])
    incremented = Sequence(vertex(rg, AddVertex, x, increment, y), WriteUndef(x), Copy(y, x))
    twice = Sequence(vertex(rg, AddVertex, x, x, y), Copy(y, x))
    number = placed(rg, [], "number", INT)
    choose = Sequence(test, Copy(popops.cast(rg, flag.reshape(()), INT, test_cast := Sequence(), "number"), number))
    body = {
        "if": Sequence(test, If(flag, incremented, twice)),
        "while": RepeatWhileTrue(test, flag, incremented),
        "switch": Sequence(test, test_cast, choose, Switch(number, {1: Repeat(3, incremented)}, twice)),
        "call": Sequence(
            test, If(flag, Call(function := graph.add_function(incremented)), Call(function)), Call(function)
        ),
    }[kind]
    values = np.float32([0, 7, 3.5, -2])
    expected = {
        "if": np.where(values < 5, values + 1, 2 * values),
        "while": np.float32([5, 7, 5.5, 5]),
        "switch": np.where(values < 5, values + 3, 2 * values),
        "call": values + 2,
    }[kind]
    program = Sequence(Copy(io["in"], x), body, Copy(x, io["out"]))
    outputs = both(graph, on, program, {"in": values.reshape(REPLICAS, 1, 1)}, {"out": REPLICAS})
    np.testing.assert_array_equal(outputs["out"].reshape(-1), expected)


def test_the_parent_decides_for_all():
    on, graph, rg = graphs()
    x = placed(rg, [1], "x")
    y = placed(rg, [1], "y")
    count = placed(graph, [1], "count")
    nxt = placed(graph, [1], "next")
    goes_on = placed(graph, [1], "on", BOOL)
    limit = constant(graph, [3.0])
    increment = constant(graph, [1.0])
    io = streams(rg, 1, ["in"], ["out"])
    test = vertex(graph, LessVertex, count[0], limit[0], goes_on[0])
    counting = Sequence(vertex(graph, AddVertex, count, increment, nxt), Copy(nxt, count))
    doubling = Sequence(vertex(rg, AddVertex, x, x, y), Copy(y, x), Copy(x, io["out"]))
    graph.set_initial_value(count, 0)
    program = Sequence(Copy(io["in"], x), RepeatWhileTrue(test, goes_on, Sequence(counting, doubling)))
    values = np.float32([1, 2, 3, 4])
    outputs = both(graph, on, program, {"in": values.reshape(REPLICAS, 1, 1)}, {"out": REPLICAS})
    np.testing.assert_array_equal(outputs["out"][:, :, 0], values[:, None] * [2, 4, 8])


# --- what is refused --------------------------------------------------------------------------------------------------


def refusals():
    def copy_to_the_parent(graph, rg):
        return Copy(placed(rg, [2], "x"), placed(graph, [2], "own"))

    def stream_of_the_parent(graph, rg):
        return Copy(graph.add_host_to_device_fifo("s", FLOAT, 2), placed(rg, [2], "x"))

    def stream_of_the_replicas(graph, rg):
        return Copy(placed(graph, [2], "x"), rg.add_device_to_host_fifo("s", FLOAT, 2))

    def buffer_of_the_parent(graph, rg):
        return Copy(placed(rg, [2], "x"), graph.add_remote_buffer("far", FLOAT, 2))

    def buffer_of_the_replicas(graph, rg):
        return Copy(placed(graph, [2], "x"), rg.add_remote_buffer("far", FLOAT, 2))

    def vertex_of_the_parent(graph, rg):
        x = placed(rg, [2], "x")
        return vertex(graph, AddVertex, x, x, placed(graph, [2], "y"))

    def meeting_under_a_decision(graph, rg):
        x = placed(rg, [2], "x")
        return If(placed(rg, [], "flag", BOOL), CrossReplicaCopy(x, x, {0: 1}))

    def parents_vertex_under_a_decision(graph, rg):
        x = placed(rg, [2], "x")
        parent_tensor = placed(graph, [2], "own")
        step = vertex(rg, AddVertex, x, x, placed(rg, [2], "y"))
        parent_vertex = graph.add_vertex(
            step.compute_set, AddVertex, {"a": parent_tensor, "b": parent_tensor, "out": placed(graph, [2], "z")}
        )
        graph.set_tile_mapping(parent_vertex, 0)
        return If(placed(rg, [], "flag", BOOL), step)

    def copy_to_a_replica_there_is_not(graph, rg):
        x = placed(rg, [2], "x")
        return CrossReplicaCopy(x, x, {0: 4})

    def copy_between_replicas_of_no_replicas(graph, rg):
        x = placed(graph, [2], "x")
        return CrossReplicaCopy(x, x, {0: 0})

    return [
        (copy_to_the_parent, GraphError, "all replicas would write one tensor of the parent"),
        (
            stream_of_the_parent,
            GraphError,
            "stream s of the parent graph is used with a tensor of the replicated",
        ),
        (stream_of_the_replicas, GraphError, "stream s of the replicated graph is used with a tensor of the parent"),
        (buffer_of_the_parent, GraphError, "all replicas would write remote buffer far of the parent"),
        (
            buffer_of_the_replicas,
            GraphError,
            "remote buffer far of a replicated graph is used with a tensor",
        ),
        (vertex_of_the_parent, GraphError, "a vertex of the parent graph in AddVertex is connected to a tensor of"),
        (meeting_under_a_decision, GraphError, "CrossReplicaCopy under control flow on a tensor of replicas"),
        (parents_vertex_under_a_decision, GraphError, "compute set AddVertex has vertices of the parent graph too"),
        (copy_to_a_replica_there_is_not, VerifyError, r"names replicas that the graph lacks[\s\S]*0 … 3"),
        (copy_between_replicas_of_no_replicas, VerifyError, "the graph is not replicated"),
    ]


@pytest.mark.parametrize(("build", "error", "match"), refusals())
def test_refuses_programs_that_cannot_run_in_all_replicas(build, error, match):
    _, graph, rg = graphs()
    program = build(graph, rg)
    with pytest.raises(error, match=match):
        poplar.Engine(graph, program)


def test_refuses_an_engine_of_a_part_of_the_graph():
    _, graph, rg = graphs()
    for part in (rg, graph.create_virtual_graph(2)):
        with pytest.raises(ArgumentError, match="an engine cannot run a virtual or replicated graph"):
            poplar.Engine(part, Sequence())


def test_refuses_a_replica_map_of_anything_but_numbers():
    _, _, rg = graphs()
    x = placed(rg, [2], "x")
    for wrong in ([1, 2], {0: "a"}, [(0, 1, 2)], {0.5: 1}):
        with pytest.raises(GraphError, match="must have a replica map"):
            CrossReplicaCopy(x, x, wrong)
    with pytest.raises(GraphError, match="different sizes"):
        CrossReplicaCopy(x, x[:1], {0: 1})
    with pytest.raises(GraphError, match=r"joins tensors[\s\S]*3"):
        CrossReplicaCopy(x, 3, {0: 1})
