"""Attempts that texts list: the first, that in use, and those that trade bytes for cycles."""

from __future__ import annotations

from ipujax.runtime.memory import Attempt, attempt_lines


def attempt(live_bytes, cycles, *, fits=False, is_used=False, byte_cost=1.0):
    return Attempt(byte_cost, 640 * 1024, 1.0, False, False, live_bytes, cycles, fits, is_used)


def test_one_attempt_has_nothing_to_tell():
    assert not list(attempt_lines([])) and not list(attempt_lines([attempt(1, 1, is_used=True)]))


def test_dominated_attempts_are_counted_alone():
    first, used = attempt(900, 50), attempt(500, 90, fits=True, is_used=True, byte_cost=16.0)
    cheaper, dominated, unknown = attempt(700, 60, fits=True), attempt(800, 70, fits=True), attempt(400, None)
    head, *lines, others = attempt_lines([first, dominated, cheaper, unknown, used])
    assert head.split() == ["cycles", "fullest", "tile", "plan"]
    assert lines == [str(used), str(cheaper), str(first)]
    assert others.strip() == "and 2 others"


def test_cycles_that_are_data_leave_the_first_and_that_in_use():
    first, used, other = attempt(900, None), attempt(500, None, is_used=True), attempt(700, None)
    assert list(attempt_lines([first, other, used]))[1:-1] == [str(used), str(first)]
    assert str(first).split()[0] == "unknown"


def test_text_names_all_changes():
    text = str(Attempt(4.0, 312 * 1024, 0.25, True, True, 12_345, 67_890, False, True))
    changes = "4 cycles per byte, planned for tiles of 312 KiB, 25 % of what gradients need kept, the rest recomputed"
    expected = f"67,890        12,345 B  {changes}, loops stream, other stages (does not fit, as shown)"
    assert text.strip() == expected
    assert "1 cycle per byte" in attempt(1, 1).changes
