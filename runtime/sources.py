"""Texts of source files, for reports that show costs beside lines.

Input: origins. Output: the lines of each file. Python's `linecache` reads them, which also has the cells of notebooks.
Limits: lines are those of the file now, which may have changed since it was traced; files that are gone or very long
are left out.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable

from ipujax.runtime.tensor import Origin

MOST_LINES = 5_000  # of one file
_LINE = re.compile(r"^(?P<name>.*)(?::|(?<=\d), line )(?P<number>[1-9]\d{0,8})(?: \((?P<function>.*)\))?$")


def line_number(line: str) -> tuple[str, int] | None:
    """Return file name and line number of an `Origin.line`, which may be of a cell; None for other texts."""
    match = _LINE.match(line)
    return (match["name"], int(match["number"])) if match else None


def source_texts(origins: Iterable[Origin]) -> dict[str, list[str]]:
    """Return the lines of the files of origins, by path, without newlines; origins without a file are left out."""
    return current_texts(origin.file for origin in origins if origin.file)


def current_texts(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the lines of files as they are now, by path, without newlines; missing and long files are left out."""
    texts: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        lines = linecache.getlines(path)
        if 0 < len(lines) <= MOST_LINES:
            texts[path] = [line.rstrip("\n") for line in lines]
    return texts
