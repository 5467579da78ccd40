"""Asks how sure the time of a training step is, and which constants of the machine it depends on.

    python examples/studies/training_step.py --batch 256

The step is one of a small perceptron in half precision. The example prints its cycles with their 90 % interval and the
mechanisms that make it wide, the kinds of sources that the cycles rest on, the energy, and the constants whose change
by one per cent changes the cycles most. With `--no-host` transfers of the host take next to no time, since figures of
the host are guesses. Nothing is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

import ipujax as ipu

WIDTHS = (784, 256, 128, 10)
RATE = 0.1
SHOWN = 5


def loss(weights: Sequence[jax.Array], batch: jax.Array) -> jax.Array:
    """A sum of squares behind layers with ReLU."""
    x = batch
    for weight in weights:
        x = jax.nn.relu(x @ weight)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def step(weights: Sequence[jax.Array], batch: jax.Array) -> Any:
    """Gradient descent."""
    gradients = jax.grad(loss)(weights, batch)
    return jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients)


def arguments(batch: int) -> tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Shapes of the weights and of a batch."""
    shapes = pairwise(WIDTHS)
    return [jax.ShapeDtypeStruct(x, jnp.float16) for x in shapes], jax.ShapeDtypeStruct((batch, WIDTHS[0]), jnp.float16)


def machine(tiles: int, has_host: bool) -> ipu.IPUModel:
    """An Mk2; without a host its transfers take next to no time, exactly."""
    quick = {} if has_host else {"host_latency_seconds": 0.0, "host_bytes_per_second": 1e18}
    return ipu.IPUModel(arch="mk2", tiles_per_ipu=tiles, **quick)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tiles", type=int, default=1472)
    parser.add_argument("--no-host", action="store_true")
    args = parser.parse_args(argv)
    fun = ipu.jit(step, device=machine(args.tiles, not args.no_host), donate_argnums=0)
    shapes = arguments(args.batch)
    profile = fun.profile(*shapes)
    interval = profile.interval
    print(f"{interval.cycles:,} cycles, 90 % interval {interval.low:,} to {interval.high:,}")
    for each in interval.uncertainties[:SHOWN]:
        print(f"  {each.name:<30}−{each.low:<10,} +{each.high:,}")
    print("cycles rest on " + ", ".join(f"{kind} {share:.0%}" for kind, share in profile.coverage.items()))
    print(f"energy {profile.energy.joules * 1e3:.1f} mJ")
    for row in ipu.sensitivities(fun, *shapes).rows[:SHOWN]:
        print(f"  {row['constant']:<30}{row['elasticity']:+.3f}")


if __name__ == "__main__":
    main()
