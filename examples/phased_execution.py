"""Trains a network three times as large as the chip's memory, phase by phase.

    python examples/phased_execution.py --picture trade-off.png

`with ipu.phase(i)` sets the order of execution. Weights, the state of the optimiser, and the values that a phase stores
for its gradient are in streaming memory; each phase loads the values that it needs. The fewer layers a phase has, the
less memory it takes. On two IPUs phases alternate: one IPU loads while the other computes. Tiles that only move data
(`Options(io_tiles=...)`) load while their own IPU computes too.

The example compiles a training step in these ways, prints memory and cycles of each, and trains with one of them; the
losses are those of plain JAX. Task: a function of the inputs to be learned from generated data.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import optax

import ipujax as ipu

SEED = 0
RATE = 1e-3
CODE_BYTES = 200 * 1024  # of a tile's memory that may hold code

Params = list[tuple[jax.Array, jax.Array]]
Step = Callable[..., tuple[Params, Any, jax.Array]]


# --- model ------------------------------------------------------------------------------------------------------------


def initial_parameters(key: jax.Array, layers: int, width: int) -> Params:
    """Weights and biases of all layers."""
    keys = jax.random.split(key, layers)
    return [(jax.random.normal(k, (width, width)) / width**0.5, jnp.zeros(width)) for k in keys]


def training_step(optimizer: optax.GradientTransformation, layers_of_phase: int | None) -> Step:
    """A step of training, in phases of some layers each; in one when None."""

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        for number, (weights, bias) in enumerate(params):
            with nullcontext() if layers_of_phase is None else ipu.phase(number // layers_of_phase):
                x = x + jnp.tanh(x @ weights + bias)
        return jnp.mean((x - y) ** 2)

    def step(params: Params, state: Any, x: jax.Array, y: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        updated: Any = optax.apply_updates(params, updates)
        return updated, state, value

    return step


def examples(count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Generated inputs, and the function of them that is to be learned."""
    x = np.random.default_rng(SEED).normal(size=(count, width)).astype(np.float32)
    return x, np.sin(2 * x)


# --- comparison -------------------------------------------------------------------------------------------------------


def compiled(step: Step, shapes: Sequence[Any], tiles: int, num_ipus: int = 1, io_tiles: int = 0) -> ipu.Compiled:
    """The step, compiled for chips of some tiles each; parameters and state are donated."""
    device = ipu.IPUModel(num_ipus, tiles_per_ipu=tiles, interleaved_offset_bytes=CODE_BYTES)
    options = ipu.Options(io_tiles=io_tiles)
    return ipu.jit(step, device=device, donate_argnums=(0, 1), options=options).lower(*shapes).compile()


def row(name: str, compiled_step: ipu.Compiled) -> tuple[float, int]:
    """Prints the memory of the fullest tile and the cycles of a step; returns both."""
    profile = compiled_step.profile
    kib = profile.memory.max_tile_bytes / 1024
    cycles = profile.cycles
    waits = profile.phase_cycles["host_exchange"] / cycles
    print(f"{name:<40}  {kib:>7.1f} KiB  {cycles:>12,} cycles, {waits:4.0%} of them waiting for streaming memory")
    return kib, cycles


def draw(points: dict[str, tuple[float, int]], curve: Sequence[tuple[float, int]], path: Path) -> None:
    """Cycles against memory: a curve of phases of more and more layers, and a point for each other way."""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.plot(*zip(*curve, strict=True), marker="o", label="one IPU, phases of more and more layers")
    for name, (kib, cycles) in points.items():
        axes.plot(kib, cycles, marker="s", linestyle="", label=name)
    axes.set_xlabel("memory of the fullest tile, KiB")
    axes.set_ylabel("cycles of a training step")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    print(f"drawn: {path}")


def main(argv: Sequence[str] | None = None) -> list[tuple[float, int]]:
    """Runs the example; returns memory and cycles of phases of more and more layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=24, help="tiles of a chip")
    parser.add_argument("--layers", type=int, default=27, help="of the network")
    parser.add_argument("--width", type=int, default=384, help="of the layers")
    parser.add_argument("--batch", type=int, default=64, help="examples of a step")
    parser.add_argument("--io-tiles", type=int, default=8, help="that only move data, where there are any")
    parser.add_argument("--steps", type=int, default=10, help="to train")
    parser.add_argument("--picture", type=Path, help="where to draw the trade-off")
    args = parser.parse_args(argv)

    optimizer = optax.adam(RATE)
    params = initial_parameters(jax.random.key(SEED), args.layers, args.width)
    state = optimizer.init(params)
    shapes = params, state, *examples(args.batch, args.width)
    size = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    chip = ipu.IPUModel(tiles_per_ipu=args.tiles).target.total_memory_bytes
    print(f"parameters and state: {size / 2**20:.1f} MiB, {size / chip:.1f} times the memory of a chip")

    try:
        row("one phase", compiled(training_step(optimizer, None), shapes, args.tiles))
    except ipu.TileMemoryError as error:
        print(f"{'one phase':<40}  does not fit: {error.needed_bytes / 1024:,.1f} KiB on the fullest tile")
    curve = list[tuple[float, int]]()
    step = None
    for count in (1, 2, 3):
        try:
            step = compiled(training_step(optimizer, count), shapes, args.tiles)
        except ipu.TileMemoryError as error:
            print(f"{f'phases of {count} layers':<40}  does not fit: {error.needed_bytes / 1024:,.1f} KiB")
            break
        curve.append(row(f"phases of {count} layer{'s' if count > 1 else ''}", step))
    single = training_step(optimizer, 1)
    io_tiles = f"{args.io_tiles} I/O tiles"
    points = {
        name: row(f"phases of 1 layer, {name}", compiled(single, shapes, args.tiles, num_ipus, io_tiles=count))
        for name, num_ipus, count in (
            ("two IPUs", 2, 0),
            (io_tiles, 1, args.io_tiles),
            (f"two IPUs, {io_tiles}", 2, args.io_tiles),
        )
    }
    if args.picture is not None:
        draw(points, curve, args.picture)

    if step is not None and args.steps:
        x, y = shapes[2:]
        plain = jax.jit(training_step(optimizer, None))
        jax_params, jax_state = jax.tree.map(jnp.copy, (params, state))
        values = []
        expected = []
        for _ in range(args.steps):
            params, state, value = step(params, state, x, y)
            jax_params, jax_state, jax_loss = plain(jax_params, jax_state, x, y)
            values.append(float(value))
            expected.append(float(jax_loss))
        difference = max(abs(a - b) / b for a, b in zip(values, expected, strict=True))
        print(f"loss {values[0]:.4f} to {values[-1]:.4f} in {args.steps} steps; plain JAX differs by {difference:.0e}")
    return curve


if __name__ == "__main__":
    main()
