"""Changes between two profiles, counted by hand."""

from __future__ import annotations

import pytest

from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ArgumentTypeError, ProfileError
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Copy, Repeat, Sequence
from ipujax.runtime.memory import code_of_exchanges
from ipujax.runtime.report.compare import compare
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.tensor.mapping import grid
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
    variables,
)


def profile_of(dear_cycles, repeats, copies=0):
    """A cheap and a dear step, several times, and copies of a to the next tiles."""
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    cheap = apply(graph, codelet("popops::Cheap", 3), a, b, 4, "model.py:3 (forward)")
    dear = apply(graph, codelet("popops::Dear", dear_cycles), b, a, 4, "model.py:9 (loss)")
    moved = []
    for number in range(copies):
        there = graph.add_variable((SIZE,), F32, f"there {number}", grid((SIZE,), (2,), 1))
        moved.append(Copy(a, there, f"move {number}"))
    return Profile(compile(graph, Sequence(*inputs(a), Repeat(repeats, Sequence(cheap, dear)), *moved, output(a))))


def test_equal_profiles_do_not_differ(tmp_path):
    profile = Profile(trained_program())
    profile.save(tmp_path / "saved")
    same = compare(profile, Profile.load(tmp_path / "saved"))
    assert same.changes == () and "No operation differs" in str(same)
    assert all(before == after for before, after in same.totals.values())
    assert repr(same) == f"Comparison({profile.cycles:,} → {profile.cycles:,} cycles, 0 operations differ)"


def test_one_operation_takes_longer():
    before = profile_of(50, 10)
    after = profile_of(60, 10)
    actual = compare(before, after)
    (change,) = actual.changes
    assert (change.origin.line, change.name) == ("model.py:9 (loss)", "popops::Dear/compute")
    assert change.difference("cycles") == 10 * 4 * 10  # ten runs of four elements a tile
    assert [change.difference(name) for name in ("moved_bytes", "variable_bytes", "exchange_code_bytes")] == [0, 0, 0]
    assert actual.totals["cycles"] == (before.cycles, after.cycles) == (before.cycles, before.cycles + 400)
    assert "+400" in str(actual) and "model.py:9 (loss)  [popops::Dear/compute]" in str(actual)


def test_new_and_removed_operations():
    before = profile_of(50, 10)
    after = profile_of(50, 10, copies=2)
    new = compare(before, after)
    gone = compare(after, before)
    moves = {change.name: change for change in new.changes if change.name.startswith("move")}
    for number in range(2):
        change = moves[f"move {number}"]
        variable = next(c for c in new.changes if c.name == f"there {number}")
        assert change.before.cycles == 0 < change.after.cycles
        assert change.difference("moved_bytes") > 0 and variable.difference("variable_bytes") == SIZE * 4
        leaf = next(node for node in after.executable.costs if getattr(node, "name", "") == f"move {number}")
        code = code_of_exchanges([after.executable.costs[leaf]], TARGET).max()
        assert change.difference("exchange_code_bytes") == code > 0
    backward = {(c.name, c.after, c.before) for c in gone.changes}
    assert {(c.name, c.before, c.after) for c in new.changes} == backward
    code = [p.memory.by_category for p in (before, after)]
    assert new.totals["exchange_code_bytes"] == tuple(
        (m["internalExchangeCode"] + m["globalExchangeCode"] + m["hostExchangeCode"]).max() for m in code
    )


def test_the_largest_change_comes_first_and_the_text_is_cut():
    actual = compare(profile_of(50, 10), profile_of(90, 20, copies=3))
    sizes = [abs(change.difference("cycles")) for change in actual.changes]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) > 3
    assert actual.text(1).endswith(f"… and {len(sizes) - 1} more")
    assert len(actual.text(None).splitlines()) == len(actual.totals) + 6 + len(sizes)


def test_step_costs_add_up():
    profile = Profile(trained_program())
    assert sum(row.cycles for row in profile.step_costs) == profile.cycles  # on one IPU, which never waits
    assert sum(row.variable_bytes for row in profile.step_costs) == sum(
        variable.num_bytes for variable in profile.executable.graph.variables
    )


def test_step_costs_count_operations():
    rows = {row.name: row for row in Profile(trained_program()).step_costs}
    # Ten runs of 16 elements, which four tiles share; the machine has no other tiles.
    assert rows["popops::Dear/compute"].flops == 10 * SIZE and rows["popops::Dear/compute"].tile_balance == 1.0
    assert (rows["out"].flops, rows["out"].tile_balance) == (0, None)


def test_something_else_than_profiles():
    profile = profile_of(50, 1)
    for pair in ((profile, profile.executable), (3, profile)):
        with pytest.raises(ArgumentTypeError, match=r"ipu.compare(.|\n)*two profiles(.|\n)*try: compiled.profile"):
            compare(*pair)


def test_a_profile_without_cycles_is_named():
    graph, program, _, _ = looping()
    unknown = Profile(compile(graph, program))
    known = profile_of(50, 1)
    for pair, which in (((unknown, known), "first"), ((known, unknown), "second")):
        with pytest.raises(ProfileError, match=rf"the {which} of the profiles(.|\n)*model.py:18(.|\n)*try: "):
            compare(*pair)


def test_calls_that_do_not_fit():
    profile = profile_of(50, 1)
    for call in (
        lambda: compare(profile),
        lambda: compare(profile, profile, 3),
        lambda: compare(profile, aftr=profile),
    ):
        with pytest.raises(
            ArgumentTypeError, match=r"ipu.compare cannot be(.|\n)*expected: ipu.compare\(before, after\)"
        ):
            call()
