"""Random programs of every kind for `benchmarks/random_checks.py`, made of the grammars of the tests.

A kind takes a random program, which also has a seed for further choices, and a number of tiles; it returns a function
of `ipu.jit` with its arguments, or None if the program is none of the kind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu
from ipujax import popsparse
from ipujax.popsparse.dynamic_plan import DynamicPlan
from tests.ipujax.popsparse.test_static_matmul import operands, random_pattern
from tests.ipujax.test_random_parallel import (
    COLLECTIVES,
    MICRO_BATCHES,
    REPLICAS,
    arguments_of_each,
    staged,
    stays_on_device,
)
from tests.lowering.random_programs import Program
from tests.lowering.test_random_programs import with_bytes

Case = tuple[Any, tuple[Any, ...]]  # function of `ipu.jit`, arguments
ITERATIONS = 4  # of a streamed loop
MESH = ipu.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))


def one_ipu(program: Program, tiles: int, options: ipu.Options) -> Case:
    """Values and gradient of a program; arguments in streaming memory in one of four."""

    def fun(*args: Any) -> Any:
        return program(*args), program.gradient(*args) if program.differentiable else ()

    offload = (0,) if program.seed % 4 == 0 else ()
    device = ipu.IPUModel(tiles_per_ipu=tiles)
    return ipu.jit(fun, device=device, options=options, offload_argnums=offload), program.arguments()


def replicas(program: Program, tiles: int, options: ipu.Options) -> Case:
    """A program on replicas that meet in collectives behind it."""
    columns = arguments_of_each(program, REPLICAS)
    is_split = [column[0].ndim > 0 for column in columns]

    def replica(*args: Any) -> list[jax.Array]:
        results = [COLLECTIVES[n % len(COLLECTIVES)](y) for n, y in enumerate(program(*args), program.seed)]
        if program.differentiable:
            results += lax.pmean(with_bytes(program.gradient(*args)), "replica")
        return [y[None] for y in results]

    fun = ipu.jit(
        replica,
        device=ipu.IPUModel(REPLICAS, tiles_per_ipu=tiles),
        replicas=REPLICAS,
        in_specs=tuple(P("replica") if split else P() for split in is_split),
        out_specs=P("replica"),
        options=options,
    )
    pairs = zip(columns, is_split, strict=True)
    return fun, tuple(np.concatenate(column) if split else column[0] for column, split in pairs)


def pipeline(program: Program, tiles: int, options: ipu.Options) -> Case | None:
    """A program whose steps are divided among the stages of a pipeline."""
    if not stays_on_device(program.steps):
        return None
    columns = arguments_of_each(program, MICRO_BATCHES)
    batch = [np.stack(column) for column in columns[1:]]

    def loss(weights: Any, batch: Any) -> jax.Array:
        return staged(program, weights, *(x[0] for x in batch))

    fun = jax.value_and_grad(loss) if program.differentiable else loss
    run = ipu.pipeline(fun, micro_batches=MICRO_BATCHES)
    return ipu.jit(run, device=ipu.IPUModel(4, tiles_per_ipu=tiles), options=options), (columns[0][0], batch)


def mesh(program: Program, tiles: int, options: ipu.Options) -> Case:
    """Layers over a mesh, on replicas or not, in stages or not; widths and forms are random."""
    rng = np.random.default_rng(program.seed)
    num_replicas = int(rng.integers(1, 3))
    has_stages = bool(rng.integers(0, 2))
    width = 4 * int(rng.integers(1, 4))
    hidden = 2 * width
    shapes = ((width, hidden), (hidden, width), (width, hidden), (hidden, width))
    weights = [0.2 * rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    x = rng.standard_normal((8 * num_replicas, width)).astype(np.float32)

    def split(value: Any, spec: P) -> Any:
        return lax.with_sharding_constraint(value, NamedSharding(MESH, spec))

    def layers(weights: Any, x: Any) -> Any:
        return jax.nn.relu(x @ split(weights[0], P(None, "model"))) @ split(weights[1], P("model"))

    def loss(weights: Any, x: Any) -> Any:
        with ipu.stage(0) if has_stages else nullcontext():
            h = layers(weights[:2], x)
        with ipu.stage(1) if has_stages else nullcontext():
            return (layers(weights[2:], h) ** 2).mean()

    step = jax.value_and_grad(loss)
    if has_stages:
        step = ipu.pipeline(step, micro_batches=2)
    num_ipus = 2 * num_replicas * (2 if has_stages else 1)
    device = ipu.IPUModel(num_ipus, tiles_per_ipu=tiles)
    if num_replicas == 1:
        return ipu.jit(step, device=device, options=options), (weights, x)

    def replica(weights: Any, x: Any) -> Any:
        return lax.pmean(step(weights, x), "replica")

    settings: dict[str, Any] = {"replicas": num_replicas, "in_specs": (P(), P("replica")), "out_specs": P()}
    return ipu.jit(replica, device=device, options=options, **settings), (weights, x)


def tile_map(program: Program, tiles: int, options: ipu.Options) -> Case:
    """A function of rows on tiles, whose rows move between two maps; with its gradient."""
    rng = np.random.default_rng(program.seed)
    count = int(rng.integers(2, 6))
    homes = tuple(rng.permutation(tiles)[:count].tolist())
    order = tuple(rng.permutation(count).tolist())
    x = rng.standard_normal((count, 3, int(rng.integers(1, 9)))).astype(np.float32)

    def row(a: Any, b: Any) -> Any:
        return jnp.sin(a) * b + 1, jnp.sum(a @ b.T)

    def loss(x: Any, y: Any) -> Any:
        u, v = ipu.tile_map(row, ipu.tile_put_sharded(x * 2, homes), ipu.tile_put_sharded(y, homes))
        return jnp.sum(ipu.tile_gather(u, order, homes) * jnp.arange(x.shape[-1])) + jnp.sum(v)

    device = ipu.IPUModel(tiles_per_ipu=tiles)
    return ipu.jit(jax.value_and_grad(loss, (0, 1)), device=device, options=options), (x, x + 1)


def sparse(program: Program, tiles: int, options: ipu.Options) -> Case:
    """A product of a sparse matrix, whose pattern is data, with its gradients."""
    rng = np.random.default_rng(program.seed)
    block = (1, 4, 8)[int(rng.integers(3))]
    rows = int(rng.integers(2, 5))
    columns = int(rng.integers(2, 5))
    pattern = random_pattern(rows * block, columns * block, block, 0.5, program.seed)
    plan = DynamicPlan(pattern.shape, block, max(1, pattern.num_blocks), columns=6, buckets=4, oversize=2.0)
    values, x, g = operands(pattern, 6)

    def product(sparse: Any, x: Any, g: Any) -> Any:
        y, backward = jax.vjp(partial(popsparse.dynamic_matmul, plan), sparse, x)
        return y, backward(g)

    device = ipu.IPUModel(tiles_per_ipu=tiles)
    return ipu.jit(product, device=device, options=options), (plan.encode(pattern, values), x, g)


def refs(program: Program, tiles: int, options: ipu.Options) -> Case:
    """A program that reads a Ref, and writes its results there."""
    state = jax.new_ref(jnp.zeros(4, jnp.float32))

    def fun(state: Any, *args: Any) -> Any:
        outs = program(*args)
        floats = [jnp.tanh(y).sum() for y in outs if y.dtype == jnp.float32 and y.size]
        state[...] = state[...] * 0.5 + sum(floats, jnp.float32(program.seed))
        state[1] = state[2] + 1
        return outs, state[...].sum()

    device = ipu.IPUModel(tiles_per_ipu=tiles)
    return ipu.jit(fun, device=device, options=options), (state, *program.arguments())


def _scanned(body: Any, w: Any, rows: Any) -> Any:
    return lax.scan(body, w, rows)


def _reversed(body: Any, w: Any, rows: Any) -> Any:
    return lax.scan(body, w, rows, reverse=True)


def _nested(body: Any, w: Any, rows: Any) -> Any:
    halves = [row.reshape(2, ITERATIONS // 2, *row.shape[1:]) for row in rows]
    return lax.scan(lambda w, half: lax.scan(body, w, half), w, halves)


def _in_branch(body: Any, w: Any, rows: Any) -> Any:
    return lax.cond(jnp.sum(w) > 0, partial(_scanned, body), partial(_reversed, body), w, rows)


def _twice(body: Any, w: Any, rows: Any) -> Any:
    w, first = lax.scan(body, w, rows)
    w, second = lax.scan(body, w, rows)
    return w, (first, second)


def _in_stages(body: Any, w: Any, rows: Any) -> Any:
    with ipu.stage(0):
        w, first = lax.scan(body, w, rows)
    with ipu.stage(1):
        w, second = lax.scan(body, w * 2, rows)
    return w, (first, second)


FORMS = (_scanned, _reversed, _nested, _in_branch, _twice, _in_stages)


def streamed_loop(program: Program, tiles: int, options: ipu.Options) -> Case | None:
    """A program as the body of a loop that streams; in one of the forms, on replicas, with a Ref, or neither."""
    if not stays_on_device(program.steps):
        return None
    columns = arguments_of_each(program, ITERATIONS)
    rows = [np.stack(column) for column in columns[1:]]
    rng = np.random.default_rng(program.seed)
    form = FORMS[int(rng.integers(len(FORMS)))]
    surroundings = ("replicas", "ref", "none")[int(rng.integers(3))]

    def body(w: Any, row: Any) -> Any:
        results = program(w, *row)
        floats = [jnp.tanh(y).sum() for y in results if y.dtype == jnp.float32 and y.size]
        return w * 0.5 + sum(floats, jnp.float32(0)), results

    options = replace(options, stream_loops=True)
    num_ipus = (REPLICAS if surroundings == "replicas" else 1) * (2 if form is _in_stages else 1)
    device = ipu.IPUModel(num_ipus, tiles_per_ipu=tiles)
    if surroundings == "replicas":

        def replica(w: Any, rows: Any) -> Any:
            mine, results = form(body, w, [row + row.dtype.type(1) for row in rows])
            return lax.pmean(mine, "replica"), results

        in_specs = (P(), P(None))
        fun = ipu.jit(replica, device=device, replicas=REPLICAS, in_specs=in_specs, out_specs=P(), options=options)
        return fun, (columns[0][0], rows)
    if surroundings == "ref":
        total = jax.new_ref(jnp.zeros(3, jnp.float32))

        def counted(total: Any, w: Any, rows: Any) -> Any:
            def adding(w: Any, row: Any) -> Any:
                total[1] += jnp.sum(w)
                return body(w, row)

            return form(adding, w, rows), total[...]

        return ipu.jit(counted, device=device, options=options), (total, columns[0][0], rows)
    return ipu.jit(partial(form, body), device=device, options=options), (columns[0][0], rows)


# Of ten programs the kinds of each; programs of the grammar have operations with Refs and memory kinds, too.
KINDS: tuple[Callable[[Program, int, ipu.Options], Case | None], ...] = (
    one_ipu,
    replicas,
    one_ipu,
    pipeline,
    one_ipu,
    mesh,
    one_ipu,
    tile_map,
    refs,
    sparse,
)
