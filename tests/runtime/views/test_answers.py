"""Answers name planted faults: a bottleneck, a full tile, an IPU that waits, and the line to change."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.compile import compile
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Copy, Execute, Repeat, Sequence
from ipujax.runtime.graph.vertex_group import Access, Axis, VertexGroup, element
from ipujax.runtime.memory import BUFFERS
from ipujax.runtime.memory.live_item import LiveItem
from ipujax.runtime.options import Options
from ipujax.runtime.report import Profile
from ipujax.runtime.tensor.mapping import grid, on_one_tile
from ipujax.runtime.tensor.roles import UNKNOWN
from ipujax.runtime.tensor.variable import Origin
from ipujax.runtime.views import answers
from ipujax.runtime.views.answers import (
    QUESTIONS,
    STAGE,
    UNPRICED,
    WAITS,
    costliest_operation,
    fullest_tile,
    idle_cycles,
    line_to_change,
    waiting_ipu,
)
from ipujax.runtime.views.hints import MEMORY_HINTS, TIME_HINTS
from ipujax.runtime.views.operation_view import operation_rows
from ipujax.runtime.views.part_answers import layer_answer
from tests.runtime.helpers import machine
from tests.runtime.profile.profile_helpers import (
    F32,
    SIZE,
    TARGET,
    apply,
    codelet,
    inputs,
    looping,
    output,
    trained_program,
    two_ipus,
    variables,
)


def steps(*cycles):
    """A program of steps on four tiles, each on a line of its own."""
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    actual = [
        apply(graph, codelet(f"step{n}", each), *((a, b) if n % 2 == 0 else (b, a)), 4, f"model.py:{n} (loss)")
        for n, each in enumerate(cycles)
    ]
    return Profile(compile(graph, Sequence(*inputs(a), *actual)))


@pytest.mark.parametrize("planted", range(5))
def test_the_planted_bottleneck_limits_and_its_line_is_to_change(planted):
    cycles = [20] * 5
    cycles[planted] = 4_000
    profile = steps(*cycles)
    answer = costliest_operation(profile)
    assert answer.subject == f"step{planted}/compute" and 0.95 < answer.share < 1
    work = 4 * 4_000 + TARGET.internal_sync_cycles
    assert f"{work:,} of {profile.cycles:,} cycles, at model.py:{planted} (loss)" in answer.sentence
    line = line_to_change(profile)
    assert line.subject == f"model.py:{planted} (loss)" and line.hint == TIME_HINTS["half"].text
    assert line.share == pytest.approx(work / profile.cycles)


def test_hint_to_spread_an_operation_on_few_tiles():
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    alone = apply(graph, codelet("alone", 1_000), a, b, 1, "model.py:1 (loss)")
    answer = costliest_operation(Profile(compile(graph, Sequence(*inputs(a), alone))))
    assert answer.subject == "alone/compute" and "it computes on few tiles" in answer.hint


@pytest.mark.parametrize("planted", [1, 3])
def test_the_planted_tile_is_fullest_with_the_planted_variable(planted):
    graph = Graph(TARGET.replace(bytes_per_tile=64 * 1024))
    large = graph.add_variable((12_800,), F32, "large", on_one_tile(12_800, planted))
    small = graph.add_variable((SIZE,), F32, "small", grid((SIZE,), (4,)))
    profile = Profile(compile(graph, Sequence(*inputs(large, small), output(large), output(small))))
    answer = fullest_tile(profile)
    assert answer.subject == f"tile {planted}" and 0.8 < answer.share < 1
    assert f"50.0 KiB {UNKNOWN}" in answer.sentence
    assert f"The largest variable is Variable(large: float32[12800]) ({UNKNOWN}), 50.0 KiB." in answer.sentence
    assert answer.hint == "spread Variable(large: float32[12800]) over more tiles: 100% of it is on this one"


def test_an_operation_that_no_tiles_share_is_named_on_the_fullest_tile():
    fun = ipu.jit(jnp.linalg.svd, device=ipu.IPUModel(tiles_per_ipu=16, bytes_per_tile=128 * 1024))
    options = ipu.Options(allow_out_of_memory=True)
    profile = fun.with_options(options).lower(jax.ShapeDtypeStruct((256, 256), F32)).compile().profile
    answer = fullest_tile(profile)
    assert BUFFERS in answer.sentence and "The largest thing with a name is <borrowed:" in answer.sentence
    assert "svd" in answer.sentence and answer.hint == MEMORY_HINTS["borrowed"].text


def test_a_gap_is_no_thing_with_a_name():
    profile = steps(1)
    gap = LiveItem.without_variable(10**6, "gap", "packing")
    breakdown = replace(profile.memory.breakdown, items=(gap, *profile.memory.breakdown.items))
    answer = fullest_tile(profile.replaced(memory=profile.memory.replaced(breakdown=breakdown)))
    assert "packing" not in answer.sentence and "The largest variable is" in answer.sentence


def test_a_tile_that_overflows_says_by_how_much():
    graph = Graph(TARGET.replace(bytes_per_tile=8192))
    large = graph.add_variable((4096,), F32, "large", on_one_tile(4096, 2))
    program = Sequence(*inputs(large), output(large))
    answer = fullest_tile(Profile(compile(graph, program, options=Options(allow_out_of_memory=True))))
    assert answer.subject == "tile 2" and answer.share > 2 and "more than it has" in answer.sentence


def unequal_stages(cycles):
    """Ten micro-batches through two IPUs, the second of which computes for so many cycles."""
    graph = Graph(TARGET.replace(num_ipus=2))
    a, b = (graph.add_variable((SIZE,), F32, name, grid((SIZE,), (4,))) for name in "ab")
    c, d = (graph.add_variable((SIZE,), F32, name, grid((SIZE,), (4,), 4)) for name in "cd")
    first = apply(graph, codelet("first", 100), a, b, 4)
    compute_set = graph.add_compute_set("second")
    accesses = tuple(Access(tensor, (element(0),)) for tensor in (c, d))
    axis = Axis("i", grid((SIZE,), (4,)).cuts[0])
    group = VertexGroup(codelet("second", cycles), (axis,), accesses, np.arange(4, 8, dtype=np.int32))
    graph.add_vertices(compute_set, group)
    body = Sequence(first, Copy(b, c), Execute(compute_set))
    return Profile(compile(graph, Sequence(*inputs(a), Repeat(10, body), output(d))))


def test_the_ipu_that_waits_is_found_and_how_long():
    profile = unequal_stages(5_000)
    idle = idle_cycles(profile)
    answer = waiting_ipu(profile)
    # IPU 0 waits for IPU 1 in each round but the first, and from its last exchange to the end.
    assert answer.subject == "IPU 0" and answer.share == pytest.approx(idle[0].sum() / profile.cycles)
    work = profile.timeline.work.sum(1)
    np.testing.assert_array_equal(idle.sum(1), profile.cycles - work)
    assert idle[0, 1] > idle[0, 0] == 0 and "before global exchange" in answer.sentence
    assert (
        f"{idle[0].sum() / profile.cycles:.1%} of the run" in answer.sentence
        and answer.hint == "move work to this IPU from IPU 1, which works most"
    )


def test_filling_and_draining_differ_from_steady_waiting():
    profile = Profile(two_ipus())  # IPU 0 only sends; IPU 1 computes 2,000 cycles five times
    idle = idle_cycles(profile)
    assert idle[1].tolist() == [0, 0, 0] and idle[0].sum() > 0.4 * profile.cycles
    assert waiting_ipu(profile).subject == "IPU 0"


def test_names_an_operation_on_one_tile_of_many():
    graph = Graph(machine(64))
    a, b = (graph.add_variable((SIZE,), F32, name, on_one_tile(SIZE, 3)) for name in "ab")
    scalar = apply(graph, codelet("schedule", 1_000), a, b, 1, "model.py:7 (learning_rate)")
    profile = Profile(compile(graph, Sequence(*inputs(a), scalar)))
    assert costliest_operation(profile).hint == TIME_HINTS["few tiles"].text == line_to_change(profile).hint


def test_of_operations_that_run_together_the_dearest_line_is_named():
    graph = Graph(TARGET)
    a, b, c = variables(graph, "a", "b", "c")
    together = graph.add_compute_set("cheap, dear")
    for name, cycles, result, line in (("cheap", 5, b, 3), ("dear", 900, c, 9)):
        accesses = tuple(Access(tensor, (element(0),)) for tensor in (a, result))
        axis = Axis("i", grid((SIZE,), (4,)).cuts[0])
        origin = Origin(f"model.py:{line} (loss)")
        tiles = np.arange(4, dtype=np.int32)
        group = VertexGroup(codelet(name, cycles), (axis,), accesses, tiles, origin=origin, name=name)
        graph.add_vertices(together, group)
    profile = Profile(compile(graph, Sequence(*inputs(a), Execute(together))))
    assert "at model.py:9 (loss)" in costliest_operation(profile).sentence
    assert line_to_change(profile).subject == "model.py:9 (loss)"


def test_one_ipu_waits_for_no_other():
    assert WAITS not in {answer.question for answer in answers(Profile(trained_program()))}


def test_unknown_figures_are_named_for_each_question():
    graph, program, _, _ = looping()
    actual = {answer.question: answer for answer in answers(Profile(compile(graph, program)))}
    assert list(actual) == [
        question for question in QUESTIONS if question not in (STAGE, UNPRICED, WAITS)
    ]  # these do not arise
    unknown = [answer for answer in actual.values() if answer.sentence.startswith("Not known: the trip count of loop")]
    assert len(unknown) == 3  # memory is known


def test_a_pipeline_fills_and_drains():
    """Two stages in turns: the second waits for the first at the start, the first for the second at the end."""

    def loss(params, x):
        with ipu.stage(0):
            hidden = jnp.sin(x @ params["w1"])
        with ipu.stage(1):
            return jnp.mean((hidden @ params["w2"]) ** 2)

    def step(params, x):
        return ipu.pipeline(loss, micro_batches=2)(params, x)

    params = {name: jax.ShapeDtypeStruct((64, 64), "float32") for name in ("w1", "w2")}
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    compiled = ipu.jit(step, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=16)).lower(params, x).compile()
    (pipeline,) = compiled.profile.pipelines
    # Arguments that are loaded before the first task are no work of a stage.
    assert all(row.busy_cycles <= pipeline.cycles for row in compiled.profile.stages)
    idle = idle_cycles(compiled.profile)
    assert idle[1, 0] > 0 and idle[0, 2] > 0 and idle[0, 0] < idle[1, 0] and idle[1, 2] < idle[0, 2]


def test_a_line_of_several_phases_names_two_and_host_streams_have_hints():
    shape = jax.ShapeDtypeStruct((2048, 64), "float32")
    profile = ipu.jit(lambda x: x + 1, device=ipu.IPUModel(tiles_per_ipu=16)).lower(shape).compile().profile
    hint = costliest_operation(profile).hint
    assert "donate_argnums" in hint and "lax.scan" in hint
    phases = {"compute": 40, "exchange": 35, "sync": 25}
    line = next(line for line in profile.operations() if "add" in line.names)
    profile.__dict__["operations"] = lambda *_: (replace(line, cycles=100, share=0.5, phases=phases),)
    answer = line_to_change(profile)
    assert "compute (40%) and exchange (35%)" in answer.sentence
    assert answer.hint.startswith("compute: half") and "; exchange: fewer" in answer.hint


def test_lines_and_layers_that_take_next_to_nothing_are_not_to_change():
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    origin = Origin("model.py:3 (f)", layer="f")
    with graph.debug_origin(origin):
        compute_set = graph.add_compute_set("step")
    cuts = grid((SIZE,), (4,)).cuts[0]
    accesses = tuple(Access(tensor, (element(0),)) for tensor in (a, b))
    axes = (Axis("i", cuts),)
    tiles = np.arange(4, dtype=np.int32)
    graph.add_vertices(compute_set, VertexGroup(codelet("step", 1), axes, accesses, tiles))
    profile = Profile(compile(graph, Sequence(*inputs(a), Execute(compute_set), output(b))))
    line = line_to_change(profile)
    layer = layer_answer(profile)
    assert line.share < 0.02 and line.sentence.startswith("No line of source takes more than 1.0%")
    assert "latency of host exchanges takes 9" in line.sentence and not line.hint
    assert layer.sentence.startswith("No layer takes more than 1.0%") and layer.subject == "f"


def test_an_operation_that_layers_repeat_is_added_up():
    def model(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    profile = ipu.jit(model, device=ipu.IPUModel(tiles_per_ipu=16)).profile([shape] * 12, shape)
    rows = [row for row in operation_rows(profile) if row.name == "dot_general"]
    share = sum(row.cycles for row in rows) / profile.busy_cycles
    assert (
        f" All 12 rows of dot_general at {rows[0].line} together take {share:.1%}."
        in costliest_operation(profile).sentence
    )


def test_the_latency_of_the_host_is_no_operation() -> None:
    profile = ipu.jit(jnp.sin).profile(jnp.ones((4,)))
    assert "latency" in operation_rows(profile)[0].name  # takes most
    assert costliest_operation(profile).subject == "sin"
