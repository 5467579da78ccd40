"""The engine: state between runs, handles, options, profiles, and the errors of wrong use."""

from __future__ import annotations

import io

import numpy as np
import pytest

from ipujax import poplar, poplin, popops
from ipujax.arguments.poplar_options import ENVIRONMENT
from ipujax.poplar.engine.engine_options import EngineOptions
from ipujax.poplar.program import Copy, If, PrintTensor, Repeat, RepeatWhileTrue, Sequence
from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ArgumentError, EngineError, ProfileError, TileMemoryError, VerifyError
from ipujax.runtime.graph.program import HostStream, StreamIn, StreamOut
from ipujax.runtime.options import Options
from tests.ipujax.poplar.engine_helpers import DEVICE, both, constant, new_graph, variable


def loaded(graph, programs, options=None):
    engine = poplar.Engine(graph, programs, options)
    engine.load(DEVICE)
    return engine


def accumulator():
    """A graph with an accumulator `total`, a program that adds 1 to it and one that doubles it."""
    graph = new_graph()
    total = variable(graph, [3], name="total")
    graph.create_host_read("total", total)
    graph.create_host_write("total", total)
    add = Sequence()
    double = Sequence()
    popops.add_in_place(graph, total, constant(graph, [1, 1, 1]), add, "add")
    popops.add_in_place(graph, total, total, double, "double")
    return graph, total, add, double


def test_state_persists_between_runs_of_all_programs():
    graph, total, add, double = accumulator()
    engine = loaded(graph, [add, double])
    for index in (0, 0, 1, 0):
        engine.run(index)
    np.testing.assert_array_equal(engine.read_tensor("total"), [5, 5, 5])
    engine.load(DEVICE)
    np.testing.assert_array_equal(engine.read_tensor(total), [0, 0, 0])


def test_a_run_without_host_calls_is_one_call_of_xla():
    graph, _, add, _ = accumulator()
    engine = loaded(graph, Repeat(5, add))
    engine.run()
    _, jitted = engine._function(0)
    function = engine._function(0)[0]
    text = jitted.lower({0: np.zeros(3, np.float32)}, {}).as_text()
    assert [v.name for v in function.reads] == [v.name for v in function.writes] == ["total"]
    assert "callback" not in text
    assert jitted._cache_size() == 1


def test_handles_write_and_read_views():
    graph = new_graph()
    x = variable(graph, [4, 4], name="x")
    graph.create_host_write("middle", x[1:3, 1:3])
    graph.create_host_read("transposed", x.transpose())
    engine = loaded(graph, Sequence())
    engine.write_tensor("middle", [[1, 2], [3, 4]])
    expected = np.zeros((4, 4), np.float32)
    expected[1:3, 1:3] = [[1, 2], [3, 4]]
    array = engine.read_tensor("transposed")
    np.testing.assert_array_equal(array, expected.T)
    array[:] = 7  # a copy
    np.testing.assert_array_equal(engine.read_tensor("transposed"), expected.T)


def test_results_outlive_runs_and_intermediates_do_not():
    graph = new_graph()
    x = variable(graph, [3], name="x", value=[1, 2, 3])
    prog = Sequence()
    middle = popops.neg(graph, x, prog, "middle")
    result = popops.square(graph, middle, prog, "result")
    prog.add(PrintTensor("result", result))
    engine = loaded(graph, prog)
    engine.set_print_stream(io.StringIO())
    engine.run()
    np.testing.assert_array_equal(engine.read_tensor(result), [1, 4, 9])
    with pytest.raises(EngineError, match=r"middle(.|\n)*create_host_read"):
        engine.read_tensor(middle)


def test_load_restores_initial_values():
    graph = new_graph()
    x = variable(graph, [2], name="x", value=[1, 2])
    prog = Sequence()
    popops.neg_in_place(graph, x, prog)
    engine = loaded(graph, prog)
    engine.run()
    np.testing.assert_array_equal(engine.read_tensor(x), [-1, -2])
    engine.load(DEVICE)
    np.testing.assert_array_equal(engine.read_tensor(x), [1, 2])


def test_exact_splits_give_the_numbers_of_the_interpreter():
    graph = new_graph()
    x = variable(graph, [50], name="x", value=np.random.default_rng(0).standard_normal(50))
    prog = Sequence()
    total = popops.reduce(graph, x, [0], "add", prog)
    unsplit = both(graph, prog, {"total": total})["total"]
    engine = loaded(graph, prog, {"debug.exactSplits": "true"})
    engine.run()
    np.testing.assert_allclose(engine.read_tensor("total"), unsplit, rtol=1e-5)


