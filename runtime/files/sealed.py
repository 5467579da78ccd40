"""Sealed files: a line of JSON, the head, then sections of bytes. A checksum covers both.

    {"format": "ipujax", "kind": …, "version": …, "key": …, "figures": {…}, "sections": {name: bytes, …}, "sha256": …}

Sections may be compressed (zlib, RFC 1950), with a bound of their bytes that is known before they are decompressed. The
bound grows with the file, so that a small file cannot take much memory; what compresses better than the bound allows is
written with less compression, or none.

Input: the kind of a file, figures and sections. Output: its content; from a file the figures and the sections again.
Checks come in this order: format, kind, version, checksum, then the fields of the figures and of each section, so that
a file of another version is refused by its version. The version is that of ipujax, with a digest of all fields that
files of the kind have: a new field makes a new version.
Limits: the checksum finds damage, not forgery; bounds and fields are checked for files that were forged.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any

from ipujax.runtime.errors import shortened
from ipujax.runtime.files.file_access import (
    DamagedError,
    FilePath,
    ForeignError,
    VersionError,
    json_memory_bytes,
    json_text,
    parse_json,
    regular_file,
)
from ipujax.runtime.files.kinds import Anything, FieldError, Integer, Kind, Lengths, Map, Record, Text

_LEVEL = 6  # of compression, zlib's own default
# A profile of a training step of BERT-Large on 4 IPUs has 32 MB of JSON, 14 times its 2.2 MB; `json_memory_bytes` of it
# is 116 times the file, and loading it takes 141 MB. Files of less than about half a megabyte share a bound.
_FREE_BYTES = 16 << 20
_MAX_RATIO = 40
_FREE_PARSED_BYTES = 64 << 20
_MAX_PARSED_RATIO = 130


def max_content_bytes(packed_bytes: int) -> int:
    """Return the upper bound of the bytes of a section of so many compressed bytes."""
    return max(_FREE_BYTES, _MAX_RATIO * packed_bytes)


def max_json_memory_bytes(packed_bytes: int) -> int:
    """Return the upper bound of the memory that the JSON of a section of so many compressed bytes takes."""
    return max(_FREE_PARSED_BYTES, _MAX_PARSED_RATIO * packed_bytes)


def compress(content: bytes, level: int = _LEVEL) -> bytes:
    """Return content compressed, no further than the bounds of `decompress` allow; at level 0 they always do."""
    memory_bytes = json_memory_bytes(content)
    for lower_level in (level, 1, 0):
        section = zlib.compress(content, lower_level)
        if len(content) <= max_content_bytes(len(section)) and memory_bytes <= max_json_memory_bytes(len(section)):
            break
    return section


def decompress(section: bytes) -> bytes:
    """Return the content of a compressed section.

    Raises:
        DamagedError: another section, or one that decompresses to more than a file can have.
    """
    limit = max_content_bytes(len(section))
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(section, limit + 1)
    except zlib.error as error:
        raise DamagedError(f"it cannot be decompressed: {error}") from error
    if len(content) > limit:
        problem = f"its {len(section):,} bytes decompress to more than such a file can have"
        raise DamagedError(problem, f"at most {limit:,} bytes", f"more than {limit:,}")
    if not stream.eof or stream.unused_data or stream.unconsumed_tail:
        raise DamagedError("its compressed bytes are cut off, or go on behind their end")
    return content


_FORMAT = "ipujax"
_START = b'{"format":"ipujax",'
_MAX_HEAD_BYTES = 16 << 20
_MAX_PARSED_HEAD_BYTES = 64 << 20
_MAX_FILE_BYTES = 4 << 30  # a computation has the constants of its program
_DIGITS = 12  # of a digest of fields
_SHOWN = 60  # characters of a name in an error


@dataclass(frozen=True)
class Section:
    """Contents of a section: JSON that is compressed, or bytes that other code reads.

    Args:
        fields: description of its fields, from which the version of files follows; empty for bytes.
        check: raises a `FieldError` for JSON of other fields; None for bytes.
        may_lack: whether a file may lack the section.
    """

    fields: str = ""
    check: Callable[[Any], None] | None = field(default=None, repr=False)
    may_lack: bool = False


@dataclass(frozen=True)
class FileKind:
    """A kind of file.

    Args:
        name: its name in the head, and in errors.
        sections: its sections by name.
        figures: kind of the figures in the head.
    """

    name: str
    sections: Mapping[str, Section]
    figures: Kind = Record({})

    @cached_property
    def version(self) -> str:
        """Version of the files that are written, and of those that are read."""
        return f"{version('ipujax')}.{hashlib.sha256(repr(self).encode()).hexdigest()[:_DIGITS]}"


@dataclass(frozen=True)
class Sealed:
    """A sealed file that was read.

    Args:
        kind: kind of the file.
        figures: figures of its head, of the fields of the kind.
        sections: bytes of its sections, by name.
    """

    kind: FileKind
    figures: Mapping[str, Any]
    sections: Mapping[str, bytes]

    def data(self, name: str) -> Any:
        """Return the data of a section of JSON.

        Raises:
            FileError: its text or a field of it is damaged, or it takes more memory than such a file can have.
        """
        return section_data(self.sections[name], self.kind.sections[name])


def section_of(data: Any, level: int = 6) -> bytes:
    """Return JSON-able data as a section; `level` is that of its compression.

    Raises:
        ValueError: a number that is not finite.
    """
    return compress(json_text(data), level)


def section_data(content: bytes, section: Section) -> Any:
    """Return the data of a section of JSON.

    Raises:
        FileError: as `Sealed.data`.
    """
    data = parse_json(decompress(content), max_json_memory_bytes(len(content)))
    if section.check is not None:
        section.check(data)
    return data


def seal(
    kind: FileKind, sections: Mapping[str, bytes], figures: Mapping[str, Any] | None = None, key: str = ""
) -> bytes:
    """Return the content of a sealed file.

    Args:
        kind: its kind.
        sections: bytes by name.
        figures: of the fields of the kind.
        key: digest of all that the contents depend on; empty without one.
    """
    fields = {
        "format": _FORMAT,
        "kind": kind.name,
        "version": kind.version,
        "key": key,
        "figures": dict(figures or {}),
        "sections": {name: len(section) for name, section in sections.items()},
    }
    body = b"".join(sections.values())
    return _line(fields | {"sha256": _checksum(fields, body)}) + body


def read_sealed(path: FilePath, kind: FileKind, key: str | None = None, *, follows_links: bool = True) -> Sealed:
    """Read a sealed file.

    Args:
        path: of the file.
        kind: kind that it must have.
        key: key that it must have; None for any.
        follows_links: whether a link is followed; else it is refused.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it is unreadable, foreign, of another version, or damaged.
    """
    with regular_file(path, follows_links=follows_links) as (file, file_bytes):
        start = file.read(len(_START))
        if start != _START:  # another file may be huge: it is not read
            raise ForeignError("it has no head of ipujax")
        line = start + file.readline(_MAX_HEAD_BYTES)
        fields = _head_fields(line, kind)
        body_bytes = sum(fields["sections"].values())
        if not len(line) + body_bytes == file_bytes <= _MAX_FILE_BYTES:
            expected = f"{len(line) + body_bytes:,} bytes"
            raise DamagedError("its bytes are not those that were written", expected, f"{file_bytes:,}")
        body = file.read(body_bytes)
    checksum = fields.pop("sha256")
    if checksum != _checksum(fields, body) or line != _line(fields | {"sha256": checksum}):
        raise DamagedError("its bytes are not those that were written")
    if key is not None and fields["key"] != key:
        raise DamagedError("it is of another program")
    _check_names(fields["sections"], kind)
    kind.figures.check(fields["figures"], "figures", Lengths())
    sections = {}
    first = 0
    for name, section_bytes in fields["sections"].items():
        sections[name] = body[first : first + section_bytes]
        first += section_bytes
    return Sealed(kind, fields["figures"], sections)


_NAMES: dict[str, Kind] = dict.fromkeys(("format", "kind", "version"), Text())
_HEAD = Record(
    _NAMES | {"key": Text(), "figures": Anything(), "sections": Map(Integer(maximum=_MAX_FILE_BYTES)), "sha256": Text()}
)


def _head_fields(line: bytes, kind: FileKind) -> dict[str, Any]:
    """Return the fields of a head of this kind and version, without its figures checked."""
    if not line.endswith(b"\n"):
        raise DamagedError("its head has no end")
    fields = parse_json(line, _MAX_PARSED_HEAD_BYTES)
    if not isinstance(fields, dict) or not all(isinstance(fields.get(name), str) for name in _NAMES):
        raise ForeignError("it has no head of ipujax")
    if fields["kind"] != kind.name:
        raise ForeignError("it is of another kind", kind.name, shortened(fields["kind"][:_SHOWN]))
    if fields["version"] != kind.version:
        got = f"version {shortened(fields['version'][:_SHOWN])}"
        raise VersionError("it is of another version of ipujax", f"version {kind.version}", got)
    _HEAD.check(fields, "", Lengths())
    return fields


def _check_names(sections: Mapping[str, int], kind: FileKind) -> None:
    required = {name for name, section in kind.sections.items() if not section.may_lack}
    if not required <= sections.keys() <= kind.sections.keys():
        raise FieldError("sections", ", ".join(kind.sections), shortened(", ".join(sections)[:_SHOWN]))


def _line(fields: Mapping[str, Any]) -> bytes:
    return json_text(fields) + b"\n"


def _checksum(fields: Mapping[str, Any], body: bytes) -> str:
    return hashlib.sha256(_line(fields) + body).hexdigest()
