"""Profiles as files: JSON, for people and every language, CBOR, the same data in fewer bytes, and saved profiles.

Input: JSON-able data. Output: a file, or bytes in a file that is open. CBOR is that of RFC 8949, written by the package
`cbor2`, which the extra `profile` installs. A saved profile is JSON compressed by gzip, with the name and the version
of the format. Files of older versions, from `OLDEST` on, are read, without the figures of later ones; newer files raise
an error. So do files that decompress to more than a profile can have (`MAX_BYTES`, `MAX_RATIO`), and figures that
differ from those that were saved, by a checksum of their JSON without spaces:

    {"format": "ipujax profile", "version": 4, "sha256": …, "profile": …}

Version 3 added the execution trace, the program tree, the contents of each tile, and texts of source files.

Source: Poplar & PopLibs user guide, "Profiling": `serializeToJSON`, `serializeToCBOR`.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import math
import os
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, ProfileError, shortened

FilePath = str | os.PathLike[str]
Where = FilePath | IO[Any]
VERSION = 4  # of the saved profiles that are written
OLDEST = 2  # version of saved profiles that can be read
_FORMAT = "ipujax profile"
_GZIP = b"\x1f\x8b"  # first bytes of files of gzip, RFC 1952
_LEVEL = 6  # of compression, gzip's own default
_NO_SPACES = (",", ":")
# Bounds of decompressed bytes, as a file could be made to fill the memory. Figures by tile and compute set make most of
# a profile: a training step of BERT-Large on 4 IPUs has 164 MB of JSON, 65 times its file, and takes 1.5 GB when it is
# read; 8 layers on 8 IPUs have 238 MB, 103 times. Repeated bytes can be 1,032 times their file (RFC 1951: 258 of them
# in 2 bits).
MAX_BYTES = 2 << 30  # of JSON
MAX_RATIO = 400  # of JSON to its file, if it is longer than `FREE_BYTES`
FREE_BYTES = 128 << 20
_CHUNK_BYTES = 1 << 20
_SAVED = "a file that profile.save wrote"


def write_json(data: Any, where: Where, *, pretty: bool = False) -> None:
    """Write data as JSON.

    Args:
        data: dicts, lists, numbers, strings; no number that JSON lacks, such as NaN.
        where: a path, or a file open for text or bytes, which stays open.
        pretty: whether to indent it.

    Raises:
        ArgumentError: something that is neither a path nor an open file.
    """
    _write(_json(data, indent=2 if pretty else None, ensure_ascii=False) + "\n", where)


def _json(data: Any, **settings: Any) -> str:
    """Return data as JSON; refuse a number that is not finite, which JSON lacks."""
    try:
        return json.dumps(data, allow_nan=False, **settings)
    except ValueError as error:
        fields = _not_finite(data, "")
        message = f"the profile cannot be written: {next(fields, 'a field')} is not a finite number"
        raise ProfileError(message, got=str(error), hint="JSON has finite numbers only") from error


def _not_finite(data: Any, path: str) -> Iterator[str]:
    """Yield the paths of numbers that are not finite."""
    if isinstance(data, float) and not math.isfinite(data):
        yield path
    elif isinstance(data, dict):
        for name, value in data.items():
            yield from _not_finite(value, f"{path}.{name}" if path else str(name))
    elif isinstance(data, list | tuple):
        for number, value in enumerate(data):
            yield from _not_finite(value, f"{path}[{number}]")


def write_cbor(data: Any, where: Where) -> None:
    """Write data as CBOR.

    Args:
        data: dicts, lists, numbers, strings.
        where: a path, or a file open for bytes, which stays open.

    Raises:
        ArgumentError: something that is neither a path nor an open file, or a file open for text.
        ProfileError: the package that writes CBOR is not installed.
    """
    if isinstance(where, io.TextIOBase):
        got = f"a file open for text, {getattr(where, 'name', type(where).__name__)}"
        raise ArgumentError(
            "CBOR must be written as bytes", expected='a path, or a file open for bytes, open(path, "wb")', got=got
        )
    try:
        cbor2 = importlib.import_module("cbor2")
    except ImportError:
        hint = "pip install 'ipujax[profile]', or JSON, which needs nothing"
        raise ProfileError("CBOR needs the package cbor2, which is not installed", hint=hint) from None
    _write(cbor2.dumps(data), where)


def write_file(path: FilePath, content: bytes) -> None:
    """Write a file; one that exists is replaced."""
    name = _name(path)
    try:
        with open(path, "wb") as file:
            file.write(content)
    except (OSError, ValueError) as error:
        message = f"the profile cannot be written to {name}"
        hint = "a path to a file in a folder that exists"
        raise ProfileError(message, got=_reason(error), hint=hint) from error


def _name(path: Any) -> str:
    """Return a path as messages quote it, or raise an `ArgumentTypeError`."""
    if not isinstance(path, str | os.PathLike):  # `open` would take an int as a file descriptor
        expected = "a str or an os.PathLike"
        raise ArgumentTypeError("a profile needs a path", expected=expected, got=type(path).__name__)
    return repr(os.fspath(path))


def checked_path(path: FilePath) -> FilePath:
    """Return a path unchanged, and refuse anything else."""
    _name(path)
    return path


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _write(content: str | bytes, where: Where) -> None:
    """Write content, text as UTF-8 where the file is open for bytes."""
    encoded = content.encode() if isinstance(content, str) else content
    if isinstance(where, str | os.PathLike):
        write_file(where, encoded)
    elif not hasattr(where, "write"):
        expected = "a path, or a file open for writing"
        raise ArgumentError("a profile cannot be written to this object", expected=expected, got=type(where).__name__)
    else:
        where.write(content if isinstance(where, io.TextIOBase) else encoded)


def write_profile(path: FilePath, data: Any) -> None:
    """Write JSON-able data as a saved profile; a file that exists is replaced."""
    content = profile_text(data).encode()
    file = gzip.compress(content, _LEVEL, mtime=0)
    if len(content) > (limit := _max_bytes(len(file))):  # a file that could not be read again is not written
        expected = f"at most {limit:,} bytes of JSON"
        hint = "profile.to_json and profile.to_html have no bound; or fewer tiles, IPUs or layers"
        message = "the profile is too large for a file that can be loaded"
        raise ProfileError(message, expected=expected, got=f"{len(content):,}", hint=hint)
    write_file(path, file)


def _max_bytes(file_bytes: int) -> int:
    """Return the upper bound of the decompressed bytes of a file."""
    return min(MAX_BYTES, max(FREE_BYTES, MAX_RATIO * file_bytes))


def profile_text(data: Any) -> str:
    """Return the JSON of a saved profile, with its checksum, from JSON-able data."""
    text = _json(data, separators=_NO_SPACES)
    head = json.dumps({"format": _FORMAT, "version": VERSION, "sha256": _digest(text)}, separators=_NO_SPACES)
    return f'{head[:-1]},"profile":{text}}}'


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class SavedFile(NamedTuple):
    """The contents of a file: the version of its format, and the data of a profile."""

    version: int
    profile: Any


def read_profile(path: FilePath) -> SavedFile:
    """Read a file of `write_profile`.

    Raises:
        ArgumentTypeError: a value that is not a path.
        ProfileError: a file that is missing, is not a profile, is damaged, is of another version, or decompresses to
            more than a profile can have.
    """
    name = _name(path)
    try:
        with open(path, "rb") as file:
            start = file.read(len(_GZIP))
            content = start + file.read() if start == _GZIP else b""  # another file may be huge: it is not read
    except (OSError, ValueError) as error:
        raise ProfileError(f"the profile {name} cannot be read", got=_reason(error)) from error
    if not content:
        raise not_a_profile(path, "", "a file that is not gzip")
    try:
        _check_size(name, content)
        data = json.loads(gzip.decompress(content))
        digest = _digest(json.dumps(data.get("profile"), separators=_NO_SPACES)) if isinstance(data, dict) else None
    except EOFError as error:
        message = f"the profile {name} is cut off"
        raise ProfileError(message, got=f"{len(content):,} bytes", hint="save or copy it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ProfileError(f"the profile {name} is damaged", got=str(error), hint="save or copy it again") from error
    except RecursionError as error:
        raise not_a_profile(path, "", "JSON that is nested too deeply") from error
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise not_a_profile(path, "", str(error)[:200]) from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise not_a_profile(path, "", f"JSON without the format {_FORMAT!r}")
    _check_version(name, data.get("version"))
    if data.get("sha256") != digest:
        message = f"the profile {name} is damaged: its figures are not those that were saved"
        raise ProfileError(message, hint="save or copy it again")
    return SavedFile(data["version"], data.get("profile"))


def _check_size(name: str, content: bytes) -> None:
    """Raise an error for content that decompresses to more than a profile can have."""
    limit = _max_bytes(len(content))
    size = 0
    with gzip.open(io.BytesIO(content)) as file:
        while size <= limit and (chunk := file.read(_CHUNK_BYTES)):  # only one chunk is in memory at a time
            size += len(chunk)
    if size > limit:
        message = (
            f"the profile {name} is damaged: its {len(content):,} bytes decompress to more than a profile can have"
        )
        expected = f"at most {limit:,} bytes"
        raise ProfileError(message, expected=expected, got=f"more than {limit:,} bytes", hint="save or copy it again")


def _check_version(name: str, version: Any) -> None:
    """Raise an error for a version that this ipujax cannot read."""
    if not isinstance(version, int) or isinstance(version, bool) or not OLDEST <= version <= VERSION:
        is_newer = isinstance(version, int) and version > VERSION
        hint = "read it with a newer ipujax" if is_newer else "save it again with this ipujax"
        expected = f"version {OLDEST} to {VERSION}"
        got = f"version {shortened(version)}"
        raise ProfileError(f"the profile {name} is of another version", expected=expected, got=got, hint=hint)


def not_a_profile(path: FilePath, field: str, got: str, expected: str = _SAVED) -> ProfileError:
    """Return the error of a file that is not a profile, or a damaged one; `field` is empty where it has no fields."""
    message = f"{_name(path)} is not a profile{f': its field {field} is damaged' if field else ''}"
    return ProfileError(message, expected=expected, got=got, hint="profile.save(path) makes one")
