"""Sealed files: reading returns the written bytes, or nothing."""

from __future__ import annotations

import os
import threading
from importlib import import_module

import numpy as np
import pytest

from ipujax.storage import CacheDirectory, DamagedError, Head, seal, unseal

KEY = "0" * 64
HEAD = Head("program", KEY, {"figure": 3, "text": "é\n"})
SECTIONS = {"one": b"\x00\n\xff", "two": b"", "three": bytes(range(256))}


def test_round_trip():
    head, sections = unseal(seal(HEAD, SECTIONS), "program", KEY)
    assert head == HEAD and sections == SECTIONS


def test_every_changed_byte_is_found():
    content = seal(HEAD, SECTIONS)
    generator = np.random.default_rng(0)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= int(generator.integers(1, 256))
        with pytest.raises(DamagedError):
            unseal(bytes(damaged), "program", KEY)


@pytest.mark.parametrize(("kind", "key"), [("profile", KEY), ("program", "1" * 64)])
def test_other_program_is_refused(kind, key):
    with pytest.raises(DamagedError, match="another program"):
        unseal(seal(HEAD, SECTIONS), kind, key)


def test_two_writers(tmp_path):
    """Readers see whole files only, whoever wrote them last."""
    directory = CacheDirectory(str(tmp_path))
    contents = [{"one": bytes([n]) * 20_000} for n in range(2)]

    def write(sections):
        for _ in range(20):
            CacheDirectory(str(tmp_path)).write((HEAD, sections))

    threads = [threading.Thread(target=write, args=(sections,)) for sections in contents]
    for thread in threads:
        thread.start()
    actual = [directory.read(KEY, "program") for _ in range(50)]
    for thread in threads:
        thread.join()
    assert all(file is None or file[1] in contents for file in actual)
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}-program.ipujax"]


def test_longest_unused_files_beyond_the_number_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("ipujax.storage.cache_directory"), "MAX_FILES", 2)
    directory = CacheDirectory(str(tmp_path))
    keys = [digit * 64 for digit in "123"]
    for age, key in enumerate(reversed(keys)):
        directory.write((Head("plan", key), SECTIONS))
        os.utime(tmp_path / f"{key}-plan.ipujax", (1000 - age, 1000 - age))
    directory.write((Head("plan", "4" * 64), SECTIONS))
    assert sorted(file.key[0] for file in directory.files()) == ["3", "4"]


def test_clear_keeps_foreign_files(tmp_path):
    directory = CacheDirectory(str(tmp_path))
    directory.write((HEAD, SECTIONS))
    (tmp_path / "notes.txt").write_text("mine")
    assert [file.path.name for file in directory.clear()] == [f"{KEY}-program.ipujax"]
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert CacheDirectory(str(tmp_path / "none")).files() == []


def test_file_that_is_removed_meanwhile_hides_no_other(tmp_path):
    directory = CacheDirectory(str(tmp_path))
    directory.write((HEAD, SECTIONS))
    for digit in "12345678":  # entries of names, without files, as between a listing and a look at the file
        (tmp_path / f"{digit * 64}-program.ipujax").symlink_to(tmp_path / "absent")
    assert [file.path.name for file in directory.files()] == [f"{KEY}-program.ipujax"]
