"""Output of commands: texts whose headings are coloured on a terminal, and how much of compilations is logged.

Input: a text with headings that are not indented. Output: lines on standard output.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ipujax.runtime.profile import coloured, wants_colours


def say(text: str) -> None:
    """Print a text, in colours if standard output is a terminal, unless the environment decides otherwise."""
    print(coloured(text) if has_colours() else text)


def has_colours() -> bool:
    """Return whether texts on standard output are coloured."""
    return wants_colours(None, is_terminal=sys.stdout.isatty())


@contextmanager
def logging_at_least(level: int) -> Iterator[None]:
    """Log nothing of compilations below a level to the script's handlers, unless it has set a level for ipujax."""
    logger = logging.getLogger("ipujax")
    own_level = logger.level
    logger.setLevel(own_level or level)
    try:
        yield
    finally:
        logger.setLevel(own_level)
