"""`ipujax advise`: runs a script, then compiles changes of its functions of `ipu.jit`, and lists what each saves.

    ipujax advise [--only NAME] [--batch-argnum N] [--csv PATH] [--html PATH] train.py [argument…]

Input: a script or module and its arguments. Output: the script's output, then a table for each function on standard
error; a file of each table, and the page of the function of most cycles.
Limits: functions of `jax.jit` are not tried, `ipujax profile` lists them; of several shapes of a function the first is.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ipujax.cli.command_parts import Commands, add_command, add_script_arguments, logging_at_least, script_command
from ipujax.cli.script_run import run_script
from ipujax.compiled_programs import TracedCall, traced_calls
from ipujax.jit import function_of
from ipujax.runtime.errors import ArgumentError, IpuError
from ipujax.runtime.logs import check_environment

if TYPE_CHECKING:
    from ipujax.advice import Advice

_HELP = """
Runs a script, unchanged, and then compiles each function of `ipu.jit` that it called again, with changes: donation,
arguments in streaming memory, recomputation of gradients, schedules and micro-batches of pipelines, half precision,
padded rows. The table goes to standard error, with what each change saves of the cycles of a call and of the fullest
tile. Changes that need an edit of the function are hints, and not tried. The exit code is that of the script.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command `advise`."""
    parser = add_command(
        commands,
        "advise",
        _run,
        summary="run a script and try changes that make its functions faster or smaller",
        description=_HELP,
        example="ipujax advise --batch-argnum 2 train.py --epochs 1",
        usage="ipujax advise [options] SCRIPT [argument ...]\n       ipujax advise [options] -m MODULE [argument ...]",
    )
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="NAME", help="try this function only; may come several times")
    help_batch = "position of an argument that is the batch, of which half is tried twice; may come several times"
    add("--batch-argnum", type=int, action="append", default=[], metavar="N", help=help_batch)
    add("--csv", metavar="PATH", help="write the table of the function of most cycles")
    add("--html", metavar="PATH", help="write the page of the function of most cycles, with what was tried")
    add_script_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    check_environment()  # a wrong log level is an error of this command, not a traceback of the script
    for path in filter(None, (args.csv, args.html)):
        _check_folder(path)
    command = script_command(args)
    process = os.getpid()
    with traced_calls() as calls:

        def show() -> None:
            with logging_at_least(logging.ERROR):  # a change that cannot be compiled is a row
                _show(_distinct(calls), args)

        try:
            return run_script(command, at_immediate_exit=show)
        finally:
            if os.getpid() == process:  # else a child that the script has forked
                show()


def _check_folder(path: str) -> None:
    """Refuse a file that cannot be written before the script runs."""
    folder = Path(path).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ArgumentError(f"{path} cannot be written", expected="a file in a folder that exists", got=str(folder))


def _distinct(calls: Sequence[TracedCall]) -> list[TracedCall]:
    """Return the first call of each function, in order."""
    first: dict[int, TracedCall] = {}
    for call in calls:
        first.setdefault(id(call.fun), call)
    return list(first.values())


def _show(calls: Sequence[TracedCall], args: argparse.Namespace) -> None:
    """Compile changes of each function, and print and write the tables."""
    from ipujax.advice import advise  # loads the compiler, which other commands do without

    tables = []
    names = []
    for call in calls:
        fun = function_of(call)
        names.append(fun.__name__)
        if args.only and fun.__name__ not in args.only:
            continue
        print(f"\n{fun.__name__}:", file=sys.stderr)
        if call.kwargs:
            print("  not tried: it is called with keyword arguments", file=sys.stderr)
            continue
        try:
            table = advise(fun, *call.args, batch_argnums=args.batch_argnum, show=False)
        except IpuError as error:
            print(f"  not tried: {error.what}", file=sys.stderr)
            continue
        tables.append(table)
        print("\n".join(f"  {line}".rstrip() for line in str(table).splitlines()), file=sys.stderr)
    for name in sorted(set(args.only) - set(names)):
        print(f"no function of ipu.jit named {name} was called", file=sys.stderr)
    if not calls:
        print("no function of ipu.jit was called; ipujax profile lists those of jax.jit", file=sys.stderr)
    _write(max(tables, key=_cycles, default=None), args)


def _cycles(table: Advice) -> int:
    return max(row.cycles for row in table.rows)


def _write(table: Advice | None, args: argparse.Namespace) -> None:
    """Write the files that are asked for, or say why one is not."""
    for path in filter(None, (args.csv, args.html)):
        if table is None or (path == args.html and table.profile is None):
            print(f"{path} is not written: no function was compiled as it is", file=sys.stderr)
        elif path == args.csv:
            table.to_csv(path)
        elif table.profile is not None:
            table.profile.to_html(path)
