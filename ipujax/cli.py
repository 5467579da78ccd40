"""The command line `ipujax`.

    ipujax run --instances 2 --replicas 4 train.py [argument…]

Input: arguments. Output: the exit code; 2 for invalid arguments, with an error text on standard error.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ipujax.distributed.launcher import DEFAULT_PREFIX, Launch
from ipujax.distributed.launcher.launch import launch
from ipujax.runtime.errors import ArgumentError, IpuError

_RUN = """
Runs a script as several processes that train together, as poprun does for IPUs: each instance holds an equal share of
the replicas of `ipu.jit(replicas=...)` and feeds its own share of the data. The script calls `ipu.distributed.init()`
before it uses JAX, and `ipu.distributed.broadcast` to give all instances the weights of instance 0.
"""
_RUN_MORE = """
Instances read nothing: their standard input is empty.
The exit code is 0 if all instances end with 0, otherwise that of the first that fails (128 + n if signal n killed it);
124 after --timeout, 2 if nothing could be started. When one instance fails, or the launcher gets SIGINT, SIGTERM or
SIGHUP, or is killed, all others are ended: what they started goes with them.

example: ipujax run --instances 2 --replicas 4 train.py --epochs 10
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: without the name of the program; those of this process when None.

    Returns:
        The exit code.
    """
    parser, run = _parsers()
    given = parser.parse_args(arguments)
    try:
        return launch(_launch(given))
    except IpuError as error:
        rows = [error.what]
        rows += [f"  {name}: {fact}" for name, fact in (("expected", error.expected), ("got", error.got)) if fact]
        rows += [f"  try: {error.hint}"] if error.hint else []
        run.print_usage(sys.stderr)
        print(f"{run.prog}: error: " + "\n".join(rows), file=sys.stderr)
        return 2


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of all commands, and that of `run`."""
    parser = argparse.ArgumentParser(
        prog="ipujax", description="Compile and run JAX programs for a simulated Graphcore IPU.", allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a script as several processes that share replicas",
        usage="ipujax run [options] SCRIPT [argument ...]\n       ipujax run [options] -m MODULE [argument ...]",
        description=_RUN,
        epilog=_RUN_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    defaults = Launch(("script",), 1, 1)
    add = run.add_argument
    add("--instances", "--num-instances", type=int, default=1, metavar="N", help="number of processes (default 1)")
    help_replicas = "number of replicas of all instances together (default: as many as instances)"
    add("--replicas", "--num-replicas", type=int, metavar="N", help=help_replicas)
    help_timeout = (
        "end all when an instance gives no sign of life for so long: no output, no call of a replicated function, no "
        f"collective (default {defaults.timeout_seconds:g}; 0: never). A call that computes for longer counts as stuck"
    )
    add("--timeout", type=float, default=defaults.timeout_seconds, metavar="SECONDS", help=help_timeout)
    help_grace = f"time between the signal to end and the kill (default {defaults.grace_seconds:g})"
    add("--grace", type=float, default=defaults.grace_seconds, metavar="SECONDS", help=help_grace)
    help_prefix = (
        "put before each line of output; may name {instance}, {instances}, {stream} and {time}; '' for none "
        f"(default {DEFAULT_PREFIX!r})"
    )
    add("--prefix", default=DEFAULT_PREFIX, metavar="TEXT", help=help_prefix)
    help_only = "show the standard output of one instance only; errors of all are shown"
    add("--only-stdout-from-instance", type=int, metavar="INDEX", help=help_only)
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as `python -m` does")
    add("script", nargs="?", metavar="SCRIPT", help="a Python file")
    add("arguments", nargs=argparse.REMAINDER, metavar="argument", help="arguments of the script")
    return parser, run


def _launch(given: argparse.Namespace) -> Launch:
    """The settings that the arguments of `run` give."""
    if given.module is not None:
        _check_module(given.module)
        command = ("-m", *given.module)
    else:
        _check_script(given.script)
        command = (given.script, *given.arguments)
    replicas = given.instances if given.replicas is None else given.replicas
    only = given.only_stdout_from_instance
    return Launch(command, given.instances, replicas, given.timeout, given.grace, given.prefix, only)


def _check_script(script: str | None) -> None:
    if script is None:
        raise ArgumentError("no script is given", expected="a Python file, or -m and a module")
    if script in ("python", "python3") or Path(script).name == Path(sys.executable).name:
        hint = "leave the interpreter out: ipujax run ... train.py"
        raise ArgumentError("a script is run, not a command", expected="a Python file", got=script, hint=hint)
    if not Path(script).exists():
        raise ArgumentError(f"there is no file {script}", expected="a Python file", got=f"looked in {os.getcwd()}")


def _check_module(module: Sequence[str]) -> None:
    if not module:
        raise ArgumentError("no module is named after -m")
    sys.path.insert(0, os.getcwd())  # as in the instances
    try:
        found = importlib.util.find_spec(module[0].partition(".")[0])  # the rest would import what it lies in
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.pop(0)
    if found is None:
        raise ArgumentError(f"there is no module {module[0]}", expected="a module that Python can import")
