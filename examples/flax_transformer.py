"""Trains a small character-level transformer of flax.nnx on a simulated IPU, and generates text with it.

    python examples/flax_transformer.py

The model and its training are those of any flax script: with `nnx.split` the step is a function of pytrees, Optax's
AdamW updates them, and `@ipu.jit` compiles the step for the machine. Then the model generates a sample in one call of
the device: a loop of `lax.scan`. With `--device cpu` it runs without the machine, and with the same losses.

Task: prediction of the next character of Python's language reference, which is part of every installation
(`pydoc_data.topics`, the text that `help("while")` prints; Python Software Foundation).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import ipujax as ipu

SEED = 0
RATE = 3e-3
TEMPERATURE = 0.7


# --- text -------------------------------------------------------------------------------------------------------------


def read() -> tuple[np.ndarray, str]:
    """Python's documentation as numbers of characters, int32[n], and the characters by number."""
    text = "\n".join(topics[name] for name in sorted(topics))
    letters = "".join(sorted(set(text)))
    number = {letter: n for n, letter in enumerate(letters)}
    return np.array([number[letter] for letter in text], np.int32), letters


def batches(text: np.ndarray, batch: int, context: int, steps: int, epoch: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Passages int32[batch, context] from anywhere, and of each character the one that follows it."""
    rng = np.random.default_rng((SEED, epoch))
    for _ in range(steps):
        starts = rng.integers(0, len(text) - context, batch)
        passages = text[starts[:, None] + np.arange(context + 1)]
        yield passages[:, :-1], passages[:, 1:]


# --- model ------------------------------------------------------------------------------------------------------------


class Block(nnx.Module):
    """Attention to the characters before, then two dense layers, both with a residual connection."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, use_bias=False, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """From characters int32[batch, context] to the logits of those that follow; one table is read at both ends."""

    def __init__(self, letters: int, context: int, width: int, heads: int, layers: int) -> None:
        rngs = nnx.Rngs(SEED)
        self.letters = nnx.Embed(letters, width, rngs=rngs)
        self.places = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List(Block(width, heads, rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        x = self.letters(text) + self.places(jnp.arange(text.shape[1]))
        mask = nnx.make_causal_mask(text)
        for block in self.blocks:
            x = block(x, mask)
        return self.letters.attend(self.norm(x))


# --- training ---------------------------------------------------------------------------------------------------------


def training_step(graph: Any, optimizer: Any) -> Any:
    """The step of AdamW for the model of this graph, compiled for the device."""

    @ipu.jit(donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, text: jax.Array, following: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(text)
            return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return train_step


def written(graph: Any, params: Any, start: np.ndarray, count: int) -> np.ndarray:
    """So many characters that the model writes after a start, each drawn by its logits and then read again."""

    @ipu.jit
    def write(params: Any, start: jax.Array, key: jax.Array) -> jax.Array:
        def next_letter(text: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = nnx.merge(graph, params)(text[None])[0, -1]
            letter = jax.random.categorical(key, logits / TEMPERATURE)
            return jnp.append(text[1:], letter), letter

        return lax.scan(next_letter, start, jax.random.split(key, count))[1]

    return np.asarray(write(params, jnp.asarray(start), jax.random.key(SEED)))


def train(args: argparse.Namespace) -> list[float]:
    """Trains, prints the cost of the step and a sample; returns the loss of each epoch."""
    text, letters = read()
    graph, params = nnx.split(Transformer(len(letters), args.context, args.width, args.heads, args.layers), nnx.Param)
    optimizer = optax.adamw(RATE)
    opt_state = optimizer.init(params)
    step = training_step(graph, optimizer)
    losses = []
    for epoch in range(1, args.epochs + 1):
        values = []
        for batch in batches(text, args.batch, args.context, args.steps, epoch):
            params, opt_state, value = step(params, opt_state, *batch)
            values.append(value)
        losses.append(float(np.mean(values)))
        print(f"epoch {epoch}/{args.epochs}  loss {losses[-1]:.4f}", flush=True)
    if args.device != "cpu":
        profile = step.profile(params, opt_state, *batch)
        print(f"a step: {profile.cycles:,} cycles, {profile.seconds * 1e6:,.0f} µs on a {args.device}")
        print(f"fullest tile: {profile.memory.max_tile_bytes:,} bytes")
    if args.sample:
        start = text[: args.context]
        print("".join(letters[n] for n in (*start, *written(graph, params, start, args.sample))))
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Runs the example; returns the mean loss of each epoch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "mk1", "mk2", "bow"], default="mk2")
    parser.add_argument("--tiles", type=int, default=0, help="tiles of the IPU; all that it has by default")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="batches of an epoch")
    parser.add_argument("--batch", type=int, default=16, help="passages of a batch")
    parser.add_argument("--context", type=int, default=64, help="characters of a passage")
    parser.add_argument("--width", type=int, default=64, help="of what is known of a character")
    parser.add_argument("--heads", type=int, default=4, help="of attention; they divide the width")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sample", type=int, default=300, help="characters to write")
    args = parser.parse_args(argv)
    if min(args.epochs, args.steps, args.batch, args.context, args.heads, args.layers) < 1 or args.width % args.heads:
        parser.error("sizes are at least 1, and --heads divides --width")
    if args.device == "cpu" and args.tiles:
        parser.error("--tiles are those of an IPU; --device cpu has none")
    tiles = {"tiles_per_ipu": args.tiles} if args.tiles else {}
    with ipu.default_device(ipu.CPU() if args.device == "cpu" else ipu.IPUModel(arch=args.device, **tiles)):
        return train(args)


if __name__ == "__main__":
    main()
