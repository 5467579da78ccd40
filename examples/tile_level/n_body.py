"""Gravity of n bodies on tiles: each tile has some bodies, and blocks of positions go around a ring of tiles.

    python examples/tile_level/n_body.py --tiles 16 --bodies 8 --steps 4

In each step of the ring a tile adds the forces of the block that it has received, and `ipu.tile_gather` sends it on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu

SOFTENING = 0.05  # of distances, so that close bodies do not fly apart
STEP = 0.005  # of time


class Bodies(NamedTuple):
    """Bodies of all tiles: positions and velocities [tiles, bodies, 3], masses [tiles, bodies]."""

    position: jax.Array
    velocity: jax.Array
    mass: jax.Array


def acceleration(position: jax.Array, other: jax.Array, mass: jax.Array) -> jax.Array:
    """Return the acceleration of the bodies of a tile by those of a block, [bodies, 3]."""
    distance = other[None] - position[:, None]
    square = jnp.sum(distance * distance, -1) + SOFTENING**2
    cube = square * jnp.sqrt(square)  # a power would take 312 cycles an element
    return jnp.sum(distance * (mass / cube)[..., None], 1)


def accelerations(position: jax.Array, mass: jax.Array, tiles: Sequence[int]) -> jax.Array:
    """Return the acceleration of all bodies, [tiles, bodies, 3]."""
    neighbours = [(n + 1) % len(tiles) for n in range(len(tiles))]

    def ring_step(_: int, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        total, visitor, visitor_mass = state
        total = ipu.tile_map(
            lambda a, x, other, m: a + acceleration(x, other, m), total, position, visitor, visitor_mass, tiles=tiles
        )
        return total, ipu.tile_gather(visitor, neighbours, tiles), ipu.tile_gather(visitor_mass, neighbours, tiles)

    return jax.lax.fori_loop(0, len(tiles), ring_step, (jnp.zeros_like(position), position, mass))[0]


def simulate(bodies: Bodies, tiles: Sequence[int], steps: int) -> tuple[Bodies, jax.Array]:
    """Return the bodies after some steps of leapfrog integration, and the cycles that these took, uint32[]."""
    position, velocity, mass = (ipu.tile_put_sharded(x, tiles) for x in bodies)
    position, start = ipu.cycle_count(position)

    def leapfrog(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        position, velocity = state
        position = ipu.tile_map(lambda x, v: x + STEP / 2 * v, position, velocity, tiles=tiles)
        force = accelerations(position, mass, tiles)
        velocity = ipu.tile_map(lambda v, a: v + STEP * a, velocity, force, tiles=tiles)
        return ipu.tile_map(lambda x, v: x + STEP / 2 * v, position, velocity, tiles=tiles), velocity

    position, velocity = jax.lax.fori_loop(0, steps, leapfrog, (position, velocity))
    position, end = ipu.cycle_count(position)
    return Bodies(position, velocity, mass), (end - start)[0, 0]


def energy(bodies: Bodies) -> float:
    """Return kinetic and potential energy of all bodies."""
    position, velocity = (x.reshape(-1, 3) for x in bodies[:2])
    mass = bodies.mass.reshape(-1)
    distance = jnp.sqrt(jnp.sum((position[:, None] - position) ** 2, -1) + SOFTENING**2)
    potential = jnp.sum(jnp.triu(mass[:, None] * mass / distance, 1))
    return float(jnp.sum(mass * jnp.sum(velocity**2, -1)) / 2 - potential)


def main(arguments: Sequence[str] | None = None) -> float:
    """Simulate, print energies and cycles, and return the relative change of energy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiles", type=int, default=16, help="tiles of the IPU")
    parser.add_argument("--bodies", type=int, default=8, help="bodies of a tile")
    parser.add_argument("--steps", type=int, default=4, help="time steps")
    args = parser.parse_args(arguments)

    rng = np.random.default_rng(0)
    shape = (args.tiles, args.bodies)
    position, velocity = rng.normal(size=(2, *shape, 3)).astype(np.float32)
    bodies = Bodies(position, velocity / 4, np.full(shape, 1 / (args.tiles * args.bodies), np.float32))

    tiles = range(args.tiles)
    step = ipu.jit(lambda bodies: simulate(bodies, tiles, args.steps), device=ipu.IPUModel(tiles_per_ipu=args.tiles))
    after, cycles = step(bodies)
    change = abs(energy(after) / energy(bodies) - 1)
    count = args.tiles * args.bodies
    print(f"{count} bodies on {args.tiles} tiles: energy {energy(bodies):.4f}, then {energy(after):.4f}")
    print(f"{int(cycles) // args.steps:,} cycles a step")
    return change


if __name__ == "__main__":
    main()
