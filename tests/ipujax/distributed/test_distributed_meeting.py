"""Answers of the launcher to instances that act together, and how it puts output together."""

from __future__ import annotations

import itertools

import pytest

import ipujax as ipu
from ipujax.distributed.launcher.meeting import Meetings
from ipujax.distributed.launcher.started import Lines, Prefix

GO = {"go": True}


def request(label: str, **facts: str) -> dict[str, object]:
    return {"what": label, "digest": repr(facts), "facts": [[place, text] for place, text in facts.items()]}


def test_all_go_when_the_last_one_comes():
    meetings = Meetings(3)
    for step in range(3):
        assert meetings.arrive(1, request("step", x=str(step))) == {}
        assert meetings.arrive(0, request("step", x=str(step))) == {}
        assert meetings.waiting() == {0: "step", 1: "step"}
        assert meetings.arrive(2, request("step", x=str(step))) == {0: GO, 1: GO, 2: GO}
        assert meetings.waiting() == {}


def without_facts(reported: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in reported.items() if key != "facts"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_facts_are_asked_for_where_digests_differ(order: tuple[int, ...]):
    recorded = [request("step", x="f32[6]" if index == 1 else "f32[4]") for index in range(3)]
    meetings = Meetings(3)
    for _ in range(2):
        replies = [meetings.arrive(index, without_facts(recorded[0])) for index in range(3)]
        assert replies == [{}, {}, dict.fromkeys(range(3), GO)]
    refused = {}
    waiting = [(index, without_facts(recorded[index])) for index in order]
    while waiting:
        replies = meetings.arrive(*waiting.pop(0))
        waiting += [(index, recorded[index]) for index, reply in replies.items() if reply == {"report": True}]
        refused |= {index: reply["refused"] for index, reply in replies.items() if "refused" in reply}
    assert set(refused) == {0, 1, 2}
    assert {reply["what"] for reply in refused.values()} == {"instances disagree on x of step"}
    assert "f32[6] on instance 1" in refused[0]["got"]


def test_one_that_ends_instead_of_telling_its_facts():
    meetings = Meetings(2)
    meetings.arrive(0, without_facts(request("step", x="1")))
    assert set(meetings.arrive(1, without_facts(request("step", x="2")))) == {0, 1}
    assert meetings.arrive(0, request("step", x="1")) == {}
    assert meetings.end(1)[0]["refused"]["what"].startswith("instance 1 ended")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_different_facts_are_refused_naming_place_and_instances(order: tuple[int, ...]):
    facts = {0: {"x": "f32[4]", "y": "f32[2]"}, 1: {"x": "f32[4]", "y": "f32[3]"}, 2: {"x": "f32[4]", "y": "f32[2]"}}
    meetings = Meetings(3)
    replies = {}
    for index in order:
        replies |= meetings.arrive(index, request("step", **facts[index]))
    assert {reply["refused"]["what"] for reply in replies.values()} == {"instances disagree on y of step"}
    assert set(replies) == {0, 1, 2}, "one that comes late is answered too"
    assert "f32[3] on instance 1" in replies[0]["refused"]["got"]


def test_a_fact_that_only_some_have():
    settings = request("step", x="f32[4]", y="f32[2]", all="x, y")
    fewer = request("step", x="f32[4]", all="x")
    for first in (0, 1):
        meetings = Meetings(2)
        meetings.arrive(first, settings if first == 0 else fewer)
        refused = meetings.arrive(1 - first, fewer if first == 0 else settings)[0]["refused"]
        assert refused["what"] == "instances disagree on y of step"
        assert refused["got"] == "f32[2] on instance 0; nothing on instance 1"


def test_different_calls_are_refused():
    meetings = Meetings(3)
    meetings.arrive(2, request("train"))
    refused = meetings.arrive(0, request("evaluate"))
    assert set(refused) == {0, 2}
    assert refused[0]["refused"]["got"] == "evaluate on instance 0; train on instance 2"
    assert meetings.arrive(1, request("train")) == {1: refused[0]}


def test_nobody_waits_for_one_that_has_ended():
    meetings = Meetings(3)
    assert meetings.end(0) == {}
    refused = meetings.arrive(1, request("train"))
    assert refused[1]["refused"]["what"].startswith("instance 0 ended")
    meetings = Meetings(3)
    meetings.arrive(1, request("train"))
    meetings.arrive(2, request("train"))
    refused = meetings.end(0)
    assert set(refused) == {1, 2}
    assert refused[2]["refused"]["got"] == "train on instances 1, 2 still to come"


def test_instances_may_end_in_any_order():
    meetings = Meetings(2)
    assert meetings.end(1) == {} and meetings.end(0) == {}


TEXT = b"one\ntwo\r\n\r10%\r20%\r\nlast"


@pytest.mark.parametrize("size", range(1, len(TEXT) + 1))
def test_lines_do_not_depend_on_the_pieces_they_come_in(size: int):
    lines = Lines(None)
    got = [line for start in range(0, len(TEXT), size) for line in lines.add(TEXT[start : start + size])]
    got += lines.end()
    assert got == [b"one\n", b"two\r\n", b"\r", b"10%\r", b"20%\r\n", b"last\n"]
    assert list(lines.end()) == []


@pytest.mark.parametrize(("longest", "number"), [(60_000, 2), (None, 1)])
def test_a_line_without_end_is_cut(longest: int | None, number: int):
    lines = Lines(longest)
    got = [line for _ in range(100) for line in lines.add(b"x" * 1000)] + list(lines.end())
    assert len(got) == number and all(line.endswith(b"\n") for line in got)
    assert sum(line.count(b"x") for line in got) == 100_000


def test_prefix_is_filled_in():
    assert Prefix("{instance}/{instances} {stream}|", 4)(3, "err") == b"3/4 err|"
    assert Prefix("", 4)(3, "out") == b""
    assert len(Prefix("{time}", 4)(0, "out")) == len("12:34:56")


@pytest.mark.parametrize("text", ["{rank}", "{", "{}", "{instance.x}"])
def test_bad_prefix(text: str):
    with pytest.raises(ipu.ArgumentError, match="cannot be filled in"):
        Prefix(text, 2)
