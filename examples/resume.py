"""Trains with checkpoints by Orbax and metrics as JSON lines, and resumes a run that was killed.

    python examples/resume.py --folder spirals --stop-after 3
    python examples/resume.py --folder spirals

The first command ends its process after the third epoch, as if it were killed. The second continues with the fourth,
and its losses are those of an uninterrupted run to the last bit: everything that a step depends on is in the checkpoint
(parameters, the optimiser's state, the random key), and the number of an epoch decides its shuffle. An epoch writes its
metrics before its checkpoint; a line whose checkpoint is missing is dropped, and its epoch is repeated. `ipu.prefetch`
prepares batches while the device computes. Orbax is optional for ipujax, but required here:
`pip install orbax-checkpoint`.

Task: two spirals, to be told apart (Lang and Witbrock, Learning to Tell Two Spirals Apart, 1988); generated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipujax as ipu

try:
    import orbax.checkpoint as ocp
except ModuleNotFoundError:
    raise SystemExit("examples/resume.py saves checkpoints by Orbax: pip install orbax-checkpoint") from None

SEED = 0
POINTS = 1024
RATE = 1e-2
NOISE = 0.05

State = dict[str, Any]


# --- task and model ---------------------------------------------------------------------------------------------------


def spirals() -> tuple[np.ndarray, np.ndarray]:
    """Points float32[1024, 2] of two spirals, a turn around each other, and which they are on, float32[1024]."""
    spiral = np.arange(POINTS) % 2
    along = np.random.default_rng(SEED).uniform(0.1, 1, POINTS)
    angle = 2 * np.pi * along + np.pi * spiral
    points = 3 * along[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return points.astype(np.float32), spiral.astype(np.float32)


def batches(size: int, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The batches of an epoch: the same ones in the same order, whichever process asks."""
    points, spiral = spirals()
    for chosen in np.random.default_rng((SEED, epoch)).permutation(POINTS).reshape(-1, size):
        yield points[chosen], spiral[chosen]


def logits(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Two hidden layers."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[:, 0]


def initial_state(width: int, optimizer: Any) -> State:
    """All that a step depends on, beside its batch."""
    rng = np.random.default_rng(SEED)
    shapes = [(2, width), (width, width), (width, 1)]
    weights = [rng.normal(0, (2 / shape[0]) ** 0.5, shape).astype(np.float32) for shape in shapes]
    params = [{"w": jnp.asarray(w), "b": jnp.zeros(w.shape[1])} for w in weights]
    return {"params": params, "opt_state": optimizer.init(params), "key": jax.random.key(SEED)}


def training_step(optimizer: Any) -> Any:
    """The step for the device; points are noisy_points a little, so that each comes from a new place each time."""

    @ipu.jit(donate_argnums=0)
    def train_step(state: State, points: jax.Array, spiral: jax.Array) -> tuple[State, jax.Array]:
        key, now = jax.random.split(state["key"])
        noisy_points = points + NOISE * jax.random.normal(now, points.shape)

        def loss(params: Any) -> jax.Array:
            return optax.sigmoid_binary_cross_entropy(logits(params, noisy_points), spiral).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "key": key}, value

    return train_step


# --- epochs -----------------------------------------------------------------------------------------------------------


def checkpointed_lines(path: Path, epochs: int, settings: dict[str, int]) -> list[str]:
    """The lines of a run's metrics up to its checkpoint: its settings, then a line for each epoch."""
    if not epochs:
        return [json.dumps(settings)]
    lines = path.read_text(encoding="utf-8").splitlines()[: 1 + epochs]
    if json.loads(lines[0]) != settings:
        sys.exit(f"the run in {path.parent} was begun with {lines[0]}; go on with these settings, or in another folder")
    return lines


def rewrite(path: Path, lines: Sequence[str]) -> None:
    """Replaces a file at once: whenever the process is killed, there is the old one or the new one."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    new.replace(path)


def train(args: argparse.Namespace) -> list[float]:
    """Trains from the last checkpoint on; returns the loss of every epoch, also of those before it."""
    folder = args.folder.resolve()
    optimizer = optax.adam(RATE)
    state = initial_state(args.width, optimizer)
    step = training_step(optimizer)
    metrics = folder / "metrics.jsonl"
    with ocp.CheckpointManager(folder / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        epochs_run = manager.latest_step() or 0
        lines = checkpointed_lines(metrics, epochs_run, {"width": args.width, "batch": args.batch})
        if args.stop_after is not None and args.stop_after <= epochs_run:
            sys.exit(f"--stop-after {args.stop_after}: the run in {folder} has {epochs_run} epochs already")
        rewrite(metrics, lines)
        if epochs_run >= args.epochs:
            print(f"the run in {folder} has {epochs_run} epochs already; --epochs for more, or another --folder")
        elif epochs_run:
            state = manager.restore(epochs_run, args=ocp.args.StandardRestore(state))
            print(f"goes on after epoch {epochs_run}")
        for epoch in range(epochs_run + 1, args.epochs + 1):
            values = []
            for batch in ipu.prefetch(batches(args.batch, epoch), depth=2):
                state, value = step(state, *batch)
                values.append(value)
            lines.append(json.dumps({"epoch": epoch, "loss": float(np.mean(values))}))
            with metrics.open("a", encoding="utf-8") as file:
                print(lines[-1], file=file)
            manager.save(epoch, args=ocp.args.StandardSave(state))
            print(f"epoch {epoch}/{args.epochs}  loss {json.loads(lines[-1])['loss']:.6f}", flush=True)
            if epoch == args.stop_after:
                manager.wait_until_finished()
                os._exit(1)  # no handler runs, nothing is closed
    return [json.loads(line)["loss"] for line in lines[1:]]


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Runs the example; returns the mean loss of each epoch of the run, in whichever process it was."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the run: checkpoints, metrics.jsonl")
    parser.add_argument("--device", choices=["cpu", "mk1", "mk2", "bow"], default="mk2")
    parser.add_argument("--tiles", type=int, default=0, help="tiles of the IPU; all that it has by default")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help=f"points of a batch; a divisor of {POINTS}")
    parser.add_argument("--width", type=int, default=64, help="of the hidden layers")
    parser.add_argument("--stop-after", type=int, metavar="EPOCH", help="end the process once this epoch is saved")
    args = parser.parse_args(argv)
    if args.epochs < 1 or args.width < 1 or args.batch < 1 or POINTS % args.batch:
        parser.error(f"--epochs and --width are at least 1, and --batch divides {POINTS}")
    if args.stop_after is not None and not 1 <= args.stop_after <= args.epochs:
        parser.error("--stop-after is one of the epochs")
    if args.device == "cpu" and args.tiles:
        parser.error("--tiles are those of an IPU; --device cpu has none")
    tiles = {"tiles_per_ipu": args.tiles} if args.tiles else {}
    with ipu.default_device(ipu.CPU() if args.device == "cpu" else ipu.IPUModel(arch=args.device, **tiles)):
        return train(args)


if __name__ == "__main__":
    main()
