"""Sealed files: a line of JSON, the head, then sections of bytes. A checksum covers both.

    {"format": "ipujax", "kind": …, "key": …, "figures": {…}, "sections": {name: bytes, …}, "sha256": …}

Input: a head and sections. Output: the content of a file; from such content the head and the sections again. Content
that is cut off, changed in any byte, of another kind or of another key is refused: nothing of it is used.
Limits: the checksum finds damage, not forgery: whoever can write the directory can write a sealed file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_FORMAT = "ipujax"
_MAX_HEAD_BYTES = 1 << 24


class DamagedError(ValueError):
    """Content that is not what was sealed; the text says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """Description of a sealed file, its first line.

    Args:
        kind: kind of its contents.
        key: digest of all that they depend on; empty without one.
        figures: further figures, JSON-able.
    """

    kind: str
    key: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


def seal(head: Head, sections: Mapping[str, bytes]) -> bytes:
    """Return the content of a sealed file."""
    fields = {
        "format": _FORMAT,
        "kind": head.kind,
        "key": head.key,
        "figures": dict(head.figures),
        "sections": {name: len(section) for name, section in sections.items()},
    }
    body = b"".join(sections.values())
    return _line(fields | {"sha256": _checksum(fields, body)}) + body


def unseal(content: bytes, kind: str, key: str | None = None) -> tuple[Head, dict[str, bytes]]:
    """Return head and sections of a sealed file.

    Args:
        content: bytes of the file.
        kind: kind that it must have.
        key: key that it must have; None for any.

    Raises:
        DamagedError: another content than was sealed, or another kind or key.
    """
    end = content.find(b"\n", 0, _MAX_HEAD_BYTES) + 1
    try:
        fields = json.loads(content[:end])
    except (ValueError, RecursionError) as error:
        raise DamagedError("it has no head") from error
    body = content[end:]
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise DamagedError("it has no head of ipujax")
    checksum = fields.pop("sha256", None)
    if checksum != _checksum(fields, body) or content[:end] != _line(fields | {"sha256": checksum}):
        raise DamagedError("its bytes are not those that were written")
    if fields["kind"] != kind or (key is not None and fields["key"] != key):
        raise DamagedError("it is of another program")
    sections = {}
    start = 0
    for name, size in fields["sections"].items():
        sections[name] = body[start : start + size]
        start += size
    return Head(fields["kind"], fields["key"], fields["figures"]), sections


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _checksum(fields: Mapping[str, Any], body: bytes) -> str:
    return hashlib.sha256(_line(fields) + body).hexdigest()
