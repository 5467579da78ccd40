"""Kernels of Pallas as loops over their grid: the numbers of Pallas' own interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import ipujax as ipu
from ipujax.lowering.jax_compat import jaxpr_as_fun
from ipujax.lowering.jaxpr import primitive_names
from ipujax.lowering.passes.inline import inline

X = np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32)
N = jax.ShapeDtypeStruct((24, 16), np.float32)
ROWS = pl.BlockSpec((8, 16), lambda i: (i, 0))


def called(kernel: Callable[..., None], out: Any = N, ins: Any = (ROWS,), outs: Any = ROWS, **params: Any) -> Any:
    params = {"grid": (3,), "interpret": True, **params}
    return pl.pallas_call(kernel, in_specs=list(ins), out_specs=outs, out_shape=out, **params)


def doubled(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * 2


def numbered(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] + pl.program_id(0) * pl.num_programs(0)


def summed(x_ref: Any, o_ref: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...].sum(0, keepdims=True)


def looped(x_ref: Any, o_ref: Any) -> None:
    @pl.loop(0, 8)
    def _(row: Any) -> None:
        o_ref[row, :] = x_ref[7 - row, :]


def carried(x_ref: Any, o_ref: Any, total: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        total[...] = jnp.ones_like(total)

    total[...] += x_ref[...]
    o_ref[...] = total[...]


def chosen(numbers: Any, x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] + numbers[pl.program_id(0)]


def prefetched(x: Any) -> Any:
    from jax.experimental.pallas import tpu as pltpu

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(3,),
        in_specs=[pl.BlockSpec((8, 16), lambda i, numbers: (numbers[i], 0))],
        out_specs=pl.BlockSpec((8, 16), lambda i, numbers: (i, 0)),
    )
    numbers = np.array([2, 0, 1], np.int32)
    return pl.pallas_call(chosen, grid_spec=spec, out_shape=N, interpret=True)(numbers, x)


def in_scratch(x: Any) -> Any:
    from jax.experimental.pallas import tpu as pltpu

    return called(carried, scratch_shapes=[pltpu.VMEM((8, 16), np.float32)])(x)


@jax.custom_vjp
def twice(x: Any) -> Any:
    return called(doubled)(x)


twice.defvjp(lambda x: (twice(x), None), lambda _, g: (called(doubled)(g),))

CALLS: dict[str, Callable[[Any], Any]] = {
    "blocks": called(doubled),
    "indices": called(numbered),
    "accumulator": called(
        summed, jax.ShapeDtypeStruct((1, 16), np.float32), outs=pl.BlockSpec((1, 16), lambda i: (0, 0))
    ),
    "loop": called(looped),
    "scratch": in_scratch,
    "prefetched": prefetched,
    "alias, part of the grid": called(doubled, grid=(2,), input_output_aliases={0: 0}),
    "elements that no step writes": called(doubled, grid=(2,)),
    "rest of a block": lambda x: called(doubled, jax.ShapeDtypeStruct((20, 16), np.float32))(x[:20]),
    "squeezed": called(
        doubled,
        grid=(24,),
        ins=[pl.BlockSpec((None, 16), lambda i: (i, 0))],
        outs=pl.BlockSpec((None, 16), lambda i: (i, 0)),
    ),
    "reversed blocks": called(doubled, ins=[pl.BlockSpec((8, 16), lambda i: (2 - i, 0))]),
    "no grid": lambda x: pl.pallas_call(doubled, out_shape=N, interpret=True)(x),
    "two dimensions": called(
        numbered,
        grid=(3, 2),
        ins=[pl.BlockSpec((8, 8), lambda i, j: (i, j))],
        outs=pl.BlockSpec((8, 8), lambda i, j: (i, j)),
    ),
    "vmap": lambda x: jax.vmap(called(numbered))(jnp.stack([x, -x])),
    "jvp": lambda x: jax.jvp(called(doubled), (x,), (x,)),
    "gradient": jax.grad(lambda x: jnp.sin(twice(x)).sum()),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_are_those_of_the_interpreter(name: str) -> None:
    fun = CALLS[name]
    jaxpr = inline(jax.make_jaxpr(fun)(X))
    assert "pallas_call" not in set(primitive_names(jaxpr.jaxpr))
    results = jax.jit(jaxpr_as_fun(jaxpr))(X)
    for actual, expected in zip(results, jax.tree.leaves(jax.jit(fun)(X)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_block_stays_while_inner_steps_add_to_it() -> None:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] += x_ref[...]

    call = called(
        kernel,
        grid=(3, 2),
        ins=[pl.BlockSpec((8, 8), lambda i, j: (i, j))],
        outs=pl.BlockSpec((8, 8), lambda i, j: (i, 0)),
    )
    (outer,) = [eqn for eqn in inline(jax.make_jaxpr(call)(X)).eqns if eqn.primitive.name == "scan"]
    (inner,) = [eqn for eqn in outer.params["jaxpr"].eqns if eqn.primitive.name == "scan"]
    assert "dynamic_update_slice" in {eqn.primitive.name for eqn in outer.params["jaxpr"].eqns}
    assert "dynamic_update_slice" not in set(primitive_names(inner.params["jaxpr"].jaxpr))


def test_a_grid_of_data_runs_as_often_as_it_says() -> None:
    def fun(steps: Any, x: Any) -> Any:
        return called(doubled, grid=(steps,))(x)

    np.testing.assert_array_equal(ipu.jit(fun)(np.int32(2), X), jax.jit(fun)(np.int32(2), X))


def test_lines_are_those_of_the_kernel() -> None:
    line = doubled.__code__.co_firstlineno + 1
    lines = {op.origin.line for op in ipu.jit(called(doubled)).profile(X).operations()}
    assert f"test_pallas_calls.py:{line} (doubled)" in lines


def test_a_kernel_for_other_chips_runs() -> None:
    call = called(doubled, interpret=False)
    np.testing.assert_array_equal(ipu.jit(call)(X), 2 * X)


SIMULATED = pltpu.InterpretParams(uninitialized_memory="zero")  # a TPU; other memory is NaN before it is written


def first_row(x_ref: Any, o_ref: Any) -> None:
    o_ref[0] = x_ref[0]


def copied_by_two_cores(x: Any) -> Any:
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=2)

    def copy(refs: Any) -> None:
        pl.core_map(mesh, interpret=SIMULATED)(lambda: pltpu.sync_copy(*refs))

    return pl.run_state(copy)((x, jnp.zeros_like(x)))[1]


@pytest.mark.parametrize("fun", [called(first_row, interpret=SIMULATED), copied_by_two_cores], ids=["grid", "cores"])
def test_a_simulated_tpu_runs_as_in_jax(fun: Callable[[Any], Any]) -> None:
    np.testing.assert_array_equal(ipu.jit(fun)(X), jax.jit(fun)(X))
