"""Parts that every command has: a parser of its arguments, and output that suits its terminal.

Input: name, help texts and example of a command; texts whose headings are not indented. Output: its parser; lines on
standard output, with coloured headings on a terminal.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ipujax.runtime.profile import coloured, wants_colours

Commands = argparse._SubParsersAction  # the result of `add_subparsers`, whose type has no public name
Run = Callable[[argparse.Namespace], int]


def add_command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    run: Run,
    *,
    summary: str,
    description: str,
    example: str,
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command to `ipujax`, and return its parser; `run` takes the parsed arguments and returns the exit code."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        usage=usage,
        description=description,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, command=parser)
    return parser


def at_least(least: float) -> Callable[[str], float]:
    """Return the type of an argument that is a number of at least `least`, a whole number if that is one."""
    return partial(_number, least)


def _number(least: float, text: str) -> float:
    try:
        number = type(least)(text)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:  # NaN neither
        kind = "a whole number" if isinstance(least, int) else "a finite number"
        raise argparse.ArgumentTypeError(f"expected {kind} of at least {least:g}, got {text!r}")
    return number


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
