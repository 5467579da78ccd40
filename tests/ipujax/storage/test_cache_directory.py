"""Directories of a cache: whole files of this version, and nothing else that is in there."""

from __future__ import annotations

import os
import socket
import threading
from importlib import import_module

import pytest

from ipujax.cli import main
from ipujax.runtime.files import FileKind, Section
from ipujax.storage import CacheDirectory, NewFile
from tests.sealed_parts import put_together, taken_apart

KEY = "0" * 64
KIND = FileKind("program", {"one": Section()})
SECTIONS = {"one": b"\x00\n\xff"}
FILE = NewFile(KIND, KEY, SECTIONS)


def path_of(folder, kind=KIND):
    return folder / f"{KEY}-{kind.name}.ipujax"


def test_two_writers(tmp_path):
    """Readers see whole files only, whoever wrote them last."""
    directory = CacheDirectory(str(tmp_path))
    contents = [{"one": bytes([n]) * 20_000} for n in range(2)]

    def write(sections):
        for _ in range(20):
            CacheDirectory(str(tmp_path)).write(NewFile(KIND, KEY, sections))

    threads = [threading.Thread(target=write, args=(sections,)) for sections in contents]
    for thread in threads:
        thread.start()
    actual = [directory.read(KEY, KIND) for _ in range(50)]
    for thread in threads:
        thread.join()
    assert all(file is None or file.sections in contents for file in actual)
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}-program.ipujax"]


def test_longest_unused_files_beyond_the_number_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("ipujax.storage.cache_directory"), "MAX_FILES", 2)
    directory = CacheDirectory(str(tmp_path))
    keys = [digit * 64 for digit in "123"]
    plan = FileKind("plan", KIND.sections)
    for age, key in enumerate(reversed(keys)):
        directory.write(NewFile(plan, key, SECTIONS))
        os.utime(tmp_path / f"{key}-plan.ipujax", (1000 - age, 1000 - age))
    directory.write(NewFile(plan, "4" * 64, SECTIONS))
    assert sorted(file.key[0] for file in directory.files()) == ["3", "4"]


def test_clear_keeps_foreign_files(tmp_path):
    directory = CacheDirectory(str(tmp_path))
    directory.write(FILE)
    (tmp_path / "notes.txt").write_text("mine")
    assert [file.path.name for file in directory.clear()[0]] == [f"{KEY}-program.ipujax"]
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert CacheDirectory(str(tmp_path / "none")).files() == []


def test_file_that_is_removed_meanwhile_hides_no_other(tmp_path):
    directory = CacheDirectory(str(tmp_path))
    directory.write(FILE)
    for digit in "12345678":  # entries of names, without files, as between a listing and a look at the file
        (tmp_path / f"{digit * 64}-program.ipujax").symlink_to(tmp_path / "absent")
    assert [file.path.name for file in directory.files()] == [f"{KEY}-program.ipujax"]


def foreign(folder, name):
    """Makes something that is no file under a name."""
    path = folder / name
    match path.name[0]:
        case "1":
            os.mkfifo(path)
        case "2":
            path.mkdir()
            (path / "mine").write_text("kept")
        case "3":
            path.symlink_to(folder / "mine")
        case "4":
            path.symlink_to(path)
        case "5":
            os.chdir(folder)
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
    return path


def test_foreign_things_stay_and_are_never_waited_for(tmp_path, capsys):
    (tmp_path / "mine").write_text("kept")
    directory = CacheDirectory(str(tmp_path))
    paths = [foreign(tmp_path, f"{digit * 64}-program.ipujax") for digit in "12345"]
    for digit in "12345":
        assert directory.read(digit * 64, KIND) is None
        directory.write(NewFile(KIND, digit * 64, SECTIONS))
    directory.write(FILE)
    CacheDirectory(str(tmp_path), 1).write(NewFile(KIND, "6" * 64, {"one": b""}))  # which shrinks
    directory.write(FILE)
    assert [file.path.name for file in directory.files()] == [path_of(tmp_path).name]
    assert sorted(directory.irregular_entries()) == paths
    assert main(["cache", "--dir", str(tmp_path)]) == 0 and paths[0].name in capsys.readouterr().out
    assert main(["cache", "--clear", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 programs, 1 files") and all(f"left: {path}: no regular file" in out for path in paths)
    assert sorted(tmp_path.iterdir()) == [*paths, tmp_path / "mine"]
    assert (tmp_path / "mine").read_text() == (paths[1] / "mine").read_text() == "kept"


def test_unfinished_files_that_are_foreign_stay(tmp_path):
    os.mkfifo(tmp_path / f".{'a' * 32}.ipujax-part")
    (tmp_path / f".{'b' * 32}.ipujax-part").write_text("cut off")
    removed, _ = CacheDirectory(str(tmp_path)).clear()
    assert [file.path.name[1] for file in removed] == ["b"]


def test_files_of_another_version_are_not_there(tmp_path, caplog):
    """They are neither damaged nor removed, and go with the others when the cache is cleared."""
    other = FileKind("program", {"one": Section(), "more": Section(may_lack=True)})
    path = path_of(tmp_path)
    CacheDirectory(str(tmp_path)).write(NewFile(other, KEY, SECTIONS))
    content = path.read_bytes()
    directory = CacheDirectory(str(tmp_path))
    assert directory.read(KEY, KIND) is None and path.read_bytes() == content
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]
    assert [file.path for file in directory.files()] == [path]
    directory.clear()
    assert not path.exists()


@pytest.mark.parametrize("change", [{"kind": "plan"}, {"key": "1" * 64}, {"figures": {"other": 1}}, {"format": "x"}])
def test_forged_heads_are_removed(tmp_path, change, caplog):
    directory = CacheDirectory(str(tmp_path))
    directory.write(FILE)
    path = path_of(tmp_path)
    head, sections = taken_apart(path)
    path.write_bytes(put_together(head | change, sections))
    assert directory.read(KEY, KIND) is None and not path.exists()
    assert ["is damaged" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("name", ["file", "none/\0", "n" * 300])
def test_directories_that_cannot_be_made(tmp_path, name, caplog):
    (tmp_path / "file").write_text("mine")
    directory = CacheDirectory(str(tmp_path / name))
    directory.write(FILE)
    assert directory.read(KEY, KIND) is None
    assert any("cannot be written" in record.getMessage() for record in caplog.records)
    assert (tmp_path / "file").read_text() == "mine"
