"""Parser of a command. Input: its name, help texts and example. Output: a parser for its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable

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
