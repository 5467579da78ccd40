"""Compares the training of `digits.py` on 1, 2, 4 and 8 replicas: throughput, and the share of the all-reduce.

    python examples/replication.py --model cnn --device mk2 --plot replication.png

Every replica is one IPU with a copy of the parameters and a part of the batch; `jax.lax.pmean` averages the gradients
of all. The machine model predicts two kinds of scaling: one batch divided among more replicas, and more replicas with
as many images each as before. Only the number of replicas differs between the rows of a table, and nothing is run for
them. Then some steps are run: the losses do not depend on the number of replicas.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, count, islice
from typing import Any

import jax
import numpy as np
import optax
from digits import MODELS, Model, Params, batches, init, load
from jax.sharding import PartitionSpec

import ipujax as ipu

SAME = PartitionSpec()
SPLIT = PartitionSpec("replica")
optimizer = optax.adam(3e-3)


# --- the training step of one replica ---------------------------------------------------------------------------------


def make_train_step(model: Model, arch: str, replicas: int) -> Any:
    """A training step on some replicas; the batch is split between them, all else is the same on all."""
    device = ipu.IPUModel(num_ipus=1 << (replicas - 1).bit_length(), arch=arch)  # a system has 1, 2, 4, 8… IPUs

    @ipu.jit(
        device=device,
        replicas=replicas,
        in_specs=(SAME, SAME, SPLIT, SPLIT),
        out_specs=SAME,
        donate_argnums=(0, 1),  # so parameters and the optimiser's state stay on the device
    )
    def train_step(params, opt_state, images, labels):
        def loss(params):
            logits = model(params, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        value, grads = jax.lax.pmean((value, grads), "replica")
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    return train_step


# --- predictions of the machine model ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One training step on some replicas, as predicted."""

    replicas: int
    batch: int
    cycles: int
    images_per_second: float
    all_reduce_cycles: int  # of the line with `pmean`: exchange between IPUs, syncs, sums, copies
    link_cycles: int  # of these, exchange between IPUs


def predict(train_step: Any, params: Params, batch: Sequence[np.ndarray], replicas: int) -> Row:
    """Compiles a step and reads its profile; nothing is run."""
    opt_state = jax.eval_shape(optimizer.init, params)
    profile = train_step.profile(params, opt_state, *batch)
    all_reduce = sum(line.cycles for line in profile.operations() if "global_exchange" in line.phases)
    images = len(batch[0])
    links = profile.phase_cycles["global_exchange"]
    return Row(replicas, images, profile.cycles, images / profile.seconds, all_reduce, links)


def table(title: str, rows: Sequence[Row]) -> str:
    """A line for each number of replicas; efficiency is of the ideal speed-up, and shares are of the step's cycles."""
    lines = [title, "replicas  images each    cycles    images/s  speed-up  efficiency  all-reduce  on links"]
    for row in rows:
        speed_up = row.images_per_second / rows[0].images_per_second
        efficiency = speed_up * rows[0].replicas / row.replicas
        lines.append(
            f"{row.replicas:8}{row.batch // row.replicas:13}{row.cycles:10,}{row.images_per_second:12,.0f}"
            f"{speed_up:9.2f}×{efficiency:12.1%}"
            f"{row.all_reduce_cycles / row.cycles:12.1%}{row.link_cycles / row.cycles:10.1%}"
        )
    return "\n".join(lines)


def plot(path: str, tables: dict[str, list[Row]]) -> None:
    """Draws throughput, and the share of the all-reduce, over the number of replicas."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    throughput, share = figure.subplots(1, 2)
    for title, rows in tables.items():
        replicas = [row.replicas for row in rows]
        (line,) = throughput.plot(replicas, [row.images_per_second for row in rows], "o-", label=title)
        ideal = [rows[0].images_per_second * n / replicas[0] for n in replicas]
        throughput.plot(replicas, ideal, ":", color=line.get_color())
        share.plot(replicas, [100 * row.all_reduce_cycles / row.cycles for row in rows], "o-", label=title)
    throughput.set(title="Throughput (dotted: ideal)", ylabel="images a second", xscale="log", yscale="log")
    share.set(title="All-reduce", ylabel="% of a step's cycles", xscale="log", ylim=(0, None))
    for axes in (throughput, share):
        axes.set_xlabel("replicas")
        axes.minorticks_off()
        axes.set_xticks(replicas, [str(n) for n in replicas])
        axes.legend(loc="lower right")
    figure.savefig(path)


# --- training ---------------------------------------------------------------------------------------------------------


def losses(train_step: Any, params: Params, data: Sequence[np.ndarray], batch: int, steps: int) -> list[float]:
    """The losses of the first steps of training."""
    # The step overwrites its arguments with its results.
    params = jax.tree.map(jax.numpy.copy, params)
    values = []
    opt_state = optimizer.init(params)
    for images, labels in islice(shuffled(data, batch), steps):
        params, opt_state, loss = train_step(params, opt_state, images, labels)
        values.append(float(loss))
    return values


def shuffled(data: Sequence[np.ndarray], batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of the training images, epoch after epoch."""
    images, _, labels, _ = data
    return chain.from_iterable(batches(images, labels, batch, epoch) for epoch in count(1))


# --- predictions and training -----------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Runs the example; returns the rows of both tables by title."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--device", choices=["mk1", "mk2", "bow"], default="mk2")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8], help="each becomes a row")
    parser.add_argument("--batch", type=int, default=512, help="images a step on all replicas together")
    parser.add_argument("--steps", type=int, default=3, help="training steps to run on each number of replicas")
    parser.add_argument("--plot", metavar="FILE", help="also draw the tables, as FILE.png")
    args = parser.parse_args(argv)
    data = load()
    replicas = sorted(set(args.replicas))
    if replicas[0] < 1 or args.steps < 0:
        parser.error("--replicas must be at least 1, and --steps 0")
    if not 1 <= args.batch <= len(data[0]) or any(args.batch % n for n in replicas):
        parser.error(f"--batch must be a multiple of all --replicas, up to the {len(data[0])} training images")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot draws with matplotlib, which is not installed: pip install 'ipujax[examples]'")

    model, shapes = MODELS[args.model]
    params = init(shapes)
    micro_batch = args.batch // replicas[-1]
    train_steps = {n: make_train_step(model, args.device, n) for n in replicas}
    tables: dict[str, list[Row]] = {}
    for title, sizes in (
        (f"fixed global batch of {args.batch} images", {n: args.batch for n in replicas}),
        (f"fixed micro-batch of {micro_batch} images", {n: micro_batch * n for n in replicas}),
    ):
        tables[title] = [predict(train_steps[n], params, next(shuffled(data, sizes[n])), n) for n in replicas]
        print(table(f"\nA training step of the {args.model} on {args.device}, {title}", tables[title]))
    if args.plot:
        plot(args.plot, tables)
        print(f"\ndrawn in {args.plot}")

    if args.steps:
        print(f"\nlosses of the first {args.steps} steps, batch {args.batch}")
        losses_by_replicas = {n: losses(train_steps[n], params, data, args.batch, args.steps) for n in replicas}
        for n, values in losses_by_replicas.items():
            print(f"{n:8} replicas  " + "  ".join(f"{value:.7f}" for value in values))
        first = np.array(losses_by_replicas[replicas[0]])
        furthest = max(float(np.max(np.abs(np.array(values) / first - 1))) for values in losses_by_replicas.values())
        print(f"they differ by {furthest:.1e} of themselves at most")
    return tables


if __name__ == "__main__":
    main()
