"""Forms of control: every node has one, and a node of which only the form is known is analysed, costed and run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from ipujax.lowering.dumps.dot import graph_dot
from ipujax.runtime.analysis.effects import EffectsOf
from ipujax.runtime.analysis.liveness import liveness
from ipujax.runtime.compile import compile
from ipujax.runtime.engine.engine import engine_function
from ipujax.runtime.errors import VerifyError
from ipujax.runtime.graph import Block, Branch, Decision, Leaf, Loop, Program, WriteUndef, program
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.listing import listing
from ipujax.runtime.graph.program import HostStream, If, Repeat, Sequence, StreamIn, StreamOut
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.tensor import Origin, Tensor
from ipujax.runtime.tensor.mapping import on_one_tile
from ipujax.runtime.verify import verify
from tests.runtime.helpers import F32, TARGET
from tests.runtime.profile.profile_helpers import BOOL, SIZE, apply, codelet, variables

FORMS = (Leaf, Block, Loop, Branch)


NODES = [
    kind
    for kind in vars(program).values()
    if isinstance(kind, type) and issubclass(kind, Program) and kind not in (*FORMS, Decision, Program)
]


def test_every_node_has_one_form():
    assert len(NODES) == 18
    for kind in NODES:
        assert sum(issubclass(kind, form) for form in FORMS) == (kind is not WriteUndef), kind


def test_loops_decide_if_they_have_a_test():
    for kind in (kind for kind in NODES if issubclass(kind, Loop)):
        assert issubclass(kind, Decision) == (kind.test is not Loop.test), kind


@pytest.mark.parametrize(("form", "missing"), [(Leaf, "label"), (Branch, "choice")])
def test_nodes_without_a_method_of_their_form_cannot_be_made(form: type[Program], missing: str):
    with pytest.raises(TypeError, match=missing):
        type("Incomplete", (form,), {})()


# --- nodes that no part of the compiler names -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class RepeatThrice(Loop):
    """Runs its body three times."""

    body: Program
    origin: Origin = Origin()

    @property
    def trips(self) -> int:
        return 3


@dataclass(frozen=True, eq=False, slots=True)
class Unless(Branch):
    """Runs its body if a flag is false."""

    predicate: Tensor
    body: Program
    skipped: Program
    origin: Origin = Origin()

    def children(self):
        return (self.skipped, self.body)

    def choice(self, value):
        return int(not value)

    def recorded_choice(self, outcome):
        return self.choice(outcome)


class Setting:
    """A graph of two variables and a flag, and steps of it."""

    def __init__(self):
        self.graph = Graph(TARGET)
        self.a, self.b = variables(self.graph, "a", "b")
        self.flag = self.graph.add_variable((), BOOL, "flag", on_one_tile(1, 0))
        self.cheap = apply(self.graph, codelet("cheap", 3), self.a, self.b, 4)
        self.dear = apply(self.graph, codelet("dear", 50), self.b, self.a, 4)
        self.streams = HostStream("a", (SIZE,), F32), HostStream("flag", (), BOOL)
        self.out = HostStream("out", (SIZE,), F32)

    def program(self, *steps):
        """A program that reads its inputs, runs steps, and writes its result."""
        starts = [StreamIn(stream, tensor) for stream, tensor in zip(self.streams, (self.a, self.flag), strict=True)]
        return Sequence(*starts, *steps, StreamOut(self.b, self.out))

    def inputs(self, flag):
        return dict(zip(self.streams, (np.arange(SIZE, dtype=F32), np.asarray(flag)), strict=True))


def unknown_and_known():
    """A program of unknown nodes, and one of known nodes that do the same."""
    b = Setting()
    loop = Sequence(b.cheap, b.dear)
    empty = Sequence()
    unknown = b.program(RepeatThrice(loop), Unless(b.flag, b.cheap, empty))
    return b, unknown, b.program(Repeat(3, loop), If(b.flag, empty, b.cheap))


def live_variables(program, effects):
    frame = liveness(program, effects)
    return [frame.live_at(step) for step in range(len(frame.steps))]


def test_unknown_nodes_are_analysed_as_known_ones():
    b, unknown, known = unknown_and_known()
    effects = EffectsOf(b.graph)
    assert effects(unknown) == effects(known)
    assert live_variables(unknown, effects) == live_variables(known, effects)


@pytest.mark.parametrize("flag", [False, True])
def test_unknown_nodes_cost_as_known_ones(flag):
    b, *programs = unknown_and_known()
    measured = []
    for each in programs:
        executable = compile(b.graph, each)
        decision = next(node for node in each.children() if isinstance(node, Branch))
        profile = Profile(executable, {decision: [int(flag)]})
        costs = [(node.cycles, node.runs) for node in profile.program_costs.walk()]
        steps = [(step.starts, step.ends) for step in profile.timeline.walk()]
        measured.append((profile.cycles, profile.phase_cycles, executable.memory.tile_bytes.tolist(), costs, steps))
    assert measured[0] == measured[1]


@pytest.mark.parametrize("flag", [False, True])
def test_interpreter_runs_unknown_nodes_as_known_ones(flag):
    b, unknown, known = unknown_and_known()
    first, second = (interpret(b.graph, each, b.inputs(flag))[b.out] for each in (unknown, known))
    np.testing.assert_array_equal(first, second)


def test_verifier_checks_unknown_nodes():
    b = Setting()
    with pytest.raises(VerifyError, match="undefined-read"):
        verify(b.graph, b.program(RepeatThrice(Sequence(b.dear, b.cheap))))  # reads b before anything wrote it
    with pytest.raises(VerifyError, match="undefined-read"):
        verify(b.graph, b.program(Unless(b.flag, b.cheap, Sequence())))  # writes b on one way only
    with pytest.raises(VerifyError, match="Unless has the wrong dtype or shape"):
        verify(b.graph, b.program(b.cheap, Unless(b.a, b.cheap, Sequence())))


def test_graph_of_unknown_nodes_is_drawn():
    b, unknown, _ = unknown_and_known()
    text = graph_dot(b.graph, unknown, "unknown")
    assert "repeat 3" in text and "unless" in text


def test_engine_and_listing_refuse_unknown_nodes():
    """They give each node a meaning of its own."""
    b, unknown, _ = unknown_and_known()
    with pytest.raises(AssertionError, match="unknown program node RepeatThrice"):
        engine_function(b.graph, unknown)(b.inputs(True))
    with pytest.raises(AssertionError, match="unknown program node RepeatThrice"):
        listing(b.graph, unknown)
