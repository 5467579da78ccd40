"""Parser of a command. Input: its name, help texts and example. Output: a parser for its arguments."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

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
