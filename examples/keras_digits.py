"""Trains a Keras CNN on handwritten digits, on a simulated IPU: stock Keras in a scope.

    python examples/keras_digits.py

The model, `compile`, `fit` and `evaluate` are as in any Keras script. In the scope of an `IPUStrategy` they run on the
IPU: the losses are those of stock Keras, and the history has the predicted cycles, the memory of the fullest tile, and
the host's time for batches. After the scope the same model is evaluated without an IPU.

Task: the 8 × 8 digits of scikit-learn (UCI, Alpaydin and Kaynak 1998).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

# Keras reads it when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from sklearn.datasets import load_digits

import ipujax.keras as ipu

CLASSES = 10
SEED = 0
TESTED = 297  # the other 1,500 are whole batches of 50


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images [1797, 8, 8, 1] from 0 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8, 1).astype(np.float32) / 16, labels


def cnn() -> keras.Model:
    """Two convolutions, and dropout ahead of the classes."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def print_epoch(epoch: int, logs: Mapping[str, float]) -> None:
    accuracy = logs["val_accuracy"]
    seconds = logs["host_seconds"]
    print(f"epoch {epoch + 1}: loss {logs['loss']:.4f}, test accuracy {accuracy:.3f}, {seconds:.1f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Trains, prints, and returns the history.

    Args:
        argv: the arguments of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=50, help="examples in a batch")
    parser.add_argument("--steps", type=int, default=10, help="batches in a call of the device")
    parser.add_argument("--tiles", type=int, default=0, help="tiles of the IPU; all that it has by default")
    args = parser.parse_args(argv)
    images, labels = digits()
    train = (images[:-TESTED], labels[:-TESTED])
    test = (images[-TESTED:], labels[-TESTED:])
    keras.utils.set_random_seed(SEED)
    config = ipu.IPUConfig()
    config.auto_select_ipus = 1
    config.ipu_model.tiles_per_ipu = args.tiles
    # Models that are made and trained inside run on the IPU.
    with ipu.IPUStrategy(config).scope():
        model = cnn()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=args.steps)
        callbacks = [ipu.ProfileLogger(), keras.callbacks.LambdaCallback(on_epoch_end=print_epoch)]
        history = model.fit(
            *train, batch_size=args.batch, epochs=args.epochs, verbose=0, callbacks=callbacks, validation_data=test
        ).history
        profile = model.ipu_profile
    print(f"{args.steps} batches of {args.batch}: {profile.cycles:,} cycles, {profile.seconds * 1e6:,.0f} µs on a Mk2")
    print(f"fullest tile: {profile.memory.max_tile_bytes:,} bytes")
    # `fit` prepares batches while the device computes: the slower of both sets the pace.
    slower = "the host" if profile.is_host_bound else "the IPU"
    print(f"this host prepares them in {profile.host.prepared_seconds_per_call * 1e6:,.0f} µs: {slower} is slower")
    _, accuracy = model.evaluate(*test, verbose=0)
    print(f"without the strategy: test accuracy {accuracy:.3f}")
    return history


if __name__ == "__main__":
    main()
