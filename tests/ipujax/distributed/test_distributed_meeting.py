"""Differences between processes that act together, and how the launcher puts output together."""

from __future__ import annotations

import pytest

import ipujax as ipu
from ipujax.distributed.instance.meeting import difference, stable
from ipujax.distributed.launcher import Launch, whole_lines


def step(**facts: str) -> dict[str, str]:
    return {"": "step", **facts}


def test_different_facts_are_named_with_place_and_instances():
    found = difference([step(x="f32[4]", y="f32[2]"), step(x="f32[4]", y="f32[3]"), step(x="f32[4]", y="f32[2]")])
    assert found["what"] == "instances disagree on y of step"
    assert found["got"] == "f32[2] on instances 0, 2; f32[3] on instance 1"


def test_a_fact_that_only_some_have():
    for texts in ([step(x="f32[4]", y="f32[2]", all="x, y"), step(x="f32[4]", all="x")],):
        assert difference(texts)["what"] == difference(texts[::-1])["what"] == "instances disagree on y of step"
        assert difference(texts)["got"] == "f32[2] on instance 0; nothing on instance 1"


def test_different_actions_are_named_before_their_facts():
    found = difference([{"": "evaluate"}, step(x="f32[4]"), {"": "evaluate"}])
    assert found["what"] == "instances are not at the same point of the program"
    assert found["got"] == "evaluate on instances 0, 2; step on instance 1"
    assert found["hint"] == "look for a call that only some instances make"
    assert difference([step(), {"": "the end of the script"}])["hint"].endswith("the same number of steps")


def test_texts_of_objects_have_no_addresses():
    assert stable(object()) == stable(object())


TEXT = b"one\ntwo\r\n\r10%\r20%\r\nlast"


@pytest.mark.parametrize("size", range(1, len(TEXT) + 1))
def test_lines_do_not_depend_on_the_pieces_they_come_in(size: int):
    pieces = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    got = [line for lines in whole_lines(pieces) for line in lines]
    assert got == [b"one\n", b"two\r\n", b"\r", b"10%\r", b"20%\r\n", b"last\n"]


def test_a_line_without_end_is_cut():
    got = [line for lines in whole_lines([b"x" * 1000] * 100) for line in lines]
    assert len(got) == 2 and all(line.endswith(b"\n") for line in got)
    assert sum(line.count(b"x") for line in got) == 100_000


def test_prefix_is_filled_in():
    assert Launch(("x",), 4, 4, prefix="{instance}/{instances} {stream}|").prefix_of(3, "err") == b"3/4 err|"
    assert Launch(("x",), 4, 4, prefix="").prefix_of(3, "out") == b""
    assert len(Launch(("x",), 4, 4, prefix="{time}").prefix_of(0, "out")) == len("12:34:56")


@pytest.mark.parametrize("text", ["{rank}", "{", "{}", "{instance.x}"])
def test_bad_prefix(text: str):
    with pytest.raises(ipu.ArgumentError, match="cannot be filled in"):
        Launch(("x",), 2, 2, prefix=text)
