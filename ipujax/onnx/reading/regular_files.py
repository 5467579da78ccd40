"""Regular files of a model, opened so that neither a link nor a pipe leads anywhere else.

External data may only come from regular files inside the model's folder, and not through links, because a model from
elsewhere could name any file of this machine. The cache of a model hub is the exception: below `snapshots/` of a
downloaded repository files are links into `blobs/` of the same repository. There links are followed one by one, and
each must stay inside of the repository.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from ipujax.onnx.onnx_errors import OnnxModelError

_MAX_LINKS = 40  # as Linux
_BLOBS = "blobs"
_SNAPSHOTS = "snapshots"
_EXPECTED = "a relative path to a regular file inside the model's folder"


def open_regular(path: Path, is_link_followed: bool = True) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened.
        OnnxModelError: a folder, a pipe or a device, none of which is waited for.
    """
    # A pipe without a writer would block. Flags that a system lacks are not needed there.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    flags |= 0 if is_link_followed else getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags)
    # The descriptor is looked at, not the path, which others may change meanwhile.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OnnxModelError(f"{path} cannot be read", expected="a regular file", got="a folder, a pipe or a device")
    return os.fdopen(descriptor, "rb")


def inner_path(folder: Path, location: str, name: str) -> Path:
    """Return the path of external data, without a link in it below the folder or the hub's repository.

    Args:
        folder: folder of the model, as the user gives it; it may have links of its own.
        location: as the model names the file.
        name: of the data, in errors.

    Raises:
        OnnxModelError: a location outside of the folder, or a link that leads out of the repository.
    """
    relative = Path(location)
    if not relative.parts or relative.is_absolute() or ".." in relative.parts or set(location) & {"\\", "\0"}:
        raise OnnxModelError(f"{name} are refused", expected=_EXPECTED, got=repr(location))
    real_folder = Path(os.path.realpath(folder))
    repository = _hub_repository(real_folder)
    path = _without_links(repository or real_folder, real_folder, relative, repository is not None, name)
    if not path.exists():
        hint = f"copy {location} into the folder of the model"
        raise OnnxModelError(f"{name} are missing", expected=_EXPECTED, got=f"no file {location!r}", hint=hint)
    return path


def _hub_repository(folder: Path) -> Path | None:
    """Return the downloaded repository that a folder is a snapshot of; None outside of a hub's cache."""
    for parent in (folder, *folder.parents):
        if parent.name == _SNAPSHOTS:
            root = parent.parent
            # A `blobs` that is a link itself could lead anywhere.
            is_repository = (root / _BLOBS).is_dir() and not (root / _BLOBS).is_symlink()
            return root if is_repository else None
    return None


def _without_links(root: Path, folder: Path, relative: Path, is_hub: bool, name: str) -> Path:
    """Follow a path part by part; refuse each step out of `root`, and outside of a hub's cache each link."""
    path = folder
    pending = list(reversed(relative.parts))
    links = 0
    while pending:
        part = pending.pop()
        path = path.parent if part == ".." else path / part
        if not path.is_relative_to(root):
            raise OnnxModelError(f"{name} are refused", expected=_EXPECTED, got=f"a link out of {root}")
        if not path.is_symlink():
            continue
        links += 1
        if not is_hub or links > _MAX_LINKS:
            got = f"{str(relative)!r}, where {part!r} is a link"
            raise OnnxModelError(f"{name} are refused", expected=_EXPECTED, got=got)
        target = Path(os.readlink(path))
        # An absolute target may have links of the user's own above the repository.
        path = Path(os.path.realpath(target.parent)) if target.is_absolute() else path.parent
        pending += [target.name] if target.is_absolute() else reversed(target.parts)
    return path
