"""Packing against maps of every byte at every step, the best of all orders, and closed forms; frames of functions."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given, settings, strategies as st

from ipujax.runtime.analysis.effects import EffectsOf
from ipujax.runtime.analysis.liveness import liveness
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Call, Copy, Function, HostStream, Sequence, StreamIn, StreamOut
from ipujax.runtime.memory.frames import frames_of
from ipujax.runtime.memory.packing import (
    ORDERS,
    group_equal_tiles,
    group_similar_tiles,
    live_together,
    merge_spans,
    move_to_front,
    pack,
    round_up,
    sort_items,
)
from ipujax.runtime.tensor.mapping import grid
from tests.runtime.helpers import TARGET

STEPS = 6

_step = st.integers(0, STEPS - 1)
_spans = st.lists(st.tuples(_step, _step).map(sorted).map(tuple), min_size=1, max_size=2).map(merge_spans)


@st.composite
def items(draw, most, columns=3):
    """Sizes in units of 8 bytes, spans, and which come first."""
    number = draw(st.integers(1, most))
    sizes = draw(
        st.lists(st.lists(st.integers(0, 5), min_size=columns, max_size=columns), min_size=number, max_size=number)
    )
    return (
        np.array(sizes) * 8,
        [draw(_spans) for _ in range(number)],
        np.array([draw(st.booleans()) for _ in range(number)]),
    )


def lives(span, step):
    return any(low <= step <= high for low, high in span)


def peak(sizes, spans):
    """Most bytes that live at one step, in each column."""
    return np.max(
        [sum((s for s, own in zip(sizes, spans, strict=True) if lives(own, t)), 0 * sizes[0]) for t in range(STEPS)], 0
    )


def pack_in(order, sizes, spans, wide, is_first):
    """Packs items in an order, some before all others."""
    return pack(
        sizes, live_together(spans), wide, move_to_front(np.flatnonzero(is_first), sort_items(sizes, spans, order))
    )


def pack_all(sizes, spans, order="longest"):
    """Packs items of which none is special."""
    return pack_in(order, sizes, spans, *np.zeros((2, len(spans)), bool))


def first_fit(order, sizes, spans):
    """The extent of one column when items are placed in an order, each at the lowest free address, byte by byte."""
    taken = np.zeros((STEPS, int(sizes.sum()) + 1), bool)
    for item in order:
        when = [t for t in range(STEPS) if lives(spans[item], t)]
        size = int(sizes[item])
        address = next(a for a in range(taken.shape[1]) if not taken[when, a : a + size].any())
        for step in when:
            taken[step, address : address + size] = True
    return int(np.flatnonzero(taken.any(0)).max(initial=-1)) + 1


@settings(max_examples=150)
@given(items(most=7), st.sampled_from(ORDERS))
def test_no_two_that_live_together_share_a_byte(drawn, order):
    sizes, spans, wide = drawn
    packing = pack_in(order, sizes, spans, wide, wide & (len(spans) % 2 == 0))
    np.testing.assert_array_equal(packing.end - packing.start, sizes.T)
    assert not (packing.start % 8).any() and not (packing.start[:, wide] % 16).any()
    for column in range(sizes.shape[1]):
        memory = np.zeros((STEPS, int(sizes[:, column].sum()) + 1), int)
        for item, own in enumerate(spans):
            for step in (t for t in range(STEPS) if lives(own, t)):
                memory[step, packing.start[column, item] : packing.end[column, item]] += 1
        assert memory.max() <= 1
    assert (packing.extent() >= peak(sizes, spans)).all()
    assert (packing.extent() <= (sizes + 8 * wide[:, None]).sum(0)).all()


@settings(max_examples=30)
@given(items(most=5, columns=1))
def test_extent_is_near_the_best_of_all_orders(drawn):
    sizes, spans, _ = drawn
    actual = min(int(pack_all(sizes, spans, order).extent()[0]) for order in ORDERS)
    column = sizes[:, 0] // 8
    best = 8 * min(first_fit(order, column, spans) for order in permutations(range(len(spans))))
    # The best first fit is the best of all: sort the items of any packing by address.
    assert peak(sizes, spans)[0] <= best <= actual <= 2 * best


@settings(max_examples=100)
@given(st.data())
def test_nested_lives_pack_without_a_gap(data):
    """Lives that contain each other or do not meet stack up: memory is the peak exactly."""
    spans = []

    def nest(low, high):
        for _ in range(data.draw(st.integers(1, 2))):
            spans.append(((low, high),))
        if high > low:
            middle = data.draw(st.integers(low, high - 1))
            for part in ((low, middle), (middle + 1, high)):
                if data.draw(st.booleans()):
                    nest(*part)

    nest(0, STEPS - 1)
    sizes = 8 * np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(spans), max_size=len(spans))))[:, None]
    np.testing.assert_array_equal(pack_all(sizes, spans).extent(), peak(sizes, spans))


@settings(max_examples=100)
@given(st.lists(st.tuples(_step, _step).map(sorted).map(tuple), min_size=1, max_size=12))
def test_items_of_one_size_pack_without_a_gap(lives):
    """Colouring of intervals: as many places as live at one step, never more."""
    sizes = np.full((len(lives), 1), 8)
    spans = [(span,) for span in lives]
    actual = pack_all(sizes, spans, "earliest")
    np.testing.assert_array_equal(actual.extent(), peak(sizes, spans))


@settings(max_examples=50)
@given(items(most=6), st.booleans())
def test_the_first_item_has_the_lowest_address(drawn, huge):
    sizes, spans, first = drawn
    sizes = sizes * (2**34 if huge else 1)  # addresses that do not fit half a number
    packing = pack_in("longest", sizes, spans, ~first, first)
    alone = pack_all(sizes[first], [own for own, is_first in zip(spans, first, strict=True) if is_first])
    np.testing.assert_array_equal(packing.start[:, first], alone.start)
    np.testing.assert_array_equal(packing.extent(first), alone.extent())


@settings(max_examples=100)
@given(items(most=6), st.data())
def test_each_item_has_the_lowest_address_that_is_free(drawn, data):
    sizes, spans, _ = drawn
    order = np.array(data.draw(st.permutations(range(len(spans)))), np.int64)
    actual = pack(sizes, live_together(spans), np.zeros(len(spans), bool), order)
    steps = [{step for low, high in own for step in range(low, high + 1)} for own in spans]
    for one in range(sizes.shape[1]):
        for number, item in enumerate(order):
            met = [other for other in order[:number] if steps[other] & steps[item]]
            taken = {a for other in met for a in range(actual.start[one, other], actual.end[one, other])}
            size = int(sizes[item, one])
            free = (a for a in range(0, 10**6, 8) if taken.isdisjoint(range(a, a + size)))
            assert not size or actual.start[one, item] == next(free)


@given(st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), min_size=1, max_size=3))
def test_classes_hold_tiles_that_are_alike(rows):
    sizes = np.array(rows)
    example, of_tile = group_equal_tiles(sizes)
    np.testing.assert_array_equal(sizes[:, example[of_tile]], sizes)
    assert len(example) == len({tuple(column) for column in sizes.T.tolist()})


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 40), min_size=6, max_size=6), max_size=4), st.sampled_from([0.0, 0.1, 0.5]))
def test_a_group_holds_the_most_of_tiles_that_are_nearly_alike(rows, tolerance):
    sizes = np.array(rows, np.int64).reshape(-1, 6)
    most, group = group_similar_tiles(sizes, tolerance)
    for one in range(most.shape[1]):
        np.testing.assert_array_equal(most[:, one], sizes[:, group == one].max(1))
    if not tolerance:
        np.testing.assert_array_equal(most[:, group], sizes)


def test_tiles_that_differ_much_are_not_in_one_group():
    _, group = group_similar_tiles(np.array([[100, 100, 100, 0], [100, 99, 20, 1]]), 0.01)
    assert group[0] == group[1] and len(set(group.tolist())) == 3


def test_rounding():
    assert round_up(np.array([0, 1, 8, 9])).tolist() == [0, 8, 8, 16]
    assert round_up(np.array([0, 1, 16, 17]), 16).tolist() == [0, 16, 16, 32]


# --- frames -----------------------------------------------------------------------------------------------------------


def test_a_frame_is_in_the_innermost_frame_around_all_its_calls():
    graph = Graph(TARGET)
    f32 = np.dtype("float32")
    a, b, c, d, e = (graph.add_variable((8,), f32, name, grid((8,), (4,))) for name in "abcde")
    shared = Function(Sequence(Copy(a, c), Copy(c, b)), "shared")
    left = Function(Sequence(Call(shared), Copy(b, d), Copy(d, a)), "left")
    right = Function(Sequence(Call(shared), Copy(b, e), Copy(e, a)), "right")
    only = Function(Sequence(Copy(a, b)), "only")
    outer = Function(Sequence(Call(only), Call(left), Call(right)), "outer")
    program = Sequence(
        StreamIn(HostStream("x", (8,), f32), a), Call(outer), Call(left), StreamOut(b, HostStream("y", (8,), f32))
    )
    frames = frames_of(liveness(program, EffectsOf(graph)))
    names = {function.name: owner and owner.name for function, owner in frames.owner.items()}
    # `left` is called by the program too, and `shared` by it and by `right`; only `outer` calls `right` and `only`.
    assert names == {"outer": None, "left": None, "shared": None, "right": "outer", "only": "outer"}
    order = [owner and owner.name for owner in frames.liveness]
    assert order[0] is None and order.index("outer") < order.index("right") < order.index("shared")
    steps = frames.liveness[None].steps
    assert {f.name for f in frames.functions_during(None, steps[1])} == {"outer", "left", "shared"}
    assert {f.name for f in frames.functions_during(None, steps[2])} == {"left", "shared"}
    inside = [[f.name for f in frames.functions_during(outer, step)] for step in frames.liveness[outer].steps]
    assert inside == [["only"], [], ["right"]]
