"""`ipujax demo`: a small training step, compiled, run and profiled.

Input: the machine. Output: text: the losses of a few steps, and the profile of one.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.cli.command_parts import Commands, add_command, has_colours, say
from ipujax.runtime.target import PRESETS

_STEPS, _RATE, _SHAPE = 20, 0.5, (128, 64, 256, 10)  # examples, features, hidden units, classes
_HELP = """
Trains a network of two layers for a few steps on a simulated IPU, in plain JAX, and shows what one step costs. Takes a
few seconds. The first lines are what a program of your own looks like.
"""
# The program is printed and run under this file name, so that lines of the profile are its lines.
_FILE = "demo.py"
_PROGRAM = """import jax, jax.numpy as jnp, ipujax as ipu

def loss_of(params, images, labels):
    logits = jax.nn.relu(images @ params["w1"]) @ params["w2"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

@ipu.jit(device=ipu.IPUModel(arch="{arch}"), donate_argnums=0)
def train_step(params, images, labels):
    loss, grads = jax.value_and_grad(loss_of)(params, images, labels)
    return jax.tree.map(lambda p, g: p - {rate} * g, params, grads), loss
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command `demo`."""
    summary = "compile, run and profile a small training step"
    parser = add_command(commands, "demo", _run, summary=summary, description=_HELP, example="ipujax demo --arch bow")
    parser.add_argument("--arch", choices=list(PRESETS), default="mk2", help="the machine (default mk2)")


def _run(args: argparse.Namespace) -> int:
    examples, features, hidden, classes = _SHAPE
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": jax.random.normal(keys[0], (features, hidden)) / features**0.5,
        "w2": jax.random.normal(keys[1], (hidden, classes)) / hidden**0.5,
    }
    images = jax.random.normal(keys[2], (examples, features))
    labels = jnp.argmax(images[:, :classes], axis=1)
    program = _PROGRAM.format(arch=args.arch, rate=_RATE)
    names: dict[str, Any] = {}
    exec(compile(program, _FILE, "exec"), names)
    step = names["train_step"]
    lines = "".join(f"  {number:>2}  {line}".rstrip() + "\n" for number, line in enumerate(program.splitlines(), 1))
    say(f"Program, {_FILE}:\n{lines}")
    profile = step.profile(params, images, labels)
    losses = []
    for _ in range(_STEPS):
        params, loss = step(params, images, labels)
        losses.append(float(loss))
    say(f"Training:\n  loss {losses[0]:.4f} before the first step, {losses[-1]:.4f} before step {_STEPS}\n")
    print(profile.summary(colours=has_colours()), end="")
    return 0
