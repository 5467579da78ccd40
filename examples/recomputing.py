"""Recomputes activations instead of storing them: memory against cycles, for a network of seven layers.

    python examples/recomputing.py --picture trade-off.png

The gradient of a network needs intermediate results. Stored, they fill the tiles; recomputed, they take cycles. The
example compiles a step without recomputation, by hand with `jax.checkpoint`, with "all", as PopART does ("standard"),
and on chips with less and less memory with "auto", which recomputes as much as needed to fit. Then it trains with the
last one, and shows that the losses are those of plain JAX.

Task: a function of sixteen numbers to be learned from generated data, as in PopART's example of recomputation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import ipujax as ipu

LAYERS = 7
INPUTS = 16
SEED = 0
RATE = 0.05
CODE_BYTES = 200 * 1024  # of a tile's memory that may hold code

Params = list[tuple[jax.Array, jax.Array]]
Step = Callable[[Params, jax.Array, jax.Array], tuple[Params, jax.Array]]


# --- model ------------------------------------------------------------------------------------------------------------


def initial_parameters(key: jax.Array, width: int) -> Params:
    """Seven layers, the last to one number."""
    widths = [INPUTS, *[width] * (LAYERS - 1), 1]
    keys = jax.random.split(key, LAYERS)
    sizes = zip(keys, pairwise(widths), strict=True)
    return [(jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b)) for k, (a, b) in sizes]


def layer(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    """A product and an activation."""
    weights, bias = params
    return jax.nn.gelu(x @ weights + bias)


def group(params: Params, x: jax.Array) -> jax.Array:
    """Some layers."""
    for each in params:
        x = layer(each, x)
    return x


def training_step(by_hand: bool) -> Step:
    """A step of gradient descent; `by_hand` saves only the inputs of each three layers, by `jax.checkpoint`."""

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        layers = jax.checkpoint(group) if by_hand else group
        for first in (0, 3):
            x = layers(params[first : first + 3], x)
        weights, bias = params[-1]
        return jnp.mean((x @ weights + bias - y) ** 2)

    def step(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradients), value

    return step


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Generated inputs, and the function of them that is to be learned."""
    x = np.random.default_rng(SEED).normal(size=(count, INPUTS)).astype(np.float32)
    return x, np.sin(x.sum(1, keepdims=True)).astype(np.float32)


# --- comparison -------------------------------------------------------------------------------------------------------


def compiled(step: Step, shapes: Sequence[object], tiles: int, kib: float | None, recompute: str) -> ipu.Compiled:
    """The step, for a chip of so much memory a tile; of the usual size, and nothing refused, when None."""
    memory = {} if kib is None else {"bytes_per_tile": int(kib * 1024)}
    code = {"interleaved_offset_bytes": min(CODE_BYTES, memory.get("bytes_per_tile", CODE_BYTES))}
    device = ipu.IPUModel(tiles_per_ipu=tiles, **memory, **code)
    options = ipu.Options(recompute=recompute, allow_out_of_memory=kib is None)
    return ipu.jit(step, device=device, donate_argnums=0, options=options).lower(*shapes).compile()


def row(name: str, compiled_step: ipu.Compiled) -> tuple[float, int]:
    """Prints the memory of the fullest tile and the cycles of a step; returns both."""
    kib = compiled_step.profile.memory.max_tile_bytes / 1024
    cycles = compiled_step.profile.cycles
    print(f"{name:<28}  {kib:>8.1f} KiB  {cycles:>12,} cycles")
    return kib, cycles


def draw(points: dict[str, tuple[float, int]], curve: Sequence[tuple[float, int]], path: Path) -> None:
    """Cycles against memory: the curve of "auto", and a point for each other way."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.plot(*zip(*sorted(curve), strict=True), marker="o", label='"auto", on chips of less and less memory')
    for name, (kib, cycles) in points.items():
        axes.plot(kib, cycles, marker="s", linestyle="", label=name)
    axes.set_xlabel("memory of the fullest tile, KiB")
    axes.set_ylabel("cycles of a training step")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    print(f"drawn: {path}")


def main(argv: Sequence[str] | None = None) -> list[tuple[float, int]]:
    """Runs the example; returns the points of the curve of "auto", KiB and cycles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=64, help="tiles of the chip")
    parser.add_argument("--width", type=int, default=128, help="of the layers")
    parser.add_argument("--batch", type=int, default=4096, help="examples of a step")
    parser.add_argument("--points", type=int, default=4, help="chips of less memory to compile for")
    parser.add_argument("--steps", type=int, default=20, help="to train")
    parser.add_argument("--picture", type=Path, help="where to draw the curve")
    args = parser.parse_args(argv)

    x, y = examples(args.batch)
    params = initial_parameters(jax.random.key(SEED), args.width)
    shapes = params, x, y
    plain = training_step(by_hand=False)
    by_hand = training_step(by_hand=True)

    points = {
        "nothing again": row("nothing again", compiled(plain, shapes, args.tiles, None, "none")),
        "by hand": row("by hand, jax.checkpoint", compiled(by_hand, shapes, args.tiles, None, "none")),
        "standard": row('recompute="standard"', compiled(plain, shapes, args.tiles, None, "standard")),
        "all": row('recompute="all"', compiled(plain, shapes, args.tiles, None, "all")),
    }
    largest_kib = points["nothing again"][0]
    curve = [points["nothing again"]]
    step = None
    for number in range(1, args.points + 1):
        room = largest_kib * (1 - 0.5 * number / args.points)
        try:
            step = compiled(plain, shapes, args.tiles, room, "auto")
        except ipu.TileMemoryError as error:
            print(f"{f'auto, {room:.0f} KiB a tile':<28}  does not fit: it needs {error.needed_bytes / 1024:.1f} KiB")
            break
        curve.append(row(f"auto, {room:.0f} KiB a tile", step))
    if args.picture is not None:
        draw(points, curve, args.picture)

    if step is not None and args.steps:
        values = []
        expected = []
        jax_params = jax.tree.map(jnp.copy, params)
        for _ in range(args.steps):
            params, value = step(params, x, y)
            jax_params, jax_loss = jax.jit(plain)(jax_params, x, y)
            values.append(float(value))
            expected.append(float(jax_loss))
        difference = max(abs(a - b) / b for a, b in zip(values, expected, strict=True))
        print(f"loss {values[0]:.4f} to {values[-1]:.4f} in {args.steps} steps; plain JAX differs by {difference:.0e}")
    return curve


if __name__ == "__main__":
    main()
