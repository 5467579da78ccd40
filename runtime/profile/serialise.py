"""Profiles as files: JSON, for people and every language, and CBOR, the same data in fewer bytes; tables as files.

Input: JSON-able data, or rows. Output: a file, or bytes in a file that is open. CBOR is that of RFC 8949, written by
the package `cbor2`, which the extra `profile` installs. Saved profiles are sealed files, see `runtime.files`.

Source: Poplar & PopLibs user guide, "Profiling": `serializeToJSON`, `serializeToCBOR`.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from ipujax.runtime import files
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, ProfileError

Where = files.FilePath | IO[Any]


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
    if _is_open_for_text(where):
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


def write_file(path: files.FilePath, content: bytes) -> None:
    """Write a file; one that exists is replaced, or as it was after an error."""
    name = path_name(path)
    try:
        files.write_file(path, content)
    except (OSError, ValueError) as error:
        message = f"the profile cannot be written to {name}"
        hint = "a path to a file in a folder that exists"
        raise ProfileError(message, got=files.file_problem(error), hint=hint) from error


def write_csv(path: files.FilePath, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table as comma-separated values, with a head; None is an empty cell; see `write_text` for errors."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_text(path: files.FilePath, text: str) -> None:
    """Write a file of a table; one that exists is replaced, or as it was after an error.

    Raises:
        ArgumentTypeError: another type than a path.
        ArgumentError: the path cannot be written.
    """
    name = path_name(path, "a table")
    try:
        files.write_file(path, text.encode())
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot write {name}", got=files.file_problem(error)) from error


def path_name(path: Any, content: str = "a profile") -> str:
    """Return a path as messages quote it, or raise an `ArgumentTypeError` that names the content."""
    if not isinstance(path, str | os.PathLike):  # `open` would take an int as a file descriptor
        expected = "a str or an os.PathLike"
        raise ArgumentTypeError(f"{content} needs a path", expected=expected, got=type(path).__name__)
    return repr(os.fspath(path))


def _write(content: str | bytes, where: Where) -> None:
    """Write content, text as UTF-8 where the file is open for bytes."""
    encoded = content.encode() if isinstance(content, str) else content
    if isinstance(where, str | os.PathLike):
        write_file(where, encoded)
    elif not hasattr(where, "write"):
        expected = "a path, or a file open for writing"
        raise ArgumentError("a profile cannot be written to this object", expected=expected, got=type(where).__name__)
    else:
        where.write(content if _is_open_for_text(where) else encoded)


def _is_open_for_text(where: Any) -> bool:
    """Return whether a file takes text: it is of `io`, or a wrapper of `tempfile` or `codecs`, with an encoding."""
    return isinstance(where, io.TextIOBase) or getattr(where, "encoding", None) is not None
