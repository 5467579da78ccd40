"""Further programs with a planted cause, siblings of those of `planted_programs`; its docstring says what is checked.

`python -m tests.ipujax.causes.planted_siblings [name…]` prints what the first sentence names, and both gains.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import ipujax as ipu
from tests.ipujax.causes import planted_programs
from tests.ipujax.causes.planted_programs import HOST, MACHINE, STATE, TILES, Planted, array, cycles, layers, planted

WIDTH = 256
ON_FOUR: dict[str, Any] = {"num_ipus": 4, "replicas": 4}


def statistics(state: Any, x: Any) -> Any:
    """Running mean and variance of a normalisation."""
    mean, variance = state
    later = 0.9 * mean + 0.1 * x.mean(0), 0.9 * variance + 0.1 * x.var(0)
    return later, ((x - mean) * lax.rsqrt(variance + 1e-5)).sum()


def shifted(buffer: Any, row: Any) -> Any:
    """Last rows that were seen."""
    return jnp.concatenate([buffer[1:], row[None]]), (buffer * row).sum()


def look_up(table: Any, x: Any) -> Any:
    return jnp.tanh(x @ table).sum(), x


def look_up_in_constant(x: Any) -> Any:
    return look_up(jnp.ones((512, 512)), x)


def four_stages(counts: tuple[int, ...], ws: Any, x: Any) -> Any:
    rest = list(ws)
    for number, count in enumerate(counts):
        with ipu.stage(number):
            x = layers(rest[:count], x)
            x = (x**2).mean() if number == len(counts) - 1 else x
        del rest[:count]
    return x


def trained_in_stages(counts: tuple[int, ...], ws: Any, x: Any) -> Any:
    fun = ipu.pipeline(jax.value_and_grad(partial(four_stages, counts)), micro_batches=32)
    value, grads = fun(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def summed_activations(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jnp.tanh(lax.psum(x @ w, "replica"))
    return ws, x


def local_activations(ws: Any, x: Any) -> Any:
    return ws, layers(ws, x)


def logistic_map(x: Any, rate: Any) -> Any:
    rate = lax.fori_loop(0, 100, lambda _, r: 3.9 * r * (1 - r), rate)
    return x * rate, rate


def exponentials(a: Any, b: Any) -> Any:
    for _ in range(4):
        a = jnp.exp(a) * b - a
    return a, b


def centred(x: Any, w: Any) -> Any:
    for _ in range(3):
        x = (x - x.mean(1, keepdims=True)) * w
    return x, w


def recurrence(w: Any, xs: Any) -> Any:
    return lax.scan(lambda h, x: (jnp.tanh(h * w + x), None), jnp.zeros_like(xs[0]), xs)[0]


def all_at_once(w: Any, xs: Any) -> Any:
    return jnp.tanh(xs * w).sum(0)


def rows_of(table: Any, numbers: Any) -> Any:
    return table[numbers].sum(1)


def one_by_one(xs: Any, ws: Any) -> Any:
    return lax.map(lambda pair: pair[0] @ pair[1], (xs, ws)), ws


def batched(xs: Any, ws: Any) -> Any:
    return xs @ ws, ws


def trained_by(schedule: str, ws: Any, x: Any) -> Any:
    fun = partial(four_stages, (2, 2, 2, 2))
    value, grads = ipu.pipeline(jax.value_and_grad(fun), micro_batches=16, schedule=schedule)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def poplar_squares(tiles_of_half: int) -> ipu.Profile:
    """Return the profile of a Poplar program that squares a vector, half of which is on so many tiles."""
    from ipujax import poplar, popops

    graph = poplar.Graph(MACHINE(1).target)
    program = poplar.program.Sequence()
    size = 1 << 15
    x = graph.add_variable(poplar.FLOAT, [size], "x")
    first = np.linspace(0, size // 2, tiles_of_half + 1)
    cuts = np.concatenate([first, np.linspace(size // 2, size, TILES - tiles_of_half + 1)[1:]]).astype(int).tolist()
    for tile, (low, high) in enumerate(pairwise(cuts)):
        graph.set_tile_mapping(x[low:high], tile)
    for _ in range(4):
        popops.mul_in_place(graph, x, x, program, "square")
    return poplar.Engine(graph, program).profile


def poplar_copies(times: int) -> ipu.Profile:
    """Return the profile of a Poplar program that copies a vector to the tiles in opposite order, and back."""
    from ipujax import poplar, popops

    graph = poplar.Graph(MACHINE(1).target)
    program = poplar.program.Sequence()
    elements = 1 << 8
    x, y = (graph.add_variable(poplar.FLOAT, [elements * TILES], name) for name in "xy")
    for tile in range(TILES):
        part = slice(tile * elements, (tile + 1) * elements)
        graph.set_tile_mapping(x[part], tile)
        graph.set_tile_mapping(y[part], TILES - 1 - tile)
    popops.mul_in_place(graph, x, x, program, "square")
    for _ in range(times):
        program.add(poplar.program.Copy(x, y))
        program.add(poplar.program.Copy(y, x))
    return poplar.Engine(graph, program).profile


EIGHT = [array(WIDTH, WIDTH)] * 8
SIX = [array(WIDTH, WIDTH)] * 6
HALF, BRAIN = ([array(1 << 15, dtype=dtype)] * 2 for dtype in (np.float16, jnp.bfloat16))

SIBLINGS: Mapping[str, Planted] = {
    "running statistics": planted(
        STATE,
        *(statistics, (array(1 << 16),) * 2, array(2, 1 << 16)),
        remedy=cycles(statistics, (array(1 << 16),) * 2, array(2, 1 << 16), donate_argnums=0),
    ),
    "last rows": planted(
        STATE,
        *(shifted, array(256, 512), array(512)),
        remedy=cycles(shifted, array(256, 512), array(512), donate_argnums=0),
    ),
    "table as an argument": planted(
        HOST,
        *(look_up, array(512, 512), array(16, 512)),
        donate_argnums=1,
        remedy=cycles(look_up_in_constant, array(16, 512), donate_argnums=0),
    ),
    "rows of a large table": planted(
        HOST,
        *(rows_of, array(20_000, 64), array(32, 4, dtype=np.int32)),
        remedy=cycles(rows_of, array(20_000, 64), array(32, 4, dtype=np.int32), offload_argnums=0),
    ),
    "sort of few elements": planted(
        "unequal work of tiles",
        *(jnp.sort, array(4096)),
        donate_argnums=0,
        remedy=cycles(jax.vmap(jnp.sort), array(64, 4096), calls=1 / 64, donate_argnums=0),
    ),
    "products one by one": planted(
        "sync",
        *(one_by_one, array(64, 16, 16), array(64, 16, 16)),
        donate_argnums=(0, 1),
        remedy=cycles(batched, array(64, 16, 16), array(64, 16, 16), donate_argnums=(0, 1)),
    ),
    "stages one after another": planted(
        "IPUs that wait",
        *(partial(trained_by, "sequential"), EIGHT, array(4096, WIDTH)),
        num_ipus=4,
        donate_argnums=0,
        remedy=cycles(partial(trained_by, "1f1b"), EIGHT, array(4096, WIDTH), num_ipus=4, donate_argnums=0),
    ),
    "heavy last stage": planted(
        "unequal work of IPUs",
        *(partial(trained_in_stages, (1, 1, 1, 5)), EIGHT, array(4096, WIDTH)),
        num_ipus=4,
        donate_argnums=0,
        remedy=cycles(
            partial(trained_in_stages, (2, 2, 2, 2)), EIGHT, array(4096, WIDTH), num_ipus=4, donate_argnums=0
        ),
    ),
    "sums of activations": planted(
        "collectives",
        *(summed_activations, SIX, array(16, WIDTH)),
        **ON_FOUR,
        donate_argnums=(0, 1),
        remedy=cycles(local_activations, SIX, array(16, WIDTH), **ON_FOUR, donate_argnums=(0, 1)),
    ),
    "logistic map": planted(
        "steps on a single tile",
        *(logistic_map, array(1 << 12), array()),
        donate_argnums=(0, 1),
        remedy=cycles(lambda x, rate: (x * rate, rate + 1), array(1 << 12), array(), donate_argnums=(0, 1)),
    ),
    "exponentials of brain floats": planted(
        "emulated dtypes",
        *(exponentials, *BRAIN),
        donate_argnums=(0, 1),
        remedy=cycles(exponentials, *HALF, donate_argnums=(0, 1)),
    ),
    "rows of 131": planted(
        "slow paths of odd rows",
        *(centred, array(512, 131), array(131)),
        donate_argnums=(0, 1),
        remedy=cycles(centred, array(512, 136), array(136), donate_argnums=(0, 1)),
    ),
    "small recurrence": planted(
        "sync",
        *(recurrence, array(64), array(128, 64)),
        donate_argnums=(0, 1),
        remedy=cycles(all_at_once, array(64), array(128, 64), donate_argnums=(0, 1)),
    ),
    "eigenvalues": planted("operations without a parallel rule", lambda x: jnp.linalg.eigh(x)[0], array(24, 24)),
    "Poplar, half on four tiles": Planted(
        "unequal work of tiles", lambda: poplar_squares(4), lambda: poplar_squares(TILES // 2).cycles
    ),
    "Poplar, to and fro": Planted("exchange", lambda: poplar_copies(8), lambda: poplar_copies(0).cycles),
}


if __name__ == "__main__":
    planted_programs.main(sys.argv[1:], SIBLINGS, {})
