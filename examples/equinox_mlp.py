"""Trains an Equinox network on handwritten digits, on a simulated IPU, with a learning rate schedule.

    python examples/equinox_mlp.py

An Equinox module is a pytree of arrays and other values. `eqx.partition` separates the two: arrays are arguments and
results of the step, the rest is closed over, and `eqx.combine` makes the module of both again. The learning rate rises,
then falls, by the count of steps in the state of Optax. With `--device cpu` the example runs without the machine, and
with the same losses.

Task: the 8 × 8 digits of scikit-learn (UCI, Alpaydin and Kaynak 1998). The first 1,500 are learned, the others tested.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import ipujax as ipu

PIXELS = 64
CLASSES = 10
SEED = 0
RATE = 3e-3
LEARNED = 1500  # images; the others are tested


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images float32[1797, 64] from 0 to 1, and their labels int32[1797]."""
    images, labels = load_digits(return_X_y=True)
    return images.astype(np.float32) / 16, labels.astype(np.int32)


def batches(images: np.ndarray, labels: np.ndarray, size: int, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of one size, in a new order each epoch; examples that do not fill a batch are left out in that epoch."""
    order = np.random.default_rng((SEED, epoch)).permutation(len(images))
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield images[chosen], labels[chosen]


def training_step(static: Any, optimizer: Any) -> Any:
    """The step of the optimiser for the arrays of a module whose rest is given, compiled for the device."""

    @ipu.jit(donate_argnums=(0, 1))
    def train_step(arrays: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(arrays: Any) -> jax.Array:
            logits = jax.vmap(eqx.combine(arrays, static))(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(arrays)
        updates, opt_state = optimizer.update(grads, opt_state, arrays)
        return eqx.apply_updates(arrays, updates), opt_state, value

    return train_step


def accuracy_of(static: Any) -> Any:
    """The share of images whose label the module finds, compiled for the device."""

    @ipu.jit
    def accuracy(arrays: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.mean(jnp.argmax(jax.vmap(eqx.combine(arrays, static))(images), axis=-1) == labels)

    return accuracy


def train(args: argparse.Namespace) -> tuple[list[float], float]:
    """Trains, tests after each epoch, prints the cost of the step; returns the losses and the last accuracy."""
    images, labels = digits()
    learned = (images[:LEARNED], labels[:LEARNED])
    test = (images[LEARNED:], labels[LEARNED:])
    model = eqx.nn.MLP(PIXELS, CLASSES, args.width, args.depth, key=jax.random.key(SEED))
    arrays, static = eqx.partition(model, eqx.is_array)
    steps = args.epochs * (len(learned[0]) // args.batch)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 10, steps))
    opt_state = optimizer.init(arrays)
    step = training_step(static, optimizer)
    accuracy = accuracy_of(static)
    losses = []
    for epoch in range(1, args.epochs + 1):
        values = []
        for batch in batches(*learned, args.batch, epoch):
            arrays, opt_state, value = step(arrays, opt_state, *batch)
            values.append(value)
        losses.append(float(np.mean(values)))
        right = float(accuracy(arrays, *test))
        print(f"epoch {epoch:2}/{args.epochs}  loss {losses[-1]:.4f}  test accuracy {right:.2%}")
    if args.device != "cpu":
        profile = step.profile(arrays, opt_state, *batch)
        print(f"a step: {profile.cycles:,} cycles, {profile.seconds * 1e6:,.0f} µs on a {args.device}")
        print(f"fullest tile: {profile.memory.max_tile_bytes:,} bytes")
    return losses, right


def main(argv: Sequence[str] | None = None) -> tuple[list[float], float]:
    """Runs the example; returns the mean loss of each epoch, and the test accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "mk1", "mk2", "bow"], default="mk2")
    parser.add_argument("--tiles", type=int, default=0, help="tiles of the IPU; all that it has by default")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=50, help="images of a batch")
    parser.add_argument("--width", type=int, default=128, help="of the hidden layers")
    parser.add_argument("--depth", type=int, default=2, help="hidden layers")
    args = parser.parse_args(argv)
    if min(args.epochs, args.batch, args.width, args.depth) < 1:
        parser.error("--epochs, --batch, --width and --depth are at least 1")
    if args.batch > LEARNED:
        parser.error(f"--batch is at most {LEARNED}, the number of training images")
    if args.device == "cpu" and args.tiles:
        parser.error("--tiles are those of an IPU; --device cpu has none")
    tiles = {"tiles_per_ipu": args.tiles} if args.tiles else {}
    with ipu.default_device(ipu.CPU() if args.device == "cpu" else ipu.IPUModel(arch=args.device, **tiles)):
        return train(args)


if __name__ == "__main__":
    main()
