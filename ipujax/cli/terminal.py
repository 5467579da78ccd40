"""Output of commands: tables, and texts whose headings are coloured on a terminal.

Input: rows, or a text with headings that are not indented. Output: lines on standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ipujax.runtime.profile import coloured, wants_colours

Row = tuple[str, ...]


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table; rows have equally many texts, columns the width of their widest one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def say(text: str) -> None:
    """Print a text, in colours if standard output is a terminal, unless the environment decides otherwise."""
    print(coloured(text) if has_colours() else text)


def has_colours() -> bool:
    """Return whether texts on standard output are coloured."""
    return wants_colours(None, is_terminal=sys.stdout.isatty())
