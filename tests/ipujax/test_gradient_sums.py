"""Gradients that collectives sum over replicas: which lines `ipu.jit` warns of, and which it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax import lax
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec as P

import ipujax as ipu

N = 4
W = (np.arange(32, dtype=np.float32).reshape(8, 4) - 16) / 16  # two rows for each replica
X = np.cos(np.arange(24, dtype=np.float32)).reshape(8, 3)
LOSS = r"a gradient passes through the psum or pmean at test_gradient_sums.py:\d+ \(loss\)"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Warnings of gradients while a function of a replica's part of the weights and of the batch is traced."""

    def collect(fun: Callable[..., Any], *args: Any, **settings: Any) -> list[str]:
        device = ipu.IPUModel(num_ipus=N, tiles_per_ipu=8)
        specs = {"in_specs": P("replica"), "out_specs": P("replica"), "replicas": N, **settings}
        with caplog.at_level(logging.WARNING, "ipujax"):
            ipu.jit(fun, device=device, **specs).trace(*args or (W, X))
        return [record.getMessage() for record in caplog.records if "gradient" in record.getMessage()]

    return collect


def summed(x: Any) -> Any:
    return lax.psum(x, "replica")


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(lax.psum(x.T @ w, "replica")) ** 2)


def plain_loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x.T @ w) ** 2)


