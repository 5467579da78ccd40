"""Traces are valid, and add up to the profile."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict

import pytest

from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ArgumentTypeError, ProfileError
from ipujax.runtime.report import Profile
from ipujax.runtime.timeline import PHASES
from tests.runtime.profile.profile_helpers import looping, trained_program, two_ipus
from tests.runtime.profile.test_reports import everything

# Of the trace event format: what an event of each phase letter must have, and of which type.
COMMON = {"ph": str, "name": str, "pid": int, "tid": int, "args": dict}
REQUIRED = {
    "X": COMMON | {"cat": str, "ts": float, "dur": float},
    "M": COMMON,
    "C": COMMON | {"ts": float},
}
PROGRAMS = {"trained": trained_program, "two IPUs": two_ipus, "everything": everything}


def written(profile, tmp_path):
    profile.to_perfetto(tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))


def of_phase(data, letter):
    return [event for event in data["traceEvents"] if event["ph"] == letter]


def threads(data):
    tracks = defaultdict(list)
    for event in of_phase(data, "X"):
        tracks[event["pid"], event["tid"]].append(event)
    return tracks


@pytest.mark.parametrize("name", PROGRAMS)
def test_events_are_of_the_format(name, tmp_path):
    data = written(Profile(PROGRAMS[name]()), tmp_path)
    assert set(data) == {"traceEvents", "displayTimeUnit", "otherData"} and data["displayTimeUnit"] in ("ms", "ns")
    for event in data["traceEvents"]:
        required = REQUIRED[event["ph"]]
        assert set(event) == set(required), event
        for key, kind in required.items():
            assert isinstance(event[key], (float, int) if kind is float else kind), (key, event)
        assert event.get("dur", 0) >= 0 <= event.get("ts", 0)
    assert all(event["name"] in ("process_name", "thread_name") for event in of_phase(data, "M"))
    named = {(event["pid"], event["tid"]) for event in of_phase(data, "M") if event["name"] == "thread_name"}
    assert set(threads(data)) <= named
    for event in of_phase(data, "C"):
        assert all(isinstance(value, int) and value > 0 for value in event["args"].values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_cycles_of_phases_are_those_of_the_profile(name, tmp_path):
    profile = Profile(PROGRAMS[name]())
    data = written(profile, tmp_path)
    for ipu in range(profile.target.num_ipus):
        sums = Counter(dict.fromkeys((*PHASES, "idle"), 0))
        for event in threads(data)[ipu + 1, 1]:
            if event["cat"] in sums:
                sums[event["cat"]] += event["args"]["cycles"]
        of_ipu = profile.timeline.phase_cycles(ipu)
        of_ipu["idle"] += profile.cycles - sum(of_ipu.values())  # up to the end of the run
        assert dict(sums) == of_ipu == data["otherData"]["phase_cycles"][f"IPU {ipu}"]
        assert sum(sums.values()) == profile.cycles
    host = [event for (pid, _), events in threads(data).items() if pid > profile.target.num_ipus for event in events]
    spent = sum(phases["host_exchange"] for phases in data["otherData"]["phase_cycles"].values())
    assert sum(event["args"]["cycles"] for event in host) == spent and data["otherData"]["cycles"] == profile.cycles


@pytest.mark.parametrize("name", PROGRAMS)
def test_slices_of_a_track_are_nested_or_disjoint(name, tmp_path):
    data = written(Profile(PROGRAMS[name]()), tmp_path)
    for events in threads(data).values():
        open_until: list[float] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            start = event["ts"]
            end = round(event["ts"] + event["dur"], 6)
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], event
            open_until.append(end)


def test_times_are_microseconds(tmp_path):
    profile = Profile(trained_program())
    data = written(profile, tmp_path)
    last = max(event["ts"] + event["dur"] for event in of_phase(data, "X"))
    assert last == pytest.approx(profile.seconds * 1e6, abs=1e-6)


def test_saved_profiles_have_the_same_trace(tmp_path):
    profile = Profile(two_ipus())
    profile.save(tmp_path / "saved")
    assert written(Profile.load(tmp_path / "saved"), tmp_path) == written(profile, tmp_path)


def test_long_runs_are_folded_and_say_so(tmp_path):
    graph, program, loop, decide = looping()
    profile = Profile(compile(graph, program), {loop: [5_000], decide: [1, 0] * 2_500})
    data = written(profile, tmp_path)
    assert (
        os.path.getsize(tmp_path / "trace.json") < 6_000_000
        and "one slice for all of them" in data["otherData"]["note"]
    )
    (folded,) = [event for event in of_phase(data, "X") if "iterations" in event["args"]]
    assert folded["name"] == f"loop in decode (model.py:18), {folded['args']['iterations']:,} iterations, folded"
    assert folded["args"]["iterations"] > 2_500
    sums = Counter(event["cat"] for event in of_phase(data, "X"))
    assert 1_000 < sums["step"] < 5_000


def test_the_error_names_a_path_that_cannot_be_written(tmp_path):
    profile = Profile(trained_program())
    with pytest.raises(ProfileError, match="cannot be written"):
        profile.to_perfetto(tmp_path / "none" / "trace.json")
    with pytest.raises(ArgumentTypeError, match="needs a path"):
        profile.to_perfetto(3)
    graph, program, _, _ = looping()
    with pytest.raises(ProfileError, match="trip count of loop"):
        Profile(compile(graph, program)).to_perfetto(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
