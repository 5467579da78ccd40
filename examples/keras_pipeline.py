"""Trains a Keras model in two replicas of a pipeline of two stages, on four IPUs, with gradient accumulation.

    python examples/keras_pipeline.py

Layers are assigned to stages while the functional model is built. Each update takes the mean gradient of several
batches in each replica. Without masks and batch normalisation it equals that of one large batch: the example trains
stock Keras on such batches, and shows that the losses are the same. Then it prints the predicted cycles of an update
for several numbers of batches: with more batches the stages wait less for each other.

Task: the 8 × 8 digits of scikit-learn (UCI, Alpaydin and Kaynak 1998).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

# Keras reads it when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from sklearn.datasets import load_digits

import ipujax.keras as ipu

CLASSES = 10
SEED = 0
STAGES = 2
BATCH = 16


def mlp(width: int) -> keras.Model:
    """Dense layers, half of them in each stage."""
    layers = keras.layers
    inputs = keras.Input((64,))
    with ipu.PipelineStage(0):
        x = layers.Dense(width, activation="relu")(inputs)
        x = layers.Dense(width, activation="relu")(x)
    with ipu.PipelineStage(1):
        x = layers.Dense(width, activation="relu")(x)
        outputs = layers.Dense(CLASSES, activation="softmax")(x)
    return keras.Model(inputs, outputs)


def trained(args: argparse.Namespace, batches: int, on_ipus: bool = True) -> tuple[list[float], Any]:
    """The losses of the epochs, and the profile of an update.

    Args:
        args: arguments of the command line.
        batches: batches of an update in each replica.
        on_ipus: True for IPUs; False for stock Keras, with batches as large as an update.
    """
    images, labels = load_digits(return_X_y=True)
    batches_of_update = batches * args.replicas
    # Whole updates only, so that both runs see the same examples.
    examples = len(labels) // (batches_of_update * BATCH) * batches_of_update * BATCH
    data = (images[:examples] / 16).astype(np.float32), labels[:examples]
    config = ipu.IPUConfig()
    config.auto_select_ipus = STAGES * args.replicas
    config.ipu_model.tiles_per_ipu = args.tiles
    keras.utils.set_random_seed(SEED)
    with ipu.IPUStrategy(config).scope() if on_ipus else nullcontext():
        model = mlp(args.width)
        if on_ipus:
            model.set_pipelining_options(batches)
            model.set_replication_options(args.replicas)
        model.compile(
            "adam", "sparse_categorical_crossentropy", steps_per_execution=batches_of_update if on_ipus else 1
        )
        size = BATCH if on_ipus else BATCH * batches_of_update
        # In order: losses of both runs are comparable only with equal batches.
        losses = model.fit(*data, batch_size=size, epochs=args.epochs, shuffle=False, verbose=0).history["loss"]
    return losses, model.ipu_profile if on_ipus else None


def main(argv: Sequence[str] | None = None) -> tuple[list[float], list[float]]:
    """Trains both ways, prints, and returns the losses.

    Args:
        argv: the arguments of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=2, help="copies of the pipeline, a power of two")
    parser.add_argument("--width", type=int, default=256, help="units of a layer")
    parser.add_argument("--tiles", type=int, default=0, help="tiles of each IPU; all that it has by default")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[2, 4, 8], help="batches of an update, a run for each number"
    )
    args = parser.parse_args(argv)
    losses = []
    stock = []
    for batches in args.batches:
        losses, profile = trained(args, batches)
        stock, _ = trained(args, batches, on_ipus=False)
        examples = batches * args.replicas * BATCH
        idle = profile.phase_cycles["idle"] / profile.cycles
        print(f"{batches} batches of {BATCH} in each of {args.replicas} replicas of {STAGES} stages:")
        print(f"  losses       {'  '.join(f'{loss:.4f}' for loss in losses)}")
        print(f"  stock Keras  {'  '.join(f'{loss:.4f}' for loss in stock)}")
        print(f"  an update: {profile.cycles:,} cycles, {profile.cycles / examples:,.0f} an example; idle {idle:.0%}")
    return losses, stock


if __name__ == "__main__":
    main()
