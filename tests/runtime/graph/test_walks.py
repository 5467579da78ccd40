"""Walks over program trees: folds, and numbers of runs, against plain recursion over all ways through the tree."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings, strategies as st

from ipujax.runtime.graph.program import Call, Copy, Function, If, Repeat, RepeatWhile, Sequence, Switch
from ipujax.runtime.graph.walks import data_loops, distinct, fold, iteration, run_counts
from tests.runtime.helpers import graph_of_variables

GRAPH, TENSORS = graph_of_variables()
FLAG = GRAPH.add_variable((), np.dtype(bool), "flag")
NUMBER = GRAPH.add_variable((), np.dtype(np.int32), "number")


@st.composite
def programs(draw, depth=4):
    """Programs of all control, in which nodes and functions are shared."""
    nodes = [Copy(TENSORS[0], TENSORS[1]), Copy(TENSORS[1], TENSORS[2])]

    def inner():
        return draw(st.sampled_from(nodes))

    for _ in range(draw(st.integers(1, 2 * depth))):
        kind = draw(st.integers(0, 5))
        if kind == 0:
            node = Sequence(*(inner() for _ in range(draw(st.integers(0, 3)))))
        elif kind == 1:
            node = Repeat(draw(st.integers(0, 3)), inner())
        elif kind == 2:
            node = RepeatWhile(inner(), FLAG, inner(), until=draw(st.booleans()))
        elif kind == 3:
            node = If(FLAG, inner(), inner())
        elif kind == 4:
            node = Switch(NUMBER, (inner(), inner()), inner())
        else:
            node = Call(Function(inner()))
        nodes.append(node)
    return Sequence(*nodes)


def counted(program, into_calls, times=1):
    """Runs of each node, by following every way through the tree."""
    counts = Counter({program: times})
    if into_calls or not isinstance(program, Call):
        runs = program.count if isinstance(program, Repeat) else 1
        for child in program.children():
            counts.update(counted(child, into_calls, times * runs))
    return counts


@settings(max_examples=60)
@given(programs(), st.booleans())
def test_run_counts_follow_every_way_through_the_tree(program, into_calls):
    counts = run_counts(program, into_calls=into_calls)
    assert counts == counted(program, into_calls)
    assert counts.keys() == set(distinct(program, into_calls=into_calls))
    places = {node: place for place, node in enumerate(counts)}
    parents = [node for node in counts if into_calls or not isinstance(node, Call)]
    assert all(places[node] < places[child] for node in parents for child in node.children())


@settings(max_examples=60)
@given(programs())
def test_fold_combines_each_node_once(program):
    combined = []

    def depth(node, children):
        combined.append(node)
        return 1 + max(children, default=0)

    depth_of = fold(depth)
    assert depth_of(program) == deepest(program)
    assert Counter(combined) == Counter(distinct(program))
    depth_of(program)
    assert len(combined) == len(set(combined))


def deepest(program):
    return 1 + max(map(deepest, program.children()), default=0)


@settings(max_examples=60)
@given(programs())
def test_rebuild_with_the_same_children_changes_nothing(program):
    for node in distinct(program):
        other = node.rebuild(node.children())
        assert type(other) is type(node)
        assert other.children() == node.children()
        assert (other.reads, other.writes, other.attributes) == (node.reads, node.writes, node.attributes)
        assert other.child_runs == node.child_runs


def test_run_counts_of_many_calls_are_linear():
    """Each function calls the last one twice: 2^60 ways, 180 nodes."""
    body = Copy(TENSORS[0], TENSORS[1])
    program = body
    for _ in range(60):
        function = Function(program)
        program = Sequence(Call(function), Call(function))
    assert run_counts(program)[body] == 2**60


def test_iteration_of_a_loop_ends_with_its_test():
    body = Copy(TENSORS[0], TENSORS[1])
    test = Copy(TENSORS[1], TENSORS[2])
    loop = RepeatWhile(test, FLAG, body)
    assert iteration(Repeat(3, body)) is body
    assert iteration(loop).children() == (body, test)
    assert data_loops(Sequence(Repeat(2, loop), If(FLAG, loop, body))) == [loop]
