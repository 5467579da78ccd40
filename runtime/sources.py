"""Texts of source files, for reports that show costs beside lines.

Input: origins. Output: for each file its lines. Python's own `linecache` reads them, which also knows the cells of
notebooks.
Limits: a file that has changed since it was traced is shown as it is now; one that is gone, or very long, is left out.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable

from ipujax.runtime.tensor import Origin

MOST_LINES = 5_000  # of one file
_LINE = re.compile(r"^(?P<name>.*)(?::|(?<=\d), line )(?P<number>[1-9]\d{0,8})(?: \((?P<function>.*)\))?$")


def line_number(line: str) -> tuple[str, int] | None:
    """File name and line number of `file:line (function)` or `cell 3, line 5 (function)`; None for other texts.

    Args:
        line: as `Origin.line`.
    """
    found = _LINE.match(line)
    return (found["name"], int(found["number"])) if found else None


def source_texts(origins: Iterable[Origin]) -> dict[str, list[str]]:
    """The lines of the files that origins name, by path, without line ends.

    Args:
        origins: those without a file are left out.
    """
    texts: dict[str, list[str]] = {}
    for path in dict.fromkeys(origin.file for origin in origins if origin.file):
        lines = linecache.getlines(path)
        if 0 < len(lines) <= MOST_LINES:
            texts[path] = [line.rstrip("\n") for line in lines]
    return texts
