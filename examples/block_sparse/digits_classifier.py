"""Trains a classifier of handwritten digits whose hidden layer is block-sparse, and compares it with a dense one.

    python examples/block_sparse/digits_classifier.py --hidden 256 --density 0.25 --epochs 20

The sparse layer has the blocks of a random pattern, which does not change; their values are trained. Data: the digits
of scikit-learn, 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison import cost, random_pattern
from sklearn.datasets import load_digits

import ipujax as ipu
from ipujax import popsparse

PIXELS = 64
CLASSES = 10
Params = dict[str, jax.Array]
Layer = Callable[[jax.Array, jax.Array], jax.Array]


def logits(layer: Layer, params: Params, images: jax.Array) -> jax.Array:
    """Scores of classes, [images, 10], of images [images, 64]."""
    hidden = jax.nn.relu(layer(params["hidden"], images.T) + params["bias"][:, None])
    return hidden.T @ params["out"]


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train both classifiers, print their accuracy and cost, and return the accuracy of each on test images."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=256, help="units of the hidden layer")
    parser.add_argument(
        "--block", type=int, default=8, choices=popsparse.BLOCK_SIZES, help="rows and columns of a block"
    )
    parser.add_argument("--density", type=float, default=0.25, help="share of the blocks that have values")
    parser.add_argument("--epochs", type=int, default=20, help="times that all examples are used")
    parser.add_argument("--batch", type=int, default=128, help="examples of a step")
    parser.add_argument("--tiles", type=int, default=1472, help="tiles of the IPU")
    args = parser.parse_args(arguments)

    digits = load_digits()
    images = (digits.images.reshape(-1, PIXELS) / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    pattern = random_pattern(args.hidden, PIXELS, args.block, args.density)
    device = ipu.IPUModel(tiles_per_ipu=args.tiles)
    keys = jax.random.split(jax.random.key(0), 2)
    weight = jax.random.normal(keys[0], (args.hidden, PIXELS)) / PIXELS**0.5
    layers: dict[str, tuple[Layer, jax.Array]] = {
        "dense": (jnp.matmul, weight),
        "sparse": (
            lambda values, x: popsparse.static_matmul(pattern, values, x, buckets=args.tiles),
            # Fewer weights reach each unit: larger ones keep the variance of its input.
            pattern.blocks_of(weight) / pattern.density**0.5,
        ),
    }
    optimizer = optax.adam(3e-3)
    test = len(images) // 5  # the first fifth is for tests
    accuracy: dict[str, float] = {}
    for name, (layer, hidden) in layers.items():
        params = {
            "hidden": hidden,
            "bias": jnp.zeros(args.hidden),
            "out": jax.random.normal(keys[1], (args.hidden, CLASSES)) / args.hidden**0.5,
        }

        def step(params: Params, state: optax.OptState, x: jax.Array, y: jax.Array, layer: Layer = layer):
            def loss(params: Params) -> jax.Array:
                return optax.softmax_cross_entropy_with_integer_labels(logits(layer, params, x), y).mean()

            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        train = ipu.jit(step, device=device)
        state = optimizer.init(params)
        for epoch in range(args.epochs):
            order = np.random.default_rng(epoch).permutation(len(images) - test) + test
            for start in range(0, len(order) - args.batch + 1, args.batch):
                chosen = order[start : start + args.batch]
                params, state = train(params, state, images[chosen], labels[chosen])
        right = np.argmax(logits(layer, params, images[:test]), 1) == labels[:test]
        accuracy[name] = float(right.mean())
        batch = params, state, images[: args.batch], labels[: args.batch]
        print(
            f"{name:<7} {hidden.size:>7,} weights, accuracy {accuracy[name]:.3f}, a step: {cost(step, device, *batch)}"
        )
    return accuracy


if __name__ == "__main__":
    main()
