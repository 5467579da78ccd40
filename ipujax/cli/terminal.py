"""What commands print: tables, and texts whose headings are coloured on a terminal.

Input: rows, or a text with headings that are not indented. Output: lines on standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ipujax.runtime.profile import coloured, wants_colours

Row = tuple[str, ...]


def table(rows: Sequence[Row]) -> list[str]:
    """Rows of one length as lines, in columns as wide as their widest entry.

    Args:
        rows: each of as many texts.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def say(text: str) -> None:
    """Prints a text, in colours if standard output is a terminal and the environment does not say otherwise."""
    print(coloured(text) if has_colours() else text)


def has_colours() -> bool:
    """Whether standard output gets colours."""
    return wants_colours(None, is_terminal=sys.stdout.isatty())
