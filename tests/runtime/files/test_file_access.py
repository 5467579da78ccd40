"""Written files: whole, or as they were, under every name that a user may give."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import threading

import pytest

from ipujax.runtime.files import write_file

OLD = b"the good file"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    return path


def test_new_files_have_the_mode_of_open(tmp_path):
    write_file(tmp_path / "new", b"content")
    with open(tmp_path / "opened", "wb"):
        pass
    assert (tmp_path / "new").read_bytes() == b"content"
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "opened").stat().st_mode


def test_replaced_files_keep_their_mode(path):
    path.chmod(0o640)
    write_file(path, b"new")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_links_stay_links(path, tmp_path):
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "chain").symlink_to(tmp_path / "link")
    (tmp_path / "to nothing").symlink_to(tmp_path / "made")
    for name in ("chain", "to nothing"):
        write_file(tmp_path / name, name.encode())
        assert (tmp_path / name).is_symlink()
    assert path.read_bytes() == b"chain" and (tmp_path / "made").read_bytes() == b"to nothing"


def test_a_full_disk_keeps_the_older_file(path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=f"large: '{path}'"):
            write_file(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == OLD and [each.name for each in path.parent.iterdir()] == ["file"]


def test_errors_of_the_system_leave_nothing_behind(path, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    places = {
        tmp_path / "folder": errno.EISDIR,
        tmp_path / "absent" / "file": errno.ENOENT,
        path / "file": errno.ENOTDIR,
        tmp_path / ("n" * 300): errno.ENAMETOOLONG,
        tmp_path / "circle": errno.ELOOP,
        "": errno.ENOENT,
        f"{tmp_path}/none/": errno.ENOENT,
    }
    for place, number in places.items():
        with pytest.raises(OSError, match=r".") as error:
            write_file(place, b"new")
        assert error.value.errno == number, place
        assert "-part" not in str(error.value)
    for name in ("a\0b", "\ud800"):
        with pytest.raises(ValueError, match=r"."):
            write_file(f"{tmp_path}/{name}", b"new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["circle", "file", "folder"]


def test_an_interrupt_keeps_the_older_file(path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(path, b"new")
    assert path.read_bytes() == OLD and len(list(path.parent.iterdir())) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_files_and_folders_that_are_read_only(path):
    path.chmod(0o400)
    with pytest.raises(PermissionError):
        write_file(path, b"new")
    path.chmod(0o600)
    path.parent.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            write_file(path, b"new")
    finally:
        path.parent.chmod(0o700)
    assert path.read_bytes() == OLD


def test_pipes_are_written_to_and_never_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"):  # nobody reads it
        write_file(pipe, b"content")
    contents = []
    reader = threading.Thread(target=lambda: contents.append(pipe.read_bytes()))
    reader.start()
    large = bytes(1 << 20)
    while reader.is_alive():
        try:
            write_file(pipe, large)
            break
        except OSError:  # the reader has not opened it yet
            continue
    reader.join()
    assert contents == [large] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_open_files_by_name():
    """As of `/dev/stdout`, and of the substitution of processes in shells."""
    read_end, write_end = os.pipe()
    write_file(f"/dev/fd/{write_end}", b"content")
    os.close(write_end)
    with open(read_end, "rb") as file:
        assert file.read() == b"content"
