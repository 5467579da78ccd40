"""The parser of one command, as all commands have it.

Input: its name, help and example. Output: a parser, whose arguments the command adds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

Commands = argparse._SubParsersAction  # of `argparse`, which has no public name for what `add_subparsers` returns
Run = Callable[[argparse.Namespace], int]


def add_command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    run: Run,
    *,
    summary: str,
    more: str,
    example: str,
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """Adds a command.

    Args:
        commands: those of `ipujax`.
        name: its name.
        run: what it does with its arguments; returns the exit code.
        summary: a line for the list of commands.
        more: what it does, for its own help.
        example: how it is called.
        usage: shown in place of what argparse would make of the arguments.

    Returns:
        Its parser.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        usage=usage,
        description=more,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, command=parser)
    return parser
