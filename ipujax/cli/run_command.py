"""`ipujax run`: a script as several processes that train together.

    ipujax run --instances 2 --replicas 4 train.py [argument…]

Input: arguments. Output: the exit code of the first instance that fails, see `_HELP`.
"""

from __future__ import annotations

import argparse

from ipujax.cli.command_parts import Commands, add_command, add_script_arguments, at_least, script_command
from ipujax.distributed.launcher import DEFAULT_PREFIX, Launch, launch

_HELP = """
Runs a script as several processes that train together, as poprun does for IPUs: each instance holds an equal share of
the replicas of `ipu.jit(replicas=...)` and feeds its own share of the data. The script calls `ipu.distributed.init()`
before it uses JAX, and `ipu.distributed.broadcast` to give all instances the weights of instance 0.

Instances read nothing: their standard input is empty.
The exit code is 0 if all instances end with 0, otherwise that of the first that fails (128 + n if signal n killed it);
124 after --timeout, 2 if nothing could be started. When one instance fails, or the launcher gets SIGINT, SIGTERM or
SIGHUP, or is killed, all others are ended: what they started goes with them.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command `run`."""
    parser = add_command(
        commands,
        "run",
        lambda args: launch(_launch(args)),
        summary="run a script as several processes that share replicas",
        description=_HELP,
        example="ipujax run --instances 2 --replicas 4 train.py --epochs 10",
        usage="ipujax run [options] SCRIPT [argument ...]\n       ipujax run [options] -m MODULE [argument ...]",
    )
    defaults = Launch(("script",), 1, 1)
    add = parser.add_argument
    add(
        "--instances",
        "--num-instances",
        type=at_least(1),
        default=1,
        metavar="N",
        help="number of processes (default 1)",
    )
    help_replicas = "number of replicas of all instances together (default: as many as instances)"
    add("--replicas", "--num-replicas", type=at_least(1), metavar="N", help=help_replicas)
    help_timeout = (
        "end all when an instance gives no sign of life for so long: no output, no call of a replicated function, no "
        f"collective (default {defaults.timeout_seconds:g}; 0: never). A call that computes for longer counts as stuck"
    )
    add("--timeout", type=at_least(0.0), default=defaults.timeout_seconds, metavar="SECONDS", help=help_timeout)
    help_grace = f"time between the signal to end and the kill (default {defaults.grace_seconds:g})"
    add("--grace", type=at_least(0.0), default=defaults.grace_seconds, metavar="SECONDS", help=help_grace)
    help_prefix = (
        "put before each line of output; may name {instance}, {instances}, {stream} and {time}; '' for none "
        f"(default {DEFAULT_PREFIX!r})"
    )
    add("--prefix", default=DEFAULT_PREFIX, metavar="TEXT", help=help_prefix)
    help_only = "show the standard output of one instance only; errors of all are shown"
    add("--only-stdout-from-instance", type=int, metavar="INDEX", help=help_only)
    add_script_arguments(parser)


def _launch(args: argparse.Namespace) -> Launch:
    command = script_command(args)
    replicas = args.instances if args.replicas is None else args.replicas
    only = args.only_stdout_from_instance
    return Launch(command, args.instances, replicas, args.timeout, args.grace, args.prefix, only)
