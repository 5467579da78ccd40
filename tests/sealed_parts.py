"""Sealed files taken apart and put together again with the right checksum, by the description of their format."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any


def taken_apart(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Fields of the head and sections of a file."""
    line, _, body = path.read_bytes().partition(b"\n")
    head = json.loads(line)
    sections = {}
    for name, size in head["sections"].items():
        sections[name] = body[:size]
        body = body[size:]
    assert not body
    return head, sections


def put_together(head: dict[str, Any], sections: dict[str, bytes]) -> bytes:
    """A file of these parts, with the sizes and the checksum of them."""
    fields = {name: value for name, value in head.items() if name != "sha256"}
    fields["sections"] = {name: len(section) for name, section in sections.items()}
    body = b"".join(sections.values())
    return line(fields | {"sha256": hashlib.sha256(line(fields) + body).hexdigest()}) + body


def line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def data(section: bytes) -> Any:
    """Data of a section of JSON."""
    return json.loads(zlib.decompress(section))


def section(data: Any) -> bytes:
    """A section of JSON, also of JSON that no file may have."""
    return zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 1)
