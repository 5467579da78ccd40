"""Saved profiles answer as the originals do; damaged and foreign files are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ArgumentTypeError, ProfileError
from ipujax.runtime.files import VersionError, read_sealed
from ipujax.runtime.files.figure_records import data_of
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Sequence
from ipujax.runtime.host.host_data import HostData
from ipujax.runtime.options import Options
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.schema import PROFILE_FILE, PROFILE_SECTION
from ipujax.runtime.target.presets import preset
from ipujax.runtime.target.target import Target
from ipujax.runtime.tensor.mapping import on_one_tile
from tests.runtime.profile.profile_helpers import F32, TARGET, inputs, looping, output, trained_program, two_ipus
from tests.sealed_parts import data, put_together, section, taken_apart

EVERYTHING = {
    "operations": 100,
    "show_execution_steps": True,
    "show_var_storage": True,
    "show_optimizations": True,
    "show_per_ipu_memory_usage": True,
}
RUN = [
    "cycles",
    "seconds",
    "ipu_phase_cycles",
    "phase_cycles",
    "limiting_ipu",
    "total_worker_cycles",
    "step_costs",
    "fallbacks",
]
RUN += [
    "emulated",
    "slow_paths",
    "padded_rows",
    "unmet_bounds",
    "computed_again",
    "target",
    "brief",
    "host",
    "interval",
    "coverage",
]


HOST = HostData(batches=8, prepared_seconds=2.0, waited_seconds=0.5, is_ahead=True)


def recorded():
    graph, program, loop, decide = looping()
    return Profile(compile(graph, program), {loop: [3], decide: [1, 0, 1]})


def too_large():
    graph = Graph(TARGET.replace(bytes_per_tile=8192))
    large = [graph.add_variable((n,), F32, "large", on_one_tile(n, tile)) for tile, n in ((1, 4096), (3, 8192))]
    program = Sequence(*inputs(*large), *map(output, large))
    return Profile(compile(graph, program, options=Options(allow_out_of_memory=True)))


PROFILES = {
    "trained": lambda: Profile(trained_program()),
    "two IPUs": lambda: Profile(two_ipus()),
    "recorded": recorded,
    "too large": too_large,
    "with a host": lambda: Profile(trained_program()).with_host(HOST, 4),
}


def again(profile, tmp_path):
    profile.save(tmp_path / "saved")
    return Profile.load(tmp_path / "saved")


@pytest.mark.parametrize("name", PROFILES)
def test_figures_equal_those_of_the_original(name, tmp_path):
    original = PROFILES[name]()
    loaded = again(original, tmp_path)
    assert isinstance(loaded, Profile) and repr(loaded) == repr(original)
    for settings in ({}, EVERYTHING, {"lines": "library"}):
        assert loaded.summary(**settings) == original.summary(**settings)
    assert loaded.graph() == original.graph() and loaded.execution() == original.execution()
    for figure in RUN:
        assert getattr(loaded, figure) == getattr(original, figure), figure
    for lines in ("user", "library"):
        assert loaded.operations(lines=lines) == original.operations(lines=lines)
    assert loaded.operations(1) == original.operations(1)
    loaded.graph()["graph"].clear()
    assert loaded.graph() == original.graph(), "what a profile gives away is a copy"


@pytest.mark.parametrize("name", PROFILES)
def test_memory_equals_that_of_the_original(name, tmp_path):
    original = PROFILES[name]().memory
    loaded = again(PROFILES[name](), tmp_path).memory
    for figure in ["tile_bytes", "gap_bytes", "shared_bytes", "code_bytes", "overflowed_bytes", "is_from_top"]:
        np.testing.assert_array_equal(getattr(loaded, figure), getattr(original, figure))
        assert getattr(loaded, figure).dtype == getattr(original, figure).dtype
    for name, layer in original.by_category.items():
        np.testing.assert_array_equal(loaded.by_category[name], layer)
    for figure in ["max_tile_bytes", "worst_tile", "total_bytes", "peak_step", "limits", "borrowed"]:
        assert getattr(loaded, figure) == getattr(original, figure)
    assert list(map(str, loaded.largest)) == list(map(str, original.largest))
    assert loaded.lacking().keys() == original.lacking().keys()
    assert not loaded.tile_bytes.flags.writeable and repr(loaded) == repr(original)
    with pytest.raises(ProfileError, match=r"fullest tile only(.|\n)*expected: tile"):
        loaded.at_peak(loaded.worst_tile + 1)


def test_a_loaded_profile_can_be_saved_again(tmp_path):
    loaded = again(PROFILES["trained"](), tmp_path)
    first = (tmp_path / "saved").read_bytes()
    again(loaded, tmp_path)
    assert (tmp_path / "saved").read_bytes() == first


def test_unknown_trip_counts_stay_unknown(tmp_path):
    graph, program, _, _ = looping()
    original = Profile(compile(graph, program))
    loaded = again(original, tmp_path)
    assert loaded.summary(**EVERYTHING) == original.summary(**EVERYTHING) and repr(loaded) == repr(original)
    assert loaded.graph() == original.graph()
    with pytest.raises(ProfileError) as expected:
        _ = original.cycles
    for ask in (lambda: loaded.cycles, loaded.execution, loaded.operations, lambda: loaded.step_costs):
        with pytest.raises(ProfileError, match=re.escape(str(expected.value))):
            ask()


def test_the_error_names_figures_that_are_not_saved(tmp_path):
    loaded = again(PROFILES["trained"](), tmp_path)
    for name in ("executable", "timeline", "numbering"):
        with pytest.raises(ProfileError, match=f"a saved profile has no {name}"):
            getattr(loaded, name)


def test_files_are_small_and_plain(tmp_path):
    again(PROFILES["trained"](), tmp_path)
    content = (tmp_path / "saved").read_bytes()
    assert len(content) < 10_000
    head, sections = taken_apart(tmp_path / "saved")
    assert (head["format"], head["kind"], list(sections)) == ("ipujax", "profile", ["profile"])
    assert data(sections["profile"])["memory"]["shared_bytes"] == "32*4"


def test_targets_as_data():
    for target in (preset("bow", 4), preset("mk1").replace(bytes_per_tile=1 << 20, native_dtypes={"float32", "bool"})):
        constants = json.loads(json.dumps(target.to_data()))
        assert Target.from_data(constants) == target and Target.from_data(constants).sources == target.sources


# --- files that are refused -------------------------------------------------------------------------------------------


def with_head(change):
    """The file with another head, with the checksum of it."""

    def forged(path):
        head, sections = taken_apart(path)
        change(head)
        return put_together(head, sections)

    return forged


def with_figures(change):
    """The file with other figures, with the checksum of them."""

    def forged(path):
        head, sections = taken_apart(path)
        figures = data(sections["profile"])
        change(figures)
        return put_together(head, {"profile": section(figures)})

    return forged


def with_bytes(change):
    return lambda path: change(path.read_bytes())


DAMAGED = {
    "cut off": (with_bytes(lambda content: content[: len(content) // 2]), r"is damaged(.|\n)*copy it again"),
    "nothing left": (with_bytes(lambda content: b""), "is not a profile"),
    "text": (with_bytes(lambda content: b"cycles: 3"), "is not a profile"),
    "a head without end": (with_bytes(lambda content: content.partition(b"\n")[0]), "is damaged: its head has no end"),
    "other bytes": (with_bytes(lambda content: content[:-60] + bytes(60)), r"is damaged: its bytes are not those that"),
    "more bytes": (
        with_bytes(lambda content: content + b"1"),
        r"is damaged: its bytes are not those that were written",
    ),
    "other start": (with_bytes(lambda content: b"PK" + content[2:]), "is not a profile"),
    "another format": (with_head(lambda head: head.update(format="trace")), "is not a profile"),
    "another kind": (with_head(lambda head: head.update(kind="plan")), r"is not a profile(.|\n)*another kind"),
    "another version": (
        with_head(lambda head: head.update(version="0.0.9.000000000000")),
        r"of another version of ipujax\n(.|\n)*expected: version \S+\n *got: version '0\.0\.9\.0+'(.|\n)*save it again",
    ),
    "another version, and other bytes": (
        with_bytes(lambda content: re.sub(rb'"version":"\S+?"', b'"version":"2"', content) + b"more"),
        r"of another version of ipujax\n(.|\n)*got: version '2'",
    ),
    "no version": (with_head(lambda head: head.pop("version")), "is not a profile"),
    "no key": (with_head(lambda head: head.pop("key")), "its field key is damaged"),
    "an unknown field": (with_head(lambda head: head.update(other=1)), "its field other is damaged"),
    "figures": (with_head(lambda head: head.update(figures={"name": 1})), "its field figures.name is damaged"),
    "sections": (with_head(lambda head: head.update(figures=[])), "its field figures is damaged"),
    "another checksum": (with_bytes(lambda content: content.replace(b'"sha256":"', b'"sha256":"0', 1)), "is damaged"),
    "no cycles": (with_figures(lambda figures: figures["run"].pop("cycles")), "is not a profile"),
    "no memory": (with_figures(lambda figures: figures.update(memory=3)), "is not a profile"),
    "too many bytes": (
        with_figures(lambda figures: figures["memory"].update(shared_bytes=f"{1 << 50}*4")),
        "is not a profile",
    ),
    "a tile less": (with_figures(lambda figures: figures["memory"].update(shared_bytes="0*3")), "is not a profile"),
    "another machine": (with_figures(lambda figures: figures["target"].update(num_ipus=0)), "is not a profile"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_and_foreign_files_are_refused(name, tmp_path):
    damage, match = DAMAGED[name]
    again(PROFILES["trained"](), tmp_path)
    path = tmp_path / "saved"
    path.write_bytes(damage(path))
    with pytest.raises(ProfileError, match=match):
        Profile.load(path)


def test_paths_that_cannot_be_used(tmp_path):
    profile = PROFILES["trained"]()
    for path in (tmp_path / "none" / "saved", tmp_path):
        with pytest.raises(ProfileError, match=r"cannot be written to(.|\n)*try: a path"):
            profile.save(path)
        with pytest.raises(ProfileError, match="cannot be read"):
            Profile.load(path)
        for write in (profile.to_json, profile.save):
            with pytest.raises(ProfileError, match="cannot be written"):
                write(path)


@pytest.mark.parametrize("path", [None, 3.5, 99999, True, b"saved", ["saved"]], ids=repr)
def test_refuses_a_non_path(path):
    profile = PROFILES["trained"]()
    for use in (profile.save, Profile.load):
        with pytest.raises(ArgumentTypeError, match=rf"(?s)needs a path.*expected: .*got: {type(path).__name__}"):
            use(path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"], ids=ascii)
def test_paths_that_no_system_has(name, tmp_path):
    profile = PROFILES["trained"]()
    path = str(tmp_path / name)
    for write in (profile.save, profile.to_json):
        with pytest.raises(ProfileError, match=r"(?s)cannot be written to.*got: \S"):
            write(path)
    with pytest.raises(ProfileError, match=r"(?s)cannot be read.*got: \S"):
        Profile.load(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", PROFILES)
def test_reports_have_the_data_of_the_original(name, tmp_path):
    original = PROFILES[name]()
    loaded = again(original, tmp_path)
    assert data_of(loaded.execution_trace) == data_of(original.execution_trace)
    assert loaded.program_costs == original.program_costs and loaded.sources == original.sources
    assert data_of(loaded.memory.contents) == data_of(original.memory.contents)


def test_a_field_more_makes_a_version_more(tmp_path):
    """A constant that a later version adds: files are of another version then, and not damaged."""
    later = replace(PROFILE_SECTION, fields=PROFILE_SECTION.fields.replace("'clock_hz'", "'clock_hz': Real(), 'new'"))
    again(PROFILES["trained"](), tmp_path)
    with pytest.raises(VersionError, match=r"another version of ipujax: expected version [\w.]+, got version '[\w.]+'"):
        read_sealed(tmp_path / "saved", replace(PROFILE_FILE, sections={"profile": later}))


def test_program_costs_add_up():
    profile = PROFILES["trained"]()
    root = profile.program_costs
    assert root.cycles == profile.cycles  # on one IPU, which never waits
    (loop,) = [node for node in root.walk() if node.type == "Repeat"]
    assert loop.name == "10 times" and [child.runs for child in loop.children] == [10, 10]
    assert loop.cycles == sum(child.cycles for child in loop.children)
    assert [child.line for child in loop.children] == ["model.py:3 (forward)", "model.py:9 (loss)"]