def test_persistent_variables_occupy_memory_during_all_programs():
    graph = new_graph()
    big, x, y = (variable(graph, [800], name=name) for name in ("big", "x", "y"))
    graph.create_host_write("x", x)
    copy = Copy(x, y)
    before = poplar.Engine(graph, copy).profile.memory.tile_bytes
    graph.create_host_read("big", big)
    after = poplar.Engine(graph, copy).profile.memory.tile_bytes
    np.testing.assert_array_equal(after - before, [400] * 8)


# --- profiles ---


def loop(graph, turns):
    """A loop whose trip count is data."""
    counter = variable(graph, [], poplar.INT, "counter")
    flag = variable(graph, [], poplar.BOOL, "flag")
    limit = variable(graph, [], poplar.INT, "limit", value=turns)
    graph.create_host_write("limit", limit)
    start = Sequence()
    test = Sequence()
    body = Sequence()
    popops.zero(graph, counter, start)
    test.add(Copy(popops.lt(graph, counter, limit, test, "less"), flag))
    popops.add_in_place(graph, counter, constant(graph, 1, poplar.INT), body, "count")
    return Sequence(start, RepeatWhileTrue(test, flag, body))


def test_execution_profile_adds_up_all_runs_since_the_reset():
    graph, _, add, double = accumulator()
    engine = loaded(graph, [add, double])
    once = [compile(graph, p, options=Options(verify_undefined=False)).timeline_of(None).cycles for p in (add, double)]
    assert engine.get_execution_profile()["simulation"]["cycles"] == 0
    for index in (0, 0, 1):
        engine.run(index)
    assert engine.get_execution_profile()["simulation"]["cycles"] == 2 * once[0] + once[1]
    engine.reset_execution_profile()
    engine.run(1)
    assert engine.get_execution_profile()["simulation"]["cycles"] == once[1]
    assert engine.get_graph_profile()["graph"]["numComputeSets"] == 2


def test_instrumented_loops_count_their_iterations():
    graph = new_graph()
    engine = loaded(graph, loop(graph, 3), {"debug.instrument": "true"})
    cycles = []
    for turns in (3, 5, 4):
        engine.write_tensor("limit", turns)
        engine.reset_execution_profile()
        engine.run()
        cycles.append(engine.execution.cycles)
    assert cycles[1] - cycles[0] == 2 * (cycles[2] - cycles[0]) > 0
    engine.reset_execution_profile()
    for turns in (3, 4):
        engine.write_tensor("limit", turns)
        engine.run()
    assert engine.execution.cycles == cycles[0] + cycles[2]


def test_loops_need_instrumentation_for_the_execution_profile_only():
    graph = new_graph()
    engine = loaded(graph, loop(graph, 2))
    engine.run()
    assert engine.get_graph_profile()["memory"]
    with pytest.raises(ProfileError, match=r"debug\.instrument"):
        engine.get_execution_profile()


def test_a_switch_costs_the_branches_that_ran():
    graph = new_graph()
    flag = variable(graph, [], poplar.BOOL, "flag")
    x = variable(graph, [8], name="x")
    graph.create_host_write("flag", flag)
    body = Sequence()
    popops.sin(graph, x, body, "slow")
    engine = loaded(graph, If(flag, body), {"debug.instrument": True})
    cycles = []
    for value in (False, True):
        engine.write_tensor("flag", value)
        engine.reset_execution_profile()
        engine.run()
        cycles.append(engine.execution.cycles)
    assert cycles[1] > cycles[0] + 2000


def test_summary_has_the_requested_sections():
    graph, _, add, _ = accumulator()
    engine = loaded(graph, add)
    engine.run()
    engine.print_profile_summary(out := io.StringIO(), {"showExecutionSteps": "true", "showPerIpuMemoryUsage": "true"})
    assert "Steps:\n" in out.getvalue() and "OnTileExecute" in out.getvalue() and "IPU 0: " in out.getvalue()
    with pytest.raises(ArgumentError, match=r"showExecutionStep'(.|\n)*try: .*showExecutionSteps"):
        engine.print_profile_summary(out, {"showExecutionStep": "true"})


def test_cpu_runs_and_has_no_profile():
    device = poplar.Device.create_cpu_device()
    graph = poplar.Graph(device)
    x = graph.add_variable(poplar.FLOAT, [3], "x")
    graph.set_tile_mapping(x, 0)
    graph.set_initial_value(x, [1, 2, 3])
    prog = Sequence()
    y = popops.square(graph, x, prog)
    engine = poplar.Engine(graph, prog)
    engine.load_and_run(device)
    np.testing.assert_array_equal(engine.read_tensor(y), [1, 4, 9])
    with pytest.raises(ProfileError, match="IPUModel"):
        engine.get_graph_profile()


# --- options ---


