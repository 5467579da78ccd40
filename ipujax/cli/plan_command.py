"""`ipujax plan`: plans of a published network on a pod, best first.

Input: the name of a network, a batch and a machine. Output: a table. Nothing is run.
"""

from __future__ import annotations

import argparse
import ast
from typing import Any

import ipujax as ipu
from ipujax.cli.command_parts import Commands, add_command, at_least, say
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import PRESETS

_HELP = """
Searches how to spread a training step, or inference, of a published network over IPUs: replicas, stages, shards,
micro-batches, schedule, memory. Figures are cycles of a step, estimated or compiled; nothing is run. `--list` shows the
networks, and where their sizes are published.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command `plan`."""
    summary = "search how to spread a published network over IPUs"
    example = "ipujax plan gpt-6.7b --ipus 64"
    parser = add_command(commands, "plan", _run, summary=summary, description=_HELP, example=example)
    parser.add_argument("name", metavar="NAME", nargs="?", help="a published network, as gpt2 or llama-7b")
    parser.add_argument("--list", action="store_true", help="list the networks, and do nothing else")
    parser.add_argument("--ipus", type=at_least(1), default=16, metavar="N", help="number of IPUs (default 16)")
    parser.add_argument("--arch", choices=list(PRESETS), default="bow", help="the machine (default bow)")
    parser.add_argument("--batch", type=at_least(1), metavar="N", help="examples of a step (default 4 for each IPU)")
    parser.add_argument("--dtype", default="float16", help="of parameters and activations (default float16)")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=VALUE", help="another size, as layers=4")
    parser.add_argument("--inference", action="store_true", help="plan inference, not a training step")
    parser.add_argument("--optimizer", choices=["adam", "sgd"], help="of training (default adam)")
    parser.add_argument(
        "--seconds", type=at_least(0.0), metavar="S", help="end after this time, with what is known by then"
    )
    parser.add_argument("--csv", metavar="PATH", help="also write the table as comma-separated values")


def _run(args: argparse.Namespace) -> int:
    # Networks are imported here: other commands do without.
    from ipujax import models
    from ipujax.models.workload import OPTIMIZERS

    if args.list:
        say("\n".join(f"{name:12} {row.source}" for name, row in models.PUBLISHED.items()))
        return 0
    if args.name is None:
        raise ArgumentError("no network to plan", expected="NAME", hint="ipujax plan --list")
    if args.inference and args.optimizer is not None:
        raise ArgumentError("--optimizer is for training", expected="--inference alone", got=args.optimizer)
    network = models.network(args.name, dtype=args.dtype, **dict(map(_size, args.size)))
    device = ipu.IPUModel(num_ipus=args.ipus, arch=args.arch)
    # Enough examples for data on each IPU, or for a pipeline with four micro-batches a stage.
    batch = 4 * args.ipus if args.batch is None else args.batch
    if args.inference:
        workload = models.inference(network, batch)
    else:
        workload = models.training(network, batch, OPTIMIZERS[args.optimizer or "adam"]())
    say(f"{workload.name}, {network.num_parameters():,} parameters, batch {batch}, {args.ipus} × {args.arch}:\n")
    table = ipu.search(
        workload.fun,
        *workload.args,
        device=device,
        batch_argnums=workload.batch_argnums,
        donate_argnums=workload.donate_argnums,
        seconds=args.seconds,
    )
    say(str(table))
    if args.csv is not None:
        table.to_csv(args.csv)
        say(f"wrote {args.csv}")
    return 0


def _size(text: str) -> tuple[str, Any]:
    """Return name and value of a size, a number or a tuple of them."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        expected = "--size NAME=VALUE, as layers=4 or groups=(2,2)"
        raise ArgumentError("a size of a network is not a number", expected=expected, got=text) from error
