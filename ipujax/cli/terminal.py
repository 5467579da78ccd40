"""Output of commands: texts whose headings are coloured on a terminal.

Input: a text with headings that are not indented. Output: lines on standard output.
"""

from __future__ import annotations

import sys

from ipujax.runtime.profile import coloured, wants_colours


def say(text: str) -> None:
    """Print a text, in colours if standard output is a terminal, unless the environment decides otherwise."""
    print(coloured(text) if has_colours() else text)


def has_colours() -> bool:
    """Return whether texts on standard output are coloured."""
    return wants_colours(None, is_terminal=sys.stdout.isatty())