def layers(block: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that applies a function of weights and activations several times, in a loop."""

    def run(w: Any, x: Any) -> Any:
        return lax.scan(lambda h, _: (block(w, h), None), x, None, length=3)[0].sum()

    return run


def block(w: Any, h: Any) -> Any:
    return jnp.tanh(w @ summed(w.T @ h))


WARNED: dict[str, Callable[..., Any]] = {
    "grad": jax.grad(loss),
    "value_and_grad": lambda w, x: jax.value_and_grad(loss)(w, x)[1],
    "vjp": lambda w, x: jax.vjp(loss, w, x)[1](1.0),
    "linearize": lambda w, x: jax.linear_transpose(jax.linearize(lambda w: loss(w, x), w)[1], w)(1.0),
    "jit": jax.grad(jax.jit(loss)),
    "jit of all": jax.jit(jax.grad(loss)),
    "checkpoint": jax.grad(jax.checkpoint(loss)),
    "vmap": lambda w, x: jax.vmap(jax.grad(loss), (None, 0))(w, x[None]),
    "scan": jax.grad(layers(block)),
    "scan of checkpoint": jax.grad(layers(jax.checkpoint(block))),
    "cond": jax.grad(lambda w, x: lax.cond(x[0, 0] > 0, loss, plain_loss, w, x)),
    "mean of a loss": jax.grad(lambda w, x: lax.pmean(plain_loss(w, x), "replica")),
    "synchronised mean": jax.grad(lambda w, x: jnp.mean((w.T @ x - lax.pmean(jnp.mean(w.T @ x), "replica")) ** 2)),
    "linear": jax.grad(lambda w, x: lax.psum((x.T @ w).sum(), "replica")),
    "gather": jax.grad(lambda w, x: jnp.mean(lax.all_gather(w, "replica", tiled=True) ** 2)),
    "second derivative": jax.hessian(loss),
    "meta learning": jax.grad(lambda w, x: plain_loss(w - lax.pmean(jax.grad(plain_loss)(w, x), "replica"), x)),
    "micro-batches": lambda w, x: ipu.pipeline(jax.grad(lambda w, xt: loss(w, xt.T)), micro_batches=3)(w, x.T),
}


@pytest.mark.parametrize("name", WARNED)
def test_collectives_that_a_gradient_passes_through_are_named(warnings: Callable[..., list[str]], name: str):
    fun = WARNED[name]
    (warning, *more) = warnings(lambda w, x: jax.tree.map(jnp.atleast_1d, fun(w, x)))
    assert not more and "at test_gradient_sums.py:" in warning
    assert "sum of the losses of all 4 replicas: 4 times" in warning and "jax.shard_map inside ipu.jit" in warning
    assert ("all_gather" in warning) == (name == "gather")


def product(op: Callable[..., Any], w: Any, x: Any) -> Any:
    """The cotangent of the weights of a collective of a product, of ones."""

    def forward(w: Any) -> Any:
        return op(x.T @ w)

    return jax.linear_transpose(forward, w)(jnp.ones_like(jax.eval_shape(forward, w)))[0]


def in_loop(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda y: lax.scan(lambda h, _: (op(h), None), y, None, length=3)[0]


TRANSPOSED: dict[str, tuple[Callable[..., Any], str]] = {
    "psum": (summed, "psum or pmean"),
    "psum in jit": (jax.jit(summed), "psum or pmean"),
    "psum in a loop": (in_loop(summed), "psum or pmean"),
    "psum under vmap": (jax.vmap(summed), "psum or pmean"),
    "psum in scopes": (jax.named_scope("dense")(summed), "psum or pmean"),
    "pmean": (lambda y: lax.pmean(y, "replica"), "psum or pmean"),
    "all_gather": (lambda y: lax.all_gather(y, "replica"), "all_gather"),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_linear_transposes_are_named(warnings: Callable[..., list[str]], name: str):
    op, collective = TRANSPOSED[name]
    (warning,) = warnings(lambda w, x: product(op, w, x))
    assert f"a gradient passes through the {collective} at test_gradient_sums.py:" in warning


@jax.custom_vjp
def sum_forward(x: Any) -> Any:
    return lax.psum(x, "replica")


@jax.custom_vjp
def sum_backward(x: Any) -> Any:
    return x


sum_forward.defvjp(lambda x: (lax.psum(x, "replica"), None), lambda _, ct: (ct,))
sum_backward.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "replica"),))


def averaged(w: Any, x: Any) -> Any:
    return lax.pmean(jax.value_and_grad(plain_loss)(w, x), "replica")


def adam(w: Any, x: Any) -> Any:
    optimizer = ipu.optim.shard(optax.adam(0.1), min_elements=0)
    grads = jax.grad(plain_loss)(w, x)
    return optimizer.update(grads, optimizer.init(w), w)[0]


def normalised(w: Any, x: Any) -> Any:
    h = w.T @ x
    mean = lax.stop_gradient(lax.pmean(jnp.mean(h), "replica"))
    return jnp.mean((jnp.tanh(h) * jnp.tanh(mean)) ** 2)


def megatron(w: Any, x: Any) -> Any:
    return jnp.mean(sum_forward(jnp.tanh(sum_backward(x).T @ w)) ** 2)


def summed_by_a_rule(w: Any) -> Any:
    return linear_call(lambda _, w: w * 2, lambda _, ct: summed(ct) * 2, (), w)


def solved_by_a_rule(w: Any) -> Any:
    return lax.custom_linear_solve(lambda v: v * 2, w, lambda _, b: b / 2, lambda _, b: summed(b) / 2)


SILENT: dict[str, Callable[..., Any]] = {
    "finished gradients": averaged,
    "finished gradients, in jit": jax.jit(averaged),
    "gathered gradients": lambda w, x: lax.all_gather(jax.grad(plain_loss)(w, x), "replica"),
    "an optimiser": adam,
    "statistics": jax.grad(normalised),
    "statistics, computed again": jax.grad(jax.checkpoint(normalised)),
    "forward mode": lambda w, x: jax.jvp(loss, (w, x), (w, x)),
    "no gradient": loss,
    "the number of a replica": jax.grad(lambda w, x: plain_loss(w, x) * lax.axis_index("replica")),
    "parts passed on": jax.grad(lambda w, x: plain_loss(lax.ppermute(w, "replica", [(0, 1), (1, 0)]), x)),
    "parts exchanged": jax.grad(lambda w, x: plain_loss(lax.all_to_all(w.T, "replica", 0, 0).T, x)),
    "parts of a sum": jax.grad(lambda w, x: jnp.mean(lax.psum_scatter(w.T, "replica", tiled=True) ** 2)),
    "rules of custom_vjp": jax.grad(megatron, (0, 1)),
    "rules of custom_vjp, in jit": jax.grad(jax.jit(megatron), (0, 1)),
    "rules of custom_vjp, computed again": jax.grad(jax.checkpoint(megatron), (0, 1)),
    "linear transposes of what sums nothing": lambda w, x: (
        product(lambda y: lax.ppermute(y, "replica", [(0, 1), (1, 0)]), w, x),
        product(lambda y: lax.psum_scatter(jnp.ones((4, 1)) @ y[:1], "replica"), w, x),
    ),
    "linear transposes, summed behind": lambda w, x: summed(product(lambda y: y, w, x)),
    "rules of linear_call": lambda w, x: product(summed_by_a_rule, w, x),
    "rules of custom_linear_solve": lambda w, x: product(solved_by_a_rule, w, x),
    "twice transposed": lambda w, x: jax.linear_transpose(lambda ct: jax.linear_transpose(summed, w)(ct)[0], w)(w),
    "micro-batches": lambda w, x: lax.pmean(
        ipu.pipeline(jax.value_and_grad(lambda w, xt: plain_loss(w, xt.T)), micro_batches=3)(w, x.T), "replica"
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_other_collectives_are_not(warnings: Callable[..., list[str]], name: str):
    fun = SILENT[name]
    assert warnings(lambda w, x: jax.tree.map(jnp.atleast_1d, fun(w, x))) == []


def test_one_replica_and_shard_map_sum_nothing(warnings: Callable[..., list[str]]):
    assert warnings(jax.grad(loss), replicas=1) == []
    mesh = jax.sharding.AbstractMesh((N,), ("replica",))
    inner = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=P("replica"), out_specs=P("replica"))
    assert warnings(inner, replicas=None, in_specs=None, out_specs=None) == []


def test_statistics_of_a_library_are_found_at_the_users_line(warnings: Callable[..., list[str]]):
    def model(axis_name: str | None) -> linen.Module:
        return linen.Sequential([linen.Dense(4), linen.BatchNorm(use_running_average=False, axis_name=axis_name)])

    variables = model(None).init(jax.random.key(0), X[:2])

    def fun(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            out, _ = model("replica").apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return jnp.mean(out**3)

        return lax.pmean(jax.grad(loss)(params), "replica")

    (warning,) = warnings(fun, variables["params"], X, in_specs=(P(), P("replica")), out_specs=P())
    assert "test_gradient_sums.py" in warning and "(loss)" in warning


def test_a_line_is_named_once_in_the_life_of_a_function(caplog: pytest.LogCaptureFixture):
    def twice(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: summed(w).sum() + jnp.sin(summed(w * x)).sum())(w)

    device = ipu.IPUModel(num_ipus=N, tiles_per_ipu=8)
    specs = {"in_specs": P("replica"), "out_specs": P("replica")}
    run = ipu.jit(twice, device=device, replicas=N, **specs)
    for size in (8, 16):
        run(np.ones(size, np.float32), np.ones(size, np.float32))
    run.with_options(ipu.Options(exact_splits=True)).trace(np.ones(8, np.float32), np.ones(8, np.float32))
    (warning,) = [record.getMessage() for record in caplog.records if "gradient" in record.getMessage()]
    assert "(summed)" in warning


def test_on_the_cpu_the_gradient_is_summed_too(caplog: pytest.LogCaptureFixture):
    specs = {"in_specs": (P("replica"), P("replica")), "out_specs": P("replica")}
    gradient = ipu.jit(jax.grad(loss), device=ipu.CPU(), replicas=N, **specs)(W, X)
    np.testing.assert_allclose(gradient, N * jax.grad(lambda w: jnp.mean(jnp.tanh(X.T @ w) ** 2))(W), rtol=1e-5)
    assert [record for record in caplog.records if "gradient" in record.getMessage()]


def test_the_gradient_of_all_replicas_is_not_summed(caplog: pytest.LogCaptureFixture):
    specs = {"in_specs": (P("replica"), P("replica")), "out_specs": P()}
    run = ipu.jit(loss, device=ipu.IPUModel(num_ipus=N, tiles_per_ipu=8), replicas=N, **specs)
    gradient = jax.grad(run)(W, X)
    np.testing.assert_allclose(gradient, jax.grad(lambda w: jnp.mean(jnp.tanh(X.T @ w) ** 2))(W), rtol=1e-5)
    assert not [record for record in caplog.records if "gradient" in record.getMessage()]
