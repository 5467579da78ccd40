"""All commands of the command line: the parser, exit codes, and errors as texts.

Input: arguments. Output: the exit code:

    0    all is well
    2    invalid arguments, or a file that cannot be read or written: one error text on standard error
    n    `profile`, `advise` and `run`: that of the script, 1 for an exception
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from ipujax.cli import (
    advise_command,
    cache_command,
    completion_command,
    demo_command,
    info_command,
    plan_command,
    primitives_command,
    profile_command,
    report_command,
    run_command,
)
from ipujax.runtime.errors import IpuError
from ipujax.runtime.target import nearest

_BROKEN_PIPE = 141  # as a shell has it: 128 and the signal of a pipe that nobody reads
_DESCRIPTION = """
Compile and run JAX programs for a simulated Graphcore IPU.

Texts are coloured on a terminal; NO_COLOR=1 and CLICOLOR=0 switch that off, CLICOLOR_FORCE=1 on.
"""
_EXAMPLES = """
The exit code is 0, or 2 for invalid arguments and files; `profile`, `advise` and `run` end with that of the script.

example: ipujax profile train.py --epochs 1
"""
# Functions that add commands to the parser, in the order of the help text.
_ADD: tuple[Callable[[argparse._SubParsersAction[argparse.ArgumentParser]], None], ...] = (
    info_command.add,
    demo_command.add,
    profile_command.add,
    advise_command.add,
    report_command.add,
    plan_command.add,
    primitives_command.add,
    cache_command.add,
    run_command.add,
    completion_command.add,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the name of the program; those of this process when None.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    _check_name(parser, words)
    args, unknown = parser.parse_known_args(words)
    command: argparse.ArgumentParser = args.command
    if unknown:
        options = re.findall(r"--[\w-]+", command.format_usage())
        hint = next(filter(None, (nearest(word, options) for word in unknown if word.startswith("-"))), None)
        command.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"\n  try: {hint}" if hint else ""))
    try:
        code: int = args.run(args)
        if not sys.stdout.closed:  # by the script
            sys.stdout.flush()
        return code
    except IpuError as error:
        rows = [error.what]
        rows += [f"  {name}: {fact}" for name, fact in (("expected", error.expected), ("got", error.got)) if fact]
        rows += [f"  try: {error.hint}"] if error.hint else []
        command.print_usage(sys.stderr)
        print(f"{command.prog}: error: " + "\n".join(rows), file=sys.stderr)
        return 2
    except BrokenPipeError:  # `ipujax … | head`
        _drop_output()
        return _BROKEN_PIPE
    except OSError as error:  # as on a disk that is full
        where = "" if error.filename is None else f" {error.filename!r}"
        print(
            f"{command.prog}: error: output cannot be written{where}\n  got: {error.strerror or error}", file=sys.stderr
        )
        _drop_output()
        return 2


def _check_name(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Exit with an error that has the nearest command, where the first word is not one; argparse would list all."""
    names = parser.get_default("names")
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in names:
        hint = nearest(name, names) or "ipujax --help"
        parser.error(f"there is no command {name!r}\n  expected: one of {', '.join(names)}\n  try: {hint}")


def _drop_output() -> None:
    """Redirect buffered output that cannot be written: Python flushes it at exit, and would print an error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ipujax",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ipujax {version('ipujax')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in _ADD:
        add(commands)
    parser.set_defaults(names=tuple(commands.choices), root=parser)
    return parser
