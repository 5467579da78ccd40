"""Profiles as files: JSON, for people and every language, and CBOR, the same data in fewer bytes.

Input: JSON-able data. Output: a file, or bytes in a file that is open. CBOR is what RFC 8949 says; the package `cbor2`
writes it, which the extra `profile` installs.
Source: Poplar & PopLibs user guide, "Profiling": `serializeToJSON`, `serializeToCBOR`.
"""

from __future__ import annotations

import importlib
import io
import json
import os
from typing import IO, Any

from ipujax.runtime.errors import ArgumentError, ProfileError

Where = str | os.PathLike[str] | IO[Any]


def write_json(data: Any, where: Where, *, pretty: bool = False) -> None:
    """Writes data as JSON.

    Args:
        data: dicts, lists, numbers, strings; no number that JSON lacks, such as NaN.
        where: a path, or a file open for text or bytes, which stays open.
        pretty: whether to indent it.

    Raises:
        ArgumentError: something that is neither a path nor an open file.
    """
    _write(json.dumps(data, indent=2 if pretty else None, allow_nan=False, ensure_ascii=False) + "\n", where)


def write_cbor(data: Any, where: Where) -> None:
    """Writes data as CBOR.

    Args:
        data: dicts, lists, numbers, strings.
        where: a path, or a file open for bytes, which stays open.

    Raises:
        ArgumentError: something that is neither a path nor an open file, or a file open for text.
        ProfileError: the package that writes CBOR is not installed.
    """
    if isinstance(where, io.TextIOBase):
        got = f"a file open for text, {getattr(where, 'name', type(where).__name__)}"
        raise ArgumentError("CBOR is bytes", expected='a path, or a file open for bytes, open(path, "wb")', got=got)
    try:
        cbor2 = importlib.import_module("cbor2")
    except ImportError:
        hint = "pip install 'ipujax[profile]', or JSON, which needs nothing"
        raise ProfileError("CBOR needs the package cbor2, which is not installed", hint=hint) from None
    _write(cbor2.dumps(data), where)


def _write(content: str | bytes, where: Where) -> None:
    """Writes all of it, text as UTF-8 where only bytes are taken."""
    encoded = content.encode() if isinstance(content, str) else content
    if isinstance(where, str | os.PathLike):
        with open(where, "wb") as file:
            file.write(encoded)
    elif not hasattr(where, "write"):
        expected = "a path, or a file open for writing"
        raise ArgumentError("a profile is written nowhere", expected=expected, got=type(where).__name__)
    else:
        where.write(content if isinstance(where, io.TextIOBase) else encoded)
