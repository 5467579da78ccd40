"""Gradients of layers are added to their accumulators in the loop over layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import ipujax as ipu
from ipujax.lowering.choice import Choice
from ipujax.lowering.jax_compat import Var
from ipujax.lowering.lower import lower
from ipujax.lowering.pipelining.part_results import loop_sums
from ipujax.runtime.graph import BYTE_COST_CYCLES
from tests.ipujax.pipeline.pipeline_models import array
from tests.lowering.helpers import assert_same, passed, run_tiles, small_target

LAYERS, WIDTH, ROWS = 5, 6, 8
WEIGHTS = LAYERS, WIDTH, WIDTH


def loss(params: Any, x: jax.Array) -> jax.Array:
    with ipu.stage(0):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
    with ipu.stage(1):
        return jnp.sum((x @ params["last"]) ** 2)


def test_no_stack_of_gradients_is_beside_their_sum() -> None:
    params = {"w": array(*WEIGHTS), "last": array(WIDTH, 2)}
    fun = ipu.pipeline(jax.grad(loss), micro_batches=4)
    args = params, array(ROWS, WIDTH, seed=1)
    target = small_target(4, num_ipus=2)
    program = lower(passed(fun, *args), target, choice=Choice(4 * BYTE_COST_CYCLES, target.bytes_per_tile))
    stacks = [v.name for v in program.graph.variables if v.size == np.prod(WEIGHTS)]
    assert len([name for name in stacks if "sum" in name]) == 1, "the accumulator"
    assert not [name for name in stacks if name.endswith("scan/stack")], stacks
    expected = jax.tree.leaves(jax.jit(jax.grad(lambda p, x: loss(p, x) / 4))(*args))
    assert_same(run_tiles(program, args), expected, 1e-5, 1e-6, "tile by tile")


def rows_of_layers(weights: Any, x: jax.Array, scale: float = 1) -> Any:
    with ipu.stage(0):
        x, rows = lax.scan(lambda x, w: (jnp.tanh(x @ w), scale * jnp.sum(x @ w, 0)), x, weights)
    with ipu.stage(1):
        return jnp.sum(x), rows


def assert_less_memory_keeps_numbers(fun: Any) -> None:
    """Run a pipeline of such a function in the plan in which loops add rows to sums, tile by tile."""
    args = array(2, 2, 2), array(4, 2, seed=1)
    target = small_target(4, num_ipus=2)
    program = lower(passed(fun, *args), target, choice=Choice(4 * BYTE_COST_CYCLES, target.bytes_per_tile))
    assert_same(run_tiles(program, args), jax.tree.leaves(jax.jit(fun)(*args)), 1e-5, 1e-6, "tile by tile")


def test_rows_that_are_two_results_are_added_to_both() -> None:
    def twice(weights: Any, x: jax.Array) -> Any:
        total, rows = rows_of_layers(weights, x)
        return total, rows, rows

    assert_less_memory_keeps_numbers(ipu.pipeline(twice, micro_batches=2, reduce=("sum", "sum", "last")))


def test_rows_are_cast_before_they_are_added() -> None:
    """A row that is infinite in the type of the result is so in a wider sum."""

    def halves(weights: Any, x: jax.Array) -> Any:
        total, rows = rows_of_layers(weights, x, scale=1e6)
        return total, rows.astype(np.float16)

    assert_less_memory_keeps_numbers(ipu.pipeline(halves, micro_batches=2, reduce="sum", accumulate_dtype=np.float32))


def test_casts_of_rows_are_left_to_the_sum() -> None:
    def fun(x: jax.Array, w: jax.Array) -> Any:
        x, rows = lax.scan(lambda x, w: (x @ w, (x, x * 2, x * 3)), x, w)
        wide, read, shared = (y.astype(jnp.float32) for y in rows)
        return wide, read, shared, rows[2], x + jnp.sum(read)

    jaxpr = passed(fun, np.ones((2, 2), np.float16), np.ones((3, 2, 2), np.float16)).jaxpr
    wide, read, shared, _, _ = jaxpr.outvars
    found = loop_sums(jaxpr, [v for v in (wide, read, shared) if isinstance(v, Var)])
    assert list(found.stacks) == [wide], "others are read by more than their sum"
    assert found.jaxpr.outvars[0] is found.stacks[wide] is not wide  # type: ignore[index]
    assert len(found.jaxpr.eqns) == len(jaxpr.eqns) - 1
