"""Sealed files: reading returns what was written, or a typed reason; nothing of a forged file is used unchecked."""

from __future__ import annotations

import json
import os
import socket
import tomllib
import zlib

import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.files import (
    DamagedError,
    FieldError,
    FileError,
    FileKind,
    ForeignError,
    Section,
    UnreadableError,
    VersionError,
    compress,
    decompress,
    parse_json,
    read_sealed,
    seal,
    sealed,
)
from ipujax.runtime.files.kinds import Integer, Record, Text
from ipujax.runtime.files.sealed import section_of
from tests.sealed_parts import put_together, taken_apart
from tests.test_layering import ROOT

KEY = "0" * 64
FIELDS = Record({"figure": Integer(), "text": Text()})
KIND = FileKind("plan", {"one": Section(), "two": Section(), "three": Section(may_lack=True)}, FIELDS)
FIGURES = {"figure": 3, "text": "é\n"}
SECTIONS = {"one": b"\x00\n\xff", "two": b"", "three": bytes(range(256))}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(seal(KIND, SECTIONS, FIGURES, KEY))
    return path


def test_round_trip(path):
    sealed = read_sealed(path, KIND, KEY)
    assert sealed.figures == FIGURES and sealed.sections == SECTIONS
    path.write_bytes(seal(KIND, {"one": b"", "two": b""}, FIGURES))
    assert read_sealed(path, KIND).sections == {"one": b"", "two": b""}


def test_format_is_as_it_is_described(path):
    head, sections = taken_apart(path)
    assert list(head) == ["format", "kind", "version", "key", "figures", "sections", "sha256"]
    assert sections == SECTIONS and put_together(head, sections) == path.read_bytes()


def test_every_changed_byte_is_found(path):
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= int(generator.integers(1, 256))
        path.write_bytes(damaged)
        with pytest.raises(FileError):
            read_sealed(path, KIND, KEY)


def test_every_prefix_is_refused(path):
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(FileError):
            read_sealed(path, KIND, KEY)


def test_order_of_the_checks(path):
    """Format, kind, version, checksum, key, fields: the first that fails is named."""
    with pytest.raises(DamagedError, match="another program"):
        read_sealed(path, KIND, "1" * 64)
    changes = [
        ({"figures": {"figure": -1, "text": ""}}, FieldError, r"figures\.figure"),
        ({"sha256": "0"}, DamagedError, "not those that were written"),
        ({"version": "0"}, VersionError, f"expected version {KIND.version}, got version '0'"),
        ({"kind": "profile"}, ForeignError, "another kind: expected plan, got 'profile'"),
        ({"format": "other"}, ForeignError, "no head of ipujax"),
    ]
    head, sections = taken_apart(path)
    for change, error, match in changes:
        head |= change
        content = put_together(head, sections)
        path.write_bytes(content.replace(b'"sha256":"', b'"sha256":"0', 1) if head["sha256"] == "0" else content)
        with pytest.raises(error, match=match):
            read_sealed(path, KIND, KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"sections": {"one": 3}},
        {"sections": {"one": 3, "two": 0, "three": 256, "four": 0}},
        {"sections": {"one": -3, "two": 6, "three": 256}},
        {"sections": {"one": 2.0, "two": 1, "three": 256}},
        {"sections": {"one": 1 << 80}},
        {"sections": []},
        {"figures": 3},
        {"figures": FIGURES | {"other": 1}},
        {"key": 3},
        {"version": 3},
        {"kind": None},
        {"other": 1},
    ],
    ids=str,
)
def test_forged_heads_are_refused(path, change):
    head, sections = taken_apart(path)
    content = put_together(head | change, sections)
    if "sections" in change:  # sizes that are not those of the sections
        line, _, body = content.partition(b"\n")
        content = json.dumps(json.loads(line) | change, separators=(",", ":")).encode() + b"\n" + body
    path.write_bytes(content)
    with pytest.raises(FileError):
        read_sealed(path, KIND, KEY)


def test_version_is_that_of_the_project_and_follows_from_the_fields():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert KIND.version.rpartition(".")[0] == project["version"] == ipu.__version__
    more = FileKind("plan", KIND.sections, Record({"figure": Integer(), "text": Text(), "new": Text()}))
    wider = FileKind("plan", KIND.sections, Record({"figure": Integer(-1), "text": Text()}))
    again = FileKind("plan", dict(KIND.sections), Record({"figure": Integer(), "text": Text()}))
    assert len({KIND.version, more.version, wider.version}) == 3 and again.version == KIND.version


def test_other_things_than_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(tmp_path)  # names of sockets are short
        server.bind("socket")
        for name in ("pipe", "folder", "circle", "socket"):
            with pytest.raises(UnreadableError):
                read_sealed(tmp_path / name, KIND)
    for name in ("/dev/zero", "a\0b", "\ud800", "n" * 300):
        with pytest.raises(UnreadableError):
            read_sealed(name, KIND)
    for name in ("link", "absent"):
        with pytest.raises(FileNotFoundError):
            read_sealed(tmp_path / name, KIND)


def test_links_are_followed_unless_they_are_foreign(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    assert read_sealed(tmp_path / "link", KIND).figures == FIGURES
    with pytest.raises(UnreadableError):
        read_sealed(tmp_path / "link", KIND, follows_links=False)


def test_sections_of_json_that_compress_well_are_read(monkeypatch):
    """They are written with less compression where the bounds would refuse them."""
    monkeypatch.setattr(sealed, "_FREE_BYTES", 1 << 10)
    monkeypatch.setattr(sealed, "_FREE_PARSED_BYTES", 1 << 10)
    data = [{"cycles": 1, "program": 2}] * 10_000
    section = section_of(data)
    assert (
        len(section) > len(zlib.compress(json.dumps(data).encode()))
        and parse_json(decompress(section), 1 << 40) == data
    )


@pytest.mark.parametrize("size", [0, 1, 1 << 16, 1 << 20])
def test_sections_of_any_bytes(size, monkeypatch):
    monkeypatch.setattr(sealed, "_FREE_BYTES", 1 << 10)
    content = np.random.default_rng(0).integers(0, 2, size, np.uint8).tobytes()
    for each in (content, bytes(size)):
        assert decompress(compress(each)) == each


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x + b"1", lambda x: b"", lambda x: x + x], ids=range(4))
def test_sections_that_are_cut_off_or_go_on(change):
    with pytest.raises(DamagedError, match=r"cut off, or go on|cannot be decompressed"):
        decompress(change(compress(b"content")))
