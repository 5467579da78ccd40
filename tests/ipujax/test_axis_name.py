"""`ipu.jit(axis_name=…)`: programs that call the axis of replicas otherwise, and messages that call it as they do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from tests.ipujax.distributed.distributed_helpers import Runner, run

__all__ = ["run"]  # a fixture

DEVICE = ipu.IPUModel(2, tiles_per_ipu=8)
X = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def trained(axis: str, device: Any) -> Any:
    """Two steps of a pipelined, sharded training step over an axis of that name."""
    optimizer = ipu.optim.shard(optax.adam(1e-2), axis, replicas=2, min_elements=4)
    state = optimizer.init(W)
    specs = ipu.optim.shard_specs(state)

    @ipu.jit(
        device=device,
        replicas=2,
        axis_name=axis,
        in_specs=(P(), specs, P(axis)),
        out_specs=(P(), specs, P(), P(None, axis)),
    )
    def step(w: Any, state: Any, x: Any) -> Any:
        value, grads = ipu.pipeline(jax.value_and_grad(loss), micro_batches=2)(w, x)
        updates, state = optimizer.update(grads, state, w)
        each = lax.axis_index(axis) * jnp.ones((1, 1)) + lax.fori_loop(0, 2, lambda _, y: lax.pmean(y, axis), x.sum())
        return optax.apply_updates(w, updates), state, lax.pmean(value, axis), each

    w, state, *_ = step(W, state, X)
    return step(w, state, X)


@pytest.mark.parametrize("device", [DEVICE, ipu.CPU()], ids=repr)
def test_the_name_changes_no_number(device: Any) -> None:
    named = trained("batch", device)
    plain = trained("replica", device)
    for a, b in zip(jax.tree.leaves(named), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)


def test_transformations_see_the_name() -> None:
    fun = ipu.jit(
        lambda x: lax.psum(x**2, "batch").sum(), device=DEVICE, replicas=2, axis_name="batch", in_specs=P("batch")
    )
    np.testing.assert_allclose(jax.grad(fun)(X), 2 * X, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(fun)(X[:, :, None] * X[:, None, :]), (X**2).sum(1) ** 2, rtol=1e-6)


def test_inner_functions_and_vmap_over_an_axis_of_the_usual_name() -> None:
    inner = jax.vmap(lambda x: x - lax.pmean(x, "replica") + lax.axis_index("batch"), axis_name="replica")
    fun = ipu.jit(inner, device=DEVICE, replicas=2, axis_name="batch", in_specs=P("batch"), out_specs=P("batch"))
    parts = X.reshape(2, 4, 4)
    expected = parts - parts.mean(1, keepdims=True) + np.arange(2)[:, None, None]
    np.testing.assert_allclose(fun(X), expected.reshape(8, 4), rtol=1e-6, atol=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "spec of the usual name": (
        {"axis_name": "batch", "in_specs": P("replica")},
        None,
        r'name axes that do not exist[\s\S]*"batch" once[\s\S]*axis_name=\'replica\'',
    ),
    "spec of another name": ({"in_specs": P("batch")}, None, r"\"replica\" once[\s\S]*try: axis_name='batch'"),
    "collective of the usual name": (
        {"axis_name": "batch", "in_specs": P("batch")},
        lambda x: lax.psum(x, "replica"),
        r"over the axis 'replica'[\s\S]*test_axis_name.py[\s\S]*expected: \"batch\"[\s\S]*axis_name='replica'",
    ),
    "result that differs": (
        {"axis_name": "batch", "in_specs": P("batch")},
        lambda x: x.sum(),
        r'expected: P\("batch"\)[\s\S]*jax.lax.pmean\(x, "batch"\)',
    ),
    "branch on which replicas disagree": (
        {"axis_name": "batch", "in_specs": P("batch")},
        lambda x: lax.cond(x.sum() > 1, lambda: lax.psum(x, "batch"), lambda: x),
        r'may disagree[\s\S]*jax.lax.pmax\(..., "batch"\)',
    ),
    "no replicas": ({"replicas": None, "axis_name": "batch"}, None, r"replicas= is not given[\s\S]*'batch'"),
    "no name": ({"axis_name": 3}, None, r"axis_name of ipu.jit[\s\S]*expected: a string[\s\S]*got: 3"),
    "no replicas, a collective": (
        {"replicas": None},
        lambda x: lax.psum(x, "batch"),
        r"over the axis 'batch'[\s\S]*ipu.jit\(..., replicas=N, axis_name='batch'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_messages_call_the_axis_as_the_program_does(name: str) -> None:
    settings, fun, match = REFUSED[name]
    with pytest.raises(ipu.IpuError, match=match):
        ipu.jit(fun or (lambda x: x), device=DEVICE, **{"replicas": 2, **settings})(X)


def test_an_optimiser_that_cannot_be_sharded_names_the_axis() -> None:
    optimizer = ipu.optim.shard(optax.adafactor(1e-2), "batch", replicas=2, min_elements=4)
    fun = ipu.jit(lambda w: optimizer.update(w, optimizer.init(w), w)[0], device=DEVICE, replicas=2, axis_name="batch")
    with pytest.raises(ipu.ArgumentError, match=r'jax.lax.pmean\(grads, "batch"\)'):
        fun(np.ones((256, 256), np.float32))


def test_replicas_of_several_processes(run: Runner) -> None:
    source = """
    import ipujax as ipu
    ipu.distributed.init()
    import jax, numpy as np
    from jax.sharding import PartitionSpec as P
    for device in (ipu.IPUModel(2, tiles_per_ipu=4), ipu.CPU()):
        fun = ipu.jit(lambda x: jax.lax.psum(x, "batch"), device=device, replicas=2, axis_name="batch",
                      in_specs=P("batch"))
        print("sum", int(fun(np.float32([ipu.distributed.instance_index() + 3]))[0]))
        split = ipu.jit(lambda x: x * 2, device=device, replicas=2, axis_name="batch",
                        in_specs=P("batch"), out_specs=P("batch"))
        assert split.eval_shape(np.ones((3, 2))).shape == split(np.ones((3, 2))).shape == (3, 2)
    """
    assert run(source, "--replicas", "2") == 0, run.err
    assert run.printed("sum") == [7] * 4
