"""`ipu.pipeline` of values with axes of a mesh in their types: explicit axes, and those of a `jax.shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P, reshard

import ipujax as ipu

EXPLICIT = ipu.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
MANUAL = AbstractMesh((2,), ("x",))
DEVICE = ipu.IPUModel(num_ipus=4, tiles_per_ipu=8)
W = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)
ROWS = np.linspace(-1, 2, 24, dtype=np.float32).reshape(8, 3)


def loss(w: Any, rows: Any, stages: int = 1) -> Any:
    with ipu.stage(0):
        h = jax.nn.relu(rows @ w)
    with ipu.stage(stages - 1):
        return jnp.mean((h @ w) ** 2)


def on_explicit_axes(*specs: P) -> list[jax.ShapeDtypeStruct]:
    """Types of weights and rows over a mesh of explicit axes."""
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(EXPLICIT, spec))
        for x, spec in zip((W, ROWS), specs, strict=True)
    ]


def test_results_over_explicit_axes_of_a_mesh() -> None:
    """They are split as those of one micro-batch, whatever reduces them."""

    def function(x: Any) -> Any:
        split = reshard(x, P("x"))
        return split, split * 2, split * 3

    mesh = AbstractMesh((4,), ("x",), (AxisType.Explicit,))
    accumulated = ipu.pipeline(function, micro_batches=2, reduce=("last", "sum", "running_mean"))
    with jax.sharding.use_abstract_mesh(mesh):
        results = jax.make_jaxpr(accumulated)(jax.ShapeDtypeStruct((8, 3), jnp.float32)).out_avals
    assert [x.str_short() for x in results] == ["float32[4@x,3]"] * 3


def test_batches_over_explicit_axes_of_a_mesh() -> None:
    """Each micro-batch is split as the batch is."""
    accumulated = ipu.pipeline(jax.value_and_grad(loss), micro_batches=4)
    compiled = ipu.jit(accumulated, device=DEVICE).lower(*on_explicit_axes(P(), P("x"))).compile()
    for actual, expected in zip(compiled(W, ROWS), jax.value_and_grad(loss)(W, ROWS), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stages", "is_shared"), [(1, True), (1, False), (2, True)])
def test_gradients_inside_of_a_shard_map(stages: int, is_shared: bool) -> None:
    """JAX sums the gradients of parameters that all devices share; losses, and gradients of their own, differ."""

    def part(w: Any, rows: Any) -> Any:
        value_and_grad = jax.value_and_grad(lambda w, rows: loss(w, rows, stages))
        accumulated = ipu.pipeline(value_and_grad, micro_batches=2)
        value, grads = accumulated(w, rows) if is_shared else accumulated(lax.pcast(w, "x", to="varying"), rows)
        return lax.pmean(value, "x"), grads / 2 if is_shared else lax.pmean(grads, "x")

    mapped = jax.shard_map(part, mesh=MANUAL, in_specs=(P(), P("x")), out_specs=P())
    expected = jax.value_and_grad(loss)(W, ROWS)
    for actual, whole in zip(ipu.jit(mapped, device=DEVICE)(W, ROWS), expected, strict=True):
        np.testing.assert_allclose(actual, whole, rtol=1e-5, atol=1e-6)


STATES = {
    "of one device": (lambda s, rows: s + rows.sum(), r"float32\[3\]{V:x}[\s\S]*pcast\(s, \('x',\), to=\"varying\"\)"),
    "of all devices": (lambda s, rows: lax.psum(s + rows.sum(), "x"), r"try: jax.lax.pcast\(result, \('x',\)"),
}


@pytest.mark.parametrize("name", STATES)
def test_states_that_vary_over_other_axes_than_before_are_refused(name: str) -> None:
    fun, match = STATES[name]
    spec = P("x") if name == "of all devices" else P()
    run = ipu.pipeline(fun, micro_batches=2, carry={0: ()})
    mapped = jax.shard_map(run, mesh=MANUAL, in_specs=(spec, P("x")), out_specs=P("x"))
    with pytest.raises(ipu.ArgumentError, match=match):
        jax.make_jaxpr(mapped)(np.ones(6 if spec else 3, np.float32), ROWS)


def test_states_that_are_split_otherwise_than_before_are_refused() -> None:
    run = ipu.pipeline(lambda w, rows: reshard(w + rows.sum(), P(None, "x")), micro_batches=2, carry={0: ()})
    state = jax.ShapeDtypeStruct((3, 4), np.float32, sharding=NamedSharding(EXPLICIT, P()))
    with pytest.raises(ipu.ArgumentError, match=r"another type[\s\S]*float32\[3,4@x\][\s\S]*jax\.sharding\.reshard"):
        ipu.jit(run, device=DEVICE).lower(state, on_explicit_axes(P(), P("x"))[1])


def test_micro_batches_of_fewer_rows_than_devices_are_refused() -> None:
    run: Any = ipu.pipeline(loss, micro_batches=8)
    with pytest.raises(ipu.ArgumentError, match=r"cannot be split into 8 micro-batches over the axes[\s\S]*8@x,3"):
        ipu.jit(run, device=DEVICE).lower(*on_explicit_axes(P(), P("x")))
