"""Trains a small network on handwritten digits on a simulated IPU, and profiles the time and memory of a step.

    python examples/digits.py --model cnn --device mk2

The training step is plain JAX and Optax; only `@ipu.jit` compiles it for the machine. With `--device cpu` it runs
without the machine. Data: the 1,797 images of 8 × 8 pixels that come with scikit-learn (Alpaydin and Kaynak, Optical
Recognition of Handwritten Digits, UCI, 1998), of which a fixed fifth is kept for testing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import ipujax as ipu

CLASSES = 10
SIDE = 8
SEED = 0

Params = dict[str, jax.Array]
Model = Callable[[Params, jax.Array], jax.Array]


# --- data -------------------------------------------------------------------------------------------------------------


def load() -> list[np.ndarray]:
    """Training images, test images (float32[n, 8, 8, 1], 0 to 1), training labels, test labels (int32[n])."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=SEED)


def batches(images: np.ndarray, labels: np.ndarray, size: int, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of one size, in a new order each epoch; examples that do not fill a batch are left out in that epoch."""
    order = np.random.default_rng((SEED, epoch)).permutation(len(images))
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield images[chosen], labels[chosen]


# --- models -----------------------------------------------------------------------------------------------------------

LAYOUT = ("NHWC", "HWIO", "NHWC")
FIELD = (1, 2, 2, 1)

conv = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=LAYOUT)
max_pool = partial(
    lax.reduce_window,
    init_value=-jnp.inf,
    computation=lax.max,
    window_dimensions=FIELD,
    window_strides=FIELD,
    padding="VALID",
)


def mlp(params: Params, images: jax.Array) -> jax.Array:
    """Two hidden layers."""
    x = images.reshape(len(images), -1)
    x = jax.nn.relu(x @ params["w1"] + params["b1"])
    x = jax.nn.relu(x @ params["w2"] + params["b2"])
    return x @ params["w3"] + params["b3"]


def cnn(params: Params, images: jax.Array) -> jax.Array:
    """Two convolutions, pooling, and a linear classifier."""
    x = jax.nn.relu(conv(images, params["w1"]) + params["b1"])
    x = jax.nn.relu(conv(x, params["w2"]) + params["b2"])
    x = max_pool(x)
    x = x.reshape(len(x), -1)
    return x @ params["w3"] + params["b3"]


# Name → function, and the shapes of its weights.
MODELS: dict[str, tuple[Model, list[tuple[int, ...]]]] = {
    "mlp": (mlp, [(SIDE * SIDE, 128), (128, 64), (64, CLASSES)]),
    "cnn": (cnn, [(3, 3, 1, 16), (3, 3, 16, 32), ((SIDE // 2) ** 2 * 32, CLASSES)]),
}


def init(shapes: Sequence[tuple[int, ...]]) -> Params:
    """Weights w1, w2… of the given shapes by He's rule, and biases b1, b2… of zeros."""
    keys = jax.random.split(jax.random.key(SEED), len(shapes))
    he = jax.nn.initializers.he_normal()
    weights = {f"w{n}": he(key, shape) for n, (key, shape) in enumerate(zip(keys, shapes, strict=True), 1)}
    return weights | {f"b{n}": jnp.zeros(shape[-1]) for n, shape in enumerate(shapes, 1)}


# --- training ---------------------------------------------------------------------------------------------------------


def train(
    model: Model, params: Params, data: list[np.ndarray], epochs: int, batch: int, profile: bool, page: str | None
) -> float:
    """Trains, tests after each epoch, prints the machine's profile; returns the accuracy on the test images."""
    train_images, test_images, train_labels, test_labels = data
    steps = len(train_images) // batch
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, epochs * steps))

    @ipu.jit(donate_argnums=(0, 1))
    def train_step(params, opt_state, images, labels):
        def loss(params):
            logits = model(params, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    @ipu.jit
    def accuracy(params, images, labels):
        return jnp.mean(jnp.argmax(model(params, images), axis=-1) == labels)

    opt_state = optimizer.init(params)
    for epoch in range(1, epochs + 1):
        losses = []
        shuffled = batches(train_images, train_labels, batch, epoch)
        for images, labels in tqdm(shuffled, f"epoch {epoch}/{epochs}", steps, leave=False, unit="step"):
            params, opt_state, loss = train_step(params, opt_state, images, labels)
            losses.append(loss)
        right = float(accuracy(params, test_images, test_labels))
        print(f"epoch {epoch:2}/{epochs}  loss {np.mean(losses):.4f}  test accuracy {right:.2%}")
    if profile:
        compiled = train_step.lower(params, opt_state, images, labels).compile()
        print("\nOne training step on the machine\n", compiled.profile.summary(), sep="\n")
        if page:
            compiled.profile.to_html(page)
    return right


def main(argv: Sequence[str] | None = None) -> float:
    """Runs the example; returns the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--device", choices=["cpu", "mk1", "mk2", "bow"], default="mk2")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="images a step")
    parser.add_argument("--html", metavar="PATH", help="write the profile as a page; needs the extra `report`")
    args = parser.parse_args(argv)
    data = load()
    if args.epochs < 1 or not 1 <= args.batch <= len(data[0]):
        parser.error(f"--epochs must be at least 1, and --batch 1 to {len(data[0])}, the number of training images")
    model, shapes = MODELS[args.model]
    on_ipu = args.device != "cpu"
    with ipu.default_device(ipu.IPUModel(num_ipus=1, arch=args.device) if on_ipu else ipu.CPU()):
        return train(model, init(shapes), data, args.epochs, args.batch, on_ipu, args.html)


if __name__ == "__main__":
    main()
