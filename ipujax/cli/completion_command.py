"""`ipujax completion`: the script by which a shell completes commands, options and files.

    eval "$(ipujax completion bash)"

Input: the name of a shell. Output: the script, made by `shtab` from the parser.
Limits: needs shtab, `pip install ipujax[completion]`.
"""

from __future__ import annotations

import argparse

from ipujax.cli.command_parts import Commands, add_command, say
from ipujax.runtime.errors import ArgumentError

_SHELLS = ("bash", "zsh", "tcsh")
_HELP = """
Prints the script by which a shell completes commands, options and names of files: bash by a line in ~/.bashrc,
eval "$(ipujax completion bash)", zsh by a file `_ipujax` with the script in a folder of $fpath.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command `completion`."""
    parser = add_command(
        commands,
        "completion",
        _run,
        summary="print the script by which a shell completes commands",
        description=_HELP,
        example="ipujax completion bash",
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")


def _run(args: argparse.Namespace) -> int:
    try:
        import shtab  # an extra
    except ImportError as error:
        problem = "ipujax completion needs the package shtab"
        raise ArgumentError(problem, expected="shtab", got=str(error), hint="pip install ipujax[completion]") from error
    say(shtab.complete(_with_files(args.root), shell=args.shell))
    return 0


def _with_files(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return a parser whose arguments that are files are completed as such."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _with_files(command)
        elif action.metavar in ("FILE", "PATH", "SCRIPT", "A", "B"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in ("DIR", "FOLDER"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return parser