def test_the_environment_overrides_the_program():
    for name in ENVIRONMENT:
        assert EngineOptions.of({"debug.instrument": "false"}, {name: '{"debug.instrument": "true"}'}).instrument
    ours, of_poplar = ENVIRONMENT
    both = {of_poplar: '{"debug.instrument": "false"}', ours: '{"debug.instrument": "true"}'}
    assert EngineOptions.of(None, both).instrument
    assert EngineOptions.of({"streams.prefetchDepth": 2}, {}).prefetch_depth == 2
    assert EngineOptions.of(None, {}) == EngineOptions()


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ({"debug.instrumnet": "true"}, {}, r"try: .*debug\.instrument"),
        ({"debug.instrument": "yes"}, {}, "must be true or false"),
        ({"streams.prefetchDepth": -1}, {}, "must be a count"),
        ({"streams.prefetchDepth": 1.5}, {}, "must be a count"),
        ({}, {ENVIRONMENT[0]: "{"}, "must be JSON"),
        ({}, {ENVIRONMENT[1]: "[]"}, "must be a JSON object"),
    ],
)
def test_refuses_invalid_options(options, environment, message):
    with pytest.raises(ArgumentError, match=message):
        EngineOptions.of(options, environment)


def test_out_of_memory_unless_allowed():
    graph = new_graph()
    x = graph.add_variable(poplar.FLOAT, [200_000], "x")
    graph.set_tile_mapping(x, 0)
    prog = Sequence()
    popops.zero(graph, x, prog)
    graph.create_host_read("x", x)
    with pytest.raises(TileMemoryError, match="tile 0"):
        poplar.Engine(graph, prog)
    engine = loaded(graph, prog, {"debug.allowOutOfMemory": "true"})
    assert engine.profile.memory.max_tile_bytes > graph.target.bytes_per_tile


def test_refuses_a_mapping_by_hand_without_memory_for_a_product():
    """The operand keeps its mapping; the error names the variables of the tile, their lines, and other mappings."""
    graph = new_graph()
    x = graph.add_variable(poplar.FLOAT, [1024, 512], "x")
    w = graph.add_variable(poplar.FLOAT, [512, 64], "w")
    graph.set_tile_mapping(x, 0)
    graph.set_tile_mapping(w, 1)
    prog = Sequence()
    graph.create_host_read("out", poplin.mat_mul(graph, x, w, prog, "product"))
    patterns = (
        r"2,097,152 B +Variable\(x: float32\[1024, 512\]\) \(variable\), test_engine.py",
        "x: .* on more tiles, if you map",
    )
    with pytest.raises(TileMemoryError, match=r"(.|\n)*".join(patterns)):
        poplar.Engine(graph, prog)


# --- wrong use ---


def test_refuses_calls_before_load():
    graph, _, add, _ = accumulator()
    engine = poplar.Engine(graph, add)
    for call in (
        lambda: engine.run(0),
        lambda: engine.read_tensor("total"),
        lambda: engine.write_tensor("total", [0] * 3),
    ):
        with pytest.raises(EngineError, match=r"before the engine is loaded\n  at: test_engine.py"):
            call()


@pytest.mark.parametrize("index", [1, -1, "0"])
def test_refuses_a_program_index_out_of_range(index):
    graph, _, add, _ = accumulator()
    with pytest.raises(EngineError, match=r"no program(.|\n)*0 … 0"):
        loaded(graph, add).run(index)


def test_refuses_a_device_of_another_machine():
    graph, _, add, _ = accumulator()
    with pytest.raises(EngineError, match="graph's target"):
        poplar.Engine(graph, add).load(poplar.IPUModel("ipu1").create_device())


def test_refuses_unknown_handles_and_invalid_values():
    graph, _, add, _ = accumulator()
    engine = loaded(graph, add)
    with pytest.raises(EngineError, match=r"read handle is called 'totl'(.|\n)*try: 'total'"):
        engine.read_tensor("totl")
    with pytest.raises(ArgumentError, match=r"float32\[3\](.|\n)*\[4\]"):
        engine.write_tensor("total", [1.0, 2, 3, 4])
    with pytest.raises(ArgumentError, match="complex"):
        engine.write_tensor("total", np.zeros(3, complex))


def test_names_an_unmapped_variable():
    graph = new_graph()
    x = variable(graph, [3], name="x")
    y = graph.add_variable(poplar.FLOAT, [3], "nowhere")
    with pytest.raises(VerifyError, match=r"unmapped-variable(.|\n)*nowhere"):
        poplar.Engine(graph, Copy(x, y))


def test_undefined_reads_are_refused_by_default_of_the_runtime():
    graph = new_graph()
    x = variable(graph, [3], name="x")
    y = variable(graph, [3], name="y")
    with pytest.raises(VerifyError, match="undefined-read"):
        compile(graph, Copy(x, y))
    compile(graph, Copy(x, y), options=Options(verify_undefined=False))
    stream = HostStream("s", (3,), np.dtype(np.float32))
    compile(graph, Sequence(StreamIn(stream, x), Copy(x, y), StreamOut(y, stream)))
