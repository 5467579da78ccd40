"""A loop until its predicate is true equals, in all that is computed of it, one while the opposite predicate is."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from ipujax.lowering.dumps.dot import graph_dot
from ipujax.lowering.dumps.json_forms import graph_json
from ipujax.runtime.analysis.effects import EffectsOf
from ipujax.runtime.analysis.liveness import liveness
from ipujax.runtime.compile import compile
from ipujax.runtime.engine import DecisionLog, engine_function
from ipujax.runtime.errors import ProfileError, VerifyError
from ipujax.runtime.graph import Loop, distinct
from ipujax.runtime.graph.codelet import Codelet, Field
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.listing import listing
from ipujax.runtime.graph.program import (
    Call,
    Copy,
    Execute,
    Function,
    HostStream,
    Program,
    Repeat,
    RepeatWhile,
    Sequence,
    StreamIn,
    StreamOut,
)
from ipujax.runtime.graph.vertex_group import Access, VertexGroup
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.options import Options
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.tensor.mapping import on_one_tile
from ipujax.runtime.verify import verify
from tests.runtime.helpers import F32, TARGET

BOOL = np.dtype(bool)
I32 = np.dtype(np.int32)
COUNT = HostStream("count", (), I32)
OUT = HostStream("out", (), I32)
FLAG_OUT = HostStream("flag", (), BOOL)


@dataclasses.dataclass
class Case:
    """A graph, a program around one loop, and the loop."""

    graph: Graph
    program: Program
    loop: Loop


def execute(graph, name, compute, source, target):
    fields = (Field("x", "in", source.dtype), Field("y", "out", target.dtype))
    code = Codelet(name, fields, compute, lambda shapes, _: np.asarray(7))
    compute_set = graph.add_compute_set(name)
    accesses = (Access(source, ()), Access(target, ()))
    graph.add_vertices(compute_set, VertexGroup(code, (), accesses, np.zeros((), np.int32)))
    return Execute(compute_set)


def counting(until, limit=5, dtype=BOOL):
    """Counts up to a limit, twice in a function: `while count < limit`, or `until count >= limit`."""
    graph = Graph(TARGET)
    count, following = (graph.add_variable((), I32, name, on_one_tile(1, 0)) for name in ("count", "following"))
    flag = graph.add_variable((), dtype, "flag", on_one_tile(1, 0))
    compare = (lambda x: x >= limit) if until else (lambda x: x < limit)
    test = execute(graph, "test", compare, count, flag)
    body = Sequence(execute(graph, "count", lambda x: x + 1, count, following), Copy(following, count))
    loop = RepeatWhile(test, flag, body, until=until)
    repeated = Repeat(2, Call(Function(loop)))
    program = Sequence(StreamIn(COUNT, count), repeated, StreamOut(count, OUT), StreamOut(flag, FLAG_OUT))
    return Case(graph, program, loop)


@pytest.mark.parametrize("until", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 5])
def test_engine_and_interpreter_count_to_the_limit(until, limit):
    case = counting(until, limit)
    start = {COUNT: np.int32(0)}
    log = DecisionLog()
    engine = engine_function(case.graph, case.program, log=log)
    for outputs in (engine(start), interpret(case.graph, case.program, start)):
        assert outputs[OUT] == limit and outputs[FLAG_OUT] == until
    assert log.decisions == {case.loop: [limit, 0]}


def test_analyses_are_equal():
    live = []
    effects = []
    for case in (counting(until=False), counting(until=True)):
        known = EffectsOf(case.graph)
        each = known(case.program)
        effects.append([sorted(v.name for v in variables) for variables in (each.reads, each.writes, each.kills)])
        frame = liveness(case.program, known)
        frames = [frame, *frame.functions.values()]
        live.append([[(i.variable.name, i.first, i.last) for i in frame.intervals] for frame in frames])
    assert effects[0] == effects[1]
    assert live[0] == live[1] and any(live[0])


@pytest.mark.parametrize("trips", [0, 3])
def test_profiles_are_equal(trips):
    cases = [counting(until=False), counting(until=True)]
    profiles = [
        Profile(compile(case.graph, case.program, options=Options(trip_counts={"while[0]": trips}))) for case in cases
    ]
    profiles += [Profile(compile(case.graph, case.program), {case.loop: [trips, trips]}) for case in cases]
    figures = [(each.cycles, each.phase_cycles, each.execution(), each.program_costs) for each in profiles]
    assert figures[0] == figures[1] == figures[2] == figures[3]
    memories = [each.memory.tile_bytes.tolist() for each in profiles]
    assert memories[0] == memories[1]
    graphs = [each.graph() for each in profiles]
    assert all(graphs[0][name] == graphs[1][name] for name in ("programs", "functionPrograms", "memory"))
    assert "RepeatWhile" in {entry["type"] for entry in graphs[1]["programs"]}


def test_unknown_trip_counts_are_refused():
    for case in (counting(until=False), counting(until=True)):
        with pytest.raises(ProfileError, match="trip count of loop 'while\\[0\\]'"):
            _ = Profile(compile(case.graph, case.program)).cycles


@pytest.mark.parametrize("until", [False, True])
def test_verifier_refuses_the_same(until):
    case = counting(until)
    verify(case.graph, case.program)
    with pytest.raises(VerifyError, match="undefined-read"):
        verify(case.graph, RepeatWhile(Sequence(), case.loop.predicate, case.loop.body, until=until))
    wrong = counting(until, dtype=F32)
    with pytest.raises(VerifyError, match=r"\[type-mismatch\]"):
        verify(wrong.graph, wrong.program)


def test_dumps_differ_in_one_word():
    case = counting(until=False)
    other = counting(until=True)
    assert listing(other.graph, other.program) == listing(case.graph, case.program).replace("while %", "until %")
    assert graph_dot(other.graph, other.program, "x") == graph_dot(case.graph, case.program, "x")
    text, other_text = (json.dumps(graph_json(each.graph, each.program)) for each in (case, other))
    assert other_text == text.replace('"until": false', '"until": true').replace("while %", "until %")


def test_rebuilt_loops_stay_loops_until():
    case = counting(until=True)
    program = case.program
    for node in distinct(program):
        if node is case.loop:
            assert node.rebuild(node.children()).until
            assert node.with_decider(node.predicate).until
