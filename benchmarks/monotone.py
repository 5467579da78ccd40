"""Statistics without bars: how often twice the batch takes less work or less time, and how often more tiles are slower.

    python benchmarks/monotone.py [--many]

Networks: random perceptrons (1 to 3 layers, widths 2 to 512, drawn by a fixed seed, SGD, momentum, RMSProp or Adam)
and the models of `examples/digits.py` with Adam; float32, state donated, lowered for one Mk2 without running. For
batches 1, 2, 4… the workers of all tiles together should take more cycles and the critical path no fewer; from 64 to
1,472 tiles the step should take no longer. Prints for each the share of pairs that violate it, and the worst pair. The
compiler guarantees none of it: a larger operation may be split differently. Cycles are those without host exchange.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import optax
from models.digits import digits_network

import ipujax as ipu
from ipujax.models.network_layers import cross_entropy

BATCHES = tuple(1 << n for n in range(8))
TILES = (64, 256, 777, 1024, 1472)
TILES_BATCH = 32
SEED = 0
OPTIMIZERS: tuple[Callable[[], optax.GradientTransformation], ...] = (
    partial(optax.sgd, 1e-2),
    partial(optax.sgd, 1e-2, momentum=0.9),
    partial(optax.rmsprop, 1e-3),
    partial(optax.adam, 1e-3),
)

Struct = jax.ShapeDtypeStruct
Network = tuple[str, Callable[..., jax.Array], Any, Callable[[int], tuple[Struct, Struct]], Any]


def perceptron(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    """Loss of dense layers with ReLU between them."""
    *hidden, (last, bias) = params
    for w, b in hidden:
        x = jax.nn.relu(x @ w + b)
    return cross_entropy(x @ last + bias, labels)


def networks(perceptrons: int) -> Iterator[Network]:
    """Name, loss, shapes of the parameters, shapes of a batch by its size, optimizer."""
    draw = random.Random(SEED)
    for _ in range(perceptrons):
        sizes = [round(2 ** draw.uniform(1, 9)) for _ in range(draw.randint(2, 4))]
        params = [(Struct(pair, np.float32), Struct(pair[1:], np.float32)) for pair in pairwise(sizes)]
        yield str(sizes), perceptron, params, partial(_batch, (sizes[0],)), draw.choice(OPTIMIZERS)()
    for name in ("mlp", "cnn"):
        loss, init, image = digits_network(name)
        params = jax.eval_shape(init, jax.random.key(SEED))
        yield f"digits {name}", loss, params, partial(_batch, image), optax.adam(1e-3)


def _batch(shape: tuple[int, ...], size: int) -> tuple[Struct, Struct]:
    return Struct((size, *shape), np.float32), Struct((size,), np.int32)


def cost(network: Network, batch: int, tiles: int) -> tuple[int, int]:
    """Cycles of all workers of a training step together, and of its critical path."""
    _, loss, params, shapes, optimizer = network

    def train_step(params: Any, opt_state: Any, x: jax.Array, labels: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    options = ipu.Options(allow_out_of_memory=True)
    run = ipu.jit(train_step, device=ipu.IPUModel(tiles_per_ipu=tiles), donate_argnums=(0, 1), options=options)
    profile = run.profile(params, jax.eval_shape(optimizer.init, params), *shapes(batch))
    return profile.total_worker_cycles, profile.cycles - profile.phase_cycles["host_exchange"]


def report(title: str, ratios: dict[str, float], broken: Callable[[float], bool], worst: Callable[..., str]) -> None:
    """Prints the share of ratios that break a rule, and the worst."""
    if not ratios:
        return
    number = sum(map(broken, ratios.values()))
    where = worst(ratios, key=ratios.__getitem__)
    print(
        f"{title:<40} {number:>5} of {len(ratios):>5} ({number / len(ratios):.1%})"
        f"  worst × {ratios[where]:.3f}: {where}"
    )


def main() -> None:
    """Prints the three statistics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", action="store_true", help="128 perceptrons instead of 6")
    many = parser.parse_args().many
    work: dict[str, float] = {}
    time: dict[str, float] = {}
    tiles_time: dict[str, float] = {}
    for network in networks(128 if many else 6):
        costs = [cost(network, batch, max(TILES)) for batch in BATCHES]
        for batch, (smaller, larger) in zip(BATCHES, pairwise(costs), strict=False):
            case = f"{network[0]}, batch {batch} → {2 * batch}"
            work[case] = larger[0] / smaller[0]
            time[case] = larger[1] / smaller[1]
        cycles = [cost(network, TILES_BATCH, tiles)[1] for tiles in TILES]
        for tiles, cycle_pair in zip(pairwise(TILES), pairwise(cycles), strict=True):
            tiles_time[f"{network[0]}, tiles {tiles[0]} → {tiles[1]}"] = cycle_pair[1] / cycle_pair[0]
    report("twice the batch is no more worker cycles", work, lambda ratio: ratio <= 1, min)
    report("twice the batch takes less time", time, lambda ratio: ratio < 1, min)
    report("more tiles take more time", tiles_time, lambda ratio: ratio > 1, max)


if __name__ == "__main__":
    main()
