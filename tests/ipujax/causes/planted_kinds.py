"""Planted programs of further kinds: meshes, 64-bit numbers, small collectives, callbacks; see `planted_programs`.

`python -m tests.ipujax.causes.planted_kinds [name…]` prints what the first sentence names, and both gains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import ipujax as ipu
from ipujax import poplar
from tests.ipujax.causes import planted_programs
from tests.ipujax.causes.planted_programs import (
    HOST,
    MACHINE,
    STATE,
    TILES,
    Planted,
    array,
    cycles,
    layers,
    momentum,
    planted,
    profile,
    sharded,
)

ON_FOUR: dict[str, Any] = {"num_ipus": 4, "replicas": 4}


def on_mesh(**settings: Any) -> ipu.Profile:
    ws = [sharded((256, 256))] * 3
    return profile(momentum, (ws, ws), sharded((256, 256), "model"), num_ipus=4, **settings)


def softmax_of_rows(x: Any) -> Any:
    return jax.nn.softmax(jnp.sin(x))


def hashed(x: Any) -> Any:
    return ((x * 2654435 + 7) ^ (x >> 13)) * 31


def product(a: Any, b: Any) -> Any:
    return jnp.tanh(a @ b), b


def of_type(dtype: Any, fun: Callable[..., Any], *shapes: tuple[int, ...]) -> ipu.Profile:
    with jax.enable_x64(True):
        args = [array(*shape, dtype=dtype) for shape in shapes]
        return profile(fun, *args, donate_argnums=tuple(range(len(args))))


def typed(dtype: Any, native_dtype: Any, fun: Callable[..., Any], *shapes: tuple[int, ...]) -> Planted:
    return Planted(
        "emulated dtypes",
        lambda: of_type(dtype, fun, *shapes),
        lambda: of_type(native_dtype, fun, *shapes).cycles,
    )


def scaled_rows(x: Any, scale: Any) -> Any:
    for _ in range(4):
        x = (x - x.mean(-1, keepdims=True)) * scale
    return x, scale


def rates_in_turn(is_scheduled: bool, x: Any, rates: Any) -> Any:
    """Updates of which each computes its rate from a counter, or finds it in a table."""

    def rate(step: Any) -> Any:
        step = step.astype(np.float32)
        rate = lax.optimization_barrier(1e-3 * jnp.minimum(step / 100, 1.0))
        rate = lax.optimization_barrier(rate * (1 + jnp.cos(step / 1000)))
        return lax.optimization_barrier(rate * jnp.sqrt(1 - 0.999**step))

    def update(step: Any, x: Any) -> Any:
        return x - (rate(step + 1) if is_scheduled else rates[step]) * jnp.tanh(x)

    return lax.fori_loop(0, 64, update, x), rates


def mean_by_python(is_python: bool, x: Any) -> Any:
    def step(_: Any, x: Any) -> Any:
        mean = x.mean()
        of_host = partial(jax.pure_callback, np.tanh, jax.ShapeDtypeStruct((), np.float32))
        return x * 0.9 + (of_host(mean) if is_python else jnp.tanh(mean))

    return lax.fori_loop(0, 20, step, x)


def sums_in_turn(arrays: Any) -> Any:
    results: list[Any] = []
    for x in arrays:
        later, *_ = lax.optimization_barrier((x, *results[-1:]))
        results.append(lax.psum(later, "replica"))
    return results


def sum_at_once(arrays: Any) -> Any:
    return jnp.split(lax.psum(jnp.concatenate(arrays), "replica"), len(arrays))


def convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def images_in_turn(xs: Any, w: Any) -> Any:
    return lax.map(lambda x: convolved(x[None], w)[0], xs), w


def momentum_of(ws: Any, moments: Any, x: Any) -> Any:
    return momentum((ws, moments), x)


def stages_of_one(micro_batches: int, ws: Any, x: Any) -> Any:
    def loss(ws: Any, x: Any) -> Any:
        for number, w in enumerate(ws):
            with ipu.stage(number):
                x = layers([w], x)
                x = (x**2).mean() if number == len(ws) - 1 else x
        return x

    grads = ipu.pipeline(jax.grad(loss), micro_batches=micro_batches)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)


class Scale(poplar.Vertex):
    x: poplar.Input[poplar.Vector[poplar.FLOAT]]
    y: poplar.Output[poplar.Vector[poplar.FLOAT]]

    def compute(x: Any) -> Any:  # its parameters are the input fields
        return x * 2


def poplar_vertices(num_tiles: int) -> ipu.Profile:
    """Return the profile of a Poplar program with a vertex class of its own, whose vertices are on some tiles."""
    graph = poplar.Graph(MACHINE(1).target)
    graph.add_codelets(Scale)
    elements = 16
    x, y = (graph.add_variable(poplar.FLOAT, [4 * TILES * elements], name) for name in "xy")
    compute_set = graph.add_compute_set("scale")
    for number in range(4 * TILES):
        part = slice(number * elements, (number + 1) * elements)
        vertex = graph.add_vertex(compute_set, "Scale", {"x": x[part], "y": y[part]})
        for placed in (x[part], y[part], vertex):
            graph.set_tile_mapping(placed, number % num_tiles)
        graph.set_perf_estimate(vertex, 60)
    return poplar.Engine(graph, poplar.program.Sequence(poplar.program.Execute(compute_set))).profile


WEIGHTS = [array(512, 512)] * 2
FOUR_STAGES: dict[str, Any] = {"num_ipus": 4, "donate_argnums": 0}
KINDS: Mapping[str, Planted] = {
    "state on a mesh": Planted(STATE, on_mesh, lambda: on_mesh(donate_argnums=0).cycles),
    "a row more than tiles": planted(
        "unequal work of tiles",
        *(softmax_of_rows, array(TILES + 3, 4096)),
        donate_argnums=0,
        remedy=cycles(softmax_of_rows, array(TILES, 4096), calls=(TILES + 3) / TILES, donate_argnums=0),
    ),
    "hash of 64-bit numbers": typed(np.int64, np.int32, hashed, (1 << 16,)),
    "product of doubles": typed(np.float64, np.float32, product, (64, 64), (64, 64)),
    "product of brain floats": typed(jnp.bfloat16, np.float16, product, (256, 256), (256, 256)),
    "rows of 509 halves": planted(
        "slow paths of odd rows",
        *(scaled_rows, array(4 * TILES, 509, dtype=np.float16), array(509, dtype=np.float16)),
        donate_argnums=(0, 1),
        remedy=cycles(
            *(scaled_rows, array(4 * TILES, 512, dtype=np.float16), array(512, dtype=np.float16)),
            donate_argnums=(0, 1),
        ),
    ),
    "rates in a loop": planted(
        "steps on a single tile",
        *(partial(rates_in_turn, True), array(1 << 12), array(64)),
        donate_argnums=(0, 1),
        remedy=cycles(partial(rates_in_turn, False), array(1 << 12), array(64), donate_argnums=(0, 1)),
    ),
    "callback in a loop": planted(
        HOST,
        *(partial(mean_by_python, True), array(1 << 14)),
        donate_argnums=0,
        remedy=cycles(partial(mean_by_python, False), array(1 << 14), donate_argnums=0),
    ),
    "small sums in turn": planted(
        "collectives",
        *(sums_in_turn, [array(256)] * 20),
        **ON_FOUR,
        donate_argnums=0,
        remedy=cycles(sum_at_once, [array(256)] * 20, **ON_FOUR, donate_argnums=0),
    ),
    "images in turn": planted(
        "sync",
        *(images_in_turn, array(64, 8, 8, 8), array(3, 3, 8, 8)),
        donate_argnums=(0, 1),
        remedy=cycles(
            lambda xs, w: (convolved(xs, w), w), array(64, 8, 8, 8), array(3, 3, 8, 8), donate_argnums=(0, 1)
        ),
    ),
    "moments in streaming memory": planted(
        "streaming memory",
        *(momentum_of, WEIGHTS, WEIGHTS, array(16, 512)),
        donate_argnums=(0, 1),
        offload_argnums=1,
        remedy=cycles(momentum_of, WEIGHTS, WEIGHTS, array(16, 512), donate_argnums=(0, 1)),
    ),
    "a micro-batch for each stage": planted(
        "IPUs that wait",
        *(partial(stages_of_one, 4), [array(256, 256)] * 4, array(4 * 64, 256)),
        **FOUR_STAGES,
        remedy=cycles(
            *(partial(stages_of_one, 64), [array(256, 256)] * 4, array(64 * 64, 256)), calls=1 / 16, **FOUR_STAGES
        ),
    ),
    "Poplar vertices on tile 0": Planted(
        "steps on a single tile", lambda: poplar_vertices(1), lambda: poplar_vertices(TILES).cycles
    ),
}


if __name__ == "__main__":
    planted_programs.main(sys.argv[1:], KINDS, {})
