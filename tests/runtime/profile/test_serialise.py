"""Profiles as JSON and CBOR: read back by other readers than wrote them."""

from __future__ import annotations

import io
import json
import sys
import tempfile

import pytest

from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ArgumentError, IpuError, ProfileError
from ipujax.runtime.profile.serialise import write_cbor, write_json
from ipujax.runtime.report.profile import Profile
from tests.runtime.profile.profile_helpers import looping

# RFC 8949, appendix A: a value and its encoding.
RFC = [
    (0, "00"),
    (1000, "1903e8"),
    (1000000000000, "1b000000e8d4a51000"),
    (-100, "3863"),
    (1.5, "fb3ff8000000000000"),
    (True, "f5"),
    (None, "f6"),
    ("ü", "62c3bc"),
    ([1, [2, 3], [4, 5]], "8301820203820405"),
    ({"a": 1, "b": [2, 3]}, "a26161016162820203"),
]


@pytest.fixture(scope="module")
def both(profile):
    return {"graphProfile": profile.graph(), "executionProfile": profile.execution()}


def test_json_by_path_and_by_file(profile, both, tmp_path):
    path = tmp_path / "profile.json"
    text = io.StringIO()
    raw = io.BytesIO()
    profile.to_json(path)
    profile.to_json(str(tmp_path / "again.json"), pretty=True)
    profile.to_json(text)
    profile.to_json(raw)
    assert json.loads(path.read_bytes()) == json.loads(text.getvalue()) == json.loads(raw.getvalue()) == both
    pretty = (tmp_path / "again.json").read_text(encoding="utf-8")
    assert json.loads(pretty) == both and len(pretty.splitlines()) > 100 > len(path.read_text().splitlines())


def test_json_in_a_temporary_file_of_text(tmp_path):
    # A wrapper of `tempfile` is open for text without being an `io.TextIOBase`.
    with tempfile.NamedTemporaryFile("w+", dir=tmp_path, encoding="utf-8") as text:
        write_json({"a": "ü"}, text)
        text.seek(0)
        assert json.load(text) == {"a": "ü"}


def test_json_in_a_file_of_bytes_that_names_no_encoding():
    # As pipes and sockets of some libraries, whose `encoding` is None where they take bytes.
    class Pipe(io.RawIOBase):
        encoding = None
        content = b""

        def write(self, data):
            self.content += bytes(data)
            return len(data)

    pipe = Pipe()
    write_json({"a": "ü"}, pipe)
    assert json.loads(pipe.content) == {"a": "ü"}


def test_cbor_by_path_and_by_file(profile, both, tmp_path):
    cbor2 = pytest.importorskip("cbor2")
    path = tmp_path / "profile.cbor"
    raw = io.BytesIO()
    profile.to_cbor(path)
    profile.to_cbor(raw)
    assert cbor2.loads(path.read_bytes()) == both and raw.getvalue() == path.read_bytes()
    text = io.StringIO()
    profile.to_json(text)
    assert path.stat().st_size < len(text.getvalue())


@pytest.mark.parametrize(("value", "encoded"), RFC)
def test_cbor_equals_examples_of_rfc_8949(value, encoded):
    pytest.importorskip("cbor2")
    raw = io.BytesIO()
    write_cbor(value, raw)
    assert raw.getvalue().hex() == encoded


def test_cbor_without_its_package_names_the_extra(profile, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cbor2", None)
    with pytest.raises(ProfileError, match=r"(?s)cbor2, which is not installed.*ipujax\[profile\]"):
        profile.to_cbor(tmp_path / "profile.cbor")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [write_json, write_cbor])
@pytest.mark.parametrize("where", [None, 7, ["profile.json"]])
def test_nowhere_to_write(write, where):
    if write is write_cbor:
        pytest.importorskip("cbor2")
    with pytest.raises(ArgumentError, match=r"(?s)cannot be written to this object.*a path, or a file"):
        write({"a": 1}, where)


def test_cbor_in_a_text_file_is_refused(profile):
    text = io.StringIO()
    with pytest.raises(ArgumentError, match=r'(?s)CBOR must be written as bytes.*"wb"'):
        profile.to_cbor(text)
    assert text.getvalue() == ""
    with tempfile.TemporaryFile("w") as unnamed, pytest.raises(ArgumentError, match="CBOR must be written as bytes"):
        profile.to_cbor(unnamed)
    with tempfile.SpooledTemporaryFile(mode="w") as spooled, pytest.raises(ArgumentError, match="written as bytes"):
        profile.to_cbor(spooled)


def test_nothing_is_written_of_a_profile_that_is_not_known(tmp_path):
    graph, program, _, _ = looping()
    profile = Profile(compile(graph, program))
    for write in (profile.to_json, profile.to_cbor):
        with pytest.raises(IpuError, match="trip count"):
            write(tmp_path / "profile")
    assert not list(tmp_path.iterdir())
